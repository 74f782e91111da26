"""MoE inside higher-order operators: fused as well, right in value and gradient, and told by explain()."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import inductor_passes
import moe_ops
from inductor_passes import _compat
from tests.helpers import assert_same, fresh_graphs, usually
from tests.passes.moe import inputs, layer, routed, up
from tests.passes.test_explain import Block

WHOLE = ["routing_dispatch", "gather_gemm_act", "gemm_combine", "fused_moe"]


def branches(hidden, *rest):
    return torch.cond(hidden.sum() > 0, layer, lambda *given: layer(*given) * 2, (hidden, *rest))


def nested_branches(hidden, *rest):
    def inner(hidden, *rest):
        return torch.cond(hidden.amax() > 0, layer, lambda *given: given[0] * 1.5, (hidden, *rest))

    return torch.cond(hidden.sum() > 0, inner, inner, (hidden, *rest))


@torch.compiler.nested_compile_region
def region(*given):
    return layer(*given)


def regions(hidden, *rest):
    return region(region(hidden, *rest), *rest) + layer(hidden, *rest)


def loop(hidden, *rest):
    def body(index, hidden):
        return index + 1, layer(hidden, *rest)

    return while_loop(lambda index, _: index < 3, body, (torch.zeros((), dtype=torch.int64), hidden))[1]


def scanned(hidden, *rest):
    def step(carry, each):
        result = layer(carry, *rest)
        return result, result + each

    return scan(step, hidden, torch.stack([hidden, hidden]))[1]


def mapped(hidden, *rest):
    return map_over(layer, torch.stack([hidden, hidden * 2]), *rest)


def checkpointed(*given):
    return checkpoint(layer, *given, use_reentrant=False)


# What explain sees in each: where the layers are, and how often they are called.
PLACES = {
    branches: [("true_graph_0 of cond", 1), ("false_graph_0 of cond", 1)],
    nested_branches: [
        ("true_graph_0 of cond in true_graph_0 of cond", 1),
        ("true_graph_0 of cond in false_graph_0 of cond", 1),
    ],
    regions: [("", 1), ("repeated_subgraph0 of invoke_subgraph", 2)],
    loop: [("while_loop_body_graph_0 of while_loop", 1)],
    scanned: [("scan_combine_graph_0 of scan", 1)],
    mapped: [("body_graph_0 of map_impl", 1)],
    checkpointed: [("", 1)],
}
STEERED = {branches: ["cond"], nested_branches: ["cond"] * 3, loop: ["while_loop"]}


def given(scale=1.0):
    made = [tensor.double() * scale for tensor in inputs()]
    return [made[0].abs(), *made[1:]] if scale > 0 else made


@pytest.mark.parametrize("model", PLACES, ids=lambda model: model.__name__)
@torch.no_grad()
def test_explain_sees_every_layer_and_says_where(model):
    report = inductor_passes.explain(model, *inputs())
    assert [(each.where, each.calls) for each in report.layers] == PLACES[model]
    for each in report.layers:
        assert (each.before, each.after) == (7, 1) and each.name.endswith(each.where)
        assert [fusion.kind for fusion in report.fused if fusion.layer == each.name] == WHOLE
    assert [each.target for each in report.capture_hazards] == STEERED.get(model, [])
    number = sum(calls for _, calls in PLACES[model])
    assert f"{number} MoE layer{'s' if number > 1 else ''}, all fused" in str(report)
    assert all(each.where in str(report) for each in report.layers)


class Counter(_compat.CustomGraphPass):
    """Counts layers per graph, two products each, after ours."""

    def __init__(self):
        self.found = []

    def __call__(self, graph):
        operators = [str(node.target) for node in graph.nodes if str(node.target).startswith("moe.")]
        assert set(operators) <= {"moe.grouped_gemm.compiled"}
        self.found.append(len(operators) // 2)

    def uuid(self):
        return None


@pytest.mark.parametrize(
    "model", usually(PLACES, (branches, loop, checkpointed)), ids=lambda model: model.__name__
)
@torch.no_grad()
def test_a_compile_fuses_each_graph_once_and_computes_the_same(model):
    counter = Counter()
    options = inductor_passes.options(post_grad_custom_pre_pass=counter)
    with fresh_graphs():
        compiled = torch.compile(model, fullgraph=True, options=options)
        for scale in (1.0, -1.0):  # both branches
            assert_same([compiled(*given(scale))], [model(*given(scale))])
    assert sum(counter.found) == len(PLACES[model]) and max(counter.found) == 1


# In a backward a loop is as a branch, and a checkpoint as a region; ten seconds each.
@pytest.mark.parametrize("model", usually(PLACES, (branches, regions)), ids=lambda model: model.__name__)
def test_gradients_are_those_of_plain_pytorch(model):
    def gradients(function):
        tensors = [tensor.requires_grad_() for tensor in given()]
        function(*tensors).square().sum().backward()
        return [tensor.grad for tensor in tensors]

    with fresh_graphs():
        compiled = torch.compile(model, fullgraph=True, options=inductor_passes.options())
        assert_same(gradients(compiled), gradients(model))


class TinyMoe(Block):
    """By its name an MoE layer, so that explain would miss its operators."""


class Stack(nn.Module):
    """Three alike blocks in branches, three that share a region, one in the open."""

    def __init__(self):
        super().__init__()
        self.branched = nn.ModuleList(TinyMoe() for _ in range(3))
        self.shared = nn.ModuleList(TinyMoe() for _ in range(3))
        self.last = TinyMoe()

    def forward(self, hidden):
        for block in self.branched:
            hidden = torch.cond(hidden.sum() > 0, lambda x, block=block: block(x), lambda x: x * 2, (hidden,))
        for block in self.shared:
            hidden = _in_region(block, hidden)
        return self.last(hidden)


@torch.compiler.nested_compile_region
def _in_region(block, hidden):
    return block(hidden)


@torch.no_grad()
def test_names_in_subgraphs_are_those_of_the_modules():
    report = inductor_passes.explain(Stack(), inputs().hidden_states)
    assert [each.name for each in report.layers] == [
        "last",
        *(f"branched.{index} in true_graph_{index} of cond" for index in range(3)),
        "shared.0 in repeated_subgraph0 of invoke_subgraph",
    ]
    lines = str(report).splitlines()
    assert lines[0].startswith(
        "1 inference graph, 7 MoE layers, all fused; 3 in true_graph_* of cond, 3 in repeated_"
    )
    assert "last, branched.0-2 in true_graph_* of cond (4 layers): 7 -> 1 operator calls" in lines
    assert "shared.0 in repeated_subgraph0 of invoke_subgraph, called 3 times: 7 -> 1 operator calls" in lines
    assert not report.unfused and len([line for line in lines if "cond (cond)" in line]) == 1


def observed(hidden, logits, w13, w2):
    """A layer whose first product something else reads."""
    weights, _, plan = routed(logits)
    gate_up = up(hidden, w13, plan)
    rows = moe_ops.gated_activation(gate_up) + gate_up.amax()
    return moe_ops.combine(moe_ops.grouped_gemm(rows, w2, plan.expert_offsets), weights, plan.inverse)


@torch.no_grad()
def test_a_refusal_in_a_branch_is_told():
    def model(hidden, *rest):
        return torch.cond(hidden.sum() > 0, observed, lambda *given: given[0] * 2, (hidden, *rest))

    report = inductor_passes.explain(model, *inputs())
    refused = {(each.layer, each.reason) for each in report.refused}
    assert ("moe_0 in true_graph_0 of cond", "gate_up has another user: aten.amax") in refused
    assert "1 MoE layer, 0 fused, 1 in part; 1 in true_graph_0 of cond" in str(report)
    assert "  refused: grouped_gemm: gate_up has another user: aten.amax" in str(report).splitlines()
