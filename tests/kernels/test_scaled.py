"""The kernels of quantised rows and weights: every dtype, blocks that divide nothing, gathered rows, weights by TMA."""

import pytest
import torch

from moe_ops.kernels import plans
from moe_ops.kernels.gpu import H200, Gpu
from moe_ops.kernels.scaled import IN_8_BITS, IN_16_BITS
from tests.helpers import mixed
from tests.kernels import oracles
from tests.kernels.by_name import launch, program_of, record
from tests.kernels.catalogue import meta
from tests.kernels.oracles import assert_close

STORED = (torch.float8_e4m3fn, torch.int8)
# Features, depth, block: by TMA and not, steps that are cut short, one block, blocks of one.
SIZES = {
    "blocks": (130, 256, (128, 128)),
    "a short last block": (72, 2 * 128 + 64, (128, 128)),
    "rows": (33, 144, (1, 144)),
    "groups": (40, 96, (1, 32)),
    "blocks that begin between boxes": (40, 160, (8, 40)),
    "odd": (37, 51, (7, 10)),
    "a matrix": (16, 40, (16, 40)),
    "weights": (3, 5, (1, 1)),
    "one": (1, 1, (1, 1)),
}
EXPERTS = 4
OFFSETS = {"ragged": [0, 5, 5, 9, 20], "none": [0, 0, 0, 0, 0], "one expert": [0, 0, 23, 23, 23]}
SLOTS = 23


def _stored(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape).to(dtype)
    return (torch.randn(shape) * 20).to(dtype)


def _scale(*shape: int) -> torch.Tensor:
    return torch.rand(shape) + 0.5


