"""Block sizes of the decode kernels, from shapes alone."""

from dataclasses import dataclass
from math import log2

from moe_ops.formula import Formula
from moe_ops.kernels.common import cdiv, next_power_of_2
from moe_ops.kernels.gpu import H200, KIB, Gpu
from moe_ops.kernels.program import ALIGNMENT, TensorMeta
from moe_ops.types import Activation

_BYTES_PER_THREAD = 256  # of weights; more only for rows that four warps cannot hold otherwise
_MAX_WARPS = 4
# A larger block of rows is read in a loop. Twice as much in one shot is for sm_90, where it was measured.
_ONE_SHOT_BYTES = 32768
_LOOP_BYTES = 16384  # of a step of that loop
MOST_ROWS = 128  # of a program
# Of all routes of a token a program reads so many bytes at once in two warps, in steps of so many bytes and numbers of
# a row: on an H200 a token of Qwen3-30B then takes 12 % less than by one step in four warps. Longer steps spill.
_COMBINED_BYTES, _COMBINED_STEP, _COMBINED_ROW = 65536, 4096, 128
_COMBINED_COLUMNS, _COMBINED_STEPS, _COMBINED_WARPS = 2, 32, 2
_UNEVEN_SHARE = 4  # of all these bytes that weights get which do not load in pieces of 16
_SHORTEST_STEP = 16
_STAGES, _STAGES_IN_LITTLE_MEMORY, _MUCH_MEMORY = 4, 3, 128 * KIB
# Of weights whose columns lie together a program of one warp reads so many columns, so many bytes of each in a step,
# and a part of the depth of at least so many steps, so that there are so many programs. Through the whole depth a
# program waits for each step before the next: a token of Qwen3-30B took 34 microseconds on an H200 that way, not 27.
# By wider rows an H100 gains 1 to 3 % and an H200 loses 0 to 4 %.
_COLUMNS, _COLUMNS_OF_SLOW_MEMORY = (64, 128), (128, 64)
_FEWEST_STEPS, _ENOUGH_PROGRAMS, _MOST_PARTS = 4, 8192, 16


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """block_n output columns a program, block_k of the depth at a time, `stages` of these steps in flight at once."""

    block_n: int
    block_k: int
    num_warps: int = _MAX_WARPS
    stages: int = 1


def up_config(weight: TensorMeta, gate: Activation | Formula, gpu: Gpu) -> GemvConfig:
    """Blocks for rows of w13 [E, 2I or I, H], of which a program reads gate and up rows together."""
    return row_config(2 if gate.is_gated else 1, weight, 8192, gpu)


def down_config(weight: TensorMeta, top_k: int, gpu: Gpu, beside: int = 0) -> GemvConfig:
    """Blocks for rows of w2 [E, H, I], which a program reads for every route of a token at once.

    And `beside` them a row of so many numbers, a shared expert's.
    """
    routes, itemsize, depth = next_power_of_2(top_k), weight.dtype.itemsize, max(weight.shape[2], 1)
    share = 1 if _loads_in_pieces(weight, depth) else _UNEVEN_SHARE
    if routes * depth * itemsize > _COMBINED_BYTES // share:
        return _looped(routes * itemsize * share, gpu)
    fitting = _COMBINED_BYTES // share // ((routes * depth + beside) * itemsize)
    block_n = min(max(fitting, 1), _COMBINED_COLUMNS, max(MOST_ROWS // routes, 1))
    longest = _COMBINED_STEP // share // (routes * block_n * itemsize)
    block_k = max(_COMBINED_ROW, next_power_of_2(cdiv(depth, _COMBINED_STEPS)))
    return GemvConfig(block_n, min(block_k, longest, next_power_of_2(depth)), _COMBINED_WARPS)


def row_config(rows: int, weight: TensorMeta, target_bytes: int, gpu: Gpu) -> GemvConfig:
    """For a program that reads `rows` rows, 1 or 2, of the weight [E, B, A] per output column."""
    share = 1 if _loads_in_pieces(weight, weight.shape[2]) else _UNEVEN_SHARE
    itemsize, depth = weight.dtype.itemsize, next_power_of_2(weight.shape[2])
    row_bytes = rows * depth * itemsize
    most = 2 * _ONE_SHOT_BYTES if gpu.capability == H200.capability else _ONE_SHOT_BYTES
    if row_bytes > most // share:
        return _looped(rows * itemsize * share, gpu)
    block_n = max(min(target_bytes // share // row_bytes, 8), 1)
    return GemvConfig(block_n, depth, _warps_for(block_n * rows * weight.shape[2] * itemsize * share))


def _warps_for(num_bytes: int) -> int:
    """The power of two of warps that is nearest, as a ratio, to what these bytes of weights, without padding, fill."""
    wanted = max(num_bytes, 1) / (32 * _BYTES_PER_THREAD)
    return min(1 << max(round(log2(wanted)), 0), _MAX_WARPS)


def _looped(step_bytes: int, gpu: Gpu) -> GemvConfig:
    """For a column too large for one shot, of which each step of the depth takes so many bytes."""
    stages = _STAGES if gpu.shared_memory >= _MUCH_MEMORY else _STAGES_IN_LITTLE_MEMORY
    return GemvConfig(1, max(_LOOP_BYTES // step_bytes, _SHORTEST_STEP), stages=stages)


def column_config(weight: TensorMeta, gpu: Gpu) -> GemvConfig:
    """For columns that lie together in the weight [E, B, A]. Steps fill the registers, so one is in flight."""
    columns, num_bytes = _COLUMNS_OF_SLOW_MEMORY if gpu.has_slow_memory else _COLUMNS
    share = 1 if _loads_in_pieces(weight, weight.shape[1]) else _UNEVEN_SHARE
    step = num_bytes // share // weight.dtype.itemsize
    return GemvConfig(columns, min(step, next_power_of_2(weight.shape[2])), num_warps=1)


def depth_of_part(depth: int, programs: int, block_k: int) -> int:
    """Of the parts into which to cut a depth where one part is so many programs: whole steps of block_k."""
    wanted = min(cdiv(_ENOUGH_PROGRAMS, max(programs, 1)), _MOST_PARTS)
    return max(cdiv(cdiv(depth, wanted), block_k), _FEWEST_STEPS) * block_k


def _loads_in_pieces(weight: TensorMeta, length: int) -> bool:
    """Whether rows or columns load in pieces of 16 bytes, `length` being how much of them lies together.

    Else each element needs an address, and so registers, of its own.
    """
    leading = weight.strides[1 if weight.strides[2] == 1 else 2]
    return weight.aligned and leading % ALIGNMENT == 0 and length % ALIGNMENT == 0
