"""A driver of CUDA that launches nothing and tells what it was asked to: Triton's launchers run on it without a GPU.

For a process of its own, in which this comes before `moe_ops`: operators on CPU tensors launch there as on a GPU.
"""

import ctypes
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

HOME = Path(tempfile.gettempdir()) / f"moe_ops-stand-in-{os.getuid()}"
STREAM = [7]  # the current one
_SIZES = {"i1": 4, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u64": 8, "fp32": 4, "fp64": 8}
_MAP_BYTES = 128


class _Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_ulonglong), ("stream", ctypes.c_ulonglong), ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint), ("shared", ctypes.c_uint), ("attributes", ctypes.c_uint),
        ("bytes", ctypes.c_uint), ("parameters", ctypes.c_ubyte * 4096),
    )  # fmt: skip


class Launched(NamedTuple):
    """What the driver was asked to launch. parameters: name and bytes of each, a descriptor's shape and strides too."""

    name: str
    how: tuple[Any, ...]
    stream: int
    parameters: tuple[tuple[str, bytes], ...]

    def addresses(self) -> list[int]:
        """Of tensors, in order."""
        return [
            struct.unpack("Q", value[:8])[0]
            for name, value in self.parameters
            if name.endswith("_ptr") or len(value) == _MAP_BYTES
        ]

    def others(self) -> list[tuple[str, bytes]]:
        """Everything but addresses."""
        return [
            (name, value[8:] if len(value) == _MAP_BYTES else value)
            for name, value in self.parameters
            if not name.endswith("_ptr")
        ]


class Driver:
    """The stand-in, active for Triton from here on."""

    def __init__(self) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia import driver
        from triton.runtime import driver as active

        path = _built(Path(driver.__file__).parent / "include")
        os.environ["TRITON_LIBCUDA_PATH"] = str(path.parent)
        os.environ["TRITON_CACHE_DIR"] = str(HOME / f"triton-{triton.__version__}-{sys.version_info[1]}")
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._library.stand_in_launches.restype = ctypes.POINTER(_Launch)
        made = driver.CudaDriver()
        made.get_device_capability = lambda device: (9, 0)
        made.get_current_device = torch.cuda.current_device = lambda: 0
        made.get_current_stream = lambda device: STREAM[0]
        made.get_current_target = lambda: GPUTarget("cuda", 90, 32)
        active.set_active(made)
        self._kernels: dict[int, tuple[str, list[tuple[str, int]]]] = {}
        _operators_of_cpu_tensors_launch()

    def launched(self) -> list[Launched]:
        """What was launched since the last time."""
        found = self._library.stand_in_launches()
        launches = [self._read(found[index]) for index in range(self._library.stand_in_num_launches())]
        self._library.stand_in_forget()
        return launches

    def other_calls(self) -> int:
        """How often the driver was asked for something else since then."""
        return self._library.stand_in_num_others()

    def know(self, compiled: Any) -> None:
        """Tells the driver the parameters of a kernel that Triton has loaded."""
        parameters = _parameters(compiled)
        self._kernels[compiled.function] = compiled.name, parameters
        sizes = (ctypes.c_size_t * len(parameters))(*(size for _, size in parameters))
        self._library.stand_in_sizes(
            ctypes.c_size_t(compiled.function), ctypes.c_size_t(len(parameters)), sizes
        )

    def _read(self, launch: _Launch) -> Launched:
        name, parameters = self._kernels.get(launch.function, ("", []))
        raw, start, values = bytes(launch.parameters[: launch.bytes]), 0, []
        for each, size in parameters if launch.bytes else ():
            values.append((each, raw[start : start + size]))
            start += size
        how = launch.function, tuple(launch.grid), launch.block, launch.shared, launch.attributes
        return Launched(name, how, launch.stream, tuple(values))


def _parameters(compiled: Any) -> list[tuple[str, int]]:
    """Name and bytes of what the machine code takes."""
    found = []
    for name, kind in compiled.src.signature.items():
        if kind.startswith("tensordesc"):
            rank = re.findall(r"\[([^]]*)\]", kind)[0].count(",") + 1
            found += [(name, _MAP_BYTES), *[(f"{name} shape", 4)] * rank, *[(f"{name} stride", 8)] * rank]
        elif kind != "constexpr":
            found.append((name, 8 if kind[0] == "*" else _SIZES[kind]))
    return found


def _built(include: Path) -> Path:
    source = Path(__file__).with_suffix(".c")
    path = HOME / "lib" / "libcuda.so.1"
    if not path.exists() or path.stat().st_mtime < source.stat().st_mtime:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{os.getpid()}.so")
        flags = ["-shared", "-fPIC", "-w", f"-I{include}", f"-Wl,-soname,{path.name}"]
        subprocess.run(["gcc", *flags, str(source), "-o", str(partial)], check=True)
        partial.replace(path)
    return path


def _operators_of_cpu_tensors_launch() -> None:
    """What is registered for CUDA from here on is so for the CPU."""
    register = torch.library.Library.impl

    def impl(self: Any, name: Any, function: Any, key: str = "", **options: Any) -> Any:
        if self.ns == "moe" and not str(name).endswith(".compiled"):
            if key == "CPU":
                return None
            key = "CPU" if key == "CUDA" else key
        return register(self, name, function, key, **options)

    torch.library.Library.impl = impl  # type: ignore[method-assign]
