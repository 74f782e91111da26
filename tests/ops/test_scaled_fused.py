"""`scaled_fused_experts` as one operator: where it is one, its gradients, its count of multiplications."""

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from moe_ops.scaled import quantised_weight

T, E, K, H, I = 7, 5, 2, 12, 8
IDS = torch.tensor([[0, 4], [4, 2], [2, -1], [1, 0], [3, 4], [0, 1], [2, 3]], dtype=torch.int32)


def _layer(**named):
    w13, w2 = (quantised_weight(torch.randn(E, *sizes), (4, 4), torch.int8) for sizes in ((2 * I, H), (H, I)))
    x, weights = torch.randn(T, H), torch.rand(T, K)
    given = {"hidden_states": x, "w13": w13, "w2": w2, "topk_weights": weights, "topk_ids": IDS}
    return given | {"w2_bias": torch.randn(E, H), "shared": torch.randn(T, H)} | named


class _Called(TorchDispatchMode):
    """Notes our operators, whose kernels are not looked into."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe":
            self.names.append(func._opname)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("differentiated", [None, "hidden_states", "topk_weights", "w2_bias", "shared"])
@pytest.mark.parametrize("rows", ["quantised", "exact"])
def test_it_is_one_operator(rows, differentiated):
    """But where gradients come through exact rows."""
    layer = _layer()
    stages = ["build_dispatch", "scaled_grouped_gemm", "gated_activation", "scaled_grouped_gemm", "combine"]
    if differentiated == "hidden_states" and rows == "quantised":
        return  # refused
    if differentiated:
        layer[differentiated].requires_grad_()
    expected = stages if rows == "exact" and differentiated else ["scaled_fused_experts"]
    with _Called() as called:
        moe_ops.scaled_fused_experts(**layer, rows=rows)
    assert called.names == expected
    graphs = EagerAndRecordGraphs()
    torch.compile(lambda: moe_ops.scaled_fused_experts(**layer, rows=rows), backend=graphs, fullgraph=True)()
    calls = [
        node.target for graph in graphs.graphs for node in graph.graph.nodes if node.op == "call_function"
    ]
    assert [each._opname for each in calls if getattr(each, "namespace", "") == "moe"] == expected


def test_gradients_are_those_of_the_stages():
    layer = _layer()
    asked = [layer[name].requires_grad_() for name in ("topk_weights", "w2_bias", "shared")]
    grad = torch.randn(T, H)
    found = torch.autograd.grad(moe_ops.scaled_fused_experts(**layer), asked, grad)
    plan = moe_ops.build_dispatch(IDS, E)
    rows, scale = moe_ops.quantise_rows(layer["hidden_states"], 4, torch.int8)
    named = {"sorted_slots": plan.sorted_slots, "dtype": torch.float32}
    gate_up = moe_ops.scaled_grouped_gemm(rows, layer["w13"], plan.expert_offsets, x_scale=scale, **named)
    rows, scale = moe_ops.quantise_rows(moe_ops.gated_activation(gate_up), 4, torch.int8)
    expert_out = moe_ops.scaled_grouped_gemm(
        rows, layer["w2"], plan.expert_offsets, layer["w2_bias"], x_scale=scale, dtype=torch.float32
    )
    out = moe_ops.combine(expert_out, layer["topk_weights"], plan.inverse, layer["shared"])
    for one, other in zip(found, torch.autograd.grad(out, asked, grad), strict=True):
        assert one.any() and torch.allclose(one, other)


def test_flops():
    with FlopCounterMode(display=False) as counter:
        moe_ops.scaled_fused_experts(**_layer())
    assert counter.get_total_flops() == 2 * T * K * (2 * I * H + H * I)
