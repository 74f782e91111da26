"""Products whose left operand is made in registers are done before these are written again.

They go on while warps do, and Hopper's tensor cores read registers when they get there. PTX has to await them; Triton
awaits all but the last few of a loop's step, and what the next step makes may be there first. Nothing says so: sums are
wrong now and then, and only where much is in flight (seen with eight warps, tiles of 128 rows and Triton 3.6).
"""

import re

import pytest
import torch
import triton

from tests.helpers import usually
from tests.kernels.aot import Compiled, compile_launch
from tests.kernels.by_name import program_of
from tests.kernels.catalogue import TENSORS, meta

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
FROM_REGISTERS = re.compile(r"wgmma\.mma_async\S+ \{[^}]*\}, \{")
AWAITED = re.compile(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)")
EXPERTS, FEATURES, DEPTH = 16, 640, 576


def _compiled(
    stored: torch.dtype, scale: torch.dtype, rows_each: int, has_zeros: bool
) -> tuple[int, Compiled]:
    """Of exact bfloat16 rows: how high a tile is, and its kernel."""
    is_paired = stored == torch.uint8
    columns = 32 if is_paired else DEPTH
    named = {
        "x": meta(EXPERTS * rows_each, DEPTH, dtype=torch.bfloat16),
        "weight": meta(EXPERTS, FEATURES, DEPTH // (2 if is_paired else 1), dtype=stored),
        "scale": meta(EXPERTS, FEATURES, DEPTH // columns, dtype=scale),
        "zero": meta(EXPERTS, FEATURES, DEPTH // columns, dtype=torch.uint8) if has_zeros else None,
        "block_rows": 1,
        "block_columns": columns,
        "expert_offsets": meta(EXPERTS + 1, dtype=torch.int32),
        "dtype": torch.bfloat16,
    }
    program = program_of("scaled_grouped_gemm", **named)
    dtypes = {**TENSORS, "x": torch.bfloat16, "weight": stored, "scale": scale, "zero": torch.uint8}
    dtypes |= {buffer.name: buffer.dtype for buffer in program.buffers}
    launch = program.launches[-1]
    return launch.args["BLOCK_M"], compile_launch(launch, dtypes)


FORMS = (
    (torch.uint8, torch.uint8, False),
    (torch.uint8, torch.bfloat16, False),
    (torch.uint8, torch.bfloat16, True),
    (torch.int8, torch.float32, False),
    (torch.float8_e4m3fn, torch.float32, False),
)
OFTEN = [*((*form, 200) for form in FORMS), (*FORMS[0], 4), (*FORMS[2], 60), (*FORMS[3], 20)]


@pytest.mark.parametrize(
    ("stored", "scale", "has_zeros", "rows_each"),
    usually(((*form, rows) for form in FORMS for rows in (4, 20, 60, 200)), OFTEN),
)
def test_no_product_goes_on_behind_its_step(stored, scale, has_zeros, rows_each):
    height, kernel = _compiled(stored, scale, rows_each, has_zeros)
    assert height >= rows_each or height == 128
    assert len(FROM_REGISTERS.findall(kernel.ptx)) >= 4
    left_pending = set(AWAITED.findall(kernel.ptx))
    assert left_pending == {"0"}
    assert not kernel.is_serialized  # what ptxas makes of them else, with some of Triton's versions
