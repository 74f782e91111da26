"""Every private torch API the operators use; `inductor_passes/_compat.py` holds those of the passes.

torch offers no public way to write an autograd kernel that serves `torch.func` and forward mode too:
`torch.library.register_autograd` raises under `torch.func.grad` and drops tangents without a word. Tested on torch
2.11, 2.13 and 2.14.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._library.utils import MutationChecker
from torch.autograd import forward_ad

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context: an operator called inside goes past its autograd kernel."""

_SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction


class SingleLevelFunction(_SingleLevelFunction):
    """An autograd.Function that records at the innermost `torch.func` level only, as operators' autograd kernels do.

    Compiled autograd knows it by the same key as any other.
    """

    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]  # pybind, without stubs
_profiler_enabled: Any = torch._C._autograd._profiler_enabled  # type: ignore[attr-defined]
_guards: Any = torch._C._dynamo.guards  # type: ignore[attr-defined]  # likewise
_eval_frame: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]  # likewise
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
_LEVEL = 0  # torch supports one level of dual numbers; torch.func nests them in wrappers


def never_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which Dynamo leaves alone with all that it calls, also below code that a graph could not hold.

    Set on its code, that of all closures of one `def`, it costs a call nothing, unlike `torch.compiler.disable`.
    """
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    return function


@contextmanager
def single_level() -> Iterator[None]:
    """Lets a `SingleLevelFunction` run while a `torch.func` transform is active."""
    was_allowed = _functorch.get_single_level_autograd_function_allowed()
    _functorch.set_single_level_autograd_function_allowed(True)
    try:
        yield
    finally:
        _functorch.set_single_level_autograd_function_allowed(was_allowed)


@contextmanager
def all_modes_recorded() -> Iterator[None]:
    """Both modes of differentiation on: running a Function turned them off, also for the levels further out."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


def is_past_autograd(tensors: Iterable[Tensor]) -> bool:
    """Whether nothing above its kernels has anything to do with an operator on `tensors` of torch's own types.

    No gradient is recorded, no transform of `torch.func` is active and no mode wants to see functions of torch.
    """
    if forward_ad._current_level >= 0 or _functorch.maybe_current_level() is not None:
        return False
    if torch._C._len_torch_function_stack():
        return False
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))


def is_watched() -> bool:
    """Whether modes, dual numbers or the profiler want to see calls: a guard of `guard_of` may not tell."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        return True
    return forward_ad._current_level >= 0 or _profiler_enabled()


def are_plain(tensors: Iterable[Tensor]) -> bool:
    """Whether the memory of each of `tensors` holds its values: the dispatcher has nothing to take off or to turn.

    False for a tensor of a transform that has ended, as pullbacks meet, and for one whose sign is yet to be turned.
    """
    return all(torch._C._dispatch_keys(each).raw_repr() in _plain_keys(each.device) for each in tensors)


@lru_cache(maxsize=None)
def _plain_keys(device: torch.device) -> frozenset[int]:
    made = []
    for is_inference in (False, True):  # whichever the first caller is in
        with torch.inference_mode(is_inference):
            made.append(torch.empty(0, device=device))
    return frozenset(torch._C._dispatch_keys(each).raw_repr() for each in made)


def guard_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Whether as many tensors are what these are, as Dynamo's guards see it: type, dtype, device, sizes, strides.

    Also whether a gradient would be recorded, and what else the dispatcher would look at: transforms, autocast. Those
    guards do not see `torch.no_grad` itself, in which tensors that require gradients may be `tensors`.
    """
    is_alike = _guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if not any(tensor.requires_grad for tensor in tensors):
        return is_alike
    return lambda *given: not torch.is_grad_enabled() and is_alike(*given)


