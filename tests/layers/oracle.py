"""The layer as a double loop in float64, independent of every operator under test."""

import torch
from torch import Tensor

from layers import FusedMoE, MoEBlock
from tests.helpers import SCORES
from tests.kernels.oracles import activate


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def experts(module: FusedMoE, hidden: Tensor, logits: Tensor) -> Tensor:
    config, routing = module.config, module.config.routing
    hidden, logits = (
        hidden.reshape(-1, hidden.shape[-1]).double(),
        logits.reshape(-1, logits.shape[-1]).double(),
    )
    out = torch.zeros_like(hidden)
    for token in range(hidden.shape[0]):
        weights, ids = _route(logits[token], module)
        for weight, index in zip(weights, ids, strict=True):
            local = index if module.expert_map is None else module.expert_map[index].item()
            if local >= 0:
                scale_in = weight if config.router.weight_on == "input" else 1.0
                scale_out = 1.0 if config.router.weight_on == "input" else weight
                out[token] += scale_out * _expert(module, hidden[token] * scale_in, local)
    assert routing.top_k == config.top_k
    return out


def block(module: MoEBlock, hidden: Tensor) -> Tensor:
    shape, hidden = hidden.shape, hidden.reshape(-1, hidden.shape[-1])
    logits = hidden.double() @ module.gate.weight.double().T
    if module.config.router.has_bias:
        logits = logits + module.gate.bias.double()
    out = experts(module.experts, hidden, logits)
    if module.config.shared_experts is not None:
        shared = module.shared_experts
        gate_up = hidden.double() @ shared.gate_up_proj.weight.double().T
        addend = activate(gate_up, module.config.activation) @ shared.down_proj.weight.double().T
        if module.config.shared_experts.gated == "sigmoid":
            addend = addend * torch.sigmoid(hidden.double() @ shared.gate.weight.double().T)
        out = out + addend
    return out.reshape(shape)


def _route(logits: Tensor, module: FusedMoE) -> tuple[list[float], list[int]]:
    routing = module.config.routing
    assert routing.num_groups == 1
    assert routing.order == "score_then_topk"
    scores = SCORES[routing.score_fn](logits)
    bias = module.e_score_correction_bias
    choice = scores if bias is None else scores + bias.double()
    ids = sorted(range(len(choice)), key=lambda e: -choice[e].item())[: routing.top_k]
    chosen = [scores[e].item() for e in ids]
    total = sum(chosen) + routing.renorm_eps if routing.renormalize else 1.0
    return [routing.scale * score / total for score in chosen], ids


def _expert(module: FusedMoE, hidden: Tensor, index: int) -> Tensor:
    gate_up = module.w13_weight[index].double() @ hidden
    if module.w13_bias is not None:
        gate_up = gate_up + module.w13_bias[index].double()
    out = module.w2_weight[index].double() @ activate(gate_up, module.config.activation)
    return out if module.w2_bias is None else out + module.w2_bias[index].double()
