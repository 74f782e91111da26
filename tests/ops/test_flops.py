"""FlopCounterMode counts our operators as it counts the same products in plain PyTorch."""

import torch
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from moe_ops import RoutingConfig

T, K, E, H, I = 6, 2, 4, 8, 5
UP, DOWN = 2 * T * K * 2 * I * H, 2 * T * K * H * I


def count(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def problem(requires_grad=False):
    shapes = [(T, H), (T, E), (E, 2 * I, H), (E, H, I)]
    return [torch.randn(shape, requires_grad=requires_grad) for shape in shapes]


def test_forward():
    x, logits, w13, w2 = problem()
    weights, ids, plan = moe_ops.routing_dispatch(logits, RoutingConfig(K))
    rows = moe_ops.permute(x, plan.sorted_slots)
    assert count(lambda: moe_ops.grouped_gemm(rows, w13, plan.expert_offsets)) == UP
    assert count(lambda: moe_ops.gather_gemm_act(x, w13, plan)) == UP
    up = moe_ops.gather_gemm_act(x, w13, plan)
    assert count(lambda: moe_ops.gemm_combine(up, w2, weights, plan)) == DOWN
    assert count(lambda: moe_ops.gather_gemm(x, w13, plan)) == UP
    gate_up = moe_ops.gather_gemm(x, w13, plan)
    assert count(lambda: moe_ops.act_gemm_combine(gate_up, w2, weights, plan)) == DOWN
    assert count(lambda: moe_ops.fused_experts(x, w13, w2, weights, ids)) == UP + DOWN
    for emit in ("fused", "stages"):
        assert (
            count(lambda emit=emit: moe_ops.fused_moe(x, logits, w13, w2, RoutingConfig(K), emit=emit))
            == UP + DOWN
        )


def test_one_expert_counts_like_a_dense_layer():
    x, w13, w2 = torch.randn(T, H), torch.randn(1, I, H), torch.randn(1, H, I)
    ids, weights = torch.zeros(T, 1, dtype=torch.int32), torch.ones(T, 1)
    ours = count(lambda: moe_ops.fused_experts(x, w13, w2, weights, ids, "relu2"))
    assert ours == count(lambda: (x @ w13[0].t()).relu().square() @ w2[0].t())


def test_backward():
    """Every product has two gradients; the fused operator multiplies with w13 once more, the stages do not."""
    for emit, again in (("stages", 0), ("fused", UP)):
        x, logits, w13, w2 = problem(requires_grad=True)
        run = lambda: moe_ops.fused_moe(x, logits, w13, w2, RoutingConfig(K), emit=emit).sum().backward()  # noqa: B023, E731
        assert count(run) == 3 * (UP + DOWN) + again
