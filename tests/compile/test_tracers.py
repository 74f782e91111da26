"""What each tracer sees: export the stages, make_fx and aot_function the fused operator; values and gradients agree."""

import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx

from layers import MoEBlock, MoEConfig, SharedExpertConfig
from tests.passes.moe import TOKENS, inputs, layer

STAGES = [
    "topk_routing",
    "build_dispatch",
    "permute",
    "grouped_gemm",
    "gated_activation",
    "grouped_gemm",
    "combine",
]


def _ops(graph):
    return [str(n.target).split(".")[1] for n in graph.nodes if str(n.target).startswith("moe.")]


class Wrapped(torch.nn.Module):
    def forward(self, hidden, logits, w13, w2):
        return layer(hidden, logits, w13, w2)


def test_export_sees_the_stages_and_runs_at_other_sizes():
    tokens = torch.export.Dim("tokens", min=2, max=512)
    dynamic = ({0: tokens}, {0: tokens}, None, None)
    with torch.no_grad():
        program = torch.export.export(Wrapped(), tuple(inputs()), dynamic_shapes=dynamic)
    assert _ops(program.graph) == STAGES
    torch.testing.assert_close(program.module()(*inputs(TOKENS + 5)), layer(*inputs(TOKENS + 5)))


def test_make_fx_sees_the_fused_operator():
    with torch.no_grad():
        graph = make_fx(layer)(*inputs())
    assert _ops(graph.graph) == ["fused_moe"]
    torch.testing.assert_close(graph(*inputs()), layer(*inputs()))


def test_aot_function_with_min_cut_runs_forward_and_backward():
    graphs = []

    def record(graph, example_inputs):
        graphs.append(_ops(graph.graph))
        return make_boxed_func(graph.forward)

    eager, traced = ([tensor.requires_grad_() for tensor in inputs()] for _ in range(2))
    compiled = aot_function(layer, record, record, min_cut_rematerialization_partition)
    out, expected = compiled(*traced), layer(*eager)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert graphs[0][0] == "fused_moe" and len(graphs) == 2
    for ours, theirs in zip(traced, eager, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_jit_trace_sees_the_fused_operator():
    """Its sizes are tensors, in Python."""
    block = MoEBlock(MoEConfig(4, 2, 16, 8, shared_experts=SharedExpertConfig(8)))
    traced = torch.jit.trace(block, (torch.randn(2, 3, 16),))
    assert "moe::fused_experts(" in str(traced.inlined_graph)
    ours, theirs = (torch.linspace(-1, 1, 80).view(1, 5, 16).requires_grad_() for _ in range(2))
    torch.testing.assert_close(traced(ours), block(theirs))
    traced(ours).square().sum().backward()
    block(theirs).square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
