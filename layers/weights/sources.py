"""Where a checkpoint's tensors come from: safetensors files or a state dict. Both copy views into place."""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from layers.weights.files import open_checkpoint
from layers.weights.safetensors_file import StoredTensor, read_into
from layers.weights.slots import View
from moe_ops._checks import expect_dense

_READERS = 4  # copying out of the page cache keeps a core busy

Copy = tuple[str, View, Tensor]
"""(name of a stored tensor, view of it, where that goes)"""


class Source(Protocol):
    """Tensors by name, read only where they are asked for."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]

    def copy(self, copies: list[Copy]) -> Iterable[int]:
        """Copies everything; yields the bytes done after each step."""
        ...


class StateDictSource:
    """Tensors in memory."""

    def __init__(self, state_dict: Mapping[str, Tensor]) -> None:
        self._tensors = state_dict
        self.shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in state_dict.items()}

    def copy(self, copies: list[Copy]) -> Iterable[int]:
        """See `Source`."""
        for name, of_stored, target in copies:
            target.copy_(of_stored(self._tensors[name].detach()))
            yield target.nbytes


class FileSource:
    """Tensors in safetensors files, read one file after the other in the order in which they lie there."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors
        self.shapes = {name: stored.shape for name, stored in tensors.items()}
        self.dtypes = {name: stored.dtype for name, stored in tensors.items()}

    def copy(self, copies: list[Copy]) -> Iterable[int]:
        """See `Source`."""
        by_file: dict[Path, list[Copy]] = {}
        for each in copies:
            by_file.setdefault(self._tensors[each[0]].path, []).append(each)
        for path, wanted in by_file.items():
            wanted.sort(key=lambda each: self._tensors[each[0]].offset)
            with path.open("rb", buffering=0) as file, ThreadPoolExecutor(_READERS) as readers:
                yield from readers.map(partial(self._copy, file.fileno()), wanted)

    def _copy(self, file: int, copy: Copy) -> int:
        name, of_stored, target = copy
        read_into(file, self._tensors[name], of_stored, target)
        return target.nbytes


def open_source(path_or_state_dict: object, prefix: str) -> Source:
    """What to load from, without what is not below `prefix`.

    Raises:
        TypeError, ValueError: it is neither path nor state dict, holds something else, or has nothing below `prefix`.
    """
    below = f"{prefix}." if prefix else ""

    def kept(tensors: Mapping[str, Any]) -> dict[str, Any]:
        found = {name.removeprefix(below): each for name, each in tensors.items() if name.startswith(below)}
        if not found:
            raise ValueError(f"prefix={prefix!r}: expected tensors below it, the checkpoint has none")
        return found

    if isinstance(path_or_state_dict, Mapping):
        _check_state_dict(path_or_state_dict)
        return StateDictSource(kept(path_or_state_dict))
    if isinstance(path_or_state_dict, str | os.PathLike):
        return FileSource(kept(open_checkpoint(path_or_state_dict)))
    kind = type(path_or_state_dict).__name__
    raise TypeError(f"path_or_state_dict is a {kind}: expected a path, or tensors by name")


def _check_state_dict(state_dict: Mapping[Any, Any]) -> None:
    for name, value in state_dict.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise TypeError(f"state dict has {name!r}: {type(value).__name__}, expected tensors by name")
        if value.is_meta:
            raise ValueError(f"state dict has {name!r} on the meta device: expected its values")
        expect_dense(f"state dict has {name!r}, which", value)
        if hasattr(value, "placements"):
            raise TypeError(f"state dict has {name!r}, a DTensor: expected plain tensors")
