"""The layer as a double loop in float64, independent of every operator under test."""

import dataclasses

import torch
from torch import Tensor

from layers import FusedMoE, MoEBlock
from moe_ops.reference import reference_routing
from tests.kernels.oracles import activate


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def experts(module: FusedMoE, hidden: Tensor, logits: Tensor) -> Tensor:
    """Hidden states and logits may have any leading dimensions; latent experts get latent states."""
    rows = hidden.reshape(-1, hidden.shape[-1]).double()
    routed = route(module, rows, logits.reshape(-1, logits.shape[-1]).double())
    out = torch.empty_like(rows)
    for token, (row, each) in enumerate(zip(rows, routed, strict=True)):
        out[token] = _token(module, row, *each)
    return out


def _token(module: FusedMoE, hidden: Tensor, weights: list[float], ids: list[int]) -> Tensor:
    config, out, unchanged = module.config, torch.zeros_like(hidden), 0.0
    for weight, index in zip(weights, ids, strict=True):
        if index >= config.num_experts:
            unchanged += weight
            continue
        local = index if module.expert_map is None else module.expert_map[index].item()
        if local >= 0:
            scale_in, scale_out = (weight, 1.0) if config.router.weight_on == "input" else (1.0, weight)
            out = out + scale_out * _expert(module, hidden * scale_in, local)
    scale = config.routing.scale if config.router.scale_on == "output" else 1.0
    return out * scale + unchanged * hidden


def block(module: MoEBlock, hidden: Tensor) -> Tensor:
    shape, config, hidden = hidden.shape, module.config, hidden.reshape(-1, hidden.shape[-1]).double()
    logits = hidden @ module.gate.weight.double().T
    if config.router.has_bias:
        logits = logits + module.gate.bias.double()
    if config.experts.latent_size is None:
        out = experts(module.experts, hidden, logits)
    else:
        latent = hidden @ module.routed_input_transform.weight.double().T
        routed = route(module.experts, hidden, logits)
        rows = torch.empty_like(latent)
        for token, (row, each) in enumerate(zip(latent, routed, strict=True)):
            rows[token] = _token(module.experts, row, *each)
        out = rows @ module.routed_output_transform.weight.double().T
    if config.shared_experts is not None:
        out = out + _shared(module, hidden)
        out = out / 2 if config.shared_experts.combination == "average" else out
    return out.reshape(shape)


def _shared(module: MoEBlock, hidden: Tensor) -> Tensor:
    shared = module.shared_experts
    gate_up = hidden @ shared.gate_up_proj.weight.double().T
    out = activate(gate_up, shared.activation) @ shared.down_proj.weight.double().T
    if module.config.shared_experts.gated == "sigmoid":
        out = out * torch.sigmoid(hidden @ shared.gate.weight.double().T)
    return out


def route(module: FusedMoE, hidden: Tensor, logits: Tensor) -> list[tuple[list[float], list[int]]]:
    """Weights and ids of every token; `hidden` is for routing functions."""
    config, bias = module.config, module.e_score_correction_bias
    router, routing = config.router, config.routing
    if router.routing_function is None:
        routing = dataclasses.replace(routing, scale=1.0) if router.scale_on == "output" else routing
        weights, ids = reference_routing(logits, routing, None if bias is None else bias.double())
    else:
        weights, ids = router.routing_function(hidden, logits, config.top_k, routing.renormalize)
    if module.expert_scale is not None:
        weights = weights * module.expert_scale.double()[ids.long()]
    return list(zip(weights.tolist(), ids.tolist(), strict=True))


def _expert(module: FusedMoE, hidden: Tensor, index: int) -> Tensor:
    size = hidden.shape[0]  # weights may be padded
    gate_up = module.w13_weight[index].double()[:, :size] @ hidden
    if module.w13_bias is not None:
        gate_up = gate_up + module.w13_bias[index].double()
    out = module.w2_weight[index].double() @ activate(gate_up, module.config.activation)
    out = out if module.w2_bias is None else out + module.w2_bias[index].double()
    if module.post_norm_weight is not None:
        eps = module.config.experts.post_norm_eps
        out = out / (out.square().mean() + eps).sqrt() * module.post_norm_weight.double()
    return out[:size]
