"""ShareRepeats: layers that read the same ids sort them once; what differs in anything stays apart."""

import expecttest
import pytest
import torch

import moe_ops
from inductor_passes.pipeline import FUSIONS, PIPELINE
from inductor_passes.share_repeats import ShareRepeats
from tests.helpers import assert_same
from tests.passes.capture import computed, rewrite
from tests.passes.moe import EXPERTS, ROUTING, inputs, layer, routed

PASS = (ShareRepeats(),)


def two_layers(hidden, logits, w13, w2):
    weights, ids = moe_ops.topk_routing(logits, ROUTING)
    hidden = moe_ops.fused_experts(hidden, w13, w2, weights, ids)
    return moe_ops.fused_experts(hidden, w13 * 2, w2, weights, ids)


def one_layer_twice(hidden, logits, w13, w2):
    return layer(layer(hidden, logits, w13, w2), logits, w13, w2)


def plans(logits, other):
    """Both plans of what `other` makes of the first one's ids."""
    _, ids, plan = routed(logits)
    return *(each * 2 for each in plan), *(each * 3 for each in other(ids))


class TestGolden(expecttest.TestCase):
    def test_before_and_after(self):
        def twice(logits):
            return plans(logits, lambda ids: moe_ops.build_dispatch(ids, EXPERTS))

        result = rewrite(twice, inputs(dynamic=True).router_logits, passes=PASS)
        self.assertExpectedInline(
            result.before,
            """\
%0 = input() : float32[T0, 4]
%1 = moe.topk_routing.default(%0, None, 'top_k=2') : 2 tensors
%2 = getitem(%1, 1) : int32[T0, 2]
%3 = moe.build_dispatch.default(%2, None, 4) : 3 tensors
%4 = getitem(%3, 0) : int32[2*T0]
%5 = getitem(%3, 1) : int32[2*T0]
%6 = getitem(%3, 2) : int32[5]
%7 = aten.mul.Tensor(%4, 2) : int32[2*T0]
%8 = aten.mul.Tensor(%5, 2) : int32[2*T0]
%9 = aten.mul.Tensor(%6, 2) : int32[5]
%10 = moe.build_dispatch.default(%2, None, 4) : 3 tensors
%11 = getitem(%10, 0) : int32[2*T0]
%12 = getitem(%10, 1) : int32[2*T0]
%13 = getitem(%10, 2) : int32[5]
%14 = aten.mul.Tensor(%11, 3) : int32[2*T0]
%15 = aten.mul.Tensor(%12, 3) : int32[2*T0]
%16 = aten.mul.Tensor(%13, 3) : int32[5]
return [%7, %8, %9, %14, %15, %16]""",
        )
        self.assertExpectedInline(
            result.after,
            """\
%0 = input() : float32[T0, 4]
%1 = moe.topk_routing.default(%0, None, 'top_k=2') : 2 tensors
%2 = getitem(%1, 1) : int32[T0, 2]
%3 = moe.build_dispatch.default(%2, None, 4) : 3 tensors
%4 = getitem(%3, 0) : int32[2*T0]
%5 = getitem(%3, 1) : int32[2*T0]
%6 = getitem(%3, 2) : int32[5]
%7 = aten.mul.Tensor(%4, 2) : int32[2*T0]
%8 = aten.mul.Tensor(%5, 2) : int32[2*T0]
%9 = aten.mul.Tensor(%6, 2) : int32[5]
%10 = aten.mul.Tensor(%4, 3) : int32[2*T0]
%11 = aten.mul.Tensor(%5, 3) : int32[2*T0]
%12 = aten.mul.Tensor(%6, 3) : int32[5]
return [%7, %8, %9, %10, %11, %12]""",
        )
        assert result.log.counts() == {"repeated build_dispatch": 1}


