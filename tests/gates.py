"""Gates as users write them, each with its formula written another way, and layers with them in float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 16, 8, 2


class Case(NamedTuple):
    """A function, the shapes of what it reads of each expert, and its textbook formula of one expert's rows."""

    function: Callable[..., Tensor]
    textbook: Callable[..., Tensor]
    per_expert: tuple[tuple[int, ...], ...] = ()
    gated: bool = True

    @property
    def rows(self) -> int:
        """Of w13."""
        return 2 * INTERMEDIATE if self.gated else INTERMEDIATE


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def clamped_silu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate.clamp(max=1.5)) * torch.clamp(up, min=-1.5, max=1.5)


def situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * (25.0 * torch.tanh(up / 25.0))


def relu2(x: Tensor) -> Tensor:
    return torch.relu(x).pow(2)


def learned_scale(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    return F.softplus(gate) * torch.where(up > 0, up, 0.1 * up) * scale


def learned_columns(gate: Tensor, up: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.gelu(gate - shift) * up.abs().sqrt() * torch.sigmoid(scale)


def root_of_scaled(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    """Where up is 0, its slope in `scale` is no number."""
    return F.silu(gate) * (up * scale).abs().sqrt()


CASES = {
    "gpt_oss": Case(
        gpt_oss,
        lambda g, u: (
            (u.clip(-2, 2) + 1) * torch.minimum(g, g.new_tensor(2)) * _sigmoid(1.702 * g.clip(None, 2))
        ),
    ),
    "clamped_silu": Case(
        clamped_silu, lambda g, u: g.clip(None, 1.5) * _sigmoid(g.clip(None, 1.5)) * u.clip(-1.5, 1.5)
    ),
    "situ": Case(situ, lambda g, u: 4 * (g / 4).tanh() * _sigmoid(g) * 25 * (u / 25).tanh()),
    "relu2": Case(relu2, lambda x: (x * (x > 0)) ** 2, gated=False),
    "learned_scale": Case(
        learned_scale,
        lambda g, u, s: (
            torch.where(g > 20, g, torch.log(1 + torch.exp(g))) * torch.where(u > 0, u, u / 10) * s
        ),
        ((EXPERTS,),),
    ),
    "root_of_scaled": Case(
        root_of_scaled, lambda g, u, s: g * _sigmoid(g) * (u * s).abs() ** 0.5, ((EXPERTS, INTERMEDIATE),)
    ),
    "learned_columns": Case(
        learned_columns,
        lambda g, u, s, b: (g - b) * 0.5 * (1 + torch.erf((g - b) / 2**0.5)) * u.abs() ** 0.5 * _sigmoid(s),
        ((EXPERTS, INTERMEDIATE), (EXPERTS,)),
    ),
}


def tensors(case: Case, tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Seeded arguments of `fused_experts`; two slots are dropped."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K].int()
    ids[0, 0] = ids[-1, 1] = -1
    return {
        "hidden_states": normal(tokens, HIDDEN),
        "w13": normal(EXPERTS, case.rows, HIDDEN) / 2,
        "w2": normal(EXPERTS, HIDDEN, INTERMEDIATE) / 2,
        "topk_weights": torch.rand(tokens, TOP_K, generator=generator),
        "topk_ids": ids,
        "per_expert": [normal(*shape) for shape in case.per_expert],
    }


def oracle(case: Case, given: dict[str, Any]) -> Tensor:
    """The layer in float64, slot by slot."""
    x, w13, w2, weights = (given[k].double() for k in ("hidden_states", "w13", "w2", "topk_weights"))
    rows = []
    for token, ids in enumerate(given["topk_ids"].tolist()):
        total = torch.zeros_like(x[token])
        for k, expert in enumerate(ids):
            if expert >= 0:
                of_expert = [each[expert].double() for each in given["per_expert"]]
                columns = (w13[expert] @ x[token]).chunk(2 if case.gated else 1)
                total = total + weights[token, k] * (w2[expert] @ case.textbook(*columns, *of_expert))
        rows.append(total)
    return torch.stack(rows)
