"""What Inductor generates for an H200 of quantised layers, without a GPU, and what it computes on one."""

import ast
import re

import pytest
import torch

import moe_ops
from inductor_passes.fuse_residual import FuseResidual
from inductor_passes.pipeline import PIPELINE, MoEPasses
from moe_ops.weight_formats import quantised_weight
from tests.compile.fake_cuda import body, compile_for_h200
from tests.helpers import mixed, relative_error, usually

H, E, I, K = 64, 8, 32, 2
# Dtype as `quantise_experts` is told, block, rows, whether there are zero points.
FORMATS = {
    "float8": (torch.float8_e4m3fn, None, "quantised", False),
    "float8 blocks": (torch.float8_e4m3fn, (16, 32), "quantised", False),
    "float8, given scales": (torch.float8_e4m3fn, None, "given", False),
    "int8": (torch.int8, None, "quantised", False),
    "int8, exact": (torch.int8, None, "exact", False),
    "MXFP4": (torch.uint8, (1, 32), "exact", False),
    "NVFP4": (torch.float4_e2m1fn_x2, (1, 16), "exact", False),
    "int4": (torch.uint4, (1, 32), "exact", False),
    "int4 with zero points": (torch.uint4, (1, 32), "exact", True),
}
_WITHOUT_RESIDUALS = MoEPasses(passes=tuple(each for each in PIPELINE if not isinstance(each, FuseResidual)))


def _weight(name, *sizes):
    dtype, block, _, has_zeros = FORMATS[name]
    made = quantised_weight(torch.randn(E, *sizes).bfloat16() / 5, block or (1, sizes[1]), dtype, has_zeros)
    return made.weight, made.scale, made.zero, made.global_scale


def _inputs(name, tokens, device):
    x, logits = torch.randn(tokens, H).bfloat16(), torch.randn(tokens, E)
    given = x, logits, torch.tensor([0.02]), *_weight(name, 2 * I, H), *_weight(name, H, I)
    return tuple(None if each is None else each.to(device) for each in given)


def _weights(block, w13, w13_scale, w13_zero, w13_global_scale, w2, w2_scale, w2_zero, w2_global_scale):
    up = moe_ops.ScaledWeight(w13, w13_scale, block or (1, H), w13_zero, w13_global_scale)
    return up, moe_ops.ScaledWeight(w2, w2_scale, block or (1, I), w2_zero, w2_global_scale)


def _layer(name):
    _, block, how, _ = FORMATS[name]

    def layer(x, logits, scale, *tensors):
        weights, ids = moe_ops.topk_routing(logits, moe_ops.RoutingConfig(K))
        up, down = _weights(block, *tensors)
        rows = moe_ops.InputScales(scale, scale) if how == "given" else how
        return x + moe_ops.scaled_fused_experts(x, up, down, weights, ids, rows=rows)

    return layer


def _stages(name):
    """The same by hand, an operator each."""
    _, block, how, _ = FORMATS[name]

    def layer(x, logits, scale, *tensors):
        weights, ids = moe_ops.topk_routing(logits, moe_ops.RoutingConfig(K))
        slots, inverse, offsets = moe_ops.build_dispatch(ids, E)

        def product(x, weight, slots):
            if how == "exact":
                return moe_ops.scaled_grouped_gemm(x, weight, offsets, sorted_slots=slots)
            given = scale if how == "given" else None
            rows, row_scale = moe_ops.quantise_rows(x, weight.block[1], weight.weight.dtype, given)
            named = {"x_scale": row_scale, "sorted_slots": slots, "dtype": x.dtype}
            return moe_ops.scaled_grouped_gemm(rows, weight, offsets, **named)

        up, down = _weights(block, *tensors)
        gate_up = product(x, up, slots)
        rows = product(moe_ops.gated_activation(gate_up), down, None)
        return x + moe_ops.combine(rows, weights, inverse)

    return layer


def _for_h200(name, tokens, made=_layer, **named):
    def empty(tokens):
        given = _inputs(name, tokens, "cpu")
        return [None if t is None else torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in given]

    return compile_for_h200(made(name), empty, tokens=tokens, **named)


@pytest.mark.parametrize(("name", "tokens"), mixed(FORMATS, (1, 64, 700)))
def test_layers_are_launches(name, tokens):
    compiled = _for_h200(name, tokens)
    assert "torch.ops.moe" not in body(compiled.code)
    assert not any(launch.startswith("triton_") for launch in compiled.launches)  # nor has the residual one
    for source in re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", compiled.code, re.S):
        compile(ast.literal_eval(f"'''{source}'''"), "<kernel>", "exec")  # as torch's workers do
    assert len(compiled.launches) <= 9
    if name.startswith("float8"):
        assert any("scaled_gemv" in launch for launch in compiled.launches) == (tokens == 1)


@pytest.mark.parametrize("name", usually(list(FORMATS), ["float8, given scales", "int4 with zero points"]))
def test_stages_are_launches(name):
    assert "torch.ops.moe" not in body(_for_h200(name, 64, _stages).code)


def test_a_copy_of_a_weight_is_a_launch():
    def copied(w13, w13_scale):
        return moe_ops.dequantise_weight(moe_ops.ScaledWeight(w13, w13_scale), torch.bfloat16)

    def empty(_):
        weight = torch.empty(E, 2 * I, H, dtype=torch.int8, device="cuda")
        return weight, torch.empty(E, 2 * I, 1, device="cuda")

    compiled = compile_for_h200(copied, empty)
    assert "torch.ops.moe" not in body(compiled.code) and len(compiled.launches) == 1


def test_a_residual_is_one_launch_less():
    before, after = _for_h200("float8", 64, graph_pass=_WITHOUT_RESIDUALS), _for_h200("float8", 64)
    assert len(before.launches) == len(after.launches) + 1


def test_symbolic_tokens_are_a_call():
    assert "torch.ops.moe.scaled_fused_experts" in body(_for_h200("int8", 64, symbolic=True).code)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 3, 64, 700])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("made", [_layer, _stages])
def test_compiled_code_computes_the_same(made, name, tokens):
    torch._dynamo.reset()
    given = _inputs(name, tokens, "cuda")
    compiled = torch.compile(made(name), backend="moe_inductor", fullgraph=True, dynamic=False)
    found, expected = compiled(*given), made(name)(*given)
    assert relative_error(found, expected) < 5e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compiled(*given)
    graph.replay()
    assert torch.equal(captured, found)
