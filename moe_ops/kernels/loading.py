"""Loading kernels before they are needed: what Triton compiles launches by, and what is loaded of many plans once."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from moe_ops.kernels.program import Argument, Descriptor, Launch, Program, Ref, materialize

_INT32 = 1 << 31


class Loader:
    """Compiles and loads kernels on `device` without running them, each variant once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loaded: dict[Hashable, Any] = {}

    def load(self, program: Program, dtypes: Mapping[str, torch.dtype]) -> list[Any]:
        """What `program` launches, as Triton compiled it. `dtypes` names those of the operator's tensors."""
        known = {**dtypes, **{buffer.name: buffer.dtype for buffer in program.buffers}}
        return [self._one(launch, known) for launch in program.launches]

    def compile(self, program: Program, dtypes: Mapping[str, torch.dtype]) -> None:
        """The same without loading: within `triton.AsyncCompileMode` it starts to be compiled."""
        known = {**dtypes, **{buffer.name: buffer.dtype for buffer in program.buffers}}
        for launch in program.launches:
            self._compiled(launch, known)

    def _one(self, launch: Launch, dtypes: Mapping[str, torch.dtype]) -> Any:
        key = variant(launch, dtypes)
        if key not in self._loaded:
            self._loaded[key] = self._load(launch, dtypes)
        return self._loaded[key]

    def _load(self, launch: Launch, dtypes: Mapping[str, torch.dtype]) -> Any:
        if not torch.cuda.is_available():
            raise ValueError(f"device={str(self._device)!r}: PyTorch finds no GPU here")
        with torch.cuda.device(self._device):
            compiled = self._compiled(launch, dtypes)
            compiled._init_handles()  # what the first launch would do: the module goes to the device
            return compiled

    def _compiled(self, launch: Launch, dtypes: Mapping[str, torch.dtype]) -> Any:
        args = [self._stand_in(launch.args[name], dtypes) for name in launch.kernel.arg_names]
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        return launch.kernel.warmup(*args, grid=launch.grid, **options)

    def _stand_in(self, argument: Argument, dtypes: Mapping[str, torch.dtype]) -> Any:
        name = _tensor_of(argument)
        if name is None:
            return argument
        stand_in = torch.empty(16, dtype=dtypes[name], device=self._device)
        return materialize(argument, stand_in) if isinstance(argument, Descriptor) else stand_in


def _tensor_of(argument: Argument) -> str | None:
    if isinstance(argument, Ref):
        return argument.name
    return argument.source if isinstance(argument, Descriptor) else None


def variant(launch: Launch, dtypes: Mapping[str, torch.dtype]) -> Hashable:
    """What Triton compiles a launch by: launches of equal variants are one machine code.

    Constants count by value. Of other integers count whether they are 1, multiples of 16, or wider than 32 bits; of
    those that a kernel says not to specialise on, the width.
    """
    kinds = tuple([_kind(param, launch.args[param.name], dtypes) for param in launch.kernel.params])
    return launch.kernel, launch.num_warps, launch.num_stages, kinds


def _kind(param: Any, argument: Argument, dtypes: Mapping[str, torch.dtype]) -> Hashable:
    name = _tensor_of(argument)
    if name is not None:
        return dtypes[name], argument.block if isinstance(argument, Descriptor) else None
    if param.is_constexpr or not isinstance(argument, int) or isinstance(argument, bool):
        return type(argument), argument
    width = -_INT32 <= argument < _INT32
    return width if param.do_not_specialize else (width, argument == 1, argument % 16 == 0)
