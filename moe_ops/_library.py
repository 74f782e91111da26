"""How every operator of the library is registered: schema, checks, implementations, vmap; gradients in `_autograd`.

`Library.define` rather than `torch.library.custom_op`: it costs 2 us a call instead of 7 (measured on torch 2.13)
and lets one schema have a CPU and a CUDA kernel. Each implementation runs the operator's checks first, so a
direct `torch.ops.moe.*` call is as safe as a public function.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moe_ops import _checks, errors
from moe_ops._cache_key import tag_compile_caches

NAMESPACE = "moe"
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

Op = Callable[..., Any]
VmapRule = Callable[..., tuple[Any, Any]]


def define(schema: str, *, check: Op, cpu: Op, cuda: Op, fake: Op) -> None:
    """Registers an operator: `check`, `cpu`, `cuda` and `fake` all take the schema's arguments.

    Raises RuntimeError when the operator exists, as it does when this package is imported under two names:
    the second registration would otherwise silently replace the overload that passes match on.
    """
    name = schema[: schema.index("(")]
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        raise RuntimeError(f"{NAMESPACE}::{name} is already registered: moe_ops was imported under two names")
    LIBRARY.define(schema, tags=_TAGS)
    LIBRARY.impl(name, _checked(check, _plain(cpu)), "CPU")
    LIBRARY.impl(name, _checked(check, cuda), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _traced(_checked(check, fake)), lib=LIBRARY)


def _checked(check: Op, implementation: Op) -> Op:
    def checked(*args: Any) -> Any:
        check(*args)
        return implementation(*args)

    return checked


def _traced(fake: Op) -> Op:
    """A fake runs while a compiler traces, before it computes the key of what it compiles.

    So here our part of that key is put back should the user have set another since the import; and what the fake
    raises is shown where the compiler's traceback ends.
    """

    def traced(*args: Any) -> Any:
        tag_compile_caches()
        errors.forget()
        try:
            return fake(*args)
        except (TypeError, ValueError) as error:
            errors.show(error)
            raise

    return traced


def _plain(reference: Op) -> Op:
    """Runs a reference without gradients or autocast: recorded inner operations would hide a missing formula.

    Outputs are made contiguous, as fakes promise and kernels write them: elementwise PyTorch keeps its input's strides.

    Leaving inference mode, even where nobody entered it, undoes the dispatch state of the operator call: below
    autograd `grouped_mm` takes a fifth longer on the CPU (121 against 99 us for 32 small experts).
    """

    def plain(*args: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            if torch.is_autocast_enabled("cpu"):
                with torch.autocast("cpu", enabled=False):
                    return _contiguous(reference(*args))
            return _contiguous(reference(*args))

    return plain


def _contiguous(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.contiguous()
    return tuple(output.contiguous() for output in outputs)


def define_flops(name: str, formula: Callable[..., int]) -> None:
    """Registers what `torch.utils.flop_counter.FlopCounterMode` counts for `name`: two per multiplication.

    `formula` gets the operator's arguments with shapes in the place of tensors. Shapes are all it sees: dropped
    slots count too. What a fused operator's backward multiplies again counts again.
    """

    def count(*shapes: Any, out_val: Any = None, **_: Any) -> int:
        return formula(*shapes)

    register_flop_formula(operator(name).overloadpacket, get_raw=False)(count)


def operator(name: str) -> Any:
    """The overload `torch.ops.moe.<name>.default`."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def call(name: str, *args: Any) -> Any:
    """Calls an operator for a public function.

    Raises TypeError for something else in a tensor's place, and for a DTensor: operators work on local shards, which
    only the caller can name.
    """
    if not torch.compiler.is_compiling():
        errors.forget()
        for argument, arg in zip(_tensor_arguments(name), args, strict=False):
            if argument is not None and type(arg) not in _ORDINARY:
                _expect_tensor(argument, arg)
    return errors.invoke(operator(name), *args)


def autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Casts to the autocast dtype inside `torch.autocast`, as torch's own matrix products do: all but float64."""
    like = tensors[0]
    if not isinstance(like, Tensor) or like.is_meta or not torch.is_autocast_enabled(like.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(like.device.type)
    return tuple(_cast(tensor, dtype) for tensor in tensors)


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    is_eligible = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if is_eligible else tensor


_ORDINARY = frozenset({Tensor, torch.nn.Parameter})


@lru_cache(maxsize=None)
def _tensor_arguments(name: str) -> tuple[Any, ...]:
    """The schema's argument where it is a tensor, None where it is an option."""
    arguments = operator(name)._schema.arguments
    return tuple(argument if "Tensor" in str(argument.type) else None for argument in arguments)


def _expect_tensor(argument: Any, value: Any) -> None:
    is_absent = value is None and "Optional" in str(argument.type)
    if not is_absent:
        _checks.expect_tensor(argument.name, value)
    if hasattr(value, "placements"):
        errors.type_error(
            "{} is a DTensor: expected a plain tensor, such as its to_local() shard", argument.name
        )


def define_vmap(name: str, token_args: Sequence[str] = ()) -> None:
    """Registers `name`'s vmap rule.

    When only `token_args` are batched the batch joins the token dimension and the operator runs once: the
    operator treats tokens one by one. Otherwise it runs once per batch element. A batched expert_map or
    correction_bias raises ValueError.
    """
    names = argument_names(name)

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        batched = {arg for arg, dim in zip(names, in_dims, strict=True) if dim is not None}
        for arg in batched & {"expert_map", "correction_bias"}:
            errors.value_error(
                "vmap over {} of {}::{}: expected it unbatched, one for the whole batch", arg, NAMESPACE, name
            )
        if batched <= set(token_args):
            return _vmap_tokens(name, info.batch_size, [arg in token_args for arg in names], in_dims, args)
        return _vmap_loop(name, info.batch_size, in_dims, args)

    torch.library.register_vmap(f"{NAMESPACE}::{name}", rule, lib=LIBRARY)


def argument_names(name: str) -> list[str]:
    """Names of the operator's arguments, in order."""
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
