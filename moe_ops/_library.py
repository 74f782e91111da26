"""How every operator of the library is registered: schema, checks, implementations, gradients, vmap.

`Library.define` rather than `torch.library.custom_op`: it costs 2 us a call instead of 7 (measured on torch 2.13)
and lets one schema have a CPU and a CUDA kernel. Each implementation runs the operator's checks first, so a
direct `torch.ops.moe.*` call is as safe as a public function.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "moe"
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

Op = Callable[..., Any]
SetupContext = Callable[[Any, tuple[Any, ...], Any], None]
Backward = Callable[..., Any]
VmapRule = Callable[..., tuple[Any, Any]]

_FORMULAS: dict[str, tuple[SetupContext, Backward]] = {}


def define(schema: str, *, check: Op, cpu: Op, cuda: Op, fake: Op) -> None:
    """Registers an operator: `check`, `cpu`, `cuda` and `fake` all take the schema's arguments.

    Raises RuntimeError when the operator exists, as it does when this package is imported under two names:
    the second registration would otherwise silently replace the overload that passes match on.
    """
    name = schema[: schema.index("(")]
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        raise RuntimeError(f"{NAMESPACE}::{name} is already registered: moe_ops was imported under two names")
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, _checked(check, _plain(cpu)), "CPU")
    _LIBRARY.impl(name, _checked(check, cuda), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _checked(check, fake), lib=_LIBRARY)


def _checked(check: Op, implementation: Op) -> Op:
    def checked(*args: Any) -> Any:
        check(*args)
        return implementation(*args)

    return checked


def _plain(reference: Op) -> Op:
    """Runs a reference without gradients or autocast: recorded inner operations would hide a missing formula.

    Leaving inference mode, even where nobody entered it, undoes the dispatch state of the operator call: below
    autograd `grouped_mm` takes a fifth longer on the CPU (121 against 99 us for 32 small experts).
    """

    def plain(*args: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            if torch.is_autocast_enabled("cpu"):
                with torch.autocast("cpu", enabled=False):
                    return reference(*args)
            return reference(*args)

    return plain


def define_gradient(name: str, setup_context: SetupContext, backward: Backward) -> None:
    """Registers `name`'s backward formula, for autograd on the operator and for `call` under `torch.func`."""
    _FORMULAS[name] = (setup_context, backward)
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=_LIBRARY
    )


def define_no_gradient(name: str) -> None:
    """Registers `name` as not differentiable (all its outputs are integers)."""
    inputs = _arguments(name)
    define_gradient(name, lambda ctx, inputs, output: None, lambda ctx, *grads: (None,) * len(inputs))


def define_gradient_of_formula(name: str, formula: Op, differentiable: Sequence[str]) -> None:
    """Registers `name`'s backward as the derivative of `formula`, plain PyTorch that computes the same thing.

    For backward operators: it makes the operators they belong to twice differentiable. `differentiable` names the
    arguments that have a gradient.
    """
    names = _arguments(name)
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

    define_gradient(name, setup_context, backward)


class _OpFunction(torch.autograd.Function):
    """Any operator of ours as an autograd.Function: `torch.func` needs setup_context and a vmap rule.

    The operator's name comes last, so that `needs_input_grad` lines up with the operator's arguments.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> Any:
        *inputs, name = args
        return operator(name)(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*(out for out in outputs if not out.dtype.is_floating_point))
        ctx.name = inputs[-1]
        if any(ctx.needs_input_grad):
            _FORMULAS[ctx.name][0](ctx, inputs[:-1], output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        result = _FORMULAS[ctx.name][1](ctx, *grads)
        return *(result if isinstance(result, tuple) else (result,)), None


@torch.compiler.allow_in_graph
def _apply(*args: Any) -> Any:
    # Dynamo must not look inside: an autograd.Function it traces itself yields silent zero gradients here.
    return _OpFunction.apply(*args)


def operator(name: str) -> Any:
    """The overload `torch.ops.moe.<name>.default`."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def call(name: str, *args: Any) -> Any:
    """Calls an operator so that `torch.func` transforms, autograd and Dynamo all see its gradient.

    Without grad mode it is the plain operator. With it the Function is used even if no argument requires grad:
    inside `vmap`, and inside a compiled `torch.func.grad`, a tensor does not say whether it will.

    Raises TypeError for a DTensor: operators work on local shards, which only the caller can name.
    """
    if not torch.compiler.is_compiling():
        _refuse_dtensors(name, args)
    return _apply(*args, name) if torch.is_grad_enabled() else operator(name)(*args)


def _refuse_dtensors(name: str, args: tuple[Any, ...]) -> None:
    for index, arg in enumerate(args):
        if isinstance(arg, Tensor) and hasattr(arg, "placements"):
            argument = _arguments(name)[index]
            raise TypeError(f"{argument} is a DTensor: expected a plain tensor, such as its to_local() shard")


def define_vmap(name: str, token_args: Sequence[str] = ()) -> None:
    """Registers `name`'s vmap rule.

    When only `token_args` are batched the batch joins the token dimension and the operator runs once: the
    operator treats tokens one by one. Otherwise it runs once per batch element. A batched expert_map or
    correction_bias raises ValueError.
    """
    names = _arguments(name)

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        batched = {arg for arg, dim in zip(names, in_dims, strict=True) if dim is not None}
        for arg in batched & {"expert_map", "correction_bias"}:
            raise ValueError(
                f"vmap over {arg} of {NAMESPACE}::{name}: expected it unbatched, one for the whole batch"
            )
        if batched <= set(token_args):
            return _vmap_tokens(name, info.batch_size, [arg in token_args for arg in names], in_dims, args)
        return _vmap_loop(name, info.batch_size, in_dims, args)

    torch.library.register_vmap(f"{NAMESPACE}::{name}", rule, lib=_LIBRARY)


def _arguments(name: str) -> list[str]:
    return [argument.name for argument in operator(name)._schema.arguments]


def _vmap_tokens(
    name: str, batch: int, is_token: list[bool], in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    flat = [
        _batch_first(arg, dim, batch).flatten(0, 1) if token and arg is not None else arg
        for arg, dim, token in zip(args, in_dims, is_token, strict=True)
    ]
    outputs = operator(name)(*flat)
    if isinstance(outputs, Tensor):
        return outputs.unflatten(0, (batch, -1)), 0
    return tuple(out.unflatten(0, (batch, -1)) for out in outputs), (0,) * len(outputs)


def _batch_first(tensor: Tensor, dim: int | None, batch: int) -> Tensor:
    return tensor.expand(batch, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _vmap_loop(
    name: str, batch: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    results = []
    for index in range(batch):
        picked = [
            arg if dim is None else arg.select(dim, index) for arg, dim in zip(args, in_dims, strict=True)
        ]
        results.append(operator(name)(*picked))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])
