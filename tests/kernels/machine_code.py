"""What a kernel's machine code does with registers that Hopper's tensor cores still read.

A product whose left operand is in registers goes on while the warps do, and reads these when it gets there. Its PTX has
to await it before they are written; Triton awaits all but the last few products of a loop's step, and what the next
step makes may be there first. Nothing says so: results are wrong now and then, and only where enough is in flight.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import triton
from triton.backends.nvidia.compiler import get_ptxas

_DISASSEMBLER = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "nvdisasm")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*([^;]*);")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_PRODUCT = re.compile(r"R\d+, R(\d+),")
_WITHOUT_RESULT = re.compile(r"ST|BAR|BRA|DEPBAR|WARPGROUP|SYNCS|LDGDEPBAR|LDGSTS|MEMBAR|FENCE|RED|EXIT|U")
_WIDTHS = {".128": 4, "M88.4": 4, ".64": 2, "WIDE": 2, "M88.2": 2}


@dataclass(frozen=True)
class Instruction:
    name: str
    operands: str

    @property
    def left(self) -> frozenset[int]:
        """Registers of a product's left operand; none where it is in shared memory."""
        found = _PRODUCT.match(self.operands) if self.name.startswith("HGMMA") else None
        return frozenset(range(int(found[1]), int(found[1]) + 4)) if found else frozenset()

    @property
    def written(self) -> frozenset[int]:
        """Registers of the result, but for a product's."""
        found = re.match(r"R(\d+)", self.operands)
        if found is None or self.name.startswith("HGMMA") or _WITHOUT_RESULT.match(self.name):
            return frozenset()
        width = next((width for mark, width in _WIDTHS.items() if mark in self.name), 1)
        return frozenset(range(int(found[1]), int(found[1]) + width))

    @property
    def left_pending(self) -> int | None:
        """How many products may go on behind this instruction, if it awaits some."""
        return int(self.operands.split(",")[1], 16) if self.name.startswith("WARPGROUP.DEPBAR") else None


def products_from_registers(ptx: str) -> tuple[int, list[str]]:
    """How many products in loops have a left operand in registers, and what is written there before they are done."""
    count, overwritten = 0, []
    for loop in _loops(_disassembled(ptx)):
        count += sum(bool(each.left) for each in loop)
        overwritten += _overwritten(loop)
    return count, overwritten


def _overwritten(loop: list[Instruction]) -> Iterator[str]:
    """Twice around: what is pending at the end is so at the beginning."""
    pending: list[frozenset[int]] = []
    for each in (*loop, *loop):
        if each.name.startswith("HGMMA"):
            pending.append(each.left)
        elif each.left_pending is not None:
            pending = (
                pending[len(pending) - each.left_pending :] if len(pending) > each.left_pending else pending
            )
            pending = pending if each.left_pending else []
        elif any(each.written & left for left in pending):
            yield f"{each.name} {each.operands}"


def _loops(lines: list[str]) -> Iterator[list[Instruction]]:
    """Innermost ones that multiply, by the branches that go back."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in lines:
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.search(line):
            code.append(Instruction(found[1], found[2].strip()))
            target = re.search(r"\.L_x_\d+", found[2]) if found[1].startswith("BRA") else None
            body = code[labels.get(target[0], len(code)) :] if target else []
            if any(each.name.startswith("HGMMA") for each in body):
                yield body


def _disassembled(ptx: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = os.path.join(folder, "kernel.ptx"), os.path.join(folder, "kernel.cubin")
        with open(source, "w") as file:
            file.write(ptx)
        subprocess.run(
            [get_ptxas(90).path, "-arch=sm_90a", source, "-o", cubin], check=True, capture_output=True
        )
        told = subprocess.run([_DISASSEMBLER, "-c", cubin], check=True, capture_output=True, text=True)
    return told.stdout.splitlines()
