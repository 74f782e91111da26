"""How every operator of the library is differentiated: reverse mode, forward mode, and every nesting of the two.

An operator has an autograd kernel of its own. `torch.library.register_autograd` raises under `torch.func.grad` and
silently drops the tangents of `torch.func.jvp`; this kernel serves autograd, `torch.func`, dual numbers and their
compiled forms, for public functions and for direct calls of `torch.ops.moe.*` alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops import _compat, records
from moe_ops._library import LIBRARY, OPERATORS, Op

Save = Callable[[Any, Any], Any]
Backward = Callable[..., Any]
Tangents = tuple[Tensor | None, ...]
Tangent = Callable[[Any, Any], Tangents]


class _Formulas(NamedTuple):
    save: Save
    backward: Backward
    tangent: Tangent


_FORMULAS: dict[type, _Formulas] = {}


def define_gradient(arguments: type, save: Save, backward: Backward, tangent: Tangent) -> None:
    """Registers how the operator of `arguments` is differentiated, for every transform of `torch.func` too.

    Args:
        save: (arguments, outputs) -> what the backward needs: tensors and options in any nesting of tuples and records.
        backward: (saved, needs, *grads) -> a record of gradients, None where there is none. `needs` is a record of
            booleans: the gradients that are asked for.
        tangent: (arguments, tangents) -> the outputs' tangents as a tuple, None for an output that has none. Arguments
            come without tangents; a tangent is None where an argument has none. Written in operators that are
            differentiable themselves; `tangent_of` makes one from a formula.
    """
    _FORMULAS[arguments] = _Formulas(save, backward, tangent)
    operator = OPERATORS[arguments]

    def autograd_kernel(*leaves: Any) -> Any:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            with _compat.single_level():
                return _Recorded.apply(*leaves, arguments)
        if _compat.may_be_dual(tensors):
            return _forward_mode(arguments, leaves)
        with _compat.below_autograd():
            return operator.overload(*leaves)

    LIBRARY.impl(operator.name, _compat.never_traced(autograd_kernel), "Autograd")


def define_gradient_as(arguments: type, like: type) -> None:
    """Registers an operator as differentiated as the operator of `like`, a record with the same leaves."""
    define_gradient(arguments, *_FORMULAS[like])


def _forward_mode(arguments: type, leaves: tuple[Any, ...]) -> Any:
    """The operator on dual numbers, or on tensors that turn out to carry no tangent."""
    operator = OPERATORS[arguments]
    inputs, tangents = zip(*map(_compat.unpack_dual, leaves), strict=True)
    if all(tangent is None for tangent in tangents):
        with _compat.below_autograd():
            return operator.overload(*leaves)
    outputs = operator.overload(*inputs)
    to_outputs = _FORMULAS[arguments].tangent(operator.build(*inputs), operator.build(*tangents))
    duals = tuple(map(_compat.make_dual, as_tuple(outputs), to_outputs))
    return duals if isinstance(outputs, tuple) else duals[0]


class _Recorded(_compat.SingleLevelFunction):
    """Any operator of ours on the tape.

    The type of its arguments comes last, so that `needs_input_grad` lines up with them.
    """

    @staticmethod
    def forward(*args: Any) -> Any:
        *leaves, arguments = args
        if _compat.may_be_dual(filter(_is_tensor, leaves)):
            leaves = [_compat.unpack_dual(value)[0] for value in leaves]
        with _compat.all_modes_recorded(), _compat.below_autograd():
            return OPERATORS[arguments].overload(*leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *leaves, ctx.arguments = inputs
        ctx.dual = tuple(leaves) if _compat.may_be_dual(filter(_is_tensor, leaves)) else ()
        saved = _FORMULAS[ctx.arguments].save(OPERATORS[ctx.arguments].build(*leaves), output)
        tensors: list[Tensor] = []
        ctx.saved = records.map_leaves(lambda leaf: _set_aside(leaf, tensors), saved)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors = ctx.saved_tensors
        saved = records.map_leaves(
            lambda leaf: tensors[leaf.index] if isinstance(leaf, _Saved) else leaf, ctx.saved
        )
        needs = OPERATORS[ctx.arguments].build(*ctx.needs_input_grad[:-1])
        return *records.flatten(_FORMULAS[ctx.arguments].backward(saved, needs, *grads)), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Called right after the forward, when an input carries a tangent."""
        build = OPERATORS[ctx.arguments].build
        with _compat.all_modes_recorded():
            inputs = build(*(_compat.unpack_dual(value)[0] for value in ctx.dual))
            results = _FORMULAS[ctx.arguments].tangent(inputs, build(*tangents[:-1]))
        ctx.dual = ()
        return results if len(results) != 1 else results[0]


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


@dataclass(frozen=True, slots=True)
class _Saved:
    """Stands for a tensor that autograd keeps."""

    index: int


def _set_aside(leaf: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    tensors.append(leaf)
    return _Saved(len(tensors) - 1)


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    """An operator's outputs as a tuple, be it one or several."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def tangent_of(formula: Op) -> Tangent:
    """The tangent rule of an operator that `formula` computes too, in operations that have one."""

    def tangent(inputs: Any, tangents: Any) -> Tangents:
        results = as_tuple(formula(records.transform(_compat.make_dual, inputs, tangents)))
        return tuple(_compat.unpack_dual(result)[1] for result in results)

    return tangent


def or_zeros(tangent: Tensor | None, like: Tensor) -> Tensor:
    """`tangent`, or zeros for an input that has none: for operators linear in each of several inputs."""
    return torch.zeros_like(like) if tangent is None else tangent


def define_no_gradient(arguments: type) -> None:
    """Registers an operator as not differentiable (all its outputs are integers)."""
    outputs = OPERATORS[arguments].overload._schema.returns
    define_gradient(
        arguments,
        lambda *_: (),
        lambda *_: records.partial(arguments),
        lambda *_: (None,) * len(outputs),
    )


def define_constant(arguments: type) -> None:
    """Registers an operator whose outputs, floating ones too, are constants to autograd."""
    operator = OPERATORS[arguments]

    def autograd_kernel(*leaves: Any) -> Any:
        with _compat.below_autograd():
            return operator.overload(*leaves)

    LIBRARY.impl(operator.name, _compat.never_traced(autograd_kernel), "Autograd")


def define_gradient_of_formula(arguments: type, formula: Op) -> None:
    """Registers an operator's derivatives as those of `formula`, plain PyTorch that computes the same thing.

    For backward operators: it makes the operators they belong to twice differentiable.
    """
    operator = OPERATORS[arguments]
    leaves, build = operator.leaves, operator.build
    differentiable = [index for index, leaf in enumerate(leaves) if leaf.is_differentiable]

    def backward(saved: Any, needs: Any, *grads: Tensor) -> Any:
        values = records.flatten(saved)
        positions = [index for index in differentiable if values[index] is not None]

        def of_differentiable(*tensors: Tensor) -> Any:
            replaced = dict(zip(positions, tensors, strict=True))
            return formula(build(*(replaced.get(index, value) for index, value in enumerate(values))))

        pullback = torch.func.vjp(of_differentiable, *(values[index] for index in positions))[1]
        results = dict(zip(positions, pullback(grads[0] if len(grads) == 1 else grads), strict=True))
        return build(*(results.get(index) for index in range(len(leaves))))

    define_gradient(arguments, lambda inputs, _: inputs, backward, tangent_of(formula))
