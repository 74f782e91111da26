"""Weights of 4 bits: what bytes and exponents stand for, how weights become such, products and layers of them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import moe_ops
from moe_ops import ScaledWeight
from moe_ops.pairs import PAIRS
from moe_ops.scaled import scaled_linear
from moe_ops.weight_formats import dequantised, quantised_weight
from tests.helpers import assert_matches_oracle, assert_same, grads_of
from tests.kernels import oracles
from tests.kernels.test_scaled_pairs import dense

E, B, A, T, K = 5, 13, 84, 7, 2
GROUPS = (1, 32)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def stored_weight(shape=(E, B, A), block=GROUPS):
    experts, rows, columns = shape
    pairs = torch.randint(0, 256, (experts, rows, columns // 2), dtype=PAIRS)
    blocks = -(-rows // block[0]), -(-columns // block[1])
    return ScaledWeight(pairs, torch.randint(118, 126, (experts, *blocks), dtype=PAIRS), block)


def value_of(weight):
    return dense(weight.weight, weight.scale, weight.block)


def plan():
    return moe_ops.build_dispatch(torch.randint(-1, E, (T, K), dtype=torch.int32), E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_bytes_and_exponents_stand_for(dtype):
    pairs = torch.arange(256, dtype=PAIRS).repeat_interleave(16).view(1, 256, 16)
    scale = torch.randperm(255).to(PAIRS).repeat(2)[:256].view(1, 256, 1)
    made = dequantised(scaled_linear("weight", ScaledWeight(pairs, scale, GROUPS), None), dtype)
    assert torch.equal(made, dense(pairs, scale, GROUPS).to(dtype))
    scale[0, 7] = 255
    made = dequantised(scaled_linear("weight", ScaledWeight(pairs, scale, GROUPS), None), dtype)
    assert made[0, 7].isnan().all() and not made[0, torch.arange(256) != 7].isnan().any()


class _Lifted(TorchDispatchMode):
    """Notes tensors made of numbers of the host: a GPU would wait for them, and no CUDA graph can have them."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._opname == "lift_fresh"
        return func(*args, **kwargs or {})


def test_what_they_stand_for_is_made_where_they_are():
    weight = scaled_linear("weight", stored_weight(), None)
    with _Lifted() as lifted:
        torch.tensor([1.0])
        assert lifted.count == 1
        dequantised(weight, torch.float32)
    assert lifted.count == 1


def test_published_tensors_are_read_as_transformers_reads_them():
    """gpt-oss' blocks [E, 2I, H / 32, 16] and scales [E, 2I, H / 32]."""
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=PAIRS)
    scales = torch.randint(110, 130, (3, 10, 4), dtype=PAIRS)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    ours = scaled_linear("weight", ScaledWeight(blocks.flatten(2), scales), None)
    assert (ours.block_rows, ours.block_columns) == GROUPS
    assert torch.equal(dequantised(ours, torch.float32), expected)


def test_weights_are_rounded_to_the_nearest_and_of_two_to_the_even():
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    ties = (numbers[1:] + numbers[:-1]) / 2
    values = torch.cat((numbers, ties, ties * 1.001, ties * 0.999, torch.tensor([7.9, 0, 0])))
    expected = torch.cat(
        (numbers, torch.tensor([0, 1, 1, 2, 2, 4, 4]), numbers[1:], numbers[:-1], torch.tensor([6.0, 0, 0]))
    )
    for power in (2.0**-9, 1, 2.0**5):
        weight = (torch.stack((values, -values)) * power)[None]
        made = quantised_weight(weight, (1, 64), PAIRS)
        assert (made.scale == 127 + torch.tensor(power).log2()).all()
        found = dequantised(scaled_linear("weight", made, None), torch.float32)
        assert torch.equal(found / power, torch.stack((expected, -expected))[None])


def test_what_was_mxfp4_becomes_what_it_was():
    weight = stored_weight((E, 40, 96))
    weight.weight[0, 0] = 0x11  # of 0.5 alone: other numbers, and the power of others
    whole = value_of(weight).float()
    made = quantised_weight(whole, GROUPS, PAIRS)
    assert torch.equal(value_of(made).float(), whole) and made.scale[0, 0, 0] == weight.scale[0, 0, 0] - 3


@pytest.mark.parametrize(
    ("given", "exponent"), [(0.0, 127), (float("nan"), 255), (float("inf"), 255), (1e-45, 0)]
)
def test_blocks_of_no_usual_magnitude(given, exponent):
    weight = torch.zeros(1, 2, 32)
    weight[0, 1, 3], weight[0, 0, 1] = given, 1
    made = quantised_weight(weight, GROUPS, PAIRS)
    assert made.scale[0, :, 0].tolist() == [125, exponent]
    found = value_of(made) if exponent < 255 else dequantised(scaled_linear("w", made, None), torch.float32)
    assert found[0, 0, 1] == 1 and found[0, 1].isnan().all() == (exponent == 255)


