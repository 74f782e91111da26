"""Products of quantised rows and weights: values against float64, gradients, what is refused; and layers of them."""

import copy

import pytest
import torch

import moe_ops
from moe_ops import ScaledWeight
from moe_ops.weight_formats import quantised_weight
from tests.helpers import assert_matches_oracle, assert_same, grads_of, mixed, usually
from tests.kernels import oracles

E, B, A, T, K = 5, 13, 37, 7, 2
BLOCKS = {
    "matrix": (B, A),
    "row": (1, A),
    "group": (1, 5),
    "block": (4, 8),
    "weight": (1, 1),
    "larger": (64, 64),
}
STORED = (torch.float8_e4m3fn, torch.int8)


def spread(scale, shape, block):
    """The scale of each element, by a loop over them."""
    found = torch.empty(shape, dtype=torch.float64)
    for row in range(shape[-2]):
        for column in range(shape[-1]):
            found[..., row, column] = scale[..., row // block[0], column // block[1]]
    return found


def stored_weight(block, dtype, shape=(E, B, A)):
    values = torch.randint(-127, 128, shape) if dtype == torch.int8 else torch.randn(shape) * 50
    blocks = -(-shape[1] // block[0]), -(-shape[2] // block[1])
    return ScaledWeight(values.to(dtype), torch.rand(shape[0], *blocks) + 0.5, block)


def value_of(weight):
    return weight.weight.double() * spread(weight.scale, weight.weight.shape, weight.block)


def plan(experts=E, tokens=T, k=K):
    ids = torch.randint(-1, experts, (tokens, k), dtype=torch.int32)
    return moe_ops.build_dispatch(ids, experts)


@pytest.mark.parametrize(
    ("name", "stored", "dtype"),
    mixed(BLOCKS, STORED, (torch.bfloat16, torch.float32, torch.float64, torch.float16), rounds=2),
    ids=str,
)
def test_exact_rows(name, stored, dtype):
    weight, at = stored_weight(BLOCKS[name], stored), plan()
    x, bias = torch.randn(T * K, A).to(dtype), torch.randn(E, B).to(dtype)
    for given in (bias, None):
        out = moe_ops.scaled_grouped_gemm(x, weight, at.expert_offsets, given)
        assert out.dtype == dtype
        assert_matches_oracle(out, oracles.grouped_gemm(x, value_of(weight), at.expert_offsets, given))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("stored", STORED)
def test_quantised_rows(name, stored):
    weight, at = stored_weight(BLOCKS[name], stored), plan()
    rows, scale = moe_ops.quantise_rows(torch.randn(T, A), weight.block[1], stored)
    bias = torch.randn(E, B)
    tokens = rows.double() * spread(scale, rows.shape, (1, weight.block[1]))
    expected = oracles.grouped_gemm(tokens[at.sorted_slots // K], value_of(weight), at.expert_offsets, bias)
    named = {"x_scale": scale, "sorted_slots": at.sorted_slots, "dtype": torch.float32}
    out = moe_ops.scaled_grouped_gemm(rows, weight, at.expert_offsets, bias, **named)
    assert_matches_oracle(out, expected)
    assert (
        moe_ops.scaled_grouped_gemm(
            rows, weight, at.expert_offsets, x_scale=scale, sorted_slots=at.sorted_slots
        ).dtype
        == torch.bfloat16
    )


@pytest.mark.parametrize("columns", [1, 4, A, 64])
@pytest.mark.parametrize("dtype", STORED)
def test_rows_are_rounded_to_the_nearest(columns, dtype):
    x = torch.randn(T, A).bfloat16()
    x[2] = 0
    rows, scale = moe_ops.quantise_rows(x, columns, dtype)
    assert rows.dtype == dtype and scale.shape == (T, -(-A // columns)) and scale.dtype == torch.float32
    largest = 127 if dtype == torch.int8 else 448
    for block in range(scale.shape[1]):
        part = x[:, block * columns : (block + 1) * columns].float()
        wanted = part.abs().amax(1) / largest
        assert torch.equal(scale[:, block], wanted.where(wanted > 0, 1))
        found = rows[:, block * columns : (block + 1) * columns].double()
        exact = part.double() / scale[:, block, None].double()
        step = 1 if dtype == torch.int8 else exact.abs().clamp(min=2**-6).log2().floor().exp2() / 8
        assert ((found - exact).abs() <= step / 2 * (1 + 1e-5)).all()
    assert not rows[2].float().any() and (scale[2] == 1).all()


def test_a_nan_stays_in_its_block():
    x = torch.randn(3, 8)
    x[1, 5] = float("nan")
    for dtype in STORED:
        _, scale = moe_ops.quantise_rows(x, 4, dtype)
        assert scale.isnan().tolist() == [[False, False], [False, True], [False, False]]


@pytest.mark.parametrize("stored", usually(STORED, STORED[:1]))
def test_gradients_of_exact_rows(stored):
    weight, at = stored_weight((4, 8), stored), plan()
    dense = value_of(weight)
    for slots, rows in ((None, T * K), (at.sorted_slots, T)):
        x = torch.randn(rows, A, dtype=torch.float64, requires_grad=True)
        bias = torch.randn(E, B, dtype=torch.float64, requires_grad=True)
        given = x if slots is None else moe_ops.permute(x, slots)

        def ours(x=x, bias=bias, slots=slots):
            return moe_ops.scaled_grouped_gemm(x, weight, at.expert_offsets, bias, sorted_slots=slots)

        expected = grads_of(
            lambda given=given, bias=bias: moe_ops.grouped_gemm(given, dense, at.expert_offsets, bias),
            (x, bias),
        )
        assert_same(grads_of(ours, (x, bias)), expected)
        assert torch.autograd.gradcheck(ours, (x, bias), check_forward_ad=True)


def test_a_bias_beside_quantised_rows_has_a_gradient():
    weight, at = stored_weight((1, A), torch.int8), plan()
    rows, scale = moe_ops.quantise_rows(torch.randn(T * K, A), A, torch.int8)
    bias = torch.randn(E, B, requires_grad=True)
    out = moe_ops.scaled_grouped_gemm(
        rows, weight, at.expert_offsets, bias, x_scale=scale, dtype=torch.float32
    )
    (found,) = torch.autograd.grad(out.sum(), bias)
    assert torch.equal(found, at.expert_offsets.diff()[:, None].expand(E, B).float())


@pytest.mark.parametrize("rows", ["exact", "quantised"])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_a_layer_is_that_of_the_weights_it_stands_for(tokens, stored, rows):
    experts, hidden, inner = 13, 24, 16
    w13 = stored_weight((8, 8), stored, (experts, 2 * inner, hidden))
    w2 = stored_weight((8, 8), stored, (experts, hidden, inner))
    w13, w2 = (ScaledWeight(each.weight, each.scale / 1000, each.block) for each in (w13, w2))
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, 3)
    ids = torch.randint(-1, experts, (tokens, 3), dtype=torch.int32)
    expert_map = torch.randperm(experts, dtype=torch.int32)
    shared, biases = (
        torch.randn(tokens, hidden),
        {"w13_bias": torch.randn(experts, 2 * inner), "w2_bias": torch.randn(experts, hidden)},
    )
    named = {**biases, "expert_map": expert_map, "shared": shared}
    out = moe_ops.scaled_fused_experts(x, w13, w2, weights, ids, **named, rows=rows)
    double = {name: each.double() if each.is_floating_point() else each for name, each in named.items()}
    expected = moe_ops.fused_experts(x.double(), value_of(w13), value_of(w2), weights.double(), ids, **double)
    if rows == "exact":
        assert_matches_oracle(out, expected)
    else:  # every row is rounded twice, to 8 bits
        bound = {torch.int8: 0.02, torch.float8_e4m3fn: 0.06}[stored]
        assert (out - expected).norm() <= bound * expected.norm()
    compiled = torch.compile(moe_ops.scaled_fused_experts, backend="aot_eager", fullgraph=True)
    assert_same([compiled(x, w13, w2, weights, ids, **named, rows=rows)], [out], 1e-6)


def test_weights_on_the_input():
    w13, w2 = stored_weight((1, 24), torch.int8, (3, 32, 24)), stored_weight((1, 16), torch.int8, (3, 24, 16))
    x, weights, ids = torch.randn(5, 24), torch.rand(5, 1), torch.randint(3, (5, 1))
    named = {"rows": "exact", "apply_router_weight_on_input": True}
    out = moe_ops.scaled_fused_experts(x, w13, w2, weights, ids, **named)
    expected = moe_ops.scaled_fused_experts(x * weights, w13, w2, torch.ones(5, 1), ids, rows="exact")
    assert_same([out], [expected], 1e-6)


def test_a_weight_is_quantised_to_the_largest_of_its_blocks():
    weight = torch.randn(3, 10, 9).bfloat16()
    weight[1, :4, :8] = 0
    for dtype, bound in ((torch.int8, 0.02), (torch.float8_e4m3fn, 0.06)):
        made = quantised_weight(weight, (4, 8), dtype)
        assert made.weight.dtype == dtype and made.scale.shape == (3, 3, 2)
        error = (value_of(made) - weight.double()).norm() / weight.double().norm()
        assert 1e-4 < error < bound
        assert made.scale[1, 0, 0] == 1 and not made.weight[1, :4, :8].float().any()
        largest = made.weight[0, :4, :8].float().abs().max()
        assert largest == (127 if dtype == torch.int8 else 448)


def test_blocks_follow_from_sizes_that_divide():
    weight, at = stored_weight((1, A), torch.int8), plan()
    x = torch.randn(T * K, A)
    found = moe_ops.scaled_grouped_gemm(x, ScaledWeight(weight.weight, weight.scale), at.expert_offsets)
    assert torch.equal(found, moe_ops.scaled_grouped_gemm(x, weight, at.expert_offsets))
    odd = stored_weight((4, 8), torch.int8)
    with pytest.raises(
        ValueError, match=r"weight.block=None with \[4, 5\] blocks of \[13, 37\] weights: expected"
    ):
        moe_ops.scaled_grouped_gemm(x, ScaledWeight(odd.weight, odd.scale), at.expert_offsets)


def test_flops():
    from torch.utils.flop_counter import FlopCounterMode

    weight, at = stored_weight((1, A), torch.int8), plan()
    with FlopCounterMode(display=False) as counter:
        moe_ops.scaled_grouped_gemm(torch.randn(T * K, A), weight, at.expert_offsets)
        moe_ops.scaled_grouped_gemm(
            torch.randn(T, A), weight, at.expert_offsets, sorted_slots=at.sorted_slots
        )
    assert counter.get_total_flops() == 2 * 2 * T * K * A * B


def _call(x=None, weight=None, offsets=None, bias=None, **named):
    offsets = plan().expert_offsets if offsets is None else offsets
    weight = stored_weight((4, 8), torch.int8) if weight is None else weight
    return moe_ops.scaled_grouped_gemm(
        torch.randn(T * K, A) if x is None else x, weight, offsets, bias, **named
    )


def _other(**fields):
    weight = stored_weight((4, 8), torch.int8)
    return ScaledWeight(**{"weight": weight.weight, "scale": weight.scale, "block": weight.block} | fields)


REFUSED = {
    "weights of 16 bits": (
        lambda: _call(weight=_other(weight=torch.randn(E, B, A))), TypeError,
        "weight has dtype torch.float32: expected torch.float8_e4m3fn or torch.int8",
    ),
    "other scales": (
        lambda: _call(weight=_other(scale=torch.rand(E, 4, 4))), ValueError,
        r"scale has shape \[5, 4, 4\]: exp",
    ),
    "whole scales": (
        lambda: _call(weight=_other(scale=torch.ones(E, 4, 5).int())), TypeError,
        "scale has dtype torch.int32: expected a floating point dtype",
    ),
    "no block": (lambda: _call(weight=_other(block=(4, 0))), ValueError, r"^weight.block=\(4, 0\): expected sizes"),
    "no rows of a block": (
        lambda: _call(weight=_other(block=(0, 8))), ValueError,
        r"^weight.block=\(0, 8\): expected sizes of at least 1",
    ),
    "narrow rows": (lambda: _call(torch.randn(T * K, A - 1)), ValueError, r"weight has shape \[5, 13, 37\]: exp"),
    "whole rows": (
        lambda: _call(torch.zeros(T * K, A, dtype=torch.int8)), TypeError,
        "x has dtype torch.int8: expected a float",
    ),
    "rows of another kind": (
        lambda: _call(torch.zeros(T * K, A).to(torch.float8_e4m3fn), x_scale=torch.rand(T * K, 5)), TypeError,
        "x has dtype torch.float8_e4m3fn: expected torch.int8, the dtype of weight",
    ),
    "scales of other rows": (
        lambda: _call(torch.zeros(T * K, A, dtype=torch.int8), x_scale=torch.rand(T * K, 4)), ValueError,
        r"x_scale has shape \[14, 4\]: expected \[14, 5\]",
    ),
    "a whole result": (
        lambda: _call(torch.zeros(T * K, A, dtype=torch.int8), x_scale=torch.rand(T * K, 5), dtype=torch.int32),
        TypeError,
        "dtype=torch.int32: expected a floating point dtype of 16 bits or more",
    ),
    "a wider result": (lambda: _call(dtype=torch.float64), TypeError, "dtype=torch.float64: expected torch.float32"),
    "a whole bias": (lambda: _call(bias=torch.ones(E, B).int()), TypeError, "bias has dtype torch.int32"),
    "another bias": (
        lambda: _call(bias=torch.randn(E, A)), ValueError,
        r"bias has shape \[5, 37\]: expected \[5, 13\]",
    ),
    "other offsets": (
        lambda: _call(offsets=plan(E + 1).expert_offsets), ValueError,
        r"expert_offsets has shape \[7\]: exp",
    ),
    "slots of others": (lambda: _call(sorted_slots=plan().sorted_slots[:-1]), ValueError, "sorted_slots has 13"),
    "a scale of two dimensions": (
        lambda: _call(weight=_other(scale=torch.rand(E, 4))), ValueError, r"weight.scale has shape \[5, 4\]: exp",
    ),
    "columns": (lambda: moe_ops.quantise_rows(torch.randn(2, 3), 0), ValueError, "columns=0: expected at least 1"),
    "a dtype": (
        lambda: moe_ops.quantise_rows(torch.randn(2, 3), 2, torch.uint8), TypeError,
        "dtype=torch.uint8: expected",
    ),
    "a vector": (lambda: moe_ops.quantise_rows(torch.randn(3), 2), ValueError, r"x has shape \[3\]: expected"),
    "whole numbers": (lambda: moe_ops.quantise_rows(torch.ones(2, 3).int(), 2), TypeError, "x has dtype torch.int32"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


def _layer(**changed):
    given = {
        "hidden_states": torch.randn(4, 6), "w13": stored_weight((1, 6), torch.int8, (3, 8, 6)),
        "w2": stored_weight((1, 4), torch.int8, (3, 6, 4)), "topk_weights": torch.rand(4, 2),
        "topk_ids": torch.randint(3, (4, 2)),
    }  # fmt: skip
    return moe_ops.scaled_fused_experts(**given | changed)


def test_what_a_layer_refuses():
    down = stored_weight((1, 5), torch.int8, (3, 6, 5))
    for changed, message in (
        *(({"rows": rows}, f"rows='{rows}': expected 'quantised', 'exact' or") for rows in ("some", "")),
        ({"hidden_states": torch.randn(4, 5)}, r"w13 has shape \[3, 8, 6\]: expected \[E, 2I, 5\]"),
        ({"w2": down}, r"w2 has shape \[3, 6, 5\]: expected \[3, 6, 4\]"),
        (
            {"w13": stored_weight((1, 6), torch.int8, (3, 7, 6))},
            "w13 has 7 gate and up features: expected an even",
        ),
        ({"topk_ids": torch.randint(3, (5, 2))}, r"topk_ids has shape \[5, 2\]: expected \[4, K\]"),
        (
            {"hidden_states": torch.randn(4, 6, requires_grad=True)},
            "rows='quantised' and hidden_states with a gradient",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            _layer(**changed)
    with pytest.raises(TypeError, match=r"hidden_states has dtype torch.int64: expected a floating"):
        _layer(hidden_states=torch.ones(4, 6).long())
    assert _layer(hidden_states=torch.randn(4, 6, requires_grad=True), rows="exact").requires_grad
    with torch.no_grad():
        assert _layer(hidden_states=torch.randn(4, 6, requires_grad=True)).isfinite().all()


def test_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _layer(rows="exact").dtype == _layer(shared=torch.randn(4, 6)).dtype == torch.bfloat16


def test_a_scaled_weight_can_be_copied():
    weight = stored_weight((4, 8), torch.int8)
    assert torch.equal(copy.deepcopy(weight).scale, weight.scale)


def test_rows_without_columns():
    rows, scale = moe_ops.quantise_rows(torch.randn(3, 0), 4)
    assert rows.shape == (3, 0) and scale.shape == (3, 0)


def test_a_tracer_refuses_slots_of_other_tokens():
    weight, at = stored_weight((1, A), torch.int8), plan()
    weight = ScaledWeight(weight.weight.to("meta"), weight.scale.to("meta"))
    x, offsets, slots = (each.to("meta") for each in (torch.randn(T, A), at.expert_offsets, at.sorted_slots))
    assert moe_ops.scaled_grouped_gemm(x, weight, offsets, sorted_slots=slots).shape == (T * K, B)
    with pytest.raises(ValueError, match="sorted_slots has 13"):
        moe_ops.scaled_grouped_gemm(x, weight, offsets, sorted_slots=slots[:-1])
