"""On a GPU: compiled code captured by hand without a host sync and replayed, against the layer in float64."""

import pytest
import torch

import inductor_passes
import moe_ops

pytestmark = pytest.mark.gpu

HIDDEN, EXPERTS, INTERMEDIATE = 256, 16, 128
ROUTING = moe_ops.RoutingConfig(top_k=4)


def _inputs(tokens, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    scaled = {
        (tokens, HIDDEN): 1.0,
        (tokens, EXPERTS): 2.0,
        (EXPERTS, 2 * INTERMEDIATE, HIDDEN): HIDDEN**-0.5,
        (EXPERTS, HIDDEN, INTERMEDIATE): INTERMEDIATE**-0.5,
    }
    made = [torch.randn(shape, generator=generator, device="cuda") * scale for shape, scale in scaled.items()]
    return [tensor.to(torch.bfloat16) for tensor in made]


def _layer(hidden, logits, w13, w2):
    return moe_ops.fused_moe(hidden * 2, logits, w13, w2, ROUTING) + hidden


def _assert_right(actual, given):
    # The float64 layer routes from the same bfloat16 logits, so it picks the same experts.
    expected = _layer(*(tensor.double().cpu() for tensor in given))
    error = (actual.double().cpu() - expected).norm() / expected.norm()
    assert error < 1e-2, f"relative error {error:.2e}"


def _capture(function, given):
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            out = function(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return graph, out


@pytest.mark.parametrize("dynamic", [False, True], ids=["launches", "operator call"])
@pytest.mark.parametrize("tokens", [2, 8, 64, 1000])
@torch.no_grad()
def test_capture_without_a_sync_and_replay_with_other_contents(tokens, dynamic):
    torch._dynamo.reset()
    given = _inputs(tokens)
    compiled = torch.compile(_layer, fullgraph=True, dynamic=dynamic, options=inductor_passes.options())
    _assert_right(compiled(*given), given)
    graph, captured = _capture(compiled, given)
    for seed in (1, 2):
        for static, fresh in zip(given, _inputs(tokens, seed), strict=True):
            static.copy_(fresh)
        graph.replay()
        _assert_right(captured, given)
