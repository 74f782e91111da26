"""Products whose left operand is made in registers are done before these are written again."""

import pytest
import torch
import triton

from tests.kernels.aot import Compiled, compile_launch
from tests.kernels.by_name import program_of
from tests.kernels.catalogue import TENSORS, meta
from tests.kernels.machine_code import Instruction, _overwritten, products_from_registers

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
EXPERTS, FEATURES, DEPTH = 16, 640, 576


def _compiled(stored: torch.dtype, scale: torch.dtype, rows_each: int) -> tuple[int, Compiled]:
    """Of exact bfloat16 rows: how high a tile is, and its kernel."""
    is_paired = stored == torch.uint8
    columns = 32 if is_paired else DEPTH
    named = {
        "x": meta(EXPERTS * rows_each, DEPTH, dtype=torch.bfloat16),
        "weight": meta(EXPERTS, FEATURES, DEPTH // (2 if is_paired else 1), dtype=stored),
        "scale": meta(EXPERTS, FEATURES, DEPTH // columns, dtype=scale),
        "block_rows": 1,
        "block_columns": columns,
        "expert_offsets": meta(EXPERTS + 1, dtype=torch.int32),
        "dtype": torch.bfloat16,
    }
    program = program_of("scaled_grouped_gemm", **named)
    dtypes = {**TENSORS, "x": torch.bfloat16, "weight": stored, "scale": scale}
    dtypes |= {buffer.name: buffer.dtype for buffer in program.buffers}
    launch = program.launches[-1]
    return launch.args["BLOCK_M"], compile_launch(launch, dtypes)


@pytest.mark.parametrize("rows_each", [4, 20, 60, 200])
@pytest.mark.parametrize(
    ("stored", "scale"),
    [
        (torch.uint8, torch.uint8),
        (torch.uint8, torch.bfloat16),
        (torch.int8, torch.float32),
        (torch.float8_e4m3fn, torch.float32),
    ],
)
def test_no_register_is_written_that_a_product_reads(stored, scale, rows_each):
    height, kernel = _compiled(stored, scale, rows_each)
    count, overwritten = products_from_registers(kernel.ptx)
    assert height >= rows_each or height == 128
    assert count >= 4 and overwritten == []
    assert not kernel.is_serialized  # what ptxas makes of them else, with some of Triton's versions


def test_what_is_written_too_early_is_found():
    product = Instruction("HGMMA.64x128x16.F32.BF16", "R24, R100, gdesc[UR8], R24, gsb0")
    other = Instruction("HGMMA.64x128x16.F32.BF16", "R24, R96, gdesc[UR8], R24, gsb0")
    awaited = {left: Instruction("WARPGROUP.DEPBAR.LE", f"gsb0, 0x{left}") for left in (0, 1, 2)}
    made = [Instruction("LDS.128", "R96, [R3]"), Instruction("IMAD", "R101, R2, R3, RZ")]
    assert list(_overwritten([*made, product, other, awaited[0]])) == []
    assert list(_overwritten([*made, product, other, awaited[1]])) == ["LDS.128 R96, [R3]"]
    assert list(_overwritten([*made, product, other, awaited[2]])) == [
        "LDS.128 R96, [R3]",
        "IMAD R101, R2, R3, RZ",
    ]
    assert list(_overwritten([*made, product, other])) == ["LDS.128 R96, [R3]", "IMAD R101, R2, R3, RZ"]
