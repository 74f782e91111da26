"""Every private Triton API that launches use, tested on Triton 3.6, 3.8 and 3.9.

Triton's own way to launch compiled code asks a tensor argument for its address and the driver whether that is the
GPU's, makes TMA descriptors anew, and calls hooks where there are none. What is below all that is a function in C that
takes addresses as they are, and this module finds it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))


class Code(NamedTuple):
    """Machine code on one device. `launch`: of (grid, stream, arguments); see `parameters`.

    parameters: of each of a kernel's arguments, how many the launcher takes: a descriptor's shape and strides follow
    it. `tensor_map`: what the launcher takes for the descriptor at that place among the kernel's arguments.
    """

    launch: Callable[[tuple[int, ...], int, Sequence[Any]], Any]
    parameters: tuple[int, ...]
    tensor_map: Callable[[int, TensorDescriptor], Any]


def code_of(compiled: Any) -> Code | None:
    """What to launch of a kernel that Triton has compiled and loaded; None where Triton must do so itself.

    That is another version or backend, a kernel that needs memory of its own, and descriptors that are no tensor maps.
    """
    launcher, makes = getattr(compiled, "run", None), _LAUNCHES.get(_VERSION)
    if makes is None or type(launcher).__name__ != "CudaLauncher":
        return None
    if (
        launcher.global_scratch_size
        or launcher.profile_scratch_size
        or getattr(launcher, "gsan_enabled", False)
    ):
        return None
    types = tuple(compiled.src.signature.values())
    boxed = [place for place, kind in enumerate(types) if kind.startswith("tensordesc")]
    maps = dict(zip(boxed, compiled.metadata.tensordesc_meta or (), strict=False))
    if None in map(maps.get, boxed):
        return None
    parameters = tuple(_length(kind) for kind in types)
    return Code(makes(compiled, launcher), parameters, lambda place, given: _tensor_map(given, maps[place]))


def _length(kind: str) -> int:
    """How many arguments the launcher takes for one: a descriptor, and its shape and strides."""
    return 1 + 2 * (kind.count(",") + 1) if kind.startswith("tensordesc") else 1


def _tensor_map(given: TensorDescriptor, meta: Any) -> Any:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(given, meta, *_MORE_OF_A_MAP[_VERSION])[0]


_MORE_OF_A_MAP: dict[tuple[int, ...], tuple[None, ...]] = {(3, 6): (), (3, 8): (None,), (3, 9): (None,)}


def _launch_3_6(compiled: Any, launcher: Any) -> Callable[..., Any]:
    wrapped = getattr(launcher.launch, "__closure__", None)  # around the function in C, for descriptors
    names = launcher.launch.__code__.co_freevars if wrapped else ()
    run = (
        dict(zip(names, wrapped or (), strict=True))["launcher"].cell_contents if wrapped else launcher.launch
    )
    options = compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    rest = None, None, compiled.packed_metadata, None, None, None  # no memory, no hooks
    return lambda grid, stream, args: run(*grid, stream, *options, *rest, *args)


def _launch_3_8(compiled: Any, launcher: Any) -> Callable[..., Any]:
    run = driver.active.utils.launch
    options = compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    rest = compiled.packed_metadata, None, None, None, None, None  # no hooks, no memory
    kinds = launcher.arg_annotations, launcher.kernel_signature
    return lambda grid, stream, args: run(*grid, stream, *options, *rest, *kinds, args)


_LAUNCHES = {(3, 6): _launch_3_6, (3, 8): _launch_3_8, (3, 9): _launch_3_8}


def has_hooks() -> bool:
    """Whether somebody wants to know of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def stream_of(device: int) -> int:
    """The current stream of a device, as launches take it."""
    return driver.active.get_current_stream(device)
