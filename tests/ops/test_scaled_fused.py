"""`scaled_fused_experts` as one operator: where it is one, its gradients, its count of multiplications."""

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from moe_ops.weight_formats import quantised_weight

T, E, K, H, I = 7, 5, 2, 12, 8
IDS = torch.tensor([[0, 4], [4, 2], [2, -1], [1, 0], [3, 4], [0, 1], [2, 3]], dtype=torch.int32)


def _layer(**named):
    w13, w2 = (quantised_weight(torch.randn(E, *sizes), (4, 4), torch.int8) for sizes in ((2 * I, H), (H, I)))
    x, weights = torch.randn(T, H), torch.rand(T, K)
    given = {"hidden_states": x, "w13": w13, "w2": w2, "topk_weights": weights, "topk_ids": IDS}
    return (
        given
        | {"w13_bias": torch.randn(E, 2 * I), "w2_bias": torch.randn(E, H), "shared": torch.randn(T, H)}
        | named
    )


class _Called(TorchDispatchMode):
    """Notes our operators, whose kernels are not looked into."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe":
            self.names.append(func._opname)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "differentiated", [None, "hidden_states", "topk_weights", "w13_bias", "w2_bias", "shared"]
)
@pytest.mark.parametrize("rows", ["quantised", "exact"])
def test_it_is_one_operator(rows, differentiated):
    """But where gradients come through exact rows."""
    layer = _layer()
    stages = ["build_dispatch", "scaled_grouped_gemm", "gated_activation", "scaled_grouped_gemm", "combine"]
    if differentiated:
        layer[differentiated].requires_grad_()
    if rows == "quantised" and differentiated in ("hidden_states", "w13_bias"):
        with pytest.raises(ValueError, match=f"rows='quantised' and {differentiated} with a gradient"):
            moe_ops.scaled_fused_experts(**layer)
        return
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
    given = rows, layer["w13"], plan.expert_offsets, layer["w13_bias"]
    gate_up = moe_ops.scaled_grouped_gemm(*given, x_scale=scale, **named)
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


@pytest.mark.parametrize("is_compiled", [False, True])
def test_gradients_of_exact_rows_come_through_vmap(is_compiled):
    """A part that vmap gives a function says of itself that it needs none."""
    x, fixed = torch.randn(3, T, H), _layer()
    del fixed["hidden_states"]

    def layer(x):
        return moe_ops.scaled_fused_experts(x, **fixed, rows="exact")

    def loss(x):
        return torch.vmap(layer)(x).square().sum()

    expected = torch.stack([torch.func.grad(lambda part: layer(part).square().sum())(part) for part in x])
    gradient = torch.func.grad(loss)
    if is_compiled:
        gradient = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    assert torch.allclose(gradient(x), expected, rtol=1e-4, atol=1e-4) and expected.any()
    if is_compiled:
        return
    x.requires_grad_()
    loss(x).backward()
    assert torch.allclose(x.grad, expected, rtol=1e-4, atol=1e-4)
    one_by_one = torch.stack([torch.func.jvp(layer, (part,), (part,))[1] for part in x.detach()])
    tangent = torch.func.jvp(torch.vmap(layer), (x.detach(),), (x.detach(),))[1]
    assert torch.allclose(tangent, one_by_one, rtol=1e-4, atol=1e-4)


def test_no_gradient_of_quantised_rows_is_lost_in_vmap():
    x, fixed = torch.randn(3, T, H, requires_grad=True), _layer()
    del fixed["hidden_states"]
    with pytest.raises(ValueError, match="rows='quantised' and hidden_states with a gradient"):
        torch.vmap(lambda part: moe_ops.scaled_fused_experts(part, **fixed))(x)
    with pytest.raises(ValueError, match="rows='quantised' and hidden_states with a gradient"):
        torch.func.jvp(torch.vmap(lambda part: moe_ops.scaled_fused_experts(part, **fixed)), (x,), (x,))