def may_be_dual(tensors: Iterable[Tensor]) -> bool:
    """Whether any of `tensors` could carry a tangent: cheap, false in everyday eager code, and leaves no trace.

    A traced graph enters its dual level in C++, where Python does not see it. There tensors are subclasses or wrapped,
    and entering a level once more tells: torch refuses to nest them.
    """
    if forward_ad._current_level >= 0:
        return True
    is_wrapped = _functorch.maybe_current_level() is not None
    return (is_wrapped or not _PLAIN_TYPES.issuperset(map(type, tensors))) and _has_dual_level()


def _has_dual_level() -> bool:
    try:
        torch._C._exit_dual_level(level=torch._C._enter_dual_level())
    except RuntimeError:
        return True
    return False


def unpack_dual(value: Any) -> tuple[Any, Tensor | None]:
    """(primal, tangent) of a tensor; (value, None) of anything else."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value, None
    return forward_ad.unpack_dual(value, level=_LEVEL)


def unbatched(tensor: Tensor) -> Tensor:
    """What `torch.vmap` gave a function a part of, which knows whether a gradient or a tangent is wanted; eagerly."""
    while _functorch.is_batchedtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def make_dual(primal: Tensor, tangent: Tensor | None) -> Tensor:
    """`primal` with a tangent, if there is one."""
    return primal if tangent is None else forward_ad.make_dual(primal, tangent, level=_LEVEL)


@torch.compiler.assume_constant_result
def is_in_jvp() -> bool:
    """Whether forward mode is active. Dynamo asks while it traces, and guards the level."""
    return forward_ad._current_level >= 0


@torch.compiler.assume_constant_result
def is_in_vmap() -> bool:
    """Whether `torch.vmap` is active. Dynamo asks while it traces, and guards the transforms that are active."""
    active = _functorch.get_interpreter_stack() or ()
    return any(each.key() == _functorch.TransformType.Vmap for each in active)


# By version: to try it, a backward would start autograd's threads, after which a process with GPUs cannot fork.
CLAMP_PASSES_ITS_LIMIT = torch.__version__ < "2.14"
"""Whether the slope of a clamp is 1 where a value equals the limit, as it was before torch 2.14, or 0."""


def has_onednn() -> bool:
    """Whether torch was built with oneDNN, and the user has it switched on."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def has_bfloat16_products() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor, as it does from AVX-512 on.

    Else torch's own products take 5 to 10 times as long as those of float32, and 40 where columns of a weight are
    contiguous.
    """
    return has_onednn() and _onednn_multiplies_bfloat16()


@lru_cache(maxsize=1)
def _onednn_multiplies_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """[m, B] = x [m, A] @ weight [B, A].T in oneDNN, which torch itself takes for reduced precision only.

    Its own choice for float32, MKL, leaves half of the speed behind on processors of other makers.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def is_exporting() -> bool:
    """Whether `torch.export` traces: in torch 2.11 Dynamo answers `torch.compiler.is_exporting()` with True always."""
    return torch.compiler._is_exporting_flag


@contextmanager
def tracing() -> Iterator[None]:
    """Lets `torch.compiler.is_compiling()` say so where a mode traces what runs inside, as in torch 2.13 it does."""
    was_compiling = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = was_compiling or torch._C._len_torch_dispatch_stack() > 0
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = was_compiling


def empty_on(device: str) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """What makes a tensor of (shape, strides, dtype) on the current device of this type; generated code calls it too.

    It takes a third of the time of `torch.empty`, as it goes past the dispatcher.
    """
    return getattr(_guards, f"_empty_strided_{device}")


def skip_mutation_check(namespace: str) -> None:
    """Keeps `torch.export.draft_export` from checking whether operators of `namespace` change their inputs.

    It takes an optional tensor that is None for one that was changed, and ends there (pytorch/pytorch#176148; torch
    2.11 and 2.13). `opcheck` checks the same in our tests.
    """
    check = MutationChecker.check

    def check_others(self: Any) -> None:
        if self.op.namespace != namespace:
            check(self)

    MutationChecker.check = check_others  # type: ignore[method-assign]
