"""Estimates: kernels as the launch plans have them, bytes and FLOPs by hand."""

import pytest
import torch
from torch.fx import symbolic_trace

import moe_ops
from inductor_passes.costs import costs, total
from inductor_passes.records import Cost
from moe_ops import arguments as of
from moe_ops.kernels import plans
from tests.passes.capture import post_grad
from tests.passes.moe import EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K, inputs, layer, routed

SLOTS = TOKENS * TOP_K
FLOPS = 2 * SLOTS * 3 * HIDDEN * INTERMEDIATE


@torch.no_grad()
def _cost(function, *args, dynamic=None):
    """The cost of a function's whole graph."""
    (module,) = post_grad(function, *args, dynamic=dynamic)
    everything = {node.name: "all" for node in module.graph.nodes}
    return costs(module.graph, everything).get("all", Cost())


def test_flops_are_those_of_the_products():
    assert _cost(layer, *inputs()).flops == FLOPS
    given = inputs()
    ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int32)
    fused = _cost(torch.ops.moe.fused_experts, *_fused_experts(given, ids))
    assert fused.flops == FLOPS


def _fused_experts(given, ids):
    from moe_ops import records

    experts = of.ExpertWeights(of.PairedLinear(given.w13), of.GroupedLinear(given.w2))
    weights = torch.ones(TOKENS, TOP_K)
    record = of.FusedExperts(given.hidden_states, experts, weights, ids, of.Placement(), None, "silu")
    return records.flatten(record)


def test_kernels_are_those_of_the_plans():
    given = inputs()
    ids = torch.zeros(9999, TOP_K, dtype=torch.int32)
    planned = plans.program(of.BuildDispatch(ids, of.Placement(), EXPERTS)).launches
    dispatch = _cost(lambda ids: moe_ops.build_dispatch(ids, EXPERTS), ids)
    assert dispatch.kernels == len(planned) > 1
    assert _cost(layer, *given).kernels > _cost(lambda logits: routed(logits)[:2], given[1]).kernels


def test_bytes_of_a_gather():
    given = inputs()
    slots = torch.arange(SLOTS, dtype=torch.int32)
    found = _cost(moe_ops.permute, given.hidden_states, slots)
    assert found == Cost(1, 4 * (TOKENS * HIDDEN + SLOTS + SLOTS * HIDDEN), 0)


@pytest.mark.parametrize(("slots", "touched"), [(1, 1), (3, 3), (64, EXPERTS)])
def test_of_weights_no_more_experts_count_than_slots(slots, touched):
    rows, weight = torch.randn(slots, 128), torch.randn(EXPERTS, 128, 128)
    offsets = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    found = _cost(moe_ops.grouped_gemm, rows, weight, offsets)
    assert 0 <= found.bytes - 4 * (touched * 128 * 128 + 2 * slots * 128) < 4096  # and where tiles are


def test_elementwise_operators_that_read_one_another_are_one_kernel():
    x = torch.randn(8, 8)
    assert _cost(lambda x: x.exp() * 2 + 1, x) == Cost(1, 2 * x.nbytes, 0)
    assert _cost(lambda x: (x.exp() * 2).sum(0), x).kernels == 2
    assert _cost(lambda x: x.view(-1).view(8, 8).t(), x) == Cost()
    assert _cost(lambda x: x.exp().view(4, 16) * 2, x).kernels == 1


def test_torch_products():
    x = torch.randn(6, 8)
    found = _cost(lambda x: x @ x.t(), x)
    assert (found.kernels, found.flops) == (1, 2 * 6 * 8 * 6)
    weight, offsets = torch.randn(4, 8, 16).bfloat16(), torch.tensor([1, 2, 3, 6], dtype=torch.int32)
    found = _cost(torch._grouped_mm, x.bfloat16(), weight, offsets)
    assert found == Cost(1, 2 * (6 * 8 + 4 * 8 * 16 + 6 * 16) + 4 * 4, 2 * 6 * 8 * 16)


def test_symbolic_sizes_count_as_traced():
    static, dynamic = (_cost(layer, *inputs(dynamic=each)) for each in (False, True))
    assert static == dynamic and static.flops == FLOPS


def test_a_kernel_is_in_one_layer():
    graph = symbolic_trace(lambda x: torch.ops.aten.exp(torch.ops.aten.sin(x))).graph
    for node in graph.nodes:
        node.target = getattr(node.target, "default", node.target)
    sine, exponential = [node.name for node in graph.nodes if node.op == "call_function"]
    assert costs(graph, {sine: "a", exponential: "a"})["a"].kernels == 1
    apart = costs(graph, {sine: "a", exponential: "b"})
    assert (apart["a"].kernels, apart["b"].kernels) == (1, 1)


def test_layers_apart_and_nothing_outside():
    graph = symbolic_trace(lambda x: (torch.exp(x), torch.sin(x), torch.cos(x))).graph
    names = [node.name for node in graph.nodes if node.op == "call_function"]
    found = costs(graph, {names[0]: "a", names[2]: "b"})
    assert {name: each.kernels for name, each in found.items()} == {"a": 1, "b": 1}
    assert total(found.values()).kernels == 2


def test_without_a_plan_an_operator_is_one_kernel(monkeypatch):
    monkeypatch.setattr(plans, "program", lambda *_: (_ for _ in ()).throw(RuntimeError("no plan")))
    assert _cost(layer, *inputs()).kernels == 7
