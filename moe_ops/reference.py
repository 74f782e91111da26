"""The whole MoE layer, token by token, in plain Python and PyTorch: what every fast path must agree with.

Nothing here shares code with the operators, so that a mistake cannot hide in both. It is slow and it is meant to be
read. Compute in float64 by passing float64 tensors.
"""

import math

import torch
from torch import Tensor

from moe_ops.types import Activation, RoutingConfig


def reference_routing(
    router_logits: Tensor, routing: RoutingConfig, correction_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """topk_weights [T, K] and topk_ids [T, K] of router_logits [T, E], one token at a time.

    Raises:
        ValueError: top_k larger than E, from the selection of a row.

    Example:
        >>> weights, ids = reference_routing(logits.double(), RoutingConfig(top_k=2))
    """
    bias = [0.0] * router_logits.shape[1] if correction_bias is None else correction_bias.tolist()
    chosen = [_route_token(row, bias, routing) for row in router_logits.tolist()]
    weights = torch.tensor([w for w, _ in chosen], dtype=router_logits.dtype).view(-1, routing.top_k)
    return weights, torch.tensor([i for _, i in chosen], dtype=torch.int32).view(-1, routing.top_k)


def _route_token(
    logits: list[float], bias: list[float], routing: RoutingConfig
) -> tuple[list[float], list[int]]:
    scores = logits if routing.order == "topk_then_score" else _score(logits, routing)
    selection = [s + b if math.isfinite(s + b) else -math.inf for s, b in zip(scores, bias, strict=True)]
    selection = _limit_groups(selection, routing)
    ids = sorted(range(len(selection)), key=lambda e: (-selection[e], e))[: routing.top_k]
    kept = [math.isfinite(selection[e]) for e in ids]
    weights = [scores[e] if ok else -math.inf for e, ok in zip(ids, kept, strict=True)]
    if routing.order == "topk_then_score":
        weights = _score(weights, routing)
    weights = [w if ok else 0.0 for w, ok in zip(weights, kept, strict=True)]
    total = (sum(weights) + routing.renorm_eps) if routing.renormalize else 1.0
    return [w / (total or 1.0) * routing.scale for w in weights], ids


def _score(logits: list[float], routing: RoutingConfig) -> list[float]:
    row = torch.tensor(logits, dtype=torch.float64)
    if (
        routing.score_fn == "sqrtsoftplus"
    ):  # far below zero log(1 + e^x) is e^x, which underflows before its root does
        near = torch.logaddexp(row, torch.zeros_like(row)).sqrt()
        return torch.where(row < -40, torch.exp(row / 2), near).tolist()
    return (row.softmax(0) if routing.score_fn == "softmax" else row.sigmoid()).tolist()


def _limit_groups(selection: list[float], routing: RoutingConfig) -> list[float]:
    if routing.num_groups == 1:
        return selection
    size = len(selection) // routing.num_groups
    groups = [selection[g * size : (g + 1) * size] for g in range(routing.num_groups)]
    best = [sum(sorted(group)[-2:]) if routing.group_score == "top2_sum" else max(group) for group in groups]
    order = sorted(range(len(groups)), key=lambda g: (-best[g], g))[: routing.topk_groups]
    filled = [score if e // size in order else routing.group_fill for e, score in enumerate(selection)]
    return [
        fill if math.isfinite(score) else -math.inf for fill, score in zip(filled, selection, strict=True)
    ]


def reference_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """An expert's nonlinearity on [2I] (or [I]) values of one token, by its textbook formula."""
    if not activation.is_gated:
        return _reference_gate(gate_up, activation)
    half = gate_up.shape[0] // 2
    gate, up = (gate_up[0::2], gate_up[1::2]) if activation.interleaved else (gate_up[:half], gate_up[half:])
    if activation.limit is None:
        if activation.linear_beta is not None:
            up = activation.linear_beta * torch.tanh(up / activation.linear_beta)
        return _reference_gate(gate, activation) * up
    limit = torch.tensor(activation.limit, dtype=gate.dtype)
    up = torch.minimum(torch.maximum(up, -limit), limit)
    if activation.name == "swiglustep":
        return torch.minimum(_reference_gate(gate, activation), limit) * up
    return _reference_gate(torch.minimum(gate, limit), activation) * (up + (activation.beta or 0.0))


def _reference_gate(gate: Tensor, activation: Activation) -> Tensor:
    if activation.name == "relu2":
        return torch.maximum(gate, torch.zeros_like(gate)) ** 2
    if activation.name.startswith("gelu_tanh"):
        return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    if activation.name.startswith("gelu"):
        return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2)))
    if activation.name == "situ":
        beta = activation.beta or 0.0
        return beta * torch.tanh(gate / beta) / (1 + torch.exp(-gate))
    alpha = 1.0 if activation.alpha is None else activation.alpha
    return gate / (1 + torch.exp(-alpha * gate))


def reference_experts(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Activation,
    *,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> Tensor:
    """[T, H]: for each token, the weighted sum of its experts, one expert at a time; differentiable.

    Example:
        >>> out = reference_experts(x, w13, w2, weights, ids, Activation("silu"))
    """
    rows = []
    for token, ids in enumerate(topk_ids.tolist()):
        total = torch.zeros_like(hidden_states[token])
        for k, expert_id in enumerate(ids):
            expert = _local(expert_id, w13.shape[0], expert_map)
            if expert is None:
                continue
            gate_up = w13[expert] @ hidden_states[token]
            gate_up = gate_up if w13_bias is None else gate_up + w13_bias[expert]
            out = w2[expert] @ reference_activation(gate_up, activation)
            out = out if w2_bias is None else out + w2_bias[expert]
            total = total + topk_weights[token, k] * out
        rows.append(total)
    return torch.stack(rows) if rows else hidden_states.clone()


def _local(expert_id: int, num_experts: int, expert_map: Tensor | None) -> int | None:
    if expert_map is not None:
        expert_id = int(expert_map[expert_id]) if 0 <= expert_id < expert_map.shape[0] else -1
    return expert_id if 0 <= expert_id < num_experts else None
