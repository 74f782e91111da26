"""Rows in 8 bits whose scales are known before: values, what is too large for them, what is refused."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import moe_ops
from moe_ops import _library
from moe_ops.quantise_rows import DTYPES
from moe_ops.scaled import scaled_linear
from moe_ops.weight_formats import dequantised, quantised_weight
from tests.helpers import relative_error
from tests.kernels.by_name import record

E, K, H, I = 13, 2, 24, 20
BLOCKS = {"rows": ((1, H), (1, I)), "matrices": ((I, H), (H, I)), "blocks": ((4, 8), (6, 5))}


def _rounded(x, scale, dtype):
    """What rows stand for, in float64: numbers of 8 bits, at most the largest, times the scale."""
    divided, most = x.float() * (1 / scale.float()), 448 if dtype.is_floating_point else 127
    whole = divided if dtype.is_floating_point else divided.round()
    return whole.clamp(-most, most).to(dtype).double() * scale.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_rows(tokens, dtype):
    """Of magnitudes that reach past the largest: those stop there."""
    x, scales = 3 * torch.randn(tokens, 11), torch.tensor([0.001, -0.004, 0.002])
    rows, scale = moe_ops.quantise_rows(x, 4, dtype, scales)
    assert rows.dtype == dtype and torch.equal(scale, torch.full((tokens, 3), 0.004))
    assert torch.equal(rows.double() * scale[:, :1].double(), _rounded(x, scales[1].abs(), dtype))
    assert tokens < 7 or (rows.double().abs() == (448 if dtype.is_floating_point else 127)).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_in_its_block(dtype):
    x = torch.ones(3, 8)
    x[1, 4], x[2, 0] = float("nan"), float("inf")
    rows, scale = moe_ops.quantise_rows(x, 4, dtype, torch.tensor([0.5]))
    assert scale.isnan().tolist() == [[False, False], [False, True], [False, False]]
    assert rows[2, 0] == (448 if dtype.is_floating_point else 127)


def test_scales_of_which_none_is_known():
    """A NaN is no scale, and zeros are as good as ones."""
    x = torch.tensor([[1.0, -2.0]])
    rows, scale = moe_ops.quantise_rows(x, 2, torch.int8, torch.zeros(3))
    assert rows.tolist() == [[1, -2]] and scale.tolist() == [[1]]
    assert moe_ops.quantise_rows(x, 2, torch.int8, torch.tensor([0.1, float("nan")]))[1].isnan().all()


def _layer(tokens, dtype, blocks, **named):
    w13 = quantised_weight(torch.randn(E, 2 * I, H) / 5, BLOCKS[blocks][0], dtype)
    w2 = quantised_weight(torch.randn(E, H, I) / 5, BLOCKS[blocks][1], dtype)
    ids = torch.randint(E, (tokens, K), dtype=torch.int32)
    ids[:1, 1:] = -1
    given = {"w13": w13, "w2": w2, "topk_weights": torch.rand(tokens, K), "topk_ids": ids}
    return {"hidden_states": torch.randn(tokens, H), **given, "w13_bias": torch.randn(E, 2 * I) / 5} | named


def _expected(layer, scales):
    x, w13, w2, weights, ids, bias = layer.values()
    up, down = (dequantised(scaled_linear("weight", each, None), torch.float64) for each in (w13, w2))
    out, rows = torch.zeros_like(x.double()), _rounded(x, scales.w13.max(), w13.weight.dtype)
    for token, choice in (ids >= 0).nonzero().tolist():
        expert = ids[token, choice]
        gate, value = (up[expert] @ rows[token] + bias[expert].double()).chunk(2)
        inner = (gate.sigmoid() * gate * value).float()
        product = down[expert] @ _rounded(inner, scales.w2.max(), w2.weight.dtype)
        out[token] += weights[token, choice].double() * product
    return out


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_values(tokens, dtype, blocks):
    """Fed from sums in another order, a number may turn the other way where it is rounded between the products."""
    layer, scales = _layer(tokens, dtype, blocks), moe_ops.InputScales(torch.rand(E) / 50, torch.rand(1) / 50)
    found, expected = moe_ops.scaled_fused_experts(**layer, rows=scales), _expected(layer, scales)
    assert found.shape == expected.shape and (not tokens or relative_error(found, expected) < 2e-3)
    if tokens == 33:
        assert relative_error(moe_ops.scaled_fused_experts(**layer), found) > 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_one_product(dtype):
    """The rows of the other have their own, as without any."""
    layer, scale = _layer(7, dtype, "rows"), torch.tensor([0.03])
    plan = moe_ops.build_dispatch(layer["topk_ids"], E)

    def product(x, name, slots, bias, input_scale):
        rows, x_scale = moe_ops.quantise_rows(x, layer[name].weight.shape[2], dtype, input_scale)
        named = {"x_scale": x_scale, "sorted_slots": slots, "dtype": torch.float32}
        return moe_ops.scaled_grouped_gemm(rows, layer[name], plan.expert_offsets, bias, **named)

    for scales in (moe_ops.InputScales(w13=scale), moe_ops.InputScales(w2=scale)):
        gate_up = product(layer["hidden_states"], "w13", plan.sorted_slots, layer["w13_bias"], scales.w13)
        rows = product(moe_ops.gated_activation(gate_up), "w2", None, None, scales.w2)
        expected = moe_ops.combine(rows, layer["topk_weights"], plan.inverse)
        assert torch.equal(moe_ops.scaled_fused_experts(**layer, rows=scales), expected)


def test_what_is_refused():
    layer, some = _layer(3, torch.int8, "rows"), torch.ones(2)
    in_pairs = quantised_weight(torch.randn(E, 2 * 32, 32), (1, 32), torch.uint8)
    in_pairs = layer | {"w13": in_pairs, "hidden_states": torch.randn(3, 32), "w13_bias": None}
    in_pairs["w2"] = quantised_weight(torch.randn(E, 32, 32), (1, 32), torch.uint8)
    for given, scales, error, message in (
        (layer, (some.reshape(1, 2),), ValueError, r"w13_input_scale has shape \[1, 2\]: expected \[N\]"),
        (layer, (None, some[:0]), ValueError, r"w2_input_scale has shape \[0\]: expected at least one scale"),
        (layer, (some.int(),), TypeError, "w13_input_scale has dtype torch.int32: expected a floating"),
        (layer, (None, some.to("meta")), ValueError, "w2_input_scale is on meta: expected cpu"),
        (layer, (0.5,), TypeError, "w13_input_scale=0.5: expected a torch.Tensor"),
        (in_pairs, (some,), ValueError, "rows='quantised' with weights of 4 bits: expected 'exact'"),
    ):
        with pytest.raises(error, match=message):
            moe_ops.scaled_fused_experts(**given, rows=moe_ops.InputScales(*scales))
    x = layer["hidden_states"].requires_grad_()
    with pytest.raises(ValueError, match="rows='quantised' and hidden_states with a gradient"):
        moe_ops.scaled_fused_experts(**layer, rows=moe_ops.InputScales(some))
    with pytest.raises(ValueError, match=r"input_scale has shape \[0\]: expected at least one scale"):
        moe_ops.quantise_rows(x.detach(), 4, torch.int8, some[:0])


@pytest.mark.parametrize("name", ["w13_input_scale", "w2_input_scale"])
def test_the_operator_refuses_scales_of_exact_rows(name):
    layer, rows = _layer(3, torch.int8, "rows"), {"rows": "exact", name: torch.ones(1)}
    given = {key: layer[key] for key in ("hidden_states", "topk_weights", "topk_ids")}
    for weight in ("w13", "w2"):
        given |= {weight: layer[weight].weight, f"{weight}_scale": layer[weight].scale}
        given |= {f"{weight}_block_rows": 1, f"{weight}_block_columns": layer[weight].weight.shape[2]}
    arguments = record("scaled_fused_experts", **given, activation="silu", **rows)
    with pytest.raises(ValueError, match=f"{name} with rows='exact': expected None"):
        _library.call(arguments)


def test_one_graph_for_all_scales():
    layer, compiles = _layer(7, torch.int8, "rows"), CompileCounter()

    @torch.compile(backend=compiles, fullgraph=True)
    def run(scales):
        return moe_ops.scaled_fused_experts(**layer, rows=scales)

    for value in (0.01, 0.03):
        scales = moe_ops.InputScales(torch.tensor([value]), torch.tensor([value, 0.02]))
        assert torch.equal(run(scales), moe_ops.scaled_fused_experts(**layer, rows=scales))
    assert compiles.frame_count == 1
