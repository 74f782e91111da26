"""Published integers of 4 bits, unpacked by another way: one code after the other, in numbers of Python."""

import pytest
import torch

from layers import integers_of_awq, integers_of_gptq, zeros_of_compressed_tensors

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
DEPTH, FEATURES, GROUPS = 64, 24, 2


def _word(codes):
    """An int32 whose lowest bits are the first code."""
    value = sum(int(code) << 4 * place for place, code in enumerate(codes))
    return value - (1 << 32) if value >= 1 << 31 else value


def packed_by_compressed_tensors(codes):
    """[R, C] codes as [R, ceil(C / 8)] words, in order; of missing columns zeros."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))
    return torch.tensor([[_word(each) for each in row.view(-1, 8)] for row in padded], dtype=torch.int32)


def packed_by_awq(codes):
    """[R, C] codes as [R, C / 8] words, in AWQ's order."""
    words = [[_word(each[place] for place in AWQ_ORDER) for each in row.view(-1, 8)] for row in codes]
    return torch.tensor(words, dtype=torch.int32)


def _drawn():
    """Codes [A, B], zero points and scales [groups, B]."""
    codes, zeros = torch.randint(0, 16, (DEPTH, FEATURES)), torch.randint(1, 16, (GROUPS, FEATURES))
    return codes, zeros, torch.rand(GROUPS, FEATURES).half()


