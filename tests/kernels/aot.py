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
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend

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
    return _compile(launch.kernel, _key(launch, dtypes), gpu.capability, launch.num_warps, launch.num_stages)


def ttir_of(launch: Launch, dtypes: dict[str, torch.dtype]) -> str:
    """What `compile_launch` begins with and keeps: it takes a twentieth of the time."""
    return _ttir(launch.kernel, _key(launch, dtypes), launch.num_warps, launch.num_stages)


def _key(launch: Launch, dtypes: dict[str, torch.dtype]) -> tuple[tuple, tuple, tuple]:
    """Signature, constants and arguments that 16 divides."""
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
    return tuple(signature.items()), tuple(constants.items()), tuple((k, 16) for k in attributes)


def _type_of(argument: Any, dtypes: dict[str, torch.dtype]) -> str:
    if isinstance(argument, Ref):
        return f"*{_TYPES[dtypes[argument.name]]}"
    if isinstance(argument, Descriptor):
        block = ",".join(map(str, argument.block))
        return f"tensordesc<{_TYPES[dtypes[argument.source]]}[{block}]>"
    return "i64" if abs(argument) >= 1 << 31 else "i32"


@lru_cache(maxsize=None)
def _compile(kernel: Any, key: tuple, capability: int, num_warps: int, num_stages: int) -> Compiled:
    options = {"num_warps": num_warps, "num_stages": num_stages}
    result = triton.compile(_source(kernel, key), target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack = _resources(result.asm["cubin"])
    asm = result.asm
    shared = result.metadata.shared
    return Compiled(kernel.__name__, num_warps, registers, stack, shared, asm["ttir"], asm["ptx"])


def _source(kernel: Any, key: tuple) -> ASTSource:
    signature, constants, divisible = key
    attributes = {index: [["tt.divisibility", 16]] for index, _ in divisible}
    return ASTSource(kernel, dict(signature), constexprs=dict(constants), attrs=attributes)


@lru_cache(maxsize=None)
def _ttir(kernel: Any, key: tuple, num_warps: int, num_stages: int) -> str:
    source, target = _source(kernel, key), GPUTarget("cuda", H200.capability, 32)
    backend = make_backend(target)
    given = {"num_warps": num_warps, "num_stages": num_stages}
    options = backend.parse_options(given | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    generation = backend.get_codegen_implementation(options), backend.get_module_map()
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    return str(stages["ttir"](source.make_ir(target, options, *generation, context), {}))


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
    return [compile_launch(launch, known(program, dtypes)) for launch in program.launches]


def known(program: Program, dtypes: dict[str, torch.dtype]) -> dict[str, torch.dtype]:
    """Dtypes of what the launches name: the operator's arguments, and buffers."""
    return {**dtypes, **{buffer.name: buffer.dtype for buffer in program.buffers}}
