"""FuseForBackward: which stages become halves, and which stay."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops
from inductor_passes.fuse_for_backward import FuseForBackward
from inductor_passes.pipeline import run_passes
from tests.passes.moe import EXPERTS, ROUTING, inputs


def fused(function, *extra):
    args = (*inputs(), *extra)
    with torch.no_grad():
        module = make_fx(function, tracing_mode="fake")(*args)
    log = run_passes(module.graph, [FuseForBackward()])
    module.recompile()
    torch.testing.assert_close(module(*args), function(*args))
    assert not run_passes(module.graph, [FuseForBackward()]).fused
    return log


def stages(hidden, logits, w13, w2, read=lambda rows, gate_up, activated: (gate_up, activated)):
    weights, ids = moe_ops.topk_routing(logits, ROUTING)
    plan = moe_ops.build_dispatch(ids, EXPERTS)
    rows = moe_ops.permute(hidden, plan.sorted_slots)
    gate_up = moe_ops.grouped_gemm(rows, w13, plan.expert_offsets)
    out, activated = read(rows, gate_up, moe_ops.gated_activation(gate_up, "silu"))
    down = moe_ops.grouped_gemm(activated, w2, plan.expert_offsets)
    return moe_ops.combine(down, weights, plan.inverse) + 0 * out.sum()


def test_a_layer_becomes_its_halves():
    log = fused(lambda *args: stages(*args))  # noqa: PLW0108  # takes no `read`
    assert log.counts() == {"gather_gemm": 1, "act_gemm_combine": 1} and not log.refused


def test_another_gate_keeps_its_second_half():
    def function(*args):
        return stages(*args, read=lambda rows, gate_up, activated: (gate_up, gate_up.chunk(2, -1)[0].sin()))

    log = fused(function)
    assert log.counts() == {"gather_gemm": 1}
    assert "not from gated_activation" in log.refused[0].reason


def test_other_plans_and_readers_stay():
    def read_rows(*args):
        return stages(*args, read=lambda rows, gate_up, activated: (rows, activated))

    def given_plan(hidden, logits, w13, w2, slots, inverse, offsets):
        rows = moe_ops.permute(hidden, slots)
        gate_up = moe_ops.grouped_gemm(rows, w13, offsets)
        down = moe_ops.grouped_gemm(moe_ops.gated_activation(gate_up, "silu"), w2, offsets)
        return moe_ops.combine(down, logits[:, :2], inverse)

    def rows_as_weight(hidden, logits, w13, w2, slots, inverse, offsets):
        rows = moe_ops.permute(hidden, slots)
        product = moe_ops.grouped_gemm(hidden.repeat(2, 1), rows[:4][:, None], offsets)
        return product.sum() + moe_ops.combine(rows, logits[:, :2], inverse)

    def rows_as_bias(hidden, logits, w13, w2, slots, inverse, offsets):
        rows = moe_ops.permute(hidden[:2], slots)
        out = moe_ops.grouped_gemm(hidden[2:6], w13, offsets, bias=rows)
        return moe_ops.combine(out, logits[:2, :2], inverse)

    assert [each.reason for each in fused(read_rows).refused] == [
        "what reads the gathered rows comes from aten.sum, not from grouped_gemm"
    ]
    ids = moe_ops.topk_routing(inputs().router_logits, ROUTING)[1]
    plan = moe_ops.build_dispatch(ids, EXPERTS)
    log = fused(given_plan, *plan)
    assert log.counts() == {"gather_gemm": 1}
    assert "not from build_dispatch" in log.refused[0].reason
    assert not fused(rows_as_weight, *plan).fused
    log = fused(rows_as_bias, *moe_ops.build_dispatch(ids[:2], EXPERTS))
    assert not log.fused and "the gathered rows are no rows of" in log.refused[-1].reason
