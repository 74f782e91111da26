"""Do two models serve the same tokens? Where they part, it has to be at a choice that rounding decides."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.serving_run import Answer
from benchmarks.serving_trace import Request

ALLOWED_ERROR = 2.0  # times stock's own, the medians over prompts
PROMPTS = 16  # that wider arithmetic computes too


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two models answered.

    Args:
        requests, same: how many there are, and how many were answered alike to the end.
        compared: tokens that are alike, in all.
        stock_error, our_error: of logits against wider arithmetic, relative, medians over prompts.
        noise: how far a single logit is apart at most.
        gap: by how much the first model prefers its token where they part, the largest.
        first_gap: by how much it prefers, asked alone, another token than it answered first in a batch, the largest.
    """

    requests: int
    same: int
    compared: int
    stock_error: float
    our_error: float
    noise: float
    gap: float
    first_gap: float

    def __str__(self) -> str:
        told = f"{self.same} of {self.requests} answers are the same to the end ({self.compared} tokens)"
        if self.same == self.requests:
            return told
        return (
            f"{told}; the others part where the two tokens' logits differ by {self.gap:.2g} at most, "
            f"while rounding moves logits by up to {self.noise:.2g} (relative errors: stock {self.stock_error:.2g}, "
            f"ours {self.our_error:.2g})"
        )


def agreement(
    models: tuple[Any, Any], exact: Any, trace: Sequence[Request], answers: tuple[Sequence[Answer], ...]
) -> Agreement:
    """Compares answers of a stock model and of ours to the same requests.

    `models`: uncompiled, with attention of their own, not of a batch; `exact`: stock in wider arithmetic.
    Raises ValueError where answers differ by more than rounding does, or ours rounds worse than stock.
    """
    prompts = [_logits(models, request.prompt) for request in trace]
    truths = [_logits((exact,), request.prompt)[0] for request in trace[:PROMPTS]]
    stock_error, our_error = (
        statistics.median(_error(logits[which], truth) for logits, truth in zip(prompts, truths))
        for which in (0, 1)
    )
    noise = max((ours - stock).abs().max().item() for stock, ours in prompts)
    firsts = [
        stock.max() - stock[each.tokens[0]] for (stock, _), each in zip(prompts, answers[0], strict=True)
    ]
    alike, gap = [], 0.0
    for request, stock, ours in zip(trace, *answers, strict=True):
        same = _common(stock.tokens, ours.tokens)
        alike.append(same == len(stock.tokens))
        if not alike[-1]:
            at, other = _logits(models, (*request.prompt, *stock.tokens[:same]))
            noise = max(noise, (at - other).abs().max().item())
            gap = max(gap, (at[stock.tokens[same]] - at[ours.tokens[same]]).abs().item())
    compared = sum(_common(stock.tokens, ours.tokens) for stock, ours in zip(*answers))
    first_gap = max(firsts).item()
    found = Agreement(len(alike), sum(alike), compared, stock_error, our_error, noise, gap, first_gap)
    _expect_rounding(found)
    return found


def _expect_rounding(found: Agreement) -> None:
    if not found.our_error <= ALLOWED_ERROR * found.stock_error:
        told = f"ours has a relative error of {found.our_error:.2e}, stock of {found.stock_error:.2e}"
        raise ValueError(f"{told}: expected at most {ALLOWED_ERROR} times stock's")
    # Each of the two was computed twice, in a batch and alone, and each time rounding moves both tokens.
    if not found.gap <= 4 * found.noise:
        raise ValueError(f"{found}: expected a gap of at most 4 times what rounding moves")
    if not found.first_gap <= 4 * found.noise:
        told = f"alone, stock prefers another first token by {found.first_gap:.2g}"
        raise ValueError(f"{told}: expected at most 4 times what rounding moves, {found.noise:.2g}")


@torch.no_grad()
def _logits(models: tuple[Any, ...], tokens: Sequence[int]) -> tuple[Tensor, ...]:
    ids = torch.tensor([tokens], device=next(models[0].parameters()).device)
    return tuple(
        model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].double() for model in models
    )


def _error(logits: Tensor, truth: Tensor) -> float:
    return ((logits - truth).norm() / truth.norm()).item()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens they begin with alike."""
    pairs = enumerate(zip(one, other))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
