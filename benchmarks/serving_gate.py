"""Do two models serve the same tokens? Where they part, it has to be at a choice that rounding decides."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.serving_run import Answer
from benchmarks.serving_trace import Request

# Relative distances of logits, the median over prompts: several times what rounding makes of equal models.
MOST_APART = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two models answered.

    Args:
        requests, same: how many there are, and how many were answered alike to the end.
        compared: tokens that are alike, in all.
        apart: how far the models' logits are apart, relative, the median over prompts.
        noise: how far a single logit is apart at most.
        gap: by how much the first model prefers its token where they part, the largest.
    """

    requests: int
    same: int
    compared: int
    apart: float
    noise: float
    gap: float

    def __str__(self) -> str:
        told = f"{self.same} of {self.requests} answers are the same to the end ({self.compared} tokens)"
        if self.same == self.requests:
            return told
        return (
            f"{told}; the others part where the two tokens' logits differ by {self.gap:.2g} at most, "
            f"while rounding moves logits by up to {self.noise:.2g} ({100 * self.apart:.2g} % of their norm)"
        )


def agreement(
    models: tuple[Any, Any], trace: Sequence[Request], answers: tuple[Sequence[Answer], Sequence[Answer]]
) -> Agreement:
    """Compares answers of a stock model and of ours to the same requests.

    `models`: uncompiled, with attention of their own, not of a batch.
    Raises ValueError where they differ by more than rounding does.
    """
    prompts = [_logits(models, request.prompt) for request in trace]
    apart = statistics.median(((ours - stock).norm() / stock.norm()).item() for stock, ours in prompts)
    noise = max((ours - stock).abs().max().item() for stock, ours in prompts)
    alike, gap = [], 0.0
    for request, stock, ours in zip(trace, *answers, strict=True):
        same = _common(stock.tokens, ours.tokens)
        alike.append(same == len(stock.tokens))
        if not alike[-1]:
            at, other = _logits(models, (*request.prompt, *stock.tokens[:same]))
            noise = max(noise, (at - other).abs().max().item())
            gap = max(gap, (at[stock.tokens[same]] - at[ours.tokens[same]]).abs().item())
    compared = sum(_common(stock.tokens, ours.tokens) for stock, ours in zip(*answers))
    found = Agreement(len(alike), sum(alike), compared, apart, noise, gap)
    _expect_rounding(found, next(models[0].parameters()).dtype)
    return found


def _expect_rounding(found: Agreement, dtype: torch.dtype) -> None:
    if not found.apart <= MOST_APART[dtype]:
        raise ValueError(f"logits are {found.apart:.2e} apart: expected at most {MOST_APART[dtype]:.0e}")
    # Each of the two was computed twice, in a batch and alone, and each time rounding moves both tokens.
    if not found.gap <= 4 * found.noise:
        raise ValueError(f"{found}: expected a gap of at most 4 times what rounding moves")


@torch.no_grad()
def _logits(models: tuple[Any, Any], tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    device = next(models[0].parameters()).device
    ids = torch.tensor([tokens], device=device)
    stock, ours = (
        model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float() for model in models
    )
    return stock, ours


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens they begin with alike."""
    pairs = enumerate(zip(one, other))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