def test_what_is_returned_is_nobody_elses():
    """Who gets two tensors may write into one of them."""
    result = rewrite(
        lambda logits: [routed(logits)[2], routed(logits)[2]], inputs().router_logits, passes=PASS
    )
    assert result.ops() == ["topk_routing", "build_dispatch", "build_dispatch"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "model, repeated",
    [(two_layers, ["build_dispatch"]), (one_layer_twice, ["topk_routing", "build_dispatch"])],
)
def test_layers_that_read_the_same_ids_sort_once(model, repeated, dynamic):
    given = [tensor.double() for tensor in inputs()]
    if dynamic:
        for tensor in given[:2]:
            torch._dynamo.mark_dynamic(tensor, 0)
    result, out = computed(model, *given, passes=FUSIONS)
    assert result.ops() == ["topk_routing", "fused_experts", "fused_experts"] and not result.reasons
    assert [kind for kind in result.log.counts() if "repeated" in kind] == [
        f"repeated {op}" for op in repeated
    ]
    assert_same([out], [model(*given)])


@pytest.mark.parametrize("model", [two_layers, one_layer_twice])
def test_what_is_written_out_for_a_cpu_sorts_once(model):
    given = [tensor.double() for tensor in inputs(65)]  # the rows of fewer are counted, not sorted
    result, out = computed(model, *given, passes=PIPELINE)
    sorts = [node for node in result.graph.nodes if "sort" in str(node.target)]
    scatters = [node for node in result.graph.nodes if "scatter" in str(node.target)]
    assert [str(each.target) for each in sorts] == ["aten.sort.stable", "aten.searchsorted.Tensor"]
    assert len(scatters) == 1
    assert_same([out], [model(*given)])


def test_rows_gathered_twice_are_gathered_once():
    def gathered(hidden, logits):
        plan = routed(logits)[2]
        return [moe_ops.permute(hidden, plan.sorted_slots) * number for number in (1.0, 2.0)]

    result = rewrite(gathered, *inputs()[:2], passes=PASS)
    assert result.ops() == ["topk_routing", "build_dispatch", "permute"]
    assert result.log.counts() == {"repeated permute": 1}


def test_a_second_run_finds_nothing():
    result = rewrite(one_layer_twice, *inputs(), passes=PASS + PASS)
    assert result.log.counts() == {"repeated topk_routing": 1, "repeated build_dispatch": 1}


MAP = torch.arange(EXPERTS, dtype=torch.int32)


@pytest.mark.parametrize(
    "other",
    [
        lambda ids: moe_ops.build_dispatch(ids, EXPERTS + 1),
        lambda ids: moe_ops.build_dispatch(ids.flip(0), EXPERTS),
        lambda ids: moe_ops.build_dispatch(ids, EXPERTS, MAP.clone()),
    ],
    ids=["number of experts", "ids", "placement"],
)
def test_plans_that_differ_stay_apart(other):
    result = rewrite(lambda logits: plans(logits, other), inputs().router_logits, passes=PASS)
    assert result.ops().count("build_dispatch") == 2 and not result.log.fused


def test_what_is_recorded_is_recorded_twice():
    """Each call adds to the load."""

    def recorded(logits, load):
        ids = moe_ops.topk_routing(logits, ROUTING)[1]
        maps = torch.arange(EXPERTS, dtype=torch.int32)[:, None], torch.ones(EXPERTS, dtype=torch.int32)
        for _ in range(2):
            moe_ops.map_replicas(ids, *maps, load=load)
        return load + 0

    load, logits = torch.zeros(EXPERTS, dtype=torch.int32), inputs().router_logits
    out = computed(recorded, logits, load, passes=PASS)[1]
    assert int(out.sum()) == 2 * logits.shape[0] * ROUTING.top_k


def test_a_plan_nobody_reads_goes():
    def unread(hidden, logits, w13, w2):
        moe_ops.build_dispatch(moe_ops.topk_routing(logits, ROUTING)[1], EXPERTS)
        return hidden

    graph = rewrite(unread, *inputs(), passes=PASS).graph
    assert not [node for node in graph.nodes if node.op == "call_function"]
