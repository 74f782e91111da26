"""What a random layer is given: weights, and tokens of several kinds."""

import torch
from torch import Tensor

from tests.fuzz.raising.grammar import Case
from tests.fuzz.raising.source import PARAMETERS

KINDS = (
    "plain",
    "alike",
    "zero",
    "far",
    "tiny",
    "same experts",
    "one expert",
    "no experts",
    "masked",
    "large",
)
"""Tokens far apart in their logits; all alike; zero; logits large or all nearly alike; experts that are the same, so
that a tie may go either way; all tokens to the same experts; weights that are zero; some tokens that are zero;
features beyond limits that random numbers do not reach."""


def _weights(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    sizes = case.sizes
    experts, hidden, inner = sizes.experts, sizes.hidden, sizes.intermediate

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    gate_up, down = made(experts, 2 * inner, hidden), made(experts, hidden, inner)
    gate, up = (half.contiguous() for half in gate_up.chunk(2, 1))
    biases = made(experts, 2 * inner)
    weights = {"w13": gate_up, "w1": gate, "w3": up, "w2": down}
    weights["every"] = torch.cat([gate_up, down.mT], 1)
    weights |= {"b13": biases, "b1": biases[:, :inner].clone(), "b3": biases[:, inner:].clone()}
    weights |= {"b2": made(experts, hidden), "s1": made(inner, hidden), "s2": made(hidden, inner)}
    weights |= {"bias": made(experts), "scale": torch.tensor(0.75)}
    weights["router"] = torch.eye(experts, hidden) + made(experts, hidden) / 64
    return weights


def _laid_out(case: Case, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the case stores them."""
    stored = dict(weights)
    if case["layout"] == "transposed":
        stored |= {name: weights[name].mT.contiguous() for name in ("w13", "w1", "w3", "w2")}
    if case["packing"] == "one matrix":
        stored["w13"] = stored["w13"].flatten(0, 1)
    dtype = getattr(torch, case.dtype)
    narrow = torch.bfloat16 if case["stored"] == "cast" else dtype
    matrices = ("w13", "w1", "w3", "w2", "every")
    return {name: each.to(narrow if name in matrices else dtype) for name, each in stored.items()}


def _tokens(case: Case, kind: str, tokens: int, generator: torch.Generator) -> Tensor:
    sizes = case.sizes
    x = torch.randn(tokens, sizes.hidden, generator=generator)
    ranks = torch.rand(tokens, sizes.experts, generator=generator).argsort(-1)
    x[:, : sizes.experts] = (ranks - sizes.experts // 2) / 4
    if kind in ("alike", "one expert"):
        x[:] = x[:1] if kind == "alike" else x * 0.01 + x[:1]
    if kind == "zero":
        x.zero_()
    if kind in ("far", "tiny"):
        x[:, : sizes.experts] *= 60 if kind == "far" else 1e-3
    if kind == "large":
        x[:, sizes.experts :] *= 200
    if kind == "masked":
        x[::2] = 0.0
    return x


def inputs(case: Case, kind: str, tokens: int) -> list[Tensor]:
    """[hidden_states, *PARAMETERS], seeded."""
    generator = torch.Generator().manual_seed(sum(map(ord, case.number + kind)) + tokens)
    weights = _weights(case, generator)
    if kind in ("same experts", "zero", "masked"):
        for name in ("w13", "w1", "w3", "w2", "every", "b13", "b1", "b3", "b2"):
            weights[name][:] = weights[name][:1].clone()
    if kind == "no experts":
        for name in ("w13", "w1", "w3", "every"):
            weights[name].zero_()
    x = _tokens(case, kind, tokens, generator).to(getattr(torch, case.dtype))
    stored = _laid_out(case, weights)
    return [x.unsqueeze(0) if case["model"] == "in a batch" else x, *(stored[name] for name in PARAMETERS)]