@pytest.mark.parametrize("block", [GROUPS, (4, 64), (B, A), (64, 128)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_products(dtype, block):
    weight, at = stored_weight(block=block), plan()
    x, bias = torch.randn(T, A).to(dtype), torch.randn(E, B).to(dtype)
    for slots, rows in ((at.sorted_slots, x[at.sorted_slots // K]), (None, x[at.sorted_slots // K])):
        given = x if slots is not None else rows
        out = moe_ops.scaled_grouped_gemm(given, weight, at.expert_offsets, bias, sorted_slots=slots)
        assert out.dtype == dtype
        assert_matches_oracle(out, oracles.grouped_gemm(rows, value_of(weight), at.expert_offsets, bias))


def test_exponents_may_have_the_dtype_that_is_called_so():
    weight, at, x = stored_weight(), plan(), torch.randn(T * K, A)
    named = ScaledWeight(weight.weight, weight.scale.view(torch.float8_e8m0fnu), GROUPS)
    found = moe_ops.scaled_grouped_gemm(x, named, at.expert_offsets)
    assert torch.equal(found, moe_ops.scaled_grouped_gemm(x, weight, at.expert_offsets))


def expect_gradients(weight, value, at):
    """Of products with a weight, through the `value` that it stands for: of rows in order, and of tokens."""
    for slots, rows in ((None, T * K), (at.sorted_slots, T)):
        x = torch.randn(rows, value.shape[2], dtype=torch.float64, requires_grad=True)
        bias = torch.randn(value.shape[:2], dtype=torch.float64, requires_grad=True)

        def ours(x=x, bias=bias, slots=slots):
            return moe_ops.scaled_grouped_gemm(x, weight, at.expert_offsets, bias, sorted_slots=slots)

        def usual(x=x, bias=bias, slots=slots):
            gathered = x if slots is None else moe_ops.permute(x, slots)
            return moe_ops.grouped_gemm(gathered, value, at.expert_offsets, bias)

        assert_same(grads_of(ours, (x, bias)), grads_of(usual, (x, bias)), 1e-12)


def test_gradients():
    weight = stored_weight()
    expect_gradients(weight, value_of(weight), plan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_a_layer_is_that_of_the_weights_it_stands_for(tokens, dtype):
    """gpt-oss': alternating gate and up rows with a limit, biases; and what else a layer takes."""
    experts, hidden, inner = 13, 64, 32
    w13, w2 = stored_weight((experts, 2 * inner, hidden)), stored_weight((experts, hidden, inner))
    x, weights = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, 3)
    ids = torch.randint(-1, experts, (tokens, 3), dtype=torch.int32)
    named = {
        "w13_bias": torch.randn(experts, 2 * inner).to(dtype),
        "w2_bias": torch.randn(experts, hidden).to(dtype),
        "expert_map": torch.randperm(experts, dtype=torch.int32),
        "shared": torch.randn(tokens, hidden).to(dtype),
        "activation": moe_ops.Activation("swiglu_oai", interleaved=True),
    }
    out = moe_ops.scaled_fused_experts(x, w13, w2, weights, ids, **named)
    double = {
        name: each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for name, each in named.items()
    }
    expected = moe_ops.fused_experts(x.double(), value_of(w13), value_of(w2), weights.double(), ids, **double)
    assert_matches_oracle(out, expected)
    compiled = torch.compile(moe_ops.scaled_fused_experts, backend="aot_eager", fullgraph=True)
    assert_same([compiled(x, w13, w2, weights, ids, **named)], [out], 1e-6)


def test_flops():
    from torch.utils.flop_counter import FlopCounterMode

    weight, at = stored_weight(), plan()
    with FlopCounterMode(display=False) as counter:
        moe_ops.scaled_grouped_gemm(torch.randn(T * K, A), weight, at.expert_offsets)
    assert counter.get_total_flops() == 2 * T * K * A * B


def _call(x=None, **named):
    fields = {name: named.pop(name) for name in ("weight", "scale", "block") if name in named}
    usual = stored_weight()
    weight = ScaledWeight(**{"weight": usual.weight, "scale": usual.scale, "block": usual.block} | fields)
    return moe_ops.scaled_grouped_gemm(
        torch.randn(T * K, A) if x is None else x, weight, plan().expert_offsets, **named
    )


def _layer(**named):
    w13, w2 = stored_weight((3, 64, 64)), stored_weight((3, 64, named.pop("inner", 32)))
    ids = torch.zeros(T, K, dtype=torch.int32)
    return moe_ops.scaled_fused_experts(torch.randn(T, 64), w13, w2, torch.rand(T, K), ids, **named)


REFUSED = {
    "scales that are neither exponents nor floating": (
        lambda: _call(scale=torch.ones(E, B, 3).int()), TypeError,
        "scale has dtype torch.int32 with weights of 4 bits: expected torch.uint8 of MXFP4, torch.float8_e4m3fn of",
    ),
    "too few scales": (
        lambda: _call(scale=torch.ones(E, B, 2, dtype=PAIRS)), ValueError, r"scale has shape \[5, 13, 2\]: expected",
    ),
    "groups of 16": (
        lambda: _call(block=(1, 16), scale=torch.ones(E, B, 6, dtype=PAIRS)), ValueError,
        "block_columns=16 with weights of 4 bits: expected a multiple of 32",
    ),
    "other rows": (lambda: _call(torch.randn(T * K, 42)), ValueError, r"weight has shape \[5, 13, 42\]: expected"),
    "an odd number of columns": (
        lambda: _call(torch.randn(T * K, 83)), ValueError, "weight of 4 bits, for 83 columns: expected an even number",
    ),
    "quantised rows": (
        lambda: _call(torch.ones(T * K, A, dtype=PAIRS), x_scale=torch.ones(T * K, 3)), ValueError,
        "x_scale with weights of 4 bits: expected None",
    ),
    "a layer of quantised rows": (
        lambda: _layer(rows="quantised"), ValueError, "rows='quantised' with weights of 4 bits: expected 'exact'",
    ),
    "a second weight of other columns": (
        lambda: _layer(inner=64), ValueError, r"w2 has shape \[3, 64, 32\]: expected \[3, 64, 16\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    call, kind, message = REFUSED[what]
    with pytest.raises(kind, match=message):
        call()
