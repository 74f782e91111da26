"""Reading safetensors: the header is checked as a whole, then bytes go from the file straight to where they belong.

The safetensors package maps a file into memory and hands out views. Its pages count as memory of the process beside
the weights they are copied to, and every one of them is faulted in; `pread` into the weights does neither.
https://github.com/huggingface/safetensors has the format: 8 bytes length, a JSON header, then the tensors' bytes.
"""

import ctypes
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MAX_HEADER = 100_000_000  # what the safetensors package accepts
_STAGING_BYTES = 4 << 20
_MAX_READ = 1 << 30  # one read call returns less than 2 GiB
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


class StoredTensor(NamedTuple):
    """A tensor in a file: its bytes begin at `offset`."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """How many bytes it has."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, StoredTensor]:
    """What a safetensors file holds, by name.

    Raises:
        ValueError: the file is not safetensors, or it is corrupt or truncated.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path}: not a safetensors file, or a truncated one{_pickle_remark(path)}")
        text = file.read(length)
    entries = _parse(path, text)
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_layout(path, tensors, 8 + length, size)
    return tensors


def _pickle_remark(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(2)
    is_pickle = start in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
    return " (it looks like a pickle; only safetensors is read)" if is_pickle else ""


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice")
        return found

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=int)  # int("NaN") raises
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: corrupt header: {error}{_pickle_remark(path)}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: corrupt header: expected a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: corrupt header: expected strings by name in __metadata__")
    return header


def _stored(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{path}: corrupt header: {name!r} has no dtype, shape and data_offsets") from None
    numbers = (*shape, begin, end)
    if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
        raise ValueError(f"{path}: corrupt header: shape and data_offsets of {name!r} are not sizes")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{path}: {name!r} has unknown dtype {dtype!r}")
    stored = StoredTensor(path, _DTYPES[dtype], shape, start + begin)
    if stored.num_bytes != end - begin:
        raise ValueError(
            f"{path}: corrupt header: {name!r} has {end - begin} bytes: expected {stored.num_bytes}"
        )
    return stored


def _check_layout(path: Path, tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    position = start
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if stored.offset != position:
            raise ValueError(
                f"{path}: corrupt header: {name!r} does not begin where the tensor before it ends"
            )
        position += stored.num_bytes
    if position != size:
        what = "truncated" if size < position else "corrupt"
        raise ValueError(f"{path}: {what}: it has {size} bytes, its header says {position}")


def read_into(file: int, stored: StoredTensor, select: Callable[[Tensor], Tensor], target: Tensor) -> None:
    """Copies `select(the stored tensor)` into `target`, of the same shape; holds at most 4 MiB beside it.

    Args:
        file: descriptor of the file.
        select: a view of the tensor it is given.
    """
    # Shape, strides and offset of a view tell which bytes it has.
    _read(file, stored.offset, select(torch.empty(stored.shape, dtype=stored.dtype, device="meta")), target)


def _read(file: int, start: int, source: Tensor, target: Tensor) -> None:
    if source.numel() == 0:
        return
    count = source.element_size() * (
        1 + sum((n - 1) * stride for n, stride in zip(source.shape, source.stride()))
    )
    offset = start + int(source.storage_offset()) * source.element_size()
    as_it_lies = source.is_contiguous() and target.is_contiguous() and source.dtype == target.dtype
    if as_it_lies and target.device.type == "cpu":
        _read_bytes(file, offset, target.data_ptr(), count)
    elif count > _STAGING_BYTES:
        for part, place in _parts(source, target):
            _read(file, start, part, place)
    else:
        staging = torch.empty(count // source.element_size(), dtype=source.dtype)
        _read_bytes(file, offset, staging.data_ptr(), count)
        target.copy_(staging.as_strided(source.shape, source.stride()))


def _parts(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both cut alike, so that each part has its own stretch of the file, which fits where it can."""
    dim = max(range(source.dim()), key=lambda each: source.stride(each) if source.shape[each] > 1 else -1)
    rows = max(1, _STAGING_BYTES // (source.stride(dim) * source.element_size()))
    return zip(source.split(rows, dim), target.split(rows, dim), strict=True)


def _read_bytes(file: int, offset: int, address: int, count: int) -> None:
    memory = memoryview((ctypes.c_char * count).from_address(address)).cast("B")
    done = 0
    while done < count:
        got = os.preadv(file, [memory[done : done + _MAX_READ]], offset + done)
        if got == 0:
            raise OSError(f"the file ended {count - done} bytes early: it changed while it was read")
        done += got
