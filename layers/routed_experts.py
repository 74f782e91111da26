"""Routed experts captured into a tensor that exists beforehand, and replayed from one.

Plain PyTorch on persistent tensors, no callbacks: both work eagerly, compiled and inside a captured graph.

Letters: T tokens of a forward, M >= T rows of a buffer, E logical experts, K experts per token.
"""

import torch
from torch import Tensor, nn

from layers._checks import expect_type
from moe_ops import RoutingConfig, routing_weights
from moe_ops.errors import value_error


class RoutedExpertsCapture(nn.Module):
    """Remembers whom each token was routed to: `experts.capture = RoutedExpertsCapture(buffer)`, None to stop.

    Args:
        buffer: [M, K] int32. A forward of T tokens writes its first T rows: logical experts, best first, whatever the
            placement. It is kept as it is given, outside of the state dict.

    Raises:
        TypeError, ValueError: `buffer` is not [M, K] int32. In a forward: more than M tokens, or another K.
    """

    buffer: Tensor

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        _expect_buffer(buffer)
        self.register_buffer("buffer", buffer, persistent=False)

    def forward(self, topk_ids: Tensor) -> None:
        """Writes [T, K] ids to the buffer."""
        _rows_of(self.buffer, topk_ids.shape[0], topk_ids.shape[1]).copy_(topk_ids)


class RoutedExpertsReplay(nn.Module):
    """Routes as a buffer says: `experts.routing_override = RoutedExpertsReplay(buffer, config.routing)`.

    Args:
        buffer: [M, K] int32, logical experts; a forward of T tokens reads its first T rows. An id outside [0, E) is an
            expert that is left out.
        routing: how logits become weights. The experts' weights are computed from the logits of this forward, with
            gradients, so a replay of what was just captured is the same layer.

    Raises:
        TypeError, ValueError: `buffer` is not [M, K] int32 with K of `routing`. In a forward: more than M tokens.
    """

    buffer: Tensor

    def __init__(self, buffer: Tensor, routing: RoutingConfig) -> None:
        super().__init__()
        _expect_buffer(buffer)
        expect_type("routing", routing, RoutingConfig)
        _rows_of(buffer, 0, routing.top_k)
        self.routing = routing
        self.register_buffer("buffer", buffer, persistent=False)

    def forward(self, hidden_states: Tensor | None, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """(topk_weights [T, K], topk_ids [T, K] int32) from logits [T, E]."""
        # A copy: what a forward tells of its routing stays true when the next batch is in the buffer.
        topk_ids = _rows_of(self.buffer, router_logits.shape[0], self.routing.top_k).clone()
        return routing_weights(router_logits, topk_ids, self.routing), topk_ids


def _expect_buffer(buffer: Tensor) -> None:
    expect_type("buffer", buffer, Tensor)
    if buffer.dtype != torch.int32:
        raise TypeError(f"buffer has dtype {buffer.dtype}: expected torch.int32")
    if buffer.dim() != 2:
        raise ValueError(f"buffer has shape {list(buffer.shape)}: expected [max_tokens, top_k]")


def _rows_of(buffer: Tensor, num_tokens: int, top_k: int) -> Tensor:
    if num_tokens > buffer.shape[0] or top_k != buffer.shape[1]:
        value_error(
            "buffer has shape {}: expected at least {} tokens and top_k={}",
            list(buffer.shape),
            num_tokens,
            top_k,
        )
    return buffer[:num_tokens]
