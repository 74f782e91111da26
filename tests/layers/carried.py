"""Tokens that can be told from each other, tensors that say which token they belong to, and a quantiser."""

import torch
from torch import Tensor

from layers import StandardExperts

FP8 = torch.float8_e4m3fn
# Of every dtype and rank: what is floating has gradients, the others go as bytes.
KINDS = (
    (torch.float32, ()),
    (torch.bfloat16, (1,)),
    (torch.float64, (2, 3)),
    (FP8, (5,)),
    (torch.bool, ()),
    (torch.int8, (3,)),
    (torch.int16, ()),
    (torch.int64, (2, 1)),
    (torch.int32, ()),
)


def numbers(num_tokens: int, rank: int = 0) -> Tensor:
    """[T]: a number for each token of a rank, no two the same, none 0."""
    return torch.arange(1, num_tokens + 1) + 100 * rank


def numbered(hidden: Tensor, numbers: Tensor) -> Tensor:
    """Hidden states that begin with the number of their token."""
    return torch.cat([numbers.unsqueeze(1).to(hidden.dtype), hidden[:, 1:]], dim=1)


def extra_tensors(numbers: Tensor) -> tuple[Tensor, ...]:
    """What belongs to tokens [...] of these numbers, and zeros to number 0."""
    return tuple(_of_kind(numbers, dtype, shape) for dtype, shape in KINDS)


def _of_kind(numbers: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    parts = torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape)
    values = numbers.reshape(*numbers.shape, *(1 for _ in shape)) * parts
    if dtype == torch.bool:
        return values % 2 == 1
    return (values % 100).float().to(dtype) if dtype in (FP8, torch.int8) else values.to(dtype)


def assert_beside_their_tokens(prepared) -> None:
    """Each row of the extra tensors is that of the token in the same row of the hidden states."""
    expected = extra_tensors(prepared.hidden_states[..., 0].long())
    assert len(prepared.extra_tensors) == len(expected)
    for extra, right in zip(prepared.extra_tensors, expected):
        assert extra.dtype == right.dtype
        assert extra.shape == right.shape
        assert torch.equal(extra.double(), right.double())


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[T, H] to int8 and a scale [T] for each row."""
    scales = rows.abs().amax(dim=1).clamp(min=1e-6) / 127 if rows.numel() else rows.new_ones(rows.shape[0])
    return (rows / scales.unsqueeze(1)).round().to(torch.int8), scales


def dequantise(rows: Tensor, scales: Tensor) -> Tensor:
    return rows.to(scales.dtype) * scales.unsqueeze(1)


class QuantisesFirst:
    """An exchange that brings quantised rows, and their scales in front of what else goes along."""

    def __init__(self, exchange) -> None:
        self.exchange = exchange
        self.activation_format = exchange.activation_format
        self.weigh_and_reduce, self.finalize = exchange.weigh_and_reduce, exchange.finalize

    def prepare(self, hidden_states, topk_weights, topk_ids, num_experts, expert_map, extra_tensors=()):
        rows, scales = quantise(hidden_states)
        routed = topk_weights, topk_ids, num_experts, expert_map
        return self.exchange.prepare(rows, *routed, (scales, *extra_tensors))


class QuantisedExperts(StandardExperts):
    """They get rows and scales."""

    def forward(self, prepared):
        rows = dequantise(prepared.hidden_states, prepared.extra_tensors[0])
        return super().forward(prepared._replace(hidden_states=rows))


class QuantisingExperts(QuantisedExperts):
    """They get rows as they are, and quantise them."""

    def forward(self, prepared):
        rows, scales = quantise(prepared.hidden_states)
        extras = scales, *prepared.extra_tensors
        return super().forward(prepared._replace(hidden_states=rows, extra_tensors=extras))
