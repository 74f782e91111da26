"""Quantised rows and weights at the edges: numbers too small, scales of other dtypes, values of other kinds."""

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

import moe_ops
from moe_ops import ScaledWeight
from moe_ops.weight_formats import quantised_weight
from tests.helpers import assert_matches_oracle
from tests.kernels import oracles

STORED = (torch.float8_e4m3fn, torch.int8)


def _weight(**changed):
    given = {"weight": torch.randint(-127, 128, (2, 8, 6)).to(torch.int8), "scale": torch.rand(2, 8, 1)}
    return ScaledWeight(**given | changed)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("largest", [1e-44, 1e-39, 1e-37, 2.0**-119])
def test_blocks_too_small_for_a_factor_are_zeros(stored, largest):
    """448 over the largest would be infinite, and that times the zeros beside it NaN."""
    x = torch.zeros(2, 8)
    x[0, 1], x[0, 2], x[1, 0] = largest, -largest / 2, 1
    rows, scale = moe_ops.quantise_rows(x, 4, stored)
    assert not rows[0].float().any() and scale[0].tolist() == [1, 1]
    assert (rows[1].float() * scale[1, 0])[0] == 1
    made = quantised_weight(x[None], (1, 4), stored)
    assert not made.weight[0, 0].float().any() and (made.weight[0, 1].float() * made.scale[0, 1, 0])[0] == 1


@pytest.mark.parametrize("stored", STORED)
def test_the_smallest_block_that_has_a_factor(stored):
    x = torch.zeros(1, 4)
    x[0, 2] = 2.0**-118
    rows, scale = moe_ops.quantise_rows(x, 4, stored)
    assert rows[0, 2].float() == (127 if stored == torch.int8 else 448) and not rows[0, :2].float().any()
    assert abs(rows[0, 2].float() * scale[0, 0] / x[0, 2] - 1) < 1e-4  # scales of less than 2**-126 lose bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("of_scale", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_scales_of_rows_have_any_floating_dtype(of_scale, dtype):
    weight, offsets = _weight(), torch.tensor([0, 3, 4], dtype=torch.int32)
    rows = torch.randint(-127, 128, (4, 6)).to(torch.int8)
    scale = torch.tensor([0.5, 1, 2, 4])[:, None].to(of_scale)
    out = moe_ops.scaled_grouped_gemm(rows, weight, offsets, x_scale=scale, dtype=dtype)
    tokens, dense = rows.double() * scale.double(), weight.weight.double() * weight.scale.double()
    assert_matches_oracle(out, oracles.grouped_gemm(tokens, dense, offsets, None))


def _product(x=None, **named):
    weight = named.pop("weight", None) or _weight()
    offsets = torch.tensor([0, 3, 4], dtype=torch.int32)
    return moe_ops.scaled_grouped_gemm(torch.randn(4, 6) if x is None else x, weight, offsets, **named)


