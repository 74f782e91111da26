"""A launch plan as a value: buffers to allocate, kernels to launch, tensors to return.

A `Program` is made from static metadata only (shapes, strides, dtypes, options), so it can be cached, run eagerly,
or written into a compiled graph by a pass. Tensors are named: the caller's after the operator's arguments,
buffers after what they hold.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_ops.kernels._compat import Code, code_of
from moe_ops.kernels.gpu import on_device
from moe_ops.kernels.packed import ALIGNMENT, Bound, Packed, pack


@dataclass(frozen=True, slots=True)
class TensorSketch:
    """A contiguous tensor by description only, for plans of tensors that do not exist."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def stride(self) -> tuple[int, ...]:
        """Strides in elements."""
        return _contiguous(self.shape)

    def storage_offset(self) -> int:
        """Where it starts."""
        return 0


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


class TensorMeta(NamedTuple):
    """What a plan may know of a tensor. `aligned`: its data starts on 16 bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool

    def stride(self, dim: int) -> int:
        """As of a tensor."""
        return self.strides[dim]


def is_dense(meta: TensorMeta) -> bool:
    """Whether a tensor is contiguous: a dimension of size 1 may have any stride."""
    pairs = zip(meta.shape, meta.strides, _contiguous(meta.shape), strict=True)
    return all(size == 1 or stride == dense for size, stride, dense in pairs)


@dataclass(frozen=True, slots=True)
class Ref:
    """A kernel argument: the tensor of that name."""

    name: str


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A kernel argument: a host TMA descriptor over `source`; strides in elements, the last one 1."""

    source: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]


Argument = Ref | Descriptor | int | float | str | bool | None


class Buffer(NamedTuple):
    """A contiguous tensor the program allocates, uninitialised: an output or a workspace."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def meta(self) -> TensorMeta:
        """What a plan may know of it."""
        return TensorMeta(self.shape, _contiguous(self.shape), self.dtype, True)


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel launch. `args` maps every kernel parameter, constexpr ones included, to its argument."""

    kernel: Any
    grid: tuple[int, ...]
    args: Mapping[str, Argument]
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        wanted = _parameters(self.kernel)
        if self.args.keys() != wanted:
            given = set(self.args)
            raise ValueError(
                f"{self.kernel.__name__}: missing {wanted - given}, unknown {given - wanted} arguments"
            )


@lru_cache(maxsize=None)
def _parameters(kernel: Any) -> frozenset[str]:
    return frozenset(kernel.arg_names)


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Allocate `buffers`, run `launches` in order on the current stream, return the tensors named in `outputs`.

    A launch of no programs at all, over a tensor without elements, is left out.
    """

    buffers: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    outputs: tuple[str, ...]
    filled: "Filled" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        launches = tuple(launch for launch in self.launches if all(launch.grid))
        object.__setattr__(self, "launches", launches)
        object.__setattr__(
            self, "filled", Filled(self.buffers, tuple(map(_step, launches)), self.outputs, {})
        )


class Filled(NamedTuple):
    """A program with its launches laid out to be run again and again; `packed` has those of devices it has run on."""

    buffers: tuple[Buffer, ...]
    steps: tuple["Step", ...]
    outputs: tuple[str, ...]
    packed: dict[torch.device, Packed]

    def run(self, tensors: Mapping[str, torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
        """Runs eagerly. `tensors` holds the operator's arguments by name; entries that are None are ignored.

        They are the same names in the same order in every run, those that are None too.
        """
        device = _device_of(tensors)
        packed = self.pack(tensors, device)
        results = None if packed is None else packed.run([*tensors.values()])
        if results is not None:
            return results
        with on_device(device):
            bound = self._bind_by_name(tensors, device)
            bound.launch()
        return bound.results

    def bind(self, tensors: Mapping[str, torch.Tensor | None], device: torch.device) -> "Bound | BoundByName":
        """Allocates buffers on the current stream. What comes back launches on the stream that is current then."""
        packed = self.pack(tensors, device)
        bound = None if packed is None else packed.bind(tensors.values())
        return bound or self._bind_by_name(tensors, device)

    def pack(
        self, tensors: Mapping[str, torch.Tensor | None], device: torch.device | None = None
    ) -> Packed | None:
        """The same by addresses, for tensors with the metadata of these; None if Triton has not compiled all of it."""
        device = device or _device_of(tensors)
        packed = self.packed.get(device) or pack(self, tensors, device)
        if packed is not None:
            self.packed[device] = packed
        return packed

    def _bind_by_name(
        self, tensors: Mapping[str, torch.Tensor | None], device: torch.device
    ) -> "BoundByName":
        values: dict[str, Any] = dict(tensors)
        for name, shape, dtype in self.buffers:
            values[name] = torch.empty(shape, dtype=dtype, device=device)
        return BoundByName(self.steps, values, self.outputs)

    def know(self, compiled: Sequence[Any], device: torch.device) -> None:
        """Keeps what Triton compiled for each launch and loaded on a device, as a run would."""
        for step, code in zip(self.steps, compiled, strict=True):
            step.know(code, -1 if device.index is None else device.index)

    def first_reader(self, name: str) -> int:
        """Which launch is the first that reads the tensor called `name`; as many as there are if none does."""
        readers = (index for index, step in enumerate(self.steps) if step.reads(name))
        return next(readers, len(self.steps))


def _device_of(tensors: Mapping[str, torch.Tensor | None]) -> torch.device:
    return next(each.device for each in tensors.values() if each is not None)


class BoundByName(NamedTuple):
    """A program's launches and the tensors of one run, by name."""

    steps: tuple["Step", ...]
    values: dict[str, Any]
    outputs: tuple[str, ...]

    def launch(self, first: int = 0, last: int | None = None) -> None:
        """Launches those from `first` until `last`, or all, on the current stream."""
        for step in self.steps[first:last]:
            step.run(self.values)

    @property
    def results(self) -> tuple[torch.Tensor, ...]:
        """What the operator returns."""
        return tuple([self.values[name] for name in self.outputs])