def _stands_for(found):
    """[B, A], a number after the other."""
    weight, scale, zero = found
    columns = []
    for column in range(2 * weight.shape[1]):
        byte, group = weight[:, column // 2].int(), column * scale.shape[1] // (2 * weight.shape[1])
        code = byte >> 4 if column % 2 else byte & 15
        columns.append((code - zero[:, group].int()) * scale[:, group].double())
    return torch.stack(columns, 1)


def _meant(codes, zeros, scales):
    of_each = (each.repeat_interleave(DEPTH // GROUPS, 0) for each in (zeros, scales))
    return ((codes - next(of_each)) * next(of_each).double()).t()


def _as_gptq(codes, zeros, less):
    return packed_by_compressed_tensors(codes.t()).t(), packed_by_compressed_tensors(zeros - less)


def test_awq():
    codes, zeros, scales = _drawn()
    found = integers_of_awq(packed_by_awq(codes), packed_by_awq(zeros), scales)
    assert torch.equal(_stands_for(found), _meant(codes, zeros, scales))
    assert (found.weight.dtype, found.zero.dtype, found.scale.dtype) == (
        torch.uint8, torch.uint8, torch.float16,
    )  # fmt: skip
    assert all(each.is_contiguous() for each in found)


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize("has_index", [False, True])
def test_gptq(is_v2, has_index):
    codes, zeros, scales = _drawn()
    g_idx = torch.arange(DEPTH, dtype=torch.int32) // (DEPTH // GROUPS) if has_index else None
    found = integers_of_gptq(*_as_gptq(codes, zeros, 0 if is_v2 else 1), scales, g_idx, is_v2=is_v2)
    assert torch.equal(_stands_for(found), _meant(codes, zeros, scales))


def test_gptq_is_of_the_first_version_unless_said():
    codes, zeros, scales = _drawn()
    found = integers_of_gptq(*_as_gptq(codes, zeros, 1), scales)
    assert torch.equal(found.zero, zeros.t())


@pytest.mark.parametrize("rows", [16, 21])
def test_zeros_of_compressed_tensors(rows):
    zeros = torch.randint(0, 16, (rows, GROUPS))
    found = zeros_of_compressed_tensors(packed_by_compressed_tensors(zeros.t()).t(), rows)
    assert torch.equal(found, zeros.to(torch.uint8)) and found.is_contiguous()


def test_stacks_of_matrices():
    drawn = [_drawn() for _ in range(3)]
    singles = [integers_of_awq(packed_by_awq(each[0]), packed_by_awq(each[1]), each[2]) for each in drawn]
    given = [(packed_by_awq(codes), packed_by_awq(zeros), scales) for codes, zeros, scales in drawn]
    for found, each in zip(integers_of_awq(*map(torch.stack, zip(*given))), zip(*singles), strict=True):
        assert torch.equal(found, torch.stack(each))
    given = [(*_as_gptq(codes, zeros, 1), scales) for codes, zeros, scales in drawn]
    for found, each in zip(integers_of_gptq(*map(torch.stack, zip(*given))), zip(*singles), strict=True):
        assert torch.equal(found, torch.stack(each))


WORDS, ZEROS, SCALES = (torch.zeros(64, 3).int(), torch.zeros(2, 3).int(), torch.rand(2, 24))
ROWS = torch.zeros(8, 24).int()
IN_ORDER = torch.arange(64) // 32
REFUSED = {
    "no words": (
        lambda: integers_of_awq(WORDS.long(), ZEROS, SCALES), TypeError,
        "qweight has dtype torch.int64: expected torch.int32, eight codes in each",
    ),
    "no words of zeros": (
        lambda: integers_of_gptq(ROWS, ZEROS.short(), SCALES), TypeError, "qzeros has dtype torch.int16: expected",
    ),
    "no tensor": (lambda: integers_of_awq(None, ZEROS, SCALES), TypeError, "qweight=None: expected Tensor"),
    "a row": (
        lambda: integers_of_awq(WORDS[0], ZEROS, SCALES), ValueError, r"qweight has shape \[3\]: expected a matrix",
    ),
    "whole scales": (
        lambda: integers_of_awq(WORDS, ZEROS, SCALES.int()), TypeError,
        "scales has dtype torch.int32: expected a floating point dtype",
    ),
    "fewer zeros": (
        lambda: integers_of_awq(WORDS, ZEROS[:, :2], SCALES), ValueError,
        r"qzeros, unpacked, has shape \[2, 16\]: expected \[2, 24\]",
    ),
    "other groups": (
        lambda: integers_of_gptq(ROWS, ZEROS, SCALES[:1]), ValueError,
        r"scales has shape \[1, 24\]: expected \[2, 24\]",
    ),
    "groups that divide nothing": (
        lambda: integers_of_awq(WORDS, ZEROS[[0, 0, 1]], SCALES[[0, 0, 1]]), ValueError,
        "qweight has 64 columns: expected an even number, of 3 groups",
    ),
    "and of rows that are packed": (
        lambda: integers_of_gptq(ROWS, ZEROS[[0, 0, 1]], SCALES[[0, 0, 1]]), ValueError,
        "qweight has 64 columns: expected an even number, of 3 groups",
    ),
    "half a byte": (
        lambda: integers_of_awq(WORDS[:63], ZEROS[:1], SCALES[:1]), ValueError,
        "qweight has 63 columns: expected an even number, of 1 groups",
    ),
    "another order": (
        lambda: integers_of_gptq(ROWS, ZEROS, SCALES, IN_ORDER.flip(0)), ValueError,
        "g_idx has columns in another order than their groups: expected 0, 0, ..., 1, 1, ...",
    ),
    "a short index": (
        lambda: integers_of_gptq(ROWS, ZEROS, SCALES, IN_ORDER[:3]), ValueError,
        r"g_idx has shape \[3\]: expected 64 columns",
    ),
    "no index": (lambda: integers_of_gptq(ROWS, ZEROS, SCALES, 3), TypeError, "g_idx=3: expected Tensor"),
    "no version": (
        lambda: integers_of_gptq(ROWS, ZEROS, SCALES, is_v2=2), TypeError, "is_v2=2: expected bool, got int",
    ),
    "zeros of 16, or of 0": (
        lambda: integers_of_gptq(ROWS, ZEROS - 1, SCALES), ValueError,
        "qzeros has 15 with is_v2=False: expected 0 to 14, zero points less 1",
    ),
    "other rows": (
        lambda: zeros_of_compressed_tensors(ROWS, 65), ValueError,
        r"weight_zero_point has shape \[8, 24\]: expected 9 words of 65 rows",
    ),
    "rows as text": (
        lambda: zeros_of_compressed_tensors(ROWS, "64"), TypeError, "rows='64': expected an int, got str",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    call, kind, message = REFUSED[what]
    with pytest.raises(kind, match=message):
        call()
