"""Plain float64 definitions, written for clarity with loops over slots, and how close a kernel must come."""

import torch
from torch.nn import functional as F

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


def replicas(
    topk_ids: torch.Tensor, experts: torch.Tensor, counts: torch.Tensor, seed: int | None
) -> list[list[int]]:
    """Physical expert of every slot: the replica that the token's number picks, -1 where there is none."""
    physical = []
    for token, ids in enumerate(topk_ids.tolist()):
        turn = token * 2654435769 % 2**32
        if seed is not None:
            turn ^= seed % 2**32
            turn = (turn ^ (turn >> 16)) * 0x85EBCA6B % 2**32
            turn = (turn ^ (turn >> 13)) * 0xC2B2AE35 % 2**32
            turn ^= turn >> 16
        physical.append([_replica(expert, turn, experts, counts) for expert in ids])
    return physical


def _replica(expert: int, turn: int, experts: torch.Tensor, counts: torch.Tensor) -> int:
    if not 0 <= expert < experts.shape[0]:
        return -1
    count = min(int(counts[expert]), experts.shape[1])
    return max(int(experts[expert, turn % count]), -1) if count > 0 else -1


def load_of(physical: list[list[int]], num_physical: int) -> list[int]:
    """How many slots have each physical expert."""
    slots = [expert for ids in physical for expert in ids]
    return [slots.count(expert) for expert in range(num_physical)]


def dispatch(locals_: list[int], num_experts: int) -> tuple[list[int], list[int], list[int]]:
    """(sorted_slots, inverse, expert_offsets) by a stable sort."""
    order = sorted(range(len(locals_)), key=lambda slot: (locals_[slot] % (num_experts + 1), slot))
    inverse = [-1] * len(locals_)
    for row, slot in enumerate(order):
        if locals_[slot] >= 0:
            inverse[slot] = row
    offsets = [sum(0 <= e < expert for e in locals_) for expert in range(num_experts + 1)]
    return order, inverse, offsets


NONLINEARITIES = {
    "silu": lambda x, _: F.silu(x),
    "gelu": lambda x, _: F.gelu(x),
    "gelu_tanh": lambda x, _: F.gelu(x, approximate="tanh"),
    "relu2": lambda x, _: x.clamp(min=0) ** 2,
    "swiglu_oai": lambda x, by: x * torch.sigmoid(by.alpha * x),
    "swiglustep": lambda x, by: F.silu(x).clamp(max=by.limit),
    "situ": lambda x, by: by.beta * torch.tanh(x / by.beta) * torch.sigmoid(x),
}


def activate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The activation over the last dimension, in the dtype of `gate_up`."""
    function = NONLINEARITIES[activation.name.replace("_no_mul", "")]
    if not activation.is_gated:
        return function(gate_up, activation)
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1) if activation.interleaved else gate_up.chunk(2, -1)
    if activation.limit is not None:
        up = up.clamp(-activation.limit, activation.limit)
        gate = gate if activation.name == "swiglustep" else gate.clamp(max=activation.limit)
    if activation.linear_beta is not None:
        up = activation.linear_beta * torch.tanh(up / activation.linear_beta)
    if activation.name == "swiglu_oai":
        up = up + activation.beta
    return function(gate, activation) * up


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


def joined(shared: torch.Tensor, gate: torch.Tensor | None, residual: torch.Tensor | None) -> torch.Tensor:
    """What joins a sum over experts, in float64."""
    out = shared.cpu().double().clone()
    out *= 1.0 if gate is None else gate.cpu().double().sigmoid()
    return out if residual is None else out + residual.cpu().double()


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
    shared_gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The expert layer slot by slot in float64."""
    hidden, w13, w2 = hidden_states.cpu().double(), w13.cpu().double(), w2.cpu().double()
    out = torch.zeros_like(hidden) if shared is None else joined(shared, shared_gate, residual)
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