class Step(NamedTuple):
    """A launch with its positional arguments laid out once; only tensors are filled in per run.

    Triton looks up which machine code a call needs by every one of its arguments, which takes most of a launch's time
    on the host. Here that follows from the plan, but for the alignment of tensors: so the code of the first run whose
    tensors all start on 16 bytes is kept, for each device, and such runs call it: by addresses alone where that is
    possible. Steps that differ in numbers alone have `codes` together, where `kinds` tells which of them are compiled
    alike.
    """

    kernel: Any
    grid: tuple[int, ...]
    template: list[Any]
    refs: tuple[tuple[int, str], ...]
    descriptors: tuple[tuple[int, Descriptor], ...]
    num_warps: int
    num_stages: int
    codes: dict[Hashable, "Known"]
    kinds: tuple[Hashable, ...]

    def reads(self, name: str) -> bool:
        """Whether a tensor is among its arguments."""
        is_described = any(each.source == name for _, each in self.descriptors)
        return is_described or any(ref == name for _, ref in self.refs)

    def run(self, values: Mapping[str, Any]) -> None:
        """Launches it on the current stream."""
        args, addresses, device = self.template.copy(), 0, -1
        for index, name in self.refs:
            args[index] = tensor = values[name]
            addresses |= tensor.data_ptr()
            device = tensor.get_device()
        for index, descriptor in self.descriptors:
            source = values[descriptor.source]
            args[index] = materialize(descriptor, source)
            addresses |= source.data_ptr()
            device = source.get_device()
        if addresses % ALIGNMENT:
            self._look_up(args)
            return
        known = self.codes.get((device, self.kinds))
        if known is not None:
            known.compiled[(*self.grid, 1, 1)[:3]](*args)
            return
        self.know(self._look_up(args), device)

    def know(self, compiled: Any, device: int) -> None:
        """Keeps what Triton compiled, for tensors that start on 16 bytes; the interpreter compiles none."""
        if compiled is not None:
            self.codes[device, self.kinds] = Known(compiled, code_of(compiled))

    def _look_up(self, args: list[Any]) -> Any:
        return self.kernel[self.grid](*args, num_warps=self.num_warps, num_stages=self.num_stages)

    def code(self, device: int) -> Code | None:
        """What to launch by addresses, if Triton has compiled it."""
        known = self.codes.get((device, self.kinds))
        return None if known is None else known.code


class Known(NamedTuple):
    """What Triton compiled for a launch, and what can be launched of it by addresses."""

    compiled: Any
    code: Code | None


def _step(launch: Launch) -> Step:
    args = launch.args
    template = [args[name] for name in launch.kernel.arg_names]
    filled = [(i, a) for i, a in enumerate(template) if type(a) in _FILLED_IN]
    for i, _ in filled:
        template[i] = None
    refs = tuple([(i, a.name) for i, a in filled if type(a) is Ref])
    descriptors = tuple([(i, a) for i, a in filled if type(a) is Descriptor])
    options = launch.num_warps, launch.num_stages
    return Step(launch.kernel, launch.grid, template, refs, descriptors, *options, {}, ())


_FILLED_IN = frozenset({Ref, Descriptor})


def materialize(descriptor: Descriptor, source: torch.Tensor) -> TensorDescriptor:
    """What a kernel gets for a descriptor, given its source."""
    shape, strides, block = descriptor.shape, descriptor.strides, descriptor.block
    return TensorDescriptor(source, list(shape), list(strides), list(block))


def describe(tensor: Any) -> TensorMeta:
    """Metadata of a real, fake or meta tensor with static sizes; hashable, the key under which plans are cached."""
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype, _is_aligned(tensor))


def describe_index(tensor: Any) -> TensorMeta:
    """Metadata of a vector that kernels take as contiguous, wherever it starts."""
    return TensorMeta(tensor.shape, (1,), tensor.dtype, True)


def _is_aligned(tensor: Any) -> bool:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.data_ptr() % ALIGNMENT == 0
    # A fake tensor has no address to ask for; allocators align storages further than we need.
    return tensor.storage_offset() * tensor.dtype.itemsize % ALIGNMENT == 0
