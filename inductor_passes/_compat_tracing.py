"""What passes need of torch's tracing that is not public, beside `_compat.py`. Tested on torch 2.11 to 2.14."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from inductor_passes._compat import detect_fake_mode, trace, triton_launch_in_place


def forget_real_tensors(graph: torch.fx.Graph) -> None:
    """From now on a compile of what was a draft runs no operator, as torch does on the real tensors beside fake ones.

    It compares both, and what it decomposes `//` into has integers where the real ones are bool. (torch 2.13)
    """
    for node in graph.find_nodes(op="placeholder"):
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if getattr(mode, "propagate_real_tensors", False):
            mode.propagate_real_tensors = False  # type: ignore[union-attr]


def at_once(function: Callable[[torch.Tensor], Any], parts: torch.Tensor) -> Any:
    """What a function returns for each part, in one run of its operators. RuntimeError where one has no rule for that.

    torch would warn of such an operator, and run it part by part.
    """
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    was_enabled = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        return torch.vmap(function)(parts)
    finally:
        functorch._set_vmap_fallback_enabled(was_enabled)


def functional_trace(function: Callable[..., Any], values: Sequence[Any]) -> torch.fx.GraphModule:
    """As `trace`, without gradients and with what changes in place made functional.

    Backends compile under a fake mode other than the one that Dynamo traced with, so tensors are made anew in that.
    """
    mode = detect_fake_mode(()) or detect_fake_mode(values)
    with torch.no_grad(), mode if mode is not None else contextlib.nullcontext():
        fresh = [_like(value) if isinstance(value, torch.Tensor) else value for value in values]
        return trace(torch.func.functionalize(function), fresh, kept=_KEPT)


_KEPT = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("silu", "softplus", "mish", "elu", "celu", "hardtanh", "hardsigmoid")
)
"""Functions whose derivative is not that of their parts: it overflows, or is another at a corner (ReLU6's at zero)."""


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def traced_node(value: Any) -> torch.fx.Node | None:
    """Inside a `functional_trace`: the node that gave `value` as it is now; None for what is no traced tensor."""
    if not isinstance(value, torch.Tensor) or not torch._is_functional_tensor(value):  # type: ignore[attr-defined]
        return None
    torch._sync(value)  # type: ignore[attr-defined]
    mode, inner = get_proxy_mode(), torch._from_functional_tensor(value)  # type: ignore[attr-defined]
    slot = None if mode is None else get_proxy_slot(inner, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def traced_nodes() -> Iterator[torch.fx.Node]:
    """Inside a `functional_trace`: all nodes so far, the last one first."""
    mode: Any = get_proxy_mode()
    return reversed(mode.tracer.graph.nodes)


def depends_on_data(value: Any) -> bool:
    """Whether a value, or a size of it, is known at run time only."""
    return isinstance(value, torch.Tensor | torch.SymInt) and bool(free_unbacked_symbols(value))


def is_made_of_tensors(value: Any) -> bool:
    """Whether a value is a tensor around others, such as a DTensor: what is called on it is not what it says."""
    return is_traceable_wrapper_subclass(value)


_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]  # pybind, without stubs
DATA_OF = _autograd._get_data_attr
"""What reads `tensor.data` in a graph of Dynamo's."""


def changed_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """What an operator of others' or a Triton kernel, called in a graph of Dynamo's, may change in place."""
    target = node.target
    if target is triton_launch_in_place():
        return node.all_input_nodes
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
        return node.all_input_nodes if any(each._schema.is_mutable for each in overloads) else []
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    changed: list[torch.fx.Node] = []
    for index, argument in enumerate(target._schema.arguments):
        if argument.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            map_arg(given, changed.append)
    return changed


def gradients_on_after(node: torch.fx.Node, are_on: bool) -> bool:
    """Whether gradients are on behind a node of a Dynamo graph, in front of which they are or not."""
    if node.target is torch._C._set_grad_enabled:
        return bool(node.args[0])
    if node.target is torch.autograd.grad_mode._enter_inference_mode:
        return not node.args[0] and are_on
    return are_on


AUTOCAST_CALLS = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
"""How a region under `torch.autocast` begins and ends in a Dynamo graph."""


@contextlib.contextmanager
def autocast_left_as_it_is() -> Iterator[None]:
    """A region that something inside enters and does not leave ends here."""
    devices = ("cpu", "cuda")
    before = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices]
    try:
        yield
    finally:
        for device, (is_enabled, dtype) in zip(devices, before, strict=True):
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, dtype)
