"""The memory around a captured step: buffers that its arguments are copied to, and what it returns.

Letters: T rows of a call.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from layers import _compat
from layers.graph_capture import Captured, CaptureError
from moe_ops.errors import describe


class Inputs:
    """Buffers for the tensors among a step's arguments; a smaller size has the first rows of each."""

    def __init__(self, args: tuple, kwargs: dict[str, Any], rows: int, device_type: str) -> None:
        self._leaves, self._structure = _compat.flatten((args, kwargs))
        self._keywords = tuple(kwargs)
        self._paths = [_named(path) for path in _compat.paths((args, kwargs))]
        places = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        if not places:
            raise TypeError("the arguments hold no tensor: expected tensors of T rows")
        self.names = [self._paths[place] for place in places]
        for path, leaf in zip(self._paths, self._leaves):
            if isinstance(leaf, Tensor):
                _expect_rows(path, leaf, device_type)
            else:
                _expect_constant(path, leaf)
        self.device = self._leaves[places[0]].device
        with torch.inference_mode(False):  # they are written to outside of it as well
            for place in places:
                example = self._leaves[place]
                self._leaves[place] = example.new_empty((rows, *example.shape[1:]))
        self._buffers = [self._leaves[place] for place in places]
        self._is_ids = [_holds_ids(name, buffer) for name, buffer in zip(self.names, self._buffers)]
        self.num_bytes = sum(buffer.nbytes for buffer in self._buffers)

    def arguments(self, size: int) -> tuple[tuple, dict[str, Any]]:
        """The arguments of a step of `size` rows."""
        leaves = [leaf[:size] if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return _compat.unflatten(leaves, self._structure)

    def versions(self) -> list[int]:
        """Counters that a write into a buffer moves."""
        return [_compat.version(buffer) for buffer in self._buffers]

    def checked(self, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors of a call, or the error that it raises."""
        if kwargs.keys() == set(self._keywords):
            kwargs = {name: kwargs[name] for name in self._keywords}  # in the order of the capture
        leaves, structure = _compat.flatten((args, kwargs))
        if structure != self._structure:
            raise TypeError(f"arguments are {structure}: expected {self._structure}, as captured")
        for path, leaf, held in zip(self._paths, leaves, self._leaves):
            _expect_like(path, leaf, held)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        rows = tensors[0].shape[0]
        for name, tensor, buffer in zip(self.names, tensors, self._buffers):
            if tensor.shape[0] != rows:
                expected = f"{rows}, those of {self.names[0]}; what has no rows belongs into the step"
                raise ValueError(f"{name} has {tensor.shape[0]} rows: expected {expected}")
            if rows > buffer.shape[0]:
                raise ValueError(
                    f"{name} has {rows} rows: expected at most {buffer.shape[0]}, of capture_sizes"
                )
        return tensors

    def fill(self, tensors: list[Tensor], size: int) -> None:
        """Writes the rows of a call, and padding behind them up to `size`."""
        with torch.no_grad():
            for tensor, buffer, is_ids in zip(tensors, self._buffers, self._is_ids):
                rows = tensor.shape[0]
                buffer[:rows].copy_(tensor)
                if rows < size:
                    padding = buffer[rows:size]
                    padding.fill_(-1) if is_ids else padding.copy_(tensor[-1:].expand_as(padding))


class Bucket:
    """A captured step of one size, and what it returns; `made` are the `holders` that the step made itself."""

    def __init__(self, captured: Captured, size: int, device: torch.device, made: list[Any]) -> None:
        self._leaves, self._structure = _compat.flatten(captured.outputs)
        self.replay, self.num_bytes = captured.replay, captured.num_bytes
        self._paths = _compat.paths(captured.outputs)
        for path, leaf in zip(self._paths, self._leaves):
            if isinstance(leaf, Tensor) and leaf.device != device:
                raise CaptureError(size, f"output{path} is on {leaf.device}, where no replay changes it")
            if isinstance(leaf, Tensor) and leaf.shape[:1] != (size,):
                shape, expected = list(leaf.shape), f"[{size}, ...], for a sum over rows has padding in it"
                raise CaptureError(size, f"output{path} has shape {shape}: expected {expected}")
            if any(leaf is each for each in made):
                told = (
                    f"output{path} is a {type(leaf).__name__}, in which every replay writes over its tensors"
                )
                raise CaptureError(size, f"{told}: expected tensors, in containers that torch.utils knows")

    def expect_numbers_of(self, other: "Bucket", size: int) -> None:
        """Raises CaptureError for a number that another size has not: it is one of rows, padding among them."""
        for path, leaf, held in zip(self._paths, self._leaves, other._leaves):
            if isinstance(leaf, int | float) and not _is_constant(leaf, held):
                told = f"output{path} is {describe(leaf)}, and {describe(held)} for other numbers of rows"
                raise CaptureError(size, f"{told}: expected tensors of rows, or constants")

    def first_rows(self, rows: int) -> Any:
        """Copies of the first rows of its outputs; what is no tensor as it was captured."""
        leaves = [leaf[:rows].clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return _compat.unflatten(leaves, self._structure)


def _named(path: str) -> str:
    # "args[0].topk_ids" of "[0][0].topk_ids", a path in (args, kwargs).
    return ("args", "kwargs")[int(path[1])] + path[3:]


def holders(outputs: Any) -> list[Any]:
    """Objects among a step's outputs that hold tensors, such as a cache with its layers. Those of modules stay."""
    return [
        leaf for leaf in _compat.flatten(outputs)[0] if not isinstance(leaf, Tensor) and _holds_tensors(leaf)
    ]


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, nn.Module | type):
        return False
    slots = [getattr(value, each.name) for each in _fields(value)]
    parts, _ = _compat.flatten([*getattr(value, "__dict__", {}).values()] or slots)
    return any(_holds_tensors(part, depth - 1) for part in parts)


def _fields(value: Any) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()


def _holds_ids(name: str, tensor: Tensor) -> bool:
    is_integer = tensor.dtype.is_signed and not tensor.dtype.is_floating_point
    return is_integer and name.endswith((".topk_ids", "['topk_ids']"))


def _expect_rows(name: str, tensor: Tensor, device_type: str) -> None:
    if tensor.device.type != device_type:
        raise ValueError(
            f"{name} is on {tensor.device}: expected {device_type}, for a graph reads no other memory"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        raise ValueError(f"{name} is sparse or nested: expected a dense tensor of T rows")
    if tensor.dim() == 0:
        raise ValueError(f"{name} has shape []: expected [T, ...]; what has no rows belongs into the step")
    if tensor.shape[0] == 0:
        raise ValueError(f"{name} has 0 rows: expected an example of at least 1 to capture")


def _expect_constant(path: str, value: Any) -> None:
    if hasattr(value, "__array__") and getattr(value, "shape", ()):  # whose contents may change unseen
        raise TypeError(f"{path} is {describe(value)}: expected a tensor of T rows, or a constant")


def _is_constant(given: Any, held: Any) -> bool:
    """Whether a graph of the one is one of the other. Of 1 it is none of 1.0 or True, whose results differ in dtype."""
    if given is held:
        return True
    is_alike = type(given) is type(held)
    try:  # two NaN are one constant
        return is_alike and bool(given == held or (given != given and held != held))
    except (RuntimeError, ValueError, TypeError):  # what holds tensors is compared by element
        return False


def _expect_like(path: str, given: Any, held: Any) -> None:
    if not isinstance(held, Tensor) or not isinstance(given, Tensor):
        if not _is_constant(given, held):
            is_another = type(given) is type(held) and describe(given) == describe(held)
            expected = "the object that was there" if is_another else describe(held)
            raise ValueError(f"{path} is {describe(given)}: expected {expected}, as captured")
        return
    if (given.dtype, given.device, given.shape[1:]) != (held.dtype, held.device, held.shape[1:]):
        shapes = [
            f"{each.dtype} [T, {', '.join(map(str, each.shape[1:]))}] on {each.device}"
            for each in (given, held)
        ]
        raise ValueError(f"{path} is {shapes[0]}: expected {shapes[1]}, as captured")
    if given.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{path} requires a gradient: expected torch.no_grad(), for a graph records none")
