"""How every operator of the library is registered: schema, checks, implementations, vmap; gradients in `_autograd`.

`Library.define` rather than `torch.library.custom_op`: it costs 2 us a call instead of 7 (measured on torch 2.13)
and lets one schema have a CPU and a CUDA kernel. Each implementation runs the operator's checks first, so a
direct `torch.ops.moe.*` call is as safe as a public function.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from moe_ops import _checks, _compat, _vmap, errors, records
from moe_ops._cache_key import tag_compile_caches
from moe_ops.records import Role

NAMESPACE = "moe"
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_compat.skip_mutation_check(NAMESPACE)

Op = Callable[..., Any]


class Operator(NamedTuple):
    """An operator and what its record of arguments says. `tensors`: position, name, and whether it may be None."""

    overload: Any
    leaves: tuple[records.Leaf, ...]
    flatten: Op
    build: Op
    tensors: tuple[tuple[int, str, bool], ...]

    @property
    def name(self) -> str:
        """Without the namespace."""
        return self.overload._schema.name.partition("::")[2]


OPERATORS: dict[type, Operator] = {}
"""By the type of their arguments."""


def define(arguments: type, returns: str, *, check: Op, cpu: Op, cuda: Op, fake: Op) -> None:
    """Registers the operator that takes `arguments`: a record of `moe_ops.arguments`, which the four functions get.

    Raises RuntimeError when the operator exists, as it does when this package is imported under two names:
    the second registration would otherwise silently replace the overload that passes match on.
    """
    name = records.operator_name(arguments)
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        raise RuntimeError(f"{NAMESPACE}::{name} is already registered: moe_ops was imported under two names")
    leaves, build = records.leaves(arguments), records.builder(arguments)
    schema = ", ".join(leaf.schema for leaf in leaves)
    LIBRARY.define(f"{name}({schema}) -> {returns}", tags=_TAGS)
    LIBRARY.impl(name, _checked(build, check, _plain(cpu)), "CPU")
    LIBRARY.impl(name, _launching(arguments, _checked(build, check, cuda)), "CUDA")
    traced = _traced(_checked(build, check, fake))
    torch.library.register_fake(f"{NAMESPACE}::{name}", traced, lib=LIBRARY)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    records.RECORDS[name] = arguments
    tensors = tuple((i, leaf.name, leaf.is_optional) for i, leaf in enumerate(leaves) if leaf.is_tensor)
    OPERATORS[arguments] = Operator(overload, leaves, records.flattener(arguments), build, tensors)


def define_compiled(arguments: type, cpu: Op, fake: Op) -> None:
    """Registers the overload `compiled` of an operator, for code that was compiled for a CPU: nothing but the work.

    Tracing has checked the arguments, and AOTAutograd has written gradients as calls of their own. So there is no check
    and no autograd kernel: a call takes 3 us more than what it computes, where the operator takes 20 to 40.
    """
    operator = OPERATORS[arguments]
    name = _declare(operator, "compiled")
    LIBRARY.impl(name, lambda *leaves: _contiguous(cpu(operator.build(*leaves))), "CPU")
    torch.library.register_fake(
        f"{NAMESPACE}::{name}", lambda *leaves: fake(operator.build(*leaves)), lib=LIBRARY
    )


def define_composite(arguments: type, overload: str, function: Op) -> Op:
    """Registers and returns an overload of an operator that is what `function` calls: it has no kernel of its own."""
    operator = OPERATORS[arguments]
    name = _declare(operator, overload)
    LIBRARY.impl(name, lambda *leaves: function(operator.build(*leaves)), "CompositeImplicitAutograd")
    return getattr(operator.overload.overloadpacket, overload)


def _declare(operator: Operator, overload: str) -> str:
    name, returns = f"{operator.name}.{overload}", operator.overload._schema.returns[0].type
    LIBRARY.define(f"{name}({', '.join(leaf.schema for leaf in operator.leaves)}) -> {returns}", tags=_TAGS)
    return name


def _checked(build: Op, check: Op, implementation: Op) -> Op:
    def checked(*leaves: Any) -> Any:
        arguments = build(*leaves)
        check(arguments)
        return implementation(arguments)

    return _compat.never_traced(checked)


def _launching(record: type, checked: Op) -> Op:
    """What passed the checks once and was launched is launched again for arguments of the same metadata."""

    def launching(*leaves: Any) -> Any:
        outputs = _plans().launch_known(record, leaves)
        return checked(*leaves) if outputs is None else outputs

    return _compat.never_traced(launching)


_LOADED: list[Any] = []
"""`moe_ops.kernels.plans`, once something was launched: Triton comes with it."""


def _plans() -> Any:
    if not _LOADED:
        from moe_ops.kernels import plans

        _LOADED.append(plans)
    return _LOADED[0]


def forget_launches() -> None:
    """Has every operator plan anew: what plans are made from has changed."""
    for plans in _LOADED:
        plans.forget_known()


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


def define_flops(arguments: type, formula: Callable[[Any], int]) -> None:
    """Registers what `torch.utils.flop_counter.FlopCounterMode` counts for an operator: two per multiplication.

    `formula` gets the operator's arguments with shapes in the place of tensors. Shapes are all it sees: dropped
    slots count too. What a fused operator's backward multiplies again counts again.
    """
    operator = OPERATORS[arguments]

    def count(*shapes: Any, out_val: Any = None, **_: Any) -> int:
        return formula(operator.build(*shapes))

    register_flop_formula(operator.overload.overloadpacket, get_raw=False)(count)


def define_flops_as(arguments: type, like: type) -> None:
    """Registers that an operator counts as the operator of `like`, a record with the same leaves."""
    formula = flop_registry[OPERATORS[like].overload.overloadpacket]
    register_flop_formula(OPERATORS[arguments].overload.overloadpacket, get_raw=True)(formula)


def run(arguments: Any) -> Any:
    """Calls the operator that takes `arguments`, without the checks of a public function."""
    operator = OPERATORS[type(arguments)]
    return operator.overload(*operator.flatten(arguments))


def call(arguments: Any) -> Any:
    """Calls the operator that takes `arguments`, for a public function.

    Raises TypeError for something else in a tensor's place, and for a DTensor: operators work on local shards, which
    only the caller can name.
    """
    operator = OPERATORS[type(arguments)]
    values = operator.flatten(arguments)
    if torch.compiler.is_compiling():
        return errors.invoke(operator.overload, *values)
    if _LOADED:
        outputs = _LOADED[0].launch_ready(type(arguments), values)
        if outputs is not None:
            return outputs
    return _call_plainly(operator, type(arguments), values)


def _call_plainly(operator: Operator, record: type, values: tuple[Any, ...]) -> Any:
    errors.forget()
    tensors = []
    for index, name, is_optional in operator.tensors:
        value = values[index]
        if value is None and is_optional:
            continue
        if type(value) not in _ORDINARY:
            _expect_tensor(name, value)
        tensors.append(value)
    try:
        if not (_ORDINARY.issuperset(map(type, tensors)) and _compat.is_past_autograd(tensors)):
            return errors.invoke(operator.overload, *values)
        with _compat.below_autograd():  # where its kernel would call the operator again
            outputs = errors.invoke(operator.overload, *values)
    except NotImplementedError:
        for index, name, _ in operator.tensors:
            _checks.expect_dense(name, values[index])
        raise
    if _LOADED and not _compat.is_watched() and _compat.are_plain(tensors):
        _LOADED[0].keep_ready(record, values)
    return outputs


def has_backward(arguments: Any) -> bool:
    """Whether what a compiler traces of these arguments will have a backward; exported programs run without one."""
    if not torch.is_grad_enabled() or _compat.is_exporting():
        return False
    operator = OPERATORS[type(arguments)]
    values = operator.flatten(arguments)
    return any(values[index] is not None and values[index].requires_grad for index, _, _ in operator.tensors)


def launch(arguments: Any) -> Any:
    """Runs the Triton launches of the operator that takes `arguments`, on a GPU.

    To be called by the operator, with its arguments or what it always makes of those with this metadata: from then on
    they go straight to the launches.
    """
    return _plans().launch_checked(arguments)


def exchange(arguments: Any, peers: Any) -> dict[str, Tensor]:
    """Runs the launch of an operator that exchanges rows with `peers`."""
    from moe_ops.kernels import exchange_plans

    return exchange_plans.launch(arguments, peers)


def has_launches(arguments: Any) -> bool:
    """Whether kernels of ours are for such arguments of an operator that also runs a library's."""
    return _plans().is_taken(arguments)


