"""A block that loops over a list of experts, around stacked ones.

`loop_trial.py` finds out how such a block computes; here are what it says, and the forward that follows it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layers.huggingface.linear_router import called
from layers.huggingface.settled import expect_options, get
from layers.router import linear_in
from moe_ops import RoutingConfig, topk_routing
from moe_ops._library import autocasts
from moe_ops.errors import value_error

_NO_TRAINING = "the block's own code fails in training, and so does it with stacked experts: expected eval()"


@dataclass(frozen=True, slots=True)
class Given:
    """Something that a block returns beside its output: what its gate gave, [T, ...] or by sequence, [B, S, ...]."""

    place: int
    by_sequence: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """How a block calls a gate that chooses, and where it finds what.

    Attributes:
        ids, weights: places in what the gate returns.
        takes_tokens: [T, H], not hidden states as they come.
    """

    ids: int
    weights: int
    takes_tokens: bool


@dataclass(frozen=True, slots=True)
class StackedBlock:
    """How a block around stacked experts computes, as its attribute `moe_ops_stacked`.

    Attributes:
        gate: name of the module that gives logits, or chooses.
        routing: what is made of logits; a gate that chooses has a `Choice`.
        correction: path of the block's selection bias, or "". A gate that chooses is given it.
        shared: name of the shared expert, or "".
        shared_gate: name of what a sigmoid of weighs it by, or "".
        loss: place of a loss in what the gate returns, whose gradient comes with the output's; -1 without one.
        is_detached: whether routed experts give no gradient in evaluation.
        trains: whether the block's own code runs in training.
        returned: beside the output; None where the output is returned alone, not in a tuple.
        widens: modes, by whether they are training, in which 16 bits give float32 without autocast.
        product_dtype: of the logits of a gate that is linear; None is that of its weight.
    """

    gate: str
    routing: RoutingConfig | Choice
    correction: str = ""
    shared: str = ""
    shared_gate: str = ""
    loss: int = -1
    is_detached: bool = False
    trains: bool = True
    returned: tuple[Any, ...] | None = None
    widens: tuple[bool, ...] = ()
    product_dtype: torch.dtype | None = None


def forward(self: Any, *args: Tensor, **named: Tensor) -> Any:
    """The forward that blocks around stacked experts get: of hidden states, by whatever name."""
    (hidden_states,) = *args, *named.values()
    how: StackedBlock = self.moe_ops_stacked
    expect_options(self, self.moe_ops_settings)
    if self.training and not how.trains:
        value_error(_NO_TRAINING)
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    given, ids, weights = _chosen(self, how, hidden_states, tokens)
    with torch.set_grad_enabled(torch.is_grad_enabled() and (self.training or not how.is_detached)):
        output = self.experts(tokens, ids, weights)
        if self.training in how.widens and not autocasts(output) and output.dtype.itemsize == 2:
            output = output.float()
    if how.loss >= 0 and given[how.loss] is not None:
        output = _WithLoss.apply(output, given[how.loss])
    if how.shared:
        shared = self.get_submodule(how.shared)(tokens)
        output = output + (
            shared * self.get_submodule(how.shared_gate)(tokens).sigmoid() if how.shared_gate else shared
        )
    output = output.view(hidden_states.shape)
    return output if how.returned is None else (output, *_made(how.returned, given, hidden_states))


def _chosen(
    block: Any, how: StackedBlock, hidden_states: Tensor, tokens: Tensor
) -> tuple[tuple[Any, ...], Tensor, Tensor]:
    """What the gate gave, ids and weights."""
    gate = block.get_submodule(how.gate)
    correction = [get(block, how.correction)] if how.correction else []
    if isinstance(how.routing, RoutingConfig):
        router_logits = _logits(gate, how, tokens)
        weights, ids = topk_routing(router_logits, how.routing, *(each.flatten() for each in correction))
        return (router_logits,), ids, weights
    given = gate(tokens if how.routing.takes_tokens else hidden_states, *correction)
    ids, weights = given[how.routing.ids], given[how.routing.weights]
    return given, ids.reshape(-1, ids.shape[-1]), weights.reshape(-1, weights.shape[-1])


def _logits(gate: Any, how: StackedBlock, tokens: Tensor) -> Tensor:
    if how.product_dtype is not None:
        return linear_in(how.product_dtype, tokens, gate.weight, gate.bias)
    return called(gate, tokens)


class _WithLoss(torch.autograd.Function):
    """The output as it is; in its backward the loss gets a gradient of one."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


def _made(returned: tuple[Any, ...], given: tuple[Any, ...], hidden_states: Tensor) -> tuple[Any, ...]:
    return tuple([_made_one(each, given, hidden_states) for each in returned])


def _made_one(each: Any, given: tuple[Any, ...], hidden_states: Tensor) -> Any:
    if isinstance(each, tuple):
        return _made(each, given, hidden_states)
    if not isinstance(each, Given):
        return each
    rows = hidden_states.shape[:-1] if each.by_sequence else (-1,)
    return given[each.place].view(*rows, given[each.place].shape[-1])
