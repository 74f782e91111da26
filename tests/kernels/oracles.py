"""Plain float64 definitions, written for clarity with loops over slots, and how close a kernel must come."""

import torch

from moe_ops.types import Activation

# Relative Frobenius error. The interpreter truncates to bfloat16 where a GPU rounds, hence its doubled bound.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Fails unless `actual` is finite where `expected` is and within the tolerance of its dtype, by norm."""
    bound = TOLERANCE[dtype or actual.dtype]
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    assert actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan()), (
        f"NaN at {(actual.isnan() != expected.isnan()).nonzero()}"
    )
    actual, expected = actual.nan_to_num(), expected.nan_to_num()
    error = (actual - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error <= bound, (
        f"relative error {error:.3g} > {bound:.3g}, largest {(actual - expected).abs().max():.3g}"
    )


def local_experts(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int) -> list[int]:
    """Local expert of every slot, -1 where it is dropped."""
    locals_ = []
    for expert in topk_ids.cpu().flatten().tolist():
        if expert_map is not None:
            expert = int(expert_map[expert]) if 0 <= expert < expert_map.numel() else -1
        locals_.append(expert if 0 <= expert < num_experts else -1)
    return locals_


def dispatch(locals_: list[int], num_experts: int) -> tuple[list[int], list[int], list[int]]:
    """(sorted_slots, inverse, expert_offsets) by a stable sort."""
    order = sorted(range(len(locals_)), key=lambda slot: (locals_[slot] % (num_experts + 1), slot))
    inverse = [-1] * len(locals_)
    for row, slot in enumerate(order):
        if locals_[slot] >= 0:
            inverse[slot] = row
    offsets = [sum(0 <= e < expert for e in locals_) for expert in range(num_experts + 1)]
    return order, inverse, offsets


def activate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation over the last dimension, in the dtype of `gate_up`."""
    if activation.name == "relu2":
        return gate_up.clamp(min=0) ** 2
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1) if activation.interleaved else gate_up.chunk(2, -1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.name == "swiglu_oai":
        return (up + 1) * gate * torch.sigmoid(activation.alpha * gate)
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}.get(activation.name)
    gelu = torch.nn.functional.gelu
    return (
        torch.nn.functional.silu(gate) if approximate is None else gelu(gate, approximate=approximate)
    ) * up


def grouped_gemm(
    x: torch.Tensor, weight: torch.Tensor, offsets: list[int], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[S, A], [E, B, A] -> [S, B] in float64; rows past the last expert are zero."""
    x, weight = x.cpu().double(), weight.cpu().double()
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=torch.float64)
    for expert, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        out[start:end] = x[start:end] @ weight[expert].T
        if bias is not None:
            out[start:end] += bias[expert].cpu().double()
    return out


def batched_gemm(
    x: torch.Tensor, weight: torch.Tensor, counts: list[int], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[E, M, A], [E, B, A] -> [E, M, B] in float64; rows past the count are zero."""
    out = torch.zeros(*x.shape[:2], weight.shape[1], dtype=torch.float64)
    for expert, count in enumerate(counts):
        rows = x[expert, : max(count, 0)].cpu().double() @ weight[expert].cpu().double().T
        if bias is not None:
            rows = rows + bias[expert].cpu().double()
        out[expert, : rows.shape[0]] = rows
    return out


def experts(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    shared: torch.Tensor | None,
    activation: Activation,
) -> torch.Tensor:
    """The expert layer slot by slot in float64."""
    hidden, w13, w2 = hidden_states.cpu().double(), w13.cpu().double(), w2.cpu().double()
    out = torch.zeros_like(hidden) if shared is None else shared.cpu().double().clone()
    top_k = topk_ids.shape[1]
    for slot, expert in enumerate(local_experts(topk_ids, expert_map, w13.shape[0])):
        if expert < 0:
            continue
        token, k = divmod(slot, top_k)
        gate_up = w13[expert] @ hidden[token]
        if w13_bias is not None:
            gate_up = gate_up + w13_bias[expert].cpu().double()
        value = w2[expert] @ activate(gate_up, activation)
        if w2_bias is not None:
            value = value + w2_bias[expert].cpu().double()
        out[token] += topk_weights[token, k].cpu().double() * value
    return out
