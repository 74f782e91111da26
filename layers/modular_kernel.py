"""A MoE layer of parts that can be exchanged: who brings tokens to experts and back, and what the experts are.

    prepare -> experts -> weigh and reduce -> finalize, and the output of shared experts is added

Letters: T tokens, H hidden size, K experts per token.

Parts hand each other values, so the graph that a compiler sees is that of the plain layer and whatever operators the
parts add. What is under way is a value too, `Pending`: there are no threads and no streams here.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from layers._checks import expect_type, rows_of
from layers.carried import expect_row_per_token
from layers.modular_parts import (
    ActivationFormat,
    AsyncPrepareAndFinalize,
    ExpertOutput,
    PermuteExpertsUnpermute,
    PrepareAndFinalize,
    Prepared,
    TopKWeightAndReduce,
    TopKWeightAndReduceDelegate,
)
from layers.router import RouterOutput
from moe_ops._checks import expect_floating, expect_index, expect_shape
from moe_ops._library import autocast
from moe_ops.errors import describe, type_error

Value = TypeVar("Value")


class Pending(NamedTuple, Generic[Value]):
    """What has been started: `hook` sees that it has arrived, then `receiver` returns it.

    Whatever stands between the start and `wait` runs while an exchange is under way.
    """

    hook: Callable[[], None]
    receiver: Callable[[], Value]

    def wait(self) -> Value:
        """The value."""
        self.hook()
        return self.receiver()


class ModularKernel(nn.Module):
    """Routed experts behind an exchange. It takes what `FusedMoE` takes, and may stand in its place in a `MoEBlock`.

    Args:
        prepare_finalize: a `PrepareAndFinalize`, or an `AsyncPrepareAndFinalize`.
        experts: a `PermuteExpertsUnpermute`, which is a module.

    Attributes:
        weigh_and_reduce: the experts' own, or that of `prepare_finalize` where they delegate.

    Raises:
        TypeError: `experts` is not a module, or one of both lacks what such a part has.
        ValueError: the formats of two neighbours differ, or an exchange brings tokens of other experts.

    Example:
        >>> kernel = ModularKernel(LocalPrepareAndFinalize(), StandardExperts(FusedMoE(config)))
        >>> output = kernel(hidden_states, router_logits)
    """

    def __init__(self, prepare_finalize: PrepareAndFinalize, experts: PermuteExpertsUnpermute) -> None:
        super().__init__()
        expect_type("experts", experts, nn.Module)
        _expect_part("prepare_finalize", prepare_finalize, PrepareAndFinalize)
        _expect_part("experts", experts, PermuteExpertsUnpermute)
        given, (taken, returned) = prepare_finalize.activation_format, experts.activation_formats
        reducer = experts.weigh_and_reduce
        if isinstance(reducer, TopKWeightAndReduceDelegate):
            reducer = prepare_finalize.weigh_and_reduce
        _expect_part("weigh_and_reduce", reducer, TopKWeightAndReduce)
        _expect_same_format(prepare_finalize, given, experts, taken)
        if reducer.activation_format is not None:
            _expect_same_format(experts, returned, reducer, reducer.activation_format)
        # Exchanges that send tokens to the owners of experts have it.
        expect_experts = getattr(prepare_finalize, "expect_experts", None)
        if expect_experts is not None:
            expect_experts(experts.num_experts, experts.expert_map)
        self.prepare_finalize, self.experts, self.weigh_and_reduce = prepare_finalize, experts, reducer
        self._is_async = isinstance(prepare_finalize, AsyncPrepareAndFinalize)

    def reset_parameters(self) -> None:
        """Draws every parameter of the experts anew."""
        self.experts.reset_parameters()

    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor | RouterOutput,
        shared: Tensor | None = None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Tensor:
        """Routed experts of every token, each weighed and summed up.

        Args:
            hidden_states: [..., H].
            router_logits: [..., E_global], or what `route` made of them.
            shared: [..., H], the output of shared experts, added to the sum.
            extra_tensors: [T, ...] of any dtypes, for the T tokens in `hidden_states`; experts find them in
                `Prepared.extra_tensors`, in the rows of their tokens.

        Returns:
            [..., H] in the dtype of `hidden_states`.

        Raises:
            ValueError, TypeError: shapes or dtypes do not fit, or a part returned something else than it is to; the
                message names argument, value, expectation.
        """
        tokens = rows_of("hidden_states", hidden_states)  # [T, H]
        addend = None if shared is None else rows_of("shared", shared)
        prepared = self.start(tokens, router_logits, extra_tensors).wait()
        output = self.finish(prepared, addend).wait()
        expect_shape("output of finalize", output, tokens.shape)
        return output.reshape(hidden_states.shape)

    def route(self, router_logits: Tensor, hidden_states: Tensor | None = None) -> RouterOutput:
        """Scores the logits [..., E_global] and picks the experts of each of the T tokens; see `FusedMoE.route`."""
        return self.experts.route(router_logits, hidden_states)

    def start(
        self,
        hidden_states: Tensor,
        router_logits: Tensor | RouterOutput,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Pending[Prepared]:
        """The way to the experts, of hidden_states [T, H] and what goes with them.

        What is independent of it may run before `wait`.
        """
        expect_shape("hidden_states", hidden_states, ("T", "H"))
        expect_tokens = getattr(self.experts, "expect_tokens", None)  # experts of a user's may take any
        if expect_tokens is not None:
            expect_tokens(hidden_states)
        if not isinstance(extra_tensors, tuple | list):
            type_error("extra_tensors={}: expected a tuple or list of tensors", describe(extra_tensors))
        is_routed = isinstance(router_logits, RouterOutput)
        routed = router_logits if is_routed else self.route(router_logits, hidden_states)
        weights, ids = routed.topk_weights, routed.topk_ids
        weighs_input = self.experts.apply_router_weight_on_input
        expect_shape("topk_ids", ids, (hidden_states.shape[0], 1 if weighs_input else "K"))
        expect_shape("topk_weights", weights, tuple(ids.shape))
        expect_index("topk_ids", ids)
        expect_floating("topk_weights", weights)
        ids = self.experts.places_of(ids)
        if weighs_input:
            hidden_states, weights = hidden_states * weights.to(hidden_states.dtype), torch.ones_like(weights)
        extras = *extra_tensors, *self.experts.extra_tensors(hidden_states.shape[0])
        expect_row_per_token(extras, hidden_states.shape[0])
        experts = self.experts.num_experts, self.experts.expert_map
        args = hidden_states, weights, ids, *experts, extras
        if self._is_async:
            return _pending("prepare_async", self.prepare_finalize.prepare_async(*args))  # type: ignore[attr-defined]
        return _arrived(self.prepare_finalize.prepare(*args))

    def finish(self, prepared: Prepared, shared: Tensor | None = None) -> Pending[Tensor]:
        """The experts and the way back, to [T, H] with shared [T, H] added."""
        _expect_value("output of prepare", prepared, Prepared)
        output = self.experts(prepared)
        _expect_value("output of experts", output, ExpertOutput)
        (addend,) = autocast((shared,))
        args = output, prepared, self.weigh_and_reduce, addend
        if self._is_async:
            return _pending("finalize_async", self.prepare_finalize.finalize_async(*args))  # type: ignore[attr-defined]
        return _arrived(self.prepare_finalize.finalize(*args))


def _arrived(value: Value) -> Pending[Value]:
    return Pending(_nothing_to_wait_for, lambda: value)


def _pending(name: str, returned: Any) -> Pending[Any]:
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        type_error("output of {}={}: expected a hook and a receiver", name, describe(returned))
    return Pending(*returned)


def _nothing_to_wait_for() -> None:
    pass


def _expect_part(name: str, part: object, kind: type) -> None:
    """Raises TypeError unless `part` has all that the protocol `kind` says; a class has it, and is none."""
    if isinstance(part, type):
        raise TypeError(f"{name} is the class {part.__name__}: expected an instance")
    for attribute in vars(kind):
        if not attribute.startswith("_") and not hasattr(part, attribute):
            raise TypeError(
                f"{name} is a {type(part).__name__}: expected a {kind.__name__}, which has {attribute}"
            )


def _expect_value(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        type_error("{}={}: expected {}", name, describe(value), kind.__name__)


def _expect_same_format(giver: Any, given: ActivationFormat, taker: Any, taken: ActivationFormat) -> None:
    if given is not taken:
        names = type(giver).__name__, type(taker).__name__
        raise ValueError(f"{names[0]} returns {given}: expected {taken}, which {names[1]} takes")
