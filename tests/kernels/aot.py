"""Compiles the kernels of a program for a GPU without having it, and reads registers, stack and PTX of the result."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from moe_ops.kernels.gpu import H200, Gpu
from moe_ops.kernels.program import Descriptor, Launch, Program, Ref

REGISTERS = 65536  # of a CTA, and of a multiprocessor
RESERVED, SHARED_OF_MULTIPROCESSOR = 1024, 228 * 1024  # bytes of a CTA that CUDA keeps, and of all on an H200
_CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int16: "i16",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


@dataclass(frozen=True)
class Compiled:
    """What the cubin of one launch needs."""

    name: str
    num_warps: int
    registers: int
    stack: int
    shared: int
    ttir: str
    ptx: str

    @property
    def is_serialized(self) -> bool:
        """Whether each product on the tensor cores waits for the one before; ptxas says so to those who ask."""
        with tempfile.TemporaryDirectory() as folder:
            source = os.path.join(folder, "kernel.ptx")
            with open(source, "w") as file:
                file.write(self.ptx)
            command = [get_ptxas(90).path, "-arch=sm_90a", source, "-o", os.path.join(folder, "cubin")]
            told = subprocess.run(command, capture_output=True, text=True, check=True)
        return "wgmma.mma_async instructions are serialized" in told.stdout + told.stderr

    def misfit(self, gpu: Gpu, parked: int = 0) -> str | None:
        """What keeps the kernel from running on `gpu` as planned, None if nothing does. parked: bytes of stack."""
        found = f"{self.registers} registers, {self.stack} bytes of stack, {self.shared} of shared memory"
        fits = self.registers * 32 * self.num_warps <= REGISTERS and self.shared <= gpu.shared_memory
        return None if fits and self.stack <= parked else f"{self.name}: {found}"


def compile_launch(launch: Launch, dtypes: dict[str, torch.dtype], gpu: Gpu = H200) -> Compiled:
    """Compiles one launch as the runtime would for 16-byte aligned tensors of these dtypes."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        argument = launch.args[parameter.name]
        if parameter.is_constexpr or argument is None or (argument == 1 and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = argument
            continue
        signature[parameter.name] = _type_of(argument, dtypes)
        divisible = isinstance(argument, Ref) or (isinstance(argument, int) and argument % 16 == 0)
        if divisible and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    key = tuple(signature.items()), tuple(constants.items()), tuple((k, 16) for k in attributes)
    return _compile(launch.kernel, key, gpu.capability, launch.num_warps, launch.num_stages)


def _type_of(argument: Any, dtypes: dict[str, torch.dtype]) -> str:
    if isinstance(argument, Ref):
        return f"*{_TYPES[dtypes[argument.name]]}"
    if isinstance(argument, Descriptor):
        block = ",".join(map(str, argument.block))
        return f"tensordesc<{_TYPES[dtypes[argument.source]]}[{block}]>"
    return "i64" if abs(argument) >= 1 << 31 else "i32"


@lru_cache(maxsize=None)
def _compile(kernel: Any, key: tuple, capability: int, num_warps: int, num_stages: int) -> Compiled:
    signature, constants, divisible = key
    attributes = {index: [["tt.divisibility", 16]] for index, _ in divisible}
    source = ASTSource(kernel, dict(signature), constexprs=dict(constants), attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = _resources(result.asm["cubin"])
    asm = result.asm
    shared = result.metadata.shared
    return Compiled(kernel.__name__, num_warps, registers, stack, shared, asm["ttir"], asm["ptx"])


def _resources(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    assert found, usage.stdout
    return int(found.group(1)), int(found.group(2))


def compile_program(program: Program, dtypes: dict[str, torch.dtype]) -> list[Compiled]:
    """Every launch of a program; `dtypes` names those of the operator's arguments."""
    known = {**dtypes, **{buffer.name: buffer.dtype for buffer in program.buffers}}
    return [compile_launch(launch, known) for launch in program.launches]