def _spread(scale: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    per_row = scale.double().repeat_interleave(block[0], -2)[..., : shape[0], :]
    return per_row.repeat_interleave(block[1], -1)[..., : shape[1]]


def _tolerance(stored: torch.dtype, dtype: torch.dtype, device: str) -> torch.dtype:
    """Hopper's tensor cores keep 14 bits of a sum of float8 products."""
    return (
        torch.float16 if device == "cuda" and stored.is_floating_point and dtype == torch.float32 else dtype
    )


class Product:
    """Weights, rows and what they make."""

    sizes = SIZES

    def __init__(self, size: str, stored: torch.dtype, transposed: bool = False) -> None:
        features, depth, self.block = self.sizes[size]
        self.weight = _stored((EXPERTS, features, depth), stored)
        if transposed:
            self.weight = self.weight.transpose(1, 2).contiguous().transpose(1, 2)
        self.scale = _scale(EXPERTS, -(-features // self.block[0]), -(-depth // self.block[1]))
        self.dense = self.weight.double() * _spread(self.scale, self.block, (features, depth))
        self.bias = torch.randn(EXPERTS, features)

    def launch(self, x, offsets, dtype, device, x_scale=None, slots=None, bias=None):
        tensors = x, self.weight, self.scale, offsets, x_scale, bias, None, None, slots
        return launch(
            "scaled_grouped_gemm",
            *(None if each is None else each.to(device) for each in tensors),
            *self.block,
            dtype,
        )


@pytest.mark.parametrize(
    ("size", "stored", "dtype", "case"),
    mixed(SIZES, STORED, (torch.bfloat16, torch.float32, torch.float16), OFFSETS, rounds=2),
    ids=str,
)
def test_exact_rows(size, stored, dtype, case, device):
    product, offsets = Product(size, stored), torch.tensor(OFFSETS[case], dtype=torch.int32)
    x, bias = torch.randn(SLOTS, product.weight.shape[2]).to(dtype), product.bias.to(dtype)
    out = product.launch(x, offsets, dtype, device, bias=bias)
    assert_close(out, oracles.grouped_gemm(x, product.dense, offsets, bias))
    assert not out[OFFSETS[case][-1] :].any()


@pytest.mark.parametrize(
    ("size", "stored", "dtype", "case", "top_k"),
    mixed(SIZES, STORED, (torch.bfloat16, torch.float32, torch.float16), OFFSETS, (1, 3), rounds=2),
    ids=str,
)
def test_quantised_rows(size, stored, dtype, case, top_k, device):
    product, tokens = Product(size, stored), 8
    slots = torch.randperm(tokens * top_k, dtype=torch.int32)
    offsets = torch.tensor(OFFSETS[case], dtype=torch.int32).clamp(max=tokens * top_k)
    depth, columns = product.weight.shape[2], product.block[1]
    x, x_scale = _stored((tokens, depth), stored), _scale(tokens, -(-depth // columns)) / 1000
    out = product.launch(x, offsets, dtype, device, x_scale=x_scale, slots=slots)
    assert out.dtype == dtype
    rows = (x.double() * _spread(x_scale, (1, columns), (tokens, depth)))[slots.long() // top_k]
    assert_close(
        out, oracles.grouped_gemm(rows, product.dense, offsets, None), _tolerance(stored, dtype, device)
    )


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("in_order", [True, False])
def test_transposed_weights(stored, in_order, device):
    product, offsets = Product("groups", stored, True), torch.tensor(OFFSETS["ragged"], dtype=torch.int32)
    x, slots = torch.randn(SLOTS, 96), None if in_order else torch.randperm(SLOTS, dtype=torch.int32)
    out = product.launch(x, offsets, torch.float32, device, slots=slots)
    assert_close(out, oracles.grouped_gemm(x if in_order else x[slots.long()], product.dense, offsets, None))


def test_nan_in_rows_of_others_is_not_met(device):
    product = Product("odd", torch.int8)
    offsets = torch.tensor([0, 4, 4, 9, 12], dtype=torch.int32)
    x = torch.randn(SLOTS, 51)
    x[5], x[12:] = float("nan"), float("nan")
    out = product.launch(x, offsets, torch.float32, device).cpu()
    assert out[5].isnan().all() and not out[torch.arange(SLOTS) != 5].isnan().any() and not out[12:].any()


def test_strange_slots_are_rows_of_zeros(device):
    product, strange = (
        Product("rows", torch.int8),
        torch.tensor([-1, 8, 1 << 30, -(1 << 31), 3, (1 << 31) - 1, 2, 0]),
    )
    offsets = torch.tensor([0, 3, 5, 5, 8], dtype=torch.int32)
    x, x_scale = _stored((8, 144), torch.int8), _scale(8, 1)
    given = {"x_scale": x_scale, "slots": strange.int()}
    out = product.launch(x, offsets, torch.float32, device, **given)
    known = (strange >= 0) & (strange < 8)
    rows = (x.double() * x_scale)[strange.where(known, 0)].where(known[:, None], 0)
    assert_close(out, oracles.grouped_gemm(rows, product.dense, offsets, None))
    assert not out.cpu()[~known].any()


@pytest.mark.parametrize("rows", [16, 17, 40, 200])
@pytest.mark.parametrize("stored", STORED)
def test_tiles_of_every_height(rows, stored, device):
    product, slots = Product("rows", stored), rows * EXPERTS
    offsets = torch.tensor([0, rows - 1, rows, 3 * rows + 5, slots - 2], dtype=torch.int32)
    x, x_scale = _stored((slots, 144), stored), _scale(slots, 1)
    out = product.launch(x, offsets, torch.float32, device, x_scale=x_scale)
    expected = oracles.grouped_gemm(x.double() * x_scale.double(), product.dense, offsets, None)
    assert_close(out, expected, _tolerance(stored, torch.float32, device))


def _planned(features, depth, block, rows, dtype=torch.bfloat16, stored=torch.float8_e4m3fn, gpu=H200):
    blocks = -(-features // block[0]), -(-depth // block[1])
    quantised = dtype.itemsize == 1
    x_scale = meta(rows, blocks[1], dtype=torch.float32) if quantised else None
    return program_of(
        "scaled_grouped_gemm",
        meta(rows, depth, dtype=dtype),
        meta(8, features, depth, dtype=stored),
        meta(8, *blocks, dtype=torch.float32),
        meta(9, dtype=torch.int32),
        x_scale,
        *(None,) * 4,
        *block,
        torch.bfloat16 if quantised else dtype,
        gpu=gpu,
    ).launches[-1]


def test_weights_come_in_boxes_where_they_can():
    assert _planned(256, 256, (128, 128), 64).args["weight_desc"] is not None
    assert _planned(256, 250, (128, 128), 64).args["weight_desc"] is None  # rows are no multiple of 16 bytes
    assert _planned(256, 320, (128, 40), 64).args["weight_desc"] is None  # nor where blocks begin
    assert _planned(256, 320, (128, 320), 64).args["weight_desc"] is not None
    assert (
        _planned(256, 256, (128, 128), 64, gpu=Gpu(89, 142, H200.shared_memory)).args["weight_desc"] is None
    )


def test_steps_divide_blocks_and_depth():
    for depth, block, step, even in (
        (256, (128, 128), 128, True), (2880, (128, 128), 64, True), (2880, (1, 2880), 64, True),
        (96, (1, 32), 32, True), (51, (7, 10), 16, False), (2047, (1, 2047), 64, False), (24, (1, 24), 16, False),
    ):  # fmt: skip
        args = _planned(64, depth, block, 64).args
        assert (args["BLOCK_K"], args["EVEN"]) == (step, even), depth
        blocks = -(-depth // block[1])
        assert args["steps"] >= blocks and args["steps"] * step >= depth
    # Tensor cores take 32 numbers of 8 bits at once.
    assert _planned(64, 51, (7, 10), 64, torch.int8, torch.int8).args["BLOCK_K"] == 32


def test_rows_in_8_bits_have_tiles_of_their_own():
    for table, block, dtype, low, most in (
        (IN_8_BITS, (64, 128), torch.float8_e4m3fn, 32, 64),
        (IN_8_BITS, (1, 256), torch.float8_e4m3fn, 64, 128),
        (IN_16_BITS, (128, 128), torch.bfloat16, 32, 128),
    ):
        found = [_planned(256, 256, block, 8 * rows, dtype) for rows in (4, 16, 60, 300)]
        assert [(each.args["BLOCK_M"], each.args["BLOCK_N"]) for each in found] == [
            (height, table[height].block_n) for height in (16, low, 64, most)
        ]
    exact = [_planned(256, 256, (1, 256), 8 * rows, torch.bfloat16) for rows in (8, 9, 28, 29, 60, 61)]
    assert [each.args["BLOCK_M"] for each in exact] == [16, 32, 32, 64, 64, 128]
    odd = _planned(64, 51, (7, 10), 8 * 300, torch.int8, torch.int8)
    assert odd.args["BLOCK_M"] == 16
    for block, most in (((1, 256), 64), ((128, 128), 32)):
        other = _planned(64, 256, block, 8 * 300, torch.int8, torch.int8, gpu=Gpu(100, 148, 227 << 10))
        assert other.args["BLOCK_M"] == most


def test_float64_is_not_for_the_kernel():
    x, scale, linear = meta(8, 64), meta(8, 1, dtype=torch.float32), meta(4, 16, 64, dtype=torch.int8)
    others = linear, meta(4, 16, 1, dtype=torch.float32), meta(5, dtype=torch.int32)
    for dtype, row_scale, result, is_taken in (
        (torch.bfloat16, None, torch.bfloat16, True),
        (torch.float64, None, torch.float64, False),
        (torch.int8, scale, torch.float32, True),
        (torch.int8, scale, torch.float64, False),
    ):
        args = record("scaled_grouped_gemm", x.to(dtype), *others, row_scale, *(None,) * 4, 1, 64, result)
        assert plans.is_taken(args) == is_taken, (dtype, result)


def test_nothing_to_sum_up(device):
    bias, offsets = torch.randn(EXPERTS, 3), torch.tensor(OFFSETS["ragged"], dtype=torch.int32)
    tensors = (
        torch.randn(SLOTS, 0),
        _stored((EXPERTS, 3, 0), torch.int8),
        _scale(EXPERTS, 1, 0),
        offsets,
        None,
        bias,
    )
    given = (None if each is None else each.to(device) for each in tensors)
    out = launch("scaled_grouped_gemm", *given, None, None, None, 3, 1, torch.float32)
    expected = oracles.grouped_gemm(tensors[0], torch.zeros(EXPERTS, 3, 0), offsets, bias)
    assert_close(out, expected)


def test_a_gpu_that_knows_no_float8():
    old = Gpu(80, 108, 163 << 10)
    with pytest.raises(
        ValueError, match=r"weight has dtype torch.float8_e4m3fn: expected torch.int8 on sm_80"
    ):
        _planned(64, 64, (64, 64), 8, gpu=old)
    assert _planned(64, 64, (64, 64), 8, stored=torch.int8, gpu=old).grid[0] > 0


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize(
    ("depth", "columns"),
    [(256, 128), (256, 256), (37, 5), (37, 64), (1, 1), (9000, 9000), (9000, 8), (130, 128)],
)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
def test_rows_are_quantised_as_on_a_cpu(depth, columns, dtype, x_dtype, device):
    import moe_ops

    x = (torch.randn(5, depth) * torch.tensor([1e-3, 1, 0, 1e4, 3])[:, None]).to(x_dtype)
    rows, scale = launch("quantise_rows", x.to(device), None, columns, dtype)
    expected_rows, expected_scale = moe_ops.quantise_rows(x, columns, dtype)
    assert torch.equal(scale.cpu(), expected_scale)
    assert rows.dtype == dtype
    exact = x.double() / expected_scale.double().repeat_interleave(columns, 1)[:, :depth]
    expect_rounded_alike(rows, expected_rows, exact)


def expect_rounded_alike(rows, expected_rows, exact):
    """Numbers in 8 bits that `exact` was rounded to."""
    found, expected = rows.cpu().float(), expected_rows.float()
    if rows.device.type == "cuda" or rows.dtype == torch.int8:
        assert torch.equal(found, expected)
        return
    # Triton's interpreter rounds away from zero between two, and to a half of the power of two above.
    exact = exact.abs()
    step = exact.clamp(min=2**-6).log2().floor().exp2() / 8
    known = ((exact / step % 1 - 0.5).abs() > 1e-5) & (torch.frexp(expected)[0].abs() != 0.5)
    assert known.double().mean() > 0.5 and torch.equal(found[known], expected[known])


@pytest.mark.parametrize("dtype", STORED)
def test_strided_rows_and_nan(dtype, device):
    x = torch.randn(12, 20).t()[:, ::2]  # [20, 6]
    x[3, 4] = float("nan")
    rows, scale = launch("quantise_rows", x.to(device), None, 3, dtype)
    assert scale.isnan().nonzero().tolist() == [[3, 1]]
    kept = torch.arange(20) != 3
    dequantised = rows.cpu().float() * scale.cpu().repeat_interleave(3, 1)
    bound = 0.01 if dtype == torch.int8 else 0.04
    assert (dequantised - x)[kept].norm() <= bound * x[kept].norm()


@pytest.mark.parametrize("dtype", STORED)
def test_blocks_too_small_for_a_factor_are_zeros(dtype, device):
    x = torch.zeros(4, 8)
    # Triton's interpreter makes 0.01 of what is below 2**-126.
    x[:, 1:3] = torch.tensor([1e-36, 1e-37, 2.0**-119, 2.0**-118])[:, None] * torch.tensor([1, -0.5])
    rows, scale = (each.cpu() for each in launch("quantise_rows", x.to(device), None, 8, dtype))
    assert (scale[:3] == 1).all() and not rows[:3].float().any()
    largest = 127 if dtype == torch.int8 else 448
    assert scale[3] == 2.0**-118 / largest and rows[3, 1].float() == largest
