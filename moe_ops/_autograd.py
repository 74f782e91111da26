"""How every operator of the library is differentiated: reverse mode, forward mode, and every nesting of the two.

An operator has an autograd kernel of its own. `torch.library.register_autograd` raises under `torch.func.grad` and
silently drops the tangents of `torch.func.jvp`; this kernel serves autograd, `torch.func`, dual numbers and their
compiled forms, for public functions and for direct calls of `torch.ops.moe.*` alike.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops import _compat
from moe_ops._library import LIBRARY, Op, argument_names, operator

SetupContext = Callable[[Any, tuple[Any, ...], Any], None]
Backward = Callable[..., Any]
Tangents = tuple[Tensor | None, ...]
Tangent = Callable[[Sequence[Any], Sequence[Any]], Tangents]


class _Formulas(NamedTuple):
    setup_context: SetupContext
    backward: Backward
    tangent: Tangent


_FORMULAS: dict[str, _Formulas] = {}


def define_gradient(name: str, setup_context: SetupContext, backward: Backward, tangent: Tangent) -> None:
    """Registers how `name` is differentiated: its autograd kernel, for every transform of `torch.func` too.

    Args:
        setup_context, backward: as in `torch.library.register_autograd`.
        tangent: (inputs, tangents) -> the outputs' tangents as a tuple, None for an output that has none. Inputs come
            without tangents; a tangent is None where an input has none. Written in operators that are differentiable
            themselves; `tangent_of` makes one from a formula.
    """
    _FORMULAS[name] = _Formulas(setup_context, backward, tangent)
    call_below = operator(name)

    def autograd_kernel(*args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            with _compat.single_level():
                return _Recorded.apply(*args, name)
        if _compat.may_be_dual(tensors):
            return _forward_mode(name, args)
        with _compat.below_autograd():
            return call_below(*args)

    LIBRARY.impl(name, autograd_kernel, "Autograd")


def _forward_mode(name: str, args: tuple[Any, ...]) -> Any:
    """The operator on dual numbers, or on tensors that turn out to carry no tangent."""
    inputs, tangents = zip(*map(_compat.unpack_dual, args), strict=True)
    if all(tangent is None for tangent in tangents):
        with _compat.below_autograd():
            return operator(name)(*args)
    outputs = operator(name)(*inputs)
    several = as_tuple(outputs)
    duals = tuple(map(_compat.make_dual, several, _FORMULAS[name].tangent(inputs, tangents)))
    return duals if isinstance(outputs, tuple) else duals[0]


class _Recorded(_compat.SingleLevelFunction):
    """Any operator of ours on the tape.

    The operator's name comes last, so that `needs_input_grad` lines up with the operator's arguments.
    """

    @staticmethod
    def forward(*args: Any) -> Any:
        *inputs, name = args
        if _compat.may_be_dual(filter(_is_tensor, inputs)):
            inputs = [_compat.unpack_dual(value)[0] for value in inputs]
        with _compat.all_modes_recorded(), _compat.below_autograd():
            return operator(name)(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *arguments, ctx.name = inputs
        ctx.arguments = tuple(arguments) if _compat.may_be_dual(filter(_is_tensor, arguments)) else ()
        _FORMULAS[ctx.name].setup_context(ctx, tuple(arguments), output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *as_tuple(_FORMULAS[ctx.name].backward(ctx, *grads)), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Called right after the forward, when an input carries a tangent."""
        with _compat.all_modes_recorded():
            inputs = tuple(_compat.unpack_dual(value)[0] for value in ctx.arguments)
            results = _FORMULAS[ctx.name].tangent(inputs, tangents[:-1])
        ctx.arguments = ()
        return results if len(results) != 1 else results[0]


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    """An operator's outputs as a tuple, be it one or several."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def tangent_of(formula: Op) -> Tangent:
    """The tangent rule of an operator that `formula` computes too, in operations that have one."""

    def tangent(inputs: Sequence[Any], tangents: Sequence[Any]) -> Tangents:
        results = as_tuple(formula(*map(_compat.make_dual, inputs, tangents)))
        return tuple(_compat.unpack_dual(result)[1] for result in results)

    return tangent


def or_zeros(tangent: Tensor | None, like: Tensor) -> Tensor:
    """`tangent`, or zeros for an input that has none: for operators linear in each of several inputs."""
    return torch.zeros_like(like) if tangent is None else tangent


def define_no_gradient(name: str) -> None:
    """Registers `name` as not differentiable (all its outputs are integers)."""
    inputs, outputs = argument_names(name), operator(name)._schema.returns
    define_gradient(
        name,
        lambda ctx, inputs, output: None,
        lambda ctx, *grads: (None,) * len(inputs),
        lambda *_: (None,) * len(outputs),
    )


def define_gradient_of_formula(name: str, formula: Op, differentiable: Sequence[str]) -> None:
    """Registers `name`'s derivatives as those of `formula`, plain PyTorch that computes the same thing.

    For backward operators: it makes the operators they belong to twice differentiable. `differentiable` names the
    arguments that have a gradient.
    """
    names = argument_names(name)
    positions = [names.index(argument) for argument in differentiable]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.options = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in inputs))

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.options, strict=True)
        inputs = [option if tensor is None else tensor for tensor, option in pairs]

        def of_differentiable(*values: Tensor) -> Any:
            replaced = dict(zip(positions, values, strict=True))
            return formula(*(replaced.get(index, value) for index, value in enumerate(inputs)))

        pullback = torch.func.vjp(of_differentiable, *(inputs[index] for index in positions))[1]
        results = dict(zip(positions, pullback(grads[0] if len(grads) == 1 else grads), strict=True))
        return tuple(results.get(index) for index in range(len(inputs)))

    define_gradient(name, setup_context, backward, tangent_of(formula))
