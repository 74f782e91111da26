"""Guards that no whole layer reaches: operators put together by hand in ways that must not be fused."""

import operator

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import moe_ops
from inductor_passes.base import Refusal
from inductor_passes.graph_tools import arguments, expect_same_value
from inductor_passes.sizes import same_size
from moe_ops.arguments import Permute
from tests.passes.capture import rewrite
from tests.passes.moe import EXPERTS, HIDDEN, ROUTING, TOKENS, inputs, routed

HALVES = ["routing_dispatch", "gather_gemm_act", "gemm_combine"]


def _node(graph, value):
    node = graph.call_function(operator.neg, ())
    node.meta["val"] = value
    return node


@pytest.mark.parametrize(
    "other",
    [torch.empty(4, 6, dtype=torch.float64), torch.empty(4, 5), torch.empty(4, 6, 1), torch.empty(6, 4).t()],
    ids=["dtype", "size", "rank", "strides"],
)
def test_a_replacement_of_another_value_is_refused(other):
    graph = Graph()
    old = _node(graph, torch.empty(4, 6))
    expect_same_value(_node(graph, torch.empty(4, 6)), old)
    with pytest.raises(Refusal, match="gives"):
        expect_same_value(_node(graph, other), old)


def test_symbols_of_one_value_are_tied_and_others_differ():
    environment = ShapeEnv(duck_shape=False)

    def symbol(name, hint):
        source = ConstantSource(name)
        made = environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        return environment.create_symintnode(made, hint=hint, source=source)

    one, alike, other = symbol("a", 4), symbol("b", 4), symbol("c", 5)
    assert one.node.expr != alike.node.expr
    assert same_size(one, alike) and one.node.expr == alike.node.expr
    assert not same_size(one, other)
    assert not same_size(one, 4)


def test_what_the_fused_operator_does_not_take_stays_apart():
    """Logits of more experts than have weights here: the stages drop the others' slots, fused_moe wants a map."""

    def partial(hidden, logits, w13, w2):
        weights, ids = moe_ops.topk_routing(logits, ROUTING)
        return moe_ops.fused_experts(hidden, w13[:3], w2[:3], weights, ids)

    result = rewrite(partial, *inputs())
    assert result.ops() == HALVES
    assert result.reasons[0].startswith("fused_moe does not take these arguments: router_logits has shape")


def test_another_reader_of_the_activated_rows():
    def observed(hidden, logits, w13, w2):
        weights, _, plan = routed(logits)
        rows = moe_ops.gather_gemm_act(hidden, w13, plan)
        return moe_ops.gemm_combine(rows, w2, weights, plan), rows.amax()

    result = rewrite(observed, *inputs())
    assert result.ops() == HALVES
    assert result.reasons == ["the activated rows has another user: aten.amax"]


@pytest.mark.parametrize("fused_router", [True, False])
def test_outputs_of_a_plan_in_the_wrong_role(fused_router):
    def swapped(hidden, logits, w13, w2):
        weights, ids = moe_ops.topk_routing(logits, ROUTING)
        plan = moe_ops.build_dispatch(ids if fused_router else ids + 0, EXPERTS)
        plan = plan._replace(sorted_slots=plan.inverse, inverse=plan.sorted_slots)
        rows = moe_ops.gather_gemm_act(hidden, w13, plan)
        return moe_ops.gemm_combine(rows, w2, weights, plan)

    reasons = rewrite(swapped, *inputs()).reasons
    assert reasons[-1].endswith("is used in another role than the plan gives it")


def test_offsets_of_another_plan_in_the_first_product():
    def mixed(hidden, logits, w13, w2):
        weights, _, plan = routed(logits)
        other = routed(-logits)[2]
        rows = moe_ops.gather_gemm_act(hidden, w13, plan._replace(expert_offsets=other.expert_offsets))
        return moe_ops.gemm_combine(rows, w2, weights, plan)

    assert rewrite(mixed, *inputs()).reasons == ["the two grouped GEMMs use different expert_offsets"]


def test_weights_from_elsewhere_keep_the_router_apart():
    def given_weights(hidden, logits, w13, w2, weights):
        _, ids = moe_ops.topk_routing(logits, ROUTING)
        return moe_ops.fused_experts(hidden, w13, w2, weights, ids)

    result = rewrite(given_weights, *inputs(), torch.rand(TOKENS, ROUTING.top_k))
    assert result.ops() == ["topk_routing", "fused_experts"]


def test_a_plan_that_others_read_stays_whole():
    def observed(hidden, logits, w13, w2):
        weights, _, plan = routed(logits)
        rows = moe_ops.gather_gemm_act(hidden, w13, plan)
        return moe_ops.gemm_combine(rows, w2, weights, plan), plan.expert_offsets + 1, weights + 1

    result = rewrite(observed, *inputs())
    assert result.ops() == ["routing_dispatch", "fused_experts"]
    assert result.log.counts()["routing_dispatch"] == 1


def test_everything_goes_along_from_ids_too():
    def everything(hidden, w13, w2, weights, ids, b13, b2, expert_map, shared):
        extras = {"w13_bias": b13, "w2_bias": b2, "expert_map": expert_map, "shared": shared}
        return moe_ops.fused_experts(hidden, w13, w2, weights, ids, "gelu_tanh", **extras)

    given = inputs()
    weights, ids = moe_ops.topk_routing(given.router_logits, ROUTING)
    extras = torch.randn(given.w13.shape[:2]), torch.randn(EXPERTS, HIDDEN), torch.randperm(EXPERTS).int()
    tensors = (
        given.hidden_states,
        given.w13,
        given.w2,
        weights,
        ids,
        *extras,
        torch.randn_like(given.hidden_states),
    )
    result = rewrite(everything, *tensors)
    assert result.ops() == ["fused_experts"]
    (fused,) = [node for node in result.graph.nodes if "fused_experts" in str(node.target)]
    by_shape = {(tensor.shape, tensor.dtype) for tensor in tensors}
    given_to = [arg for arg in fused.args if isinstance(arg, Node)]
    read = [(arg.meta["val"].shape, arg.meta["val"].dtype) for arg in given_to]
    assert set(read) == by_shape and len(set(given_to)) == len(given_to) == 9


def test_a_map_computed_from_the_router_by_way_of_others():
    def circular(logits):
        _, ids = moe_ops.topk_routing(logits, ROUTING)
        return moe_ops.build_dispatch(ids, EXPERTS, (ids * 2)[:EXPERTS, 0] + 0)

    assert rewrite(circular, inputs().router_logits).reasons == [
        "expert_map is computed from the router's output"
    ]


def test_a_call_by_keyword_is_read_too():
    graph = Graph()
    hidden, slots = (graph.placeholder(name) for name in ("hidden_states", "sorted_slots"))
    call = graph.call_function(torch.ops.moe.permute.default, (hidden,), {"sorted_slots": slots})
    assert arguments(call) == Permute(hidden, slots)
