"""Routed experts captured into a tensor that exists beforehand, replayed from one, or looked up by token id.

Plain PyTorch on persistent tensors, no callbacks: all work eagerly, compiled and inside a captured graph.

Letters: T tokens of a forward, M >= T rows of a buffer, E logical experts, K experts per token, V token ids.
"""

from dataclasses import replace

import torch
from torch import Tensor

from layers._checks import expect_type
from layers.given_tensors import GivenTensors
from moe_ops import RoutingConfig, routing_weights
from moe_ops._checks import expect_shape
from moe_ops.errors import value_error


class RoutedExpertsCapture(GivenTensors):
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
        expect_shape("topk_ids", topk_ids, ("T", "K"))
        _rows_of(self.buffer, topk_ids.shape[0], topk_ids.shape[1]).copy_(topk_ids)


class KnownExperts(GivenTensors):
    """A `routing_override` that knows the experts of each token, and weighs them by the logits.

    Args:
        routing: how logits become weights.

    Raises:
        TypeError: `routing` is no `RoutingConfig`.
    """

    def __init__(self, routing: RoutingConfig) -> None:
        super().__init__()
        expect_type("routing", routing, RoutingConfig)
        self.routing = routing
        self.unscaled = replace(routing, scale=1.0)

    def forward(
        self, hidden_states: Tensor | None, router_logits: Tensor, routing: RoutingConfig | None = None
    ) -> tuple[Tensor, Tensor]:
        """(topk_weights [T, K], topk_ids [T, K] int32) from logits [T, E].

        A layer that scales its output gives `unscaled` as the `routing`; None is the one given here.
        """
        topk_ids = self.topk_ids(router_logits.shape[0])
        return routing_weights(
            router_logits, topk_ids, self.routing if routing is None else routing
        ), topk_ids

    def topk_ids(self, num_tokens: int) -> Tensor:
        """[T, K] int32: the experts of the next T tokens."""
        raise NotImplementedError


class RoutedExpertsReplay(KnownExperts):
    """Routes as a buffer says: `experts.routing_override = RoutedExpertsReplay(buffer, config.routing)`.

    Args:
        buffer: [M, K] int32, logical experts; a forward of T tokens reads its first T rows. An id outside [0, E) is an
            expert that is left out.
        routing: how logits become weights; a layer that scales its output (`RouterConfig.scale_on`) applies its own
            scale. Weights are computed from the logits of this forward, with gradients, so a replay of what was just
            captured is the same layer, up to slots that had no usable expert left to choose: these had weight 0 and
            are weighed like any other here, unless their ids become -1 (`buffer[:T][routed.topk_weights == 0] = -1`).

    Raises:
        TypeError, ValueError: `buffer` is not [M, K] int32 with K of `routing`. In a forward: more than M tokens.
    """

    buffer: Tensor

    def __init__(self, buffer: Tensor, routing: RoutingConfig) -> None:
        _expect_buffer(buffer)
        super().__init__(routing)
        _rows_of(buffer, 0, routing.top_k)
        self.register_buffer("buffer", buffer, persistent=False)

    def topk_ids(self, num_tokens: int) -> Tensor:
        """The first T rows of the buffer."""
        # A copy: what a forward tells of its routing stays true when the next batch is in the buffer.
        return _rows_of(self.buffer, num_tokens, self.routing.top_k).clone()


class HashRouting(KnownExperts):
    """Routes by what each token is: `experts.routing_override = HashRouting(table, token_ids, config.routing)`.

    DeepSeek-V4 does so in its first layers. Its tensors are those it is given, not copies, until a move to another
    device: build it after that.

    Args:
        table: [V, K] int32, the logical experts of each token id. An id of an expert outside [0, E) leaves it out.
        token_ids: [M] int32 or int64, of the tokens that come next: a tensor that all layers may share, changed in
            place before a forward, which reads its first T. A token id outside [0, V) gets no expert.
        routing: how logits become weights, as in `RoutedExpertsReplay`.

    Raises:
        TypeError, ValueError: `table` is not [V, K] int32 with K of `routing`, or `token_ids` not [M] integers. In a
            forward: more than M tokens.
    """

    table: Tensor
    token_ids: Tensor

    def __init__(self, table: Tensor, token_ids: Tensor, routing: RoutingConfig) -> None:
        _expect_ids("table", table, (torch.int32,), ("vocabulary", "top_k"))
        _expect_ids("token_ids", token_ids, (torch.int32, torch.int64), ("max_tokens",))
        super().__init__(routing)
        if table.shape[1] != routing.top_k or not table.shape[0]:
            raise ValueError(
                f"table has shape {list(table.shape)}: expected token ids and top_k={routing.top_k}"
            )
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("token_ids", token_ids, persistent=False)

    def topk_ids(self, num_tokens: int) -> Tensor:
        """Those of the first T token ids, -1 for one outside the vocabulary."""
        if num_tokens > self.token_ids.shape[0]:
            value_error(
                "token_ids has shape {}: expected at least {}", list(self.token_ids.shape), num_tokens
            )
        tokens = self.token_ids[:num_tokens]
        known = (tokens >= 0) & (tokens < self.table.shape[0])
        experts = self.table[tokens.masked_fill(~known, 0)]
        return experts.masked_fill(~known.unsqueeze(1), -1)


def _expect_buffer(buffer: Tensor) -> None:
    _expect_ids("buffer", buffer, (torch.int32,), ("max_tokens", "top_k"))


def _expect_ids(name: str, ids: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[str, ...]) -> None:
    expect_type(name, ids, Tensor)
    if ids.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {ids.dtype}: expected {' or '.join(map(str, dtypes))}")
    if ids.dim() != len(shape):
        raise ValueError(f"{name} has shape {list(ids.shape)}: expected [{', '.join(shape)}]")


def _rows_of(buffer: Tensor, num_tokens: int, top_k: int) -> Tensor:
    if num_tokens > buffer.shape[0] or top_k != buffer.shape[1]:
        value_error(
            "buffer has shape {}: expected at least {} tokens and top_k={}",
            list(buffer.shape),
            num_tokens,
            top_k,
        )
    return buffer[:num_tokens]
