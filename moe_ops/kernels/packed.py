"""Launches by addresses: what a plan that runs again does, once Triton has compiled all of it for a device.

Arguments lie ready but for the addresses. Buffers that no caller sees are parts of one workspace. A TMA descriptor is a
function of an address and what the plan says, so it is kept by address and never stale: another tensor there has the
same metadata, or it had another plan. Plans of one form share the function that runs them, which is written out for it:
no loop over arguments is left in it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_ops._compat import empty_on
from moe_ops.kernels._compat import Code, has_hooks, stream_of

ALIGNMENT = 16
"""Bytes on which a tensor must start for TMA, and does if an allocator placed it."""
_APART = 256  # bytes from which buffers start, as an allocator would place them
_MOST_MAPS = 64  # of a descriptor


class Placed(NamedTuple):
    """A tensor as a TMA descriptor needs it."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """As a tensor's."""
        return self.address


class Boxes(NamedTuple):
    """A descriptor among the arguments: its place, which tensor it is of, and those made so far, by address.

    encode: of a TMA descriptor, which is over `shape`, `strides` and `block` of a tensor of `dtype`.
    """

    place: int
    tensor: int
    encode: Callable[[TensorDescriptor], Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    dtype: torch.dtype
    made: dict[int, Any]

    def at(self, address: int) -> Any:
        """The one for a tensor that starts there."""
        found = self.made.get(address)
        if found is None:
            if len(self.made) >= _MOST_MAPS:
                self.made.clear()
            box = list(self.shape), list(self.strides), list(self.block)
            found = self.made[address] = self.encode(TensorDescriptor(Placed(address, self.dtype), *box))
        return found


class PackedLaunch(NamedTuple):
    """A launch whose `arguments` want tensors' addresses: each place, and which tensor."""

    launch: Callable[[tuple[int, ...], int, Sequence[Any]], Any]
    grid: tuple[int, ...]
    arguments: list[Any]
    places: tuple[tuple[int, int], ...]
    boxes: tuple[Boxes, ...]

    def run(self, stream: int, addresses: Sequence[int]) -> None:
        """Launches it."""
        arguments = self.arguments.copy()
        for place, tensor in self.places:
            arguments[place] = addresses[tensor]
        for boxes in self.boxes:
            arguments[boxes.place] = boxes.at(addresses[boxes.tensor])
        self.launch(self.grid, stream, arguments)


class Bound(NamedTuple):
    """A packed program and the tensors of one run; `kept` must live until everything is launched."""

    launches: tuple[PackedLaunch, ...]
    device: torch.device
    addresses: list[int]
    results: tuple[torch.Tensor, ...]
    kept: torch.Tensor | None

    def launch(self, first: int = 0, last: int | None = None) -> None:
        """Launches those from `first` until `last`, or all, on the current stream."""
        stream, addresses = stream_of(self.device.index), self.addresses
        for launch in self.launches[first:last]:
            launch.run(stream, addresses)


class Packed(NamedTuple):
    """A program on one device. Tensors are numbered: those given, then `outputs`, then parts of a workspace.

    index: of the GPU. outputs: shape, strides and dtype. size: bytes of the workspace, in which parts start at `parts`.
    results: numbers of the tensors that are returned. runner: see `_runner`.
    """

    device: torch.device
    index: int | None
    launches: tuple[PackedLaunch, ...]
    outputs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    size: int
    parts: tuple[int, ...]
    results: tuple[int, ...]
    runner: Callable[..., Any]

    def run(self, given: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...] | None:
        """What the program returns; None if Triton has to launch it, and nothing was launched."""
        if has_hooks():
            return None
        index = self.index
        if index is None or index == torch.cuda.current_device():
            return self.runner(self, given, stream_of(index))
        with torch.cuda.device(index):
            return self.runner(self, given, stream_of(index))

    def bind(self, given: Iterable[torch.Tensor | None]) -> Bound | None:
        """What to launch with these tensors.

        None if one does not start where the compiled code wants it, or somebody watches what Triton launches.
        """
        if has_hooks():
            return None
        tensors, device, bits = [*given], self.device, 0
        for shape, _, dtype in self.outputs:
            tensors.append(torch.empty(shape, dtype=dtype, device=device))
        addresses = [0 if each is None else each.data_ptr() for each in tensors]
        for address in addresses:
            bits |= address
        if bits % ALIGNMENT:
            return None
        workspace = None
        if self.parts:
            workspace = torch.empty(self.size // 4, dtype=torch.int32, device=device)
            start = workspace.data_ptr()
            addresses += [start + part for part in self.parts]
        results: Any = tuple([tensors[number] for number in self.results])
        return Bound(self.launches, device, addresses, results, workspace)


def pack(program: Any, tensors: Mapping[str, torch.Tensor | None], device: torch.device) -> Packed | None:
    """A `Filled` by addresses, given `tensors` by name; None if it has no launches or Triton has not compiled all."""
    codes = [step.code(-1 if device.index is None else device.index) for step in program.steps]
    if not codes or None in codes:
        return None
    made = [buffer for buffer in program.buffers if buffer.name in program.outputs]
    inner = [buffer for buffer in program.buffers if buffer.name not in program.outputs]
    dtypes = {name: None if each is None else each.dtype for name, each in tensors.items()}
    dtypes |= {buffer.name: buffer.dtype for buffer in (*made, *inner)}
    numbered = {name: (number, dtype) for number, (name, dtype) in enumerate(dtypes.items())}
    size, parts = _parts(prod(buffer.shape) * buffer.dtype.itemsize for buffer in inner)
    launches = tuple(
        [_pack_launch(step, code, numbered) for step, code in zip(program.steps, codes, strict=True)]
    )
    results = tuple([numbered[name][0] for name in program.outputs])
    given = tuple([each is not None for each in tensors.values()])
    places = tuple(
        [(each.places, tuple([(box.place, box.tensor) for box in each.boxes])) for each in launches]
    )
    runner = _runner(Form(device.type, given, len(made), len(inner), places, results))
    # What makes them takes a tuple and no `torch.Size`, which is what an argument's sizes are.
    outputs = tuple([(tuple(buffer.shape), buffer.meta.strides, buffer.dtype) for buffer in made])
    return Packed(device, device.index, launches, outputs, size, parts, results, runner)


class Form(NamedTuple):
    """What packed programs may have in common. given: which tensors are not None. made, parts: how many there are.

    places: of each launch, where it has addresses and descriptors, and of which tensors.
    """

    device: str
    given: tuple[bool, ...]
    made: int
    parts: int
    places: tuple[tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]], ...]
    results: tuple[int, ...]


