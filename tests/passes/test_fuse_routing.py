"""FuseRoutingDispatch: what it fuses, what it refuses and why."""

import expecttest
import torch

import moe_ops
from inductor_passes.fuse_routing import FuseRoutingDispatch
from tests.passes.capture import rewrite
from tests.passes.moe import EXPERTS, ROUTING, inputs, routed

PASS = (FuseRoutingDispatch(),)


def _plan(logits):
    weights, _, plan = routed(logits)
    return weights, *plan


class TestGolden(expecttest.TestCase):
    def test_before_and_after(self):
        result = rewrite(_plan, inputs(dynamic=True).router_logits, passes=PASS)
        self.assertExpectedInline(
            result.before,
            """\
%0 = input() : float32[T0, 4]
%1 = moe.topk_routing.default(%0, None, 'top_k=2') : 2 tensors
%2 = getitem(%1, 0) : float32[T0, 2]
%3 = getitem(%1, 1) : int32[T0, 2]
%4 = moe.build_dispatch.default(%3, None, 4) : 3 tensors
%5 = getitem(%4, 0) : int32[2*T0]
%6 = getitem(%4, 1) : int32[2*T0]
%7 = getitem(%4, 2) : int32[5]
return [%2, %5, %6, %7]""",
        )
        self.assertExpectedInline(
            result.after,
            """\
%0 = input() : float32[T0, 4]
%1 = moe.routing_dispatch.default(%0, None, None, 4, 'top_k=2') : 5 tensors
%2 = getitem(%1, 4) : int32[5]
%3 = getitem(%1, 3) : int32[2*T0]
%4 = getitem(%1, 2) : int32[2*T0]
%5 = getitem(%1, 1) : int32[T0, 2]
%6 = getitem(%1, 0) : float32[T0, 2]
return [%6, %4, %3, %2]""",
        )
        assert result.log.counts() == {"routing_dispatch": 1}


def test_outputs_read_before_the_dispatch_are_moved_too():
    def early(logits):
        weights, ids = moe_ops.topk_routing(logits, ROUTING)
        doubled = weights * 2
        return doubled, moe_ops.build_dispatch(ids, EXPERTS).inverse, ids

    result = rewrite(early, inputs().router_logits, passes=PASS)
    assert result.ops() == ["routing_dispatch"]
    torch.testing.assert_close(result.module(inputs().router_logits)[0], early(inputs().router_logits)[0])


def test_second_run_finds_nothing():
    result = rewrite(_plan, inputs().router_logits, passes=PASS + PASS)
    assert result.log.counts() == {"routing_dispatch": 1} and not result.reasons


def test_refuses_ids_from_elsewhere():
    def foreign(ids):
        return moe_ops.build_dispatch(ids, EXPERTS)

    result = rewrite(foreign, torch.zeros(3, 2, dtype=torch.int32), passes=PASS)
    assert result.ops() == ["build_dispatch"]
    assert result.reasons[0].startswith("topk_ids come from the graph input")


def test_refuses_a_second_dispatch_of_one_router():
    def twice(logits):
        _, ids = moe_ops.topk_routing(logits, ROUTING)
        return moe_ops.build_dispatch(ids, EXPERTS), moe_ops.build_dispatch(ids, EXPERTS - 1)

    result = rewrite(twice, inputs().router_logits, passes=PASS)
    assert result.log.counts() == {"routing_dispatch": 1}
    assert result.reasons == ["topk_ids come from a router that is already fused with another dispatch"]


def test_refuses_changed_ids():
    def remapped(logits):
        _, ids = moe_ops.topk_routing(logits, ROUTING)
        return moe_ops.build_dispatch((ids + 1) % EXPERTS, EXPERTS)

    result = rewrite(remapped, inputs().router_logits, passes=PASS)
    assert result.ops() == ["topk_routing", "build_dispatch"]
    assert "not from topk_routing" in result.reasons[0]


def test_refuses_a_map_computed_from_the_router():
    def circular(logits):
        _, ids = moe_ops.topk_routing(logits, ROUTING)
        return moe_ops.build_dispatch(ids, EXPERTS, ids[:EXPERTS, 0] + 0)

    result = rewrite(circular, inputs().router_logits, passes=PASS)
    assert result.reasons == ["expert_map is computed from the router's output"]
