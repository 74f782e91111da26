"""torch.compile with our passes on a GPU: direct launches, symbolic token counts, CUDA graphs, training."""

import re
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code

import inductor_passes
import moe_ops
from tests.helpers import grads_of, relative_error

pytestmark = pytest.mark.gpu
ROUTING = moe_ops.RoutingConfig(top_k=4)
E, H, I = 16, 256, 192


@pytest.fixture(autouse=True)
def cold():
    with fresh_cache():
        yield


def weights(requires_grad=False):
    w13 = torch.randn(E, 2 * I, H, device="cuda", dtype=torch.bfloat16) / H**0.5
    w2 = torch.randn(E, H, I, device="cuda", dtype=torch.bfloat16) / I**0.5
    return w13.requires_grad_(requires_grad), w2.requires_grad_(requires_grad)


def inputs(tokens, requires_grad=False):
    x = torch.randn(tokens, H, device="cuda", dtype=torch.bfloat16, requires_grad=requires_grad)
    return x, torch.randn(tokens, E, device="cuda", requires_grad=requires_grad)


def layer(x, logits, w13, w2):
    return moe_ops.fused_moe(x, logits, w13, w2, ROUTING) + x


def eager(*args):
    return moe_ops.fused_moe(*args, ROUTING, emit="fused") + args[0]


@pytest.mark.parametrize("tokens", [1, 4, 33, 300])
def test_static_tokens_launch_the_kernels_directly(tokens):
    args = (*inputs(tokens), *weights())
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, options=inductor_passes.options())
    with torch.no_grad():
        out, (code,) = run_and_get_code(compiled, *args)
    assert "torch.ops.moe" not in code
    assert len(re.findall(r"^\s+_?\w*kernel\w*\.run\(", code, re.M)) >= 2
    assert relative_error(out, eager(*args)) < 5e-3


def test_symbolic_tokens_keep_one_operator_and_one_graph():
    w13, w2 = weights()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, options=inductor_passes.options())
    counters.clear()
    with torch.no_grad():
        _, (code,) = run_and_get_code(compiled, *inputs(33), w13, w2)
        for tokens in (2, 7, 64, 1000):
            args = (*inputs(tokens), w13, w2)
            assert relative_error(compiled(*args), eager(*args)) < 5e-3
    assert code.count("torch.ops.moe.fused_moe.default(") == 1
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_cuda_graphs_replay_with_new_contents_and_routing(dynamic):
    w13, w2 = weights()
    options = inductor_passes.options("reduce-overhead", **{"triton.cudagraph_or_error": True})
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, options=options)
    counters.clear()
    with torch.no_grad():
        for _ in range(5):
            args = (*inputs(8), w13, w2)
            assert relative_error(compiled(*args).clone(), eager(*args)) < 5e-3
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_backend_entry_point_by_name():
    args = (*inputs(33), *weights())
    with torch.no_grad():
        out = torch.compile(layer, fullgraph=True, backend="moe_inductor", mode="reduce-overhead")(*args)
    assert relative_error(out, eager(*args)) < 5e-3


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", [None, inductor_passes.options()], ids=["plain", "passes"])
def test_training(options, dynamic):
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, options=options)
    for tokens in (64, 33):
        _expect_gradients(compiled, (*inputs(tokens, True), *weights(True)))


def _expect_gradients(compiled, tensors):
    ours, theirs = grads_of(lambda: compiled(*tensors), tensors), grads_of(lambda: eager(*tensors), tensors)
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b) < 1e-2


def test_manual_capture_has_no_sync():
    """The eager operator captured by hand under sync debugging, replayed with other tokens and routing."""
    w13, w2 = weights()
    x, logits = inputs(33)
    with torch.no_grad():
        eager(x, logits, w13, w2)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                out = eager(x, logits, w13, w2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for _ in range(3):
            fresh = inputs(33)
            x.copy_(fresh[0])
            logits.copy_(fresh[1])
            graph.replay()
            assert torch.equal(out, eager(*fresh, w13, w2))


def test_explain_on_the_gpu():
    report = inductor_passes.explain(layer, *inputs(33), *weights())
    assert not report.graph_breaks
    assert not report.capture_hazards
    assert any(fusion.kind == "fused_experts" for fusion in report.fused)  # a residual joins the sum


def test_warmup_makes_the_first_call_capturable():
    """In a fresh process: load, capture at once, replay, and only then run eagerly to compare."""
    code = """
import torch, layers, moe_ops
config = layers.MoEConfig(num_experts=16, top_k=4, hidden_size=256, intermediate_size=192, has_bias=True)
moe_ops.warmup(config, [1, 33, 300])
layer = layers.FusedMoE(config, device="cuda", dtype=torch.bfloat16)
for tokens in (1, 33, 300):
    x, logits = torch.randn(tokens, 256, device="cuda").bfloat16(), torch.randn(tokens, 16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = layer(x, logits)
    graph.replay()
    with torch.no_grad():
        assert torch.equal(out, layer(x, logits)), tokens
print("captured")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "captured", result.stderr[-2000:]
