"""Block sizes of the grouped GEMMs, as data: keyed by rows per tile. A tuning table chooses among them by shape.

Those of an H200 were measured there. Ahead-of-time tests compile all of them for every GPU that docs/PERFORMANCE.md
names, and find them within its shared memory and registers.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Block sizes and launch parameters. block_n counts weight rows on the TMA path, output columns on the other."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1


Table = dict[int, LaunchConfig]


@dataclass(frozen=True, slots=True)
class Tables:
    """Choices for an H200, and what differs on other GPUs and for rows that do not load in pieces of 16 bytes.

    Such rows take a register and an address for every element: more warps, or smaller blocks.
    """

    h200: Table
    elsewhere: Table
    uneven: Table

    def choose(self, tuned: bool, even: bool) -> Table:
        """tuned: for an H200. even: the rows load in pieces of 16 bytes."""
        table = self.h200 if tuned else self.h200 | self.elsewhere
        return table if even else table | self.uneven


# Small tiles stream weights (two CTAs per SM keep enough bytes in flight); 128 rows fill the tensor cores.
BY_TMA = Tables(
    h200={
        16: LaunchConfig(16, 128, 128, 4, 3, 2),
        32: LaunchConfig(32, 128, 128, 4, 3, 2),
        64: LaunchConfig(64, 128, 64, 4, 4, 2),
        128: LaunchConfig(128, 256, 64, 8, 4, 1),
    },
    elsewhere={128: LaunchConfig(128, 128, 64, 8, 3, 1)},
    uneven={
        32: LaunchConfig(32, 128, 64, 8, 6, 2),
        64: LaunchConfig(64, 128, 64, 8, 4, 2),
        128: LaunchConfig(64, 128, 64, 8, 4, 2),
    },
)
# Where the depth is no multiple of 128: half of it per stage and twice the stages, so the same bytes in flight and no
# masked tail. Of the fewest rows half the columns too, which divide such a width more often: 3 % for gpt-oss (H200).
BY_TMA_IN_SHORT_STEPS = {16: LaunchConfig(16, 64, 64, 4, 8, 2), 32: LaunchConfig(32, 128, 64, 4, 6, 2)}
# Rows in order, by TMA, without a gate: tiles half as high pad less, and there is room for five stages of them.
BY_TMA_IN_ORDER = LaunchConfig(64, 256, 64, 8, 5)
# Tiles of mixed heights, see `gemm_mixed`, for experts of few rows: 64, 32 and 16 rows, two CTAs to a multiprocessor.
BY_TMA_MIXED_FEW = LaunchConfig(64, 128, 128, 4, 2, 2)
# Worth timing against the choice above on a shape of its own.
TMA_ALTERNATIVES = (
    LaunchConfig(16, 64, 128, 4, 4, 2),
    LaunchConfig(16, 64, 256, 4, 3, 1),
    LaunchConfig(32, 64, 128, 4, 4, 2),
    LaunchConfig(64, 256, 64, 4, 4, 1),
    LaunchConfig(128, 128, 64, 8, 3, 2),
    LaunchConfig(128, 256, 64, 8, 3, 1),
)
_HALF = Tables(
    h200={
        16: LaunchConfig(16, 64, 64, 4, 3),
        32: LaunchConfig(32, 64, 64, 4, 3),
        64: LaunchConfig(64, 64, 32, 8, 3),
    },
    elsewhere={},
    uneven={
        16: LaunchConfig(16, 64, 32, 4, 3),
        32: LaunchConfig(32, 64, 64, 8, 3),
        64: LaunchConfig(64, 32, 32, 4, 3),
    },
)
_F32 = Tables(
    h200={
        16: LaunchConfig(16, 64, 32, 4, 2),
        32: LaunchConfig(32, 64, 32, 4, 2),
        64: LaunchConfig(64, 64, 16, 8, 2),
    },
    elsewhere={32: LaunchConfig(32, 64, 32, 8, 2)},
    uneven={16: LaunchConfig(16, 32, 32, 4, 2), 32: LaunchConfig(32, 64, 32, 8, 2)},
)
_F64 = Tables({16: LaunchConfig(16, 32, 16, 4, 2), 32: LaunchConfig(32, 32, 16, 4, 2)}, {}, {})
BY_POINTER = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: _F32, torch.float64: _F64}


def _all_of(tables: Tables) -> frozenset[LaunchConfig]:
    return frozenset(config for table in (tables.h200, tables.elsewhere) for config in table.values())


_BY_BOX = _all_of(BY_TMA) | {
    *BY_TMA_IN_SHORT_STEPS.values(),
    BY_TMA_IN_ORDER,
    BY_TMA_MIXED_FEW,
    *TMA_ALTERNATIVES,
}
offered = {
    dtype: _all_of(tables) | (_BY_BOX if dtype.itemsize == 2 else frozenset())
    for dtype, tables in BY_POINTER.items()
}
"""All that a product of a dtype whose rows load in pieces can be launched with: what a tuning table may name."""