@lru_cache(maxsize=None)
def _runner(form: Form) -> Callable[[Packed, Sequence[torch.Tensor | None], int], Any]:
    """The function of a packed program of this form, tensors and a stream that gives its results.

    None, with nothing launched, if a tensor does not start where the compiled code wants it.
    """
    outputs = range(len(form.given), len(form.given) + form.made)
    tensors = [*(number for number, is_given in enumerate(form.given) if is_given), *outputs]
    known = [f"a{number} = t{number}.data_ptr()" for number in tensors]
    written = [
        "_, _, launches, outputs, size, parts, _, _ = packed",
        f"{''.join(f't{number}, ' for number in range(len(form.given)))}= given",
        *[f"t{number} = empty(*outputs[{index}])" for index, number in enumerate(outputs)],
        *known,
        f"if ({' | '.join(f'a{number}' for number in tensors)}) % {ALIGNMENT}: return None",
    ]
    if form.parts:
        written += ["workspace = empty((size // 4,), (1,), int32)", "start = workspace.data_ptr()"]
    for index in range(form.parts):
        written.append(f"a{outputs.stop + index} = start + parts[{index}]")
    for index, each in enumerate(form.places):
        written += _launch_written(index, *each)
    written.append(f"return ({''.join(f't{number}, ' for number in form.results)})")
    names: dict[str, Any] = {"empty": empty_on(form.device), "int32": torch.int32}
    exec("def runner(packed, given, stream):\n " + "\n ".join(written), names)
    return names["runner"]


def _launch_written(
    index: int, places: Iterable[tuple[int, int]], boxes: Iterable[tuple[int, int]]
) -> list[str]:
    return [
        f"launch, grid, arguments, _, boxes = launches[{index}]",
        "arguments = arguments.copy()",
        *[f"arguments[{place}] = a{tensor}" for place, tensor in places],
        *[f"arguments[{place}] = boxes[{i}].at(a{tensor})" for i, (place, tensor) in enumerate(boxes)],
        "launch(grid, stream, arguments)",
    ]


def _parts(sizes: Iterable[int]) -> tuple[int, tuple[int, ...]]:
    """Bytes of a workspace with parts of these sizes, and where they start."""
    total, starts = 0, []
    for size in sizes:
        starts.append(total)
        total += -(-size // _APART) * _APART
    return total, tuple(starts)


def _pack_launch(step: Any, code: Code, numbered: Mapping[str, tuple[int, Any]]) -> PackedLaunch:
    starts, arguments = _starts(code.parameters), step.template
    if len(starts) < sum(code.parameters):  # descriptors take more than their place
        pairs = zip(step.template, code.parameters, strict=True)
        arguments = [value for value, length in pairs for _ in range(length)]
    places = tuple([(starts[place], numbered[name][0]) for place, name in step.refs])
    boxes = []
    for place, each in step.descriptors:
        (number, dtype), start = numbered[each.source], starts[place]
        arguments[start : start + code.parameters[place]] = (None, *each.shape, *each.strides)
        encode = partial(code.tensor_map, place)
        boxes.append(Boxes(start, number, encode, each.shape, each.strides, each.block, dtype, {}))
    return PackedLaunch(code.launch, (*step.grid, 1, 1)[:3], arguments, places, tuple(boxes))


@lru_cache(maxsize=None)
def _starts(parameters: tuple[int, ...]) -> tuple[int, ...]:
    """Where the launcher's arguments for each of a kernel's begin."""
    return (0, *accumulate(parameters[:-1]))