def launch_library(arguments: Any, product: Callable[..., Tensor]) -> Tensor:
    """`product`, a library's, of the tensors of an operator that `has_launches` said no to; as with `launch`."""
    _plans().keep_library(arguments, product)
    operator = OPERATORS[type(arguments)]
    return product(*operator.flatten(arguments)[: len(operator.tensors)])


def launch_with_shared(routed: Any, alone: Any, products: Callable[[Any], Tensor]) -> Tensor:
    """Runs a `FusedExperts` and, on a second stream where that is faster, the `SharedAlone` that joins its sum."""
    return _plans().launch_with_shared(routed, alone, products)


def autocast(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts to the autocast dtype inside `torch.autocast`, as torch's own matrix products do: all but float64.

    `values` are tensors, records of them, and None. The first is a tensor whose device counts.
    """
    if not autocasts(values[0]):
        return values
    dtype = torch.get_autocast_dtype(values[0].device.type)
    return records.map_leaves(lambda value: _cast(value, dtype), values)


def autocasts(like: Any) -> bool:
    """Whether `autocast` does anything, for values of which `like` is the first."""
    return isinstance(like, Tensor) and not like.is_meta and torch.is_autocast_enabled(like.device.type)


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    is_eligible = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if is_eligible else tensor


_ORDINARY = frozenset({Tensor, torch.nn.Parameter})


def _expect_tensor(name: str, value: Any) -> None:
    _checks.expect_tensor(name, value)
    if hasattr(value, "placements"):
        errors.type_error("{} is a DTensor: expected a plain tensor, such as its to_local() shard", name)


def define_vmap(arguments: type) -> None:
    """Registers an operator's vmap rule: it runs once per batch element.

    A batched argument that is one for all tokens (a placement, a correction bias) raises ValueError.
    """
    _define_vmap(arguments, frozenset())


def define_vmap_over_tokens(arguments: type) -> None:
    """Registers the vmap rule of an operator that treats tokens one by one.

    When only arguments per token are batched the batch joins the token dimension and the operator runs once.
    Otherwise as `define_vmap`.
    """
    leaves = OPERATORS[arguments].leaves
    _define_vmap(arguments, frozenset(leaf.name for leaf in leaves if Role.PER_TOKEN in leaf.roles))


def _define_vmap(arguments: type, per_token: frozenset[str]) -> None:
    overload, leaves, *_ = OPERATORS[arguments]

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        batched = [leaf for leaf, dim in zip(leaves, in_dims, strict=True) if dim is not None]
        for leaf in batched:
            if Role.WHOLE in leaf.roles:
                errors.value_error(
                    "vmap over {} of {}: expected it unbatched, one for the whole batch", leaf.name, overload
                )
        if per_token.issuperset(leaf.name for leaf in batched):
            is_token = [leaf.name in per_token for leaf in leaves]
            return _vmap.over_tokens(overload, info.batch_size, is_token, in_dims, args)
        return _vmap.one_by_one(overload, info.batch_size, in_dims, args)

    torch.library.register_vmap(overload._schema.name, rule, lib=LIBRARY)