IN_8_BITS = {"x": torch.ones(4, 6).to(torch.int8), "x_scale": torch.ones(4, 1)}
OTHERS = {
    "rows": (lambda: _product([1.0]), r"x=<list>: expected a torch.Tensor"),
    "result": (lambda: _product(dtype="float32"), "dtype='float32': expected a torch.dtype"),
    "result of rows in 8 bits": (lambda: _product(**IN_8_BITS, dtype=float), "dtype=<type>: expected a torch.dtype"),
    "one size": (lambda: _product(weight=_weight(block=128)), r"weight.block=128: expected None or \(rows, columns\)"),
    "a size": (lambda: _product(weight=_weight(block=(4,))), r"weight.block=\(4,\): expected None or \(rows,"),
    "no sizes": (lambda: _product(weight=_weight(block=())), r"weight.block=\(\): expected None or \(rows,"),
    "a broken size": (lambda: _product(weight=_weight(block=(1.0, 6))), r"weight.block=1.0: expected an int"),
    "columns": (lambda: moe_ops.quantise_rows(torch.randn(2, 3), "2"), "columns='2': expected an int"),
    "no dtype": (lambda: moe_ops.quantise_rows(torch.randn(2, 3), 2, None), "dtype=None: expected torch.float8_e4m3fn"),
    "another dtype": (
        lambda: torch.ops.moe.quantise_rows(torch.randn(2, 3), None, 2, torch.uint8), "dtype=torch.uint8: expected",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_values_of_other_kinds(name):
    call, message = OTHERS[name]
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("size", [100, 1 << 40, (1 << 63) - 1])
def test_blocks_larger_than_the_matrix(size):
    x, weight = torch.randn(4, 6), _weight(scale=torch.rand(2, 1, 1), block=(size, size))
    assert torch.equal(
        _product(x, weight=weight), _product(x, weight=ScaledWeight(weight.weight, weight.scale))
    )
    for found, expected in zip(moe_ops.quantise_rows(x, size), moe_ops.quantise_rows(x, 6), strict=True):
        assert torch.equal(found.float(), expected.float())
    assert moe_ops.quantise_rows(torch.randn(3, 0), size)[1].shape == (3, 0)


def _layer(x, rows="quantised", topk_weights=None, **named):
    w13, w2 = _weight(), _weight(weight=torch.ones(2, 6, 4).to(torch.int8), scale=torch.rand(2, 6, 1))
    topk_weights = torch.rand(3, 2) if topk_weights is None else topk_weights
    return moe_ops.scaled_fused_experts(
        x, w13, w2, topk_weights, torch.randint(2, (3, 2)), rows=rows, **named
    )


REFUSED_GRADIENT = "rows='quantised' and {} with a gradient: expected 'exact' or torch.no_grad"


@pytest.mark.parametrize("name", ["hidden_states", "w13_bias"])
def test_quantised_rows_lose_no_gradient_without_a_word(name):
    """Rows behind a bias are rounded as well, and what is rounded is a constant."""
    x, biases = torch.randn(3, 6), {"w13_bias": torch.randn(2, 8), "w2_bias": torch.randn(2, 6)}
    asked = x if name == "hidden_states" else biases[name]
    asked.requires_grad_()
    with pytest.raises(ValueError, match=REFUSED_GRADIENT.format(name)):
        _layer(x, **biases)
    with torch.no_grad():
        assert _layer(x, **biases).isfinite().all()
    (found,) = torch.autograd.grad(_layer(x, "exact", **biases).sum(), asked)
    assert found.any()


def test_what_comes_behind_quantised_rows_has_a_gradient():
    weights, bias = torch.rand(3, 2, requires_grad=True), torch.randn(2, 6, requires_grad=True)
    out = _layer(torch.randn(3, 6), topk_weights=weights, w2_bias=bias)
    to_weights, to_bias = torch.autograd.grad(out.sum(), (weights, bias))
    assert to_weights.any() and torch.allclose(to_bias.sum(), 6 * weights.sum())


def test_quantised_rows_lose_no_tangent_without_a_word():
    x, bias = torch.randn(3, 6), torch.randn(2, 8)
    for name, function, at in (
        ("hidden_states", _layer, x),
        ("w13_bias", lambda bias: _layer(x, w13_bias=bias), bias),
    ):
        with pytest.raises(ValueError, match=REFUSED_GRADIENT.format(name)):
            torch.func.jvp(function, (at,), (torch.ones_like(at),))
        with pytest.raises(ValueError, match=REFUSED_GRADIENT.format(name)):
            torch.func.grad(lambda at, function=function: function(at).sum())(at)
    _, tangent = torch.func.jvp(
        lambda weights: _layer(x, topk_weights=weights), (torch.rand(3, 2),), (torch.ones(3, 2),)
    )
    assert tangent.any()


def test_compiled_quantised_rows_lose_no_tangent_without_a_word():
    x, weights = torch.randn(3, 6), torch.rand(3, 2)

    def compiled(function):
        return torch.compile(function, backend="aot_eager", fullgraph=True)

    with pytest.raises(Exception, match=REFUSED_GRADIENT.format("hidden_states")):
        compiled(lambda at: torch.func.jvp(_layer, (at,), (at,)))(x)
    of_weights = compiled(lambda at: torch.func.jvp(lambda w: _layer(x, topk_weights=w), (at,), (at,)))
    out, tangent = of_weights(weights)
    assert tangent.any() and torch.allclose(out, tangent)


@pytest.mark.parametrize("rows", ["quantised", "exact"])
def test_a_layer_names_its_biases(rows):
    x = torch.randn(
        3, 6, requires_grad=rows == "exact"
    )  # then it is stages, which know their own names alone
    for name, shape in (("w13_bias", (2, 6)), ("w2_bias", (2, 8))):
        message = rf"{name} has shape \[2, {shape[1]}\]: expected \[2, {14 - shape[1]}\]"
        with pytest.raises(ValueError, match=message):
            _layer(x, rows, **{name: torch.randn(shape)})


def test_asking_for_tangents_leaves_nothing_in_a_graph():
    """torch has no rule for unpacking a tangent under vmap, where Dynamo traces it too."""
    x, ids, weights = torch.randn(5, 3, 6), torch.randint(2, (3, 2)), torch.rand(3, 2)
    w13, w2 = _weight(), _weight(weight=torch.ones(2, 6, 4).to(torch.int8), scale=torch.rand(2, 6, 1))

    def layer(x, times=1):
        return moe_ops.scaled_fused_experts(x, w13, w2, weights.repeat(times, 1), ids.repeat(times, 1))

    graphs = EagerAndRecordGraphs()
    compiled = torch.compile(torch.vmap(layer), backend=graphs, fullgraph=True)
    assert torch.equal(compiled(x), layer(x.flatten(0, 1), 5).view(5, 3, 6))
    torch.compile(layer, backend=graphs, fullgraph=True)(x[0])
    assert len(graphs.graphs) == 2 and not any("dual" in graph.code for graph in graphs.graphs)


def test_a_direct_call_names_the_argument_of_the_operator():
    weight, offsets = torch.zeros(2, 4, 8, dtype=torch.int8), torch.tensor([0, 1, 1], dtype=torch.int32)
    args = torch.randn(1, 8), weight, torch.ones(2, 1, 1), offsets, *(None,) * 5
    with pytest.raises(ValueError, match="block_rows=0: expected at least 1"):
        torch.ops.moe.scaled_grouped_gemm(*args, 0, 8, torch.float32)
