"""Which grouped-GEMM kernel and block sizes a problem gets: a pure function of shapes, strides, dtypes and the GPU.

A tuning table in use, part of the `Gpu`, comes first; for what it does not have, rules choose from `gemm_tables`.
"""

import torch

from moe_ops.kernels import tma
from moe_ops.kernels.common import cdiv, next_power_of_2
from moe_ops.kernels.gemm import Gemm
from moe_ops.kernels.gemm_tables import (
    BY_POINTER,
    BY_TMA,
    BY_TMA_IN_ORDER,
    BY_TMA_IN_SHORT_STEPS,
    BY_TMA_MIXED_FEW,
    TMA_ALTERNATIVES,
    LaunchConfig,
    Tables,
)
from moe_ops.kernels.gpu import H200, Gpu
from moe_ops.kernels.program import ALIGNMENT, TensorMeta

_LONG_STEP = 128  # of depth: where it does not divide, tiles of one height take steps of 64
_TMA_TILE_ROWS = 128  # tiles of fewer rows are bound by weight traffic, not by arithmetic
# Beyond it rows by TMA need the many rows below: 6 % slower at depth 14336 and 256 rows an expert.
_DEEP = 4096
_COMPUTE_BOUND_ROWS = 512  # per expert
# Per expert: more than the first have tiles of 128, up to the second, or the last if a tail follows, at times of 64.
_FEW_ROWS, _HALVED_ROWS, _HALVED_BEFORE_A_TAIL = 80.0, 320.0, 192.0
_MOST_ROWS = (8.0, 20.0, _FEW_ROWS)
_GRADIENT_ROWS = 64  # per step of a weight gradient
_GRADIENT_WIDE_ROWS = 128  # per expert, from which its blocks are wide; measured at 64 and 256
INVARIANT_ROWS = 64
"""Rows per tile where bits may not depend on how many rows there are: the most that still load without TMA, which loads
rows only where there are many, and the fewest that fill a Hopper tensor core."""
_MIXED_ROWS = 20  # of an expert, up to which tiles of mixed heights are low
# Of the smaller side of an expert's weights: wide layers, and narrow ones, that mix tiles of more rows at all.
_MIXED_FEATURES, _MIXED_NARROW_FEATURES = 2048, 512
# The depth up to which a tile is short, and the larger side from which a narrow layer's products are not.
_MIXED_DEPTH = 3072
_FEW_TILES = 3  # to a multiprocessor
_MIXED_FEW_FEATURES, _MIXED_NARROW_ROWS = 1024, 6  # below the one they pay from more rows than the other
_WIDE_FEATURES = 5120  # copying S x H rows costs as much as so many columns of the product gain by TMA


def loads_rows_by_tma(gemm: Gemm, config: LaunchConfig) -> bool:
    """Whether rows [S, A] that lie in order come by TMA (up to 4 % faster on an H200) or by cp.async."""
    suits = not gemm.tail and (gemm.x.meta.shape[1] <= _DEEP or _is_compute_bound(gemm))
    pays = config == BY_TMA_IN_ORDER or (suits and config.block_m >= _TMA_TILE_ROWS)
    return pays and _rows_are_boxes(gemm)


def _rows_are_boxes(gemm: Gemm) -> bool:
    return gemm.top_k is None and tma.allows(gemm.gpu, gemm.x.meta, tma.boxed_rows(gemm.x.meta))


def loads_rows_in_pieces(x: TensorMeta) -> bool:
    """Whether the compiler sees that rows [S, A] load in pieces of 16 bytes: it knows of multiples of 16 elements."""
    return x.aligned and x.strides[1] == 1 and x.strides[0] % ALIGNMENT == 0 and x.shape[1] % ALIGNMENT == 0


def sorts_rows_first(gemm: Gemm) -> bool:
    """Whether copying the rows into expert order pays: TMA saves ~5 % of a GEMM this wide, the copy costs less.

    Not of columns that come in two boxes, whose tiles have mixed heights and gather rows: 1 to 3 % (H200).
    """
    wide = gemm.features * (2 if gemm.gated else 1) >= _WIDE_FEATURES
    by_box = gemm.weight_by_tma and (gemm.paired or not gemm.doubled)
    return gemm.rows_per_tile is None and wide and _is_compute_bound(gemm) and by_box


def _is_compute_bound(gemm: Gemm) -> bool:
    return gemm.rows_per_expert >= _COMPUTE_BOUND_ROWS


def mixed_config(gemm: Gemm) -> LaunchConfig | None:
    """Blocks of tiles of mixed heights, see `gemm_mixed`, where such are as fast as tiles of one height or faster.

    Of experts with up to 20 rows they are low. With uniform routing layers on an H200 take from 1 % more to 4 % less,
    where few experts have most rows from 2 % more to 25 % less: an expert's rows then are many tiles of 16 or 32.
    """
    any_order = gemm.rows_per_tile is None and gemm.max_tokens is None and loads_rows_in_pieces(gemm.x.meta)
    if not (any_order and gemm.weight_by_tma and is_tuned(gemm.gpu)):
        return None
    rows = gemm.rows_per_expert
    if rows > _MIXED_ROWS:
        return BY_TMA.h200[_TMA_TILE_ROWS] if _mixes_many(gemm, rows) else None
    pays = _narrowest(gemm) >= _MIXED_FEW_FEATURES or rows > _MIXED_NARROW_ROWS
    return BY_TMA_MIXED_FEW if pays else None


def _mixes_many(gemm: Gemm, rows: float) -> bool:
    """Whether experts with more than 20 rows do: where a tile is two products, and with so many rows.

    For two products persistent CTAs cannot prefetch: 1 to 10 % with 128 to 2048 rows.
    """
    doubled = gemm.doubled and not sorts_rows_first(gemm)
    more_than, most = _rows_that_mix(gemm)
    return doubled or more_than < rows <= most


def _rows_that_mix(gemm: Gemm) -> tuple[float, float]:
    """Beyond how many rows, and up to how many.

    Measured beside tiles of one height in whole layers on an H200, with uniform, skewed and zipf routing. Wide ones
    with up to 176 rows are 2 to 6, 2 to 3 and 3 to 8 % faster, but not where tiles are deep: CTAs that share a weight
    tile start at different times, and the second finds no longer in the L2 cache what the first read. Narrow ones with
    a long side are up to 5, 3 and 12 % faster. Of the others only gathered rows gain, which a persistent CTA does not
    load ahead: 2 % slower to 5 % faster, from skew on to 9 % faster. On an H100, whose weights take longer to come,
    narrow ones take from 4 % less to 2 % more with uniform routing and 1 to 13 % less with zipf routing.
    """
    depth = gemm.linear.weight.meta.shape[2]
    narrowest, shallow = _narrowest(gemm), depth <= _MIXED_DEPTH
    if gemm.gpu.has_slow_memory:
        return 0, _TMA_TILE_ROWS if narrowest >= _MIXED_NARROW_FEATURES else 0
    if narrowest >= _MIXED_FEATURES:
        return 0, 176 if shallow else _TMA_TILE_ROWS
    few = _tiles_of_an_expert_each(gemm) < _FEW_TILES * gemm.gpu.multiprocessors
    if narrowest < _MIXED_NARROW_FEATURES or few:
        return 0, 0
    gathered = gemm.top_k is not None
    if max(gemm.features, depth) >= _MIXED_DEPTH:
        return 0, 160 if gathered and shallow else _FEW_ROWS
    return (64, 160) if gathered else (0, 0)


def _narrowest(gemm: Gemm) -> int:
    return min(gemm.features, gemm.linear.weight.meta.shape[2])


def candidates(gemm: Gemm) -> tuple[LaunchConfig, ...]:
    """The configurations worth timing for this product, those `pick_config` chooses from first."""
    choices = _tables(gemm).choose(is_tuned(gemm.gpu), even=True).values()
    in_order = (BY_TMA_IN_ORDER,) if _can_halve_tiles(gemm) else ()
    by_box = (*BY_TMA_IN_SHORT_STEPS.values(), BY_TMA_MIXED_FEW, *TMA_ALTERNATIVES)
    return (*choices, *in_order, *(by_box if gemm.weight_by_tma else ()))


def pick_config(gemm: Gemm) -> LaunchConfig:
    """Configuration for rows spread over the experts of the weight [E, B, A]: the table's in use, else by rule."""
    return _tuned(gemm) or config_by_rule(gemm)


def _tuned(gemm: Gemm) -> LaunchConfig | None:
    """What was measured for such a product, where its kernel and rows are those that were measured."""
    tuning = gemm.gpu.tuning
    if tuning is None or gemm.rows_per_tile is not None or gemm.max_tokens is not None:
        return None
    config = tuning.choice(gemm.product, gemm.rows_per_expert)
    return config if config in alternatives(gemm) else None


def alternatives(gemm: Gemm) -> tuple[LaunchConfig, ...]:
    """Those of `candidates` that are for rows which load as these do."""
    in_pieces = loads_rows_in_pieces(gemm.x.meta)
    return tuple(each for each in candidates(gemm) if in_pieces or loads_rows_by_tma(gemm, each))


def config_by_rule(gemm: Gemm) -> LaunchConfig:
    """The choice without a table."""
    if _halves_few_tiles(gemm):
        return BY_TMA_IN_ORDER
    if (mixed := mixed_config(gemm)) is not None:
        return mixed
    if _halves_tiles(gemm):
        return BY_TMA_IN_ORDER
    wanted, depth = rows_of_one_height(gemm), gemm.linear.weight.meta.shape[2]
    best = _tables(gemm).choose(is_tuned(gemm.gpu), even=True)
    even = loads_rows_in_pieces(gemm.x.meta) or loads_rows_by_tma(gemm, best[min(wanted, max(best))])
    table = _tables(gemm).choose(is_tuned(gemm.gpu), even)
    config = table[min(wanted, max(table))]
    if config.block_k > 64 and gemm.weight_by_tma and depth % config.block_k:
        config = BY_TMA_IN_SHORT_STEPS[config.block_m]
    return config


def _can_halve_tiles(gemm: Gemm) -> bool:
    by_box = gemm.weight_by_tma and not tma.is_transposed(gemm.linear.weight.meta)
    any_order = gemm.rows_per_tile is None and gemm.max_tokens is None
    return by_box and any_order and not gemm.gated and is_tuned(gemm.gpu) and _rows_are_boxes(gemm)


def _halves_tiles(gemm: Gemm) -> bool:
    """Whether experts of a narrow layer have so few rows that tiles of 128 pad many.

    On an H200 layers of OLMoE and Qwen3-30B-A3B with 128 to 256 rows an expert take up to 5 % less, wide ones 1 % less
    (Mixtral, DeepSeek-V3) to 2 % more (gpt-oss). Of products with a tail those of up to 192 rows take 4 % more to 14 %
    less, with more rows up to 9 % more; of a half of a layer's experts up to 4 % more with 200.
    """
    most = _HALVED_BEFORE_A_TAIL if _is_before_others(gemm) else _HALVED_ROWS
    narrow = _narrowest(gemm) < _MIXED_FEATURES
    return _FEW_ROWS < gemm.rows_per_expert <= most and narrow and _can_halve_tiles(gemm)


def _halves_few_tiles(gemm: Gemm) -> bool:
    """Whether tiles of 128 rows of a wide layer would be so few that some multiprocessors have one more than others.

    On an H200 layers of 8 and 16 experts take from 10 % less to 2 % more with uniform routing, 8 % less to 2 % more
    with skewed and 9 % less to 3 % more with zipf routing. Where half of the multiprocessors would have none, tiles of
    half the height take longer.
    """
    rows, tiles, some = gemm.rows_per_expert, _tiles_of_an_expert_each(gemm), gemm.gpu.multiprocessors
    few = some < 2 * tiles <= 2 * _FEW_TILES * some and _narrowest(gemm) >= _MIXED_FEATURES
    measured = not (_is_before_others(gemm) or gemm.gpu.has_slow_memory)
    # Rows come last: a plan is for all counts that are alike in what it asked of them.
    return few and measured and _can_halve_tiles(gemm) and 64 < rows <= 160


def _is_before_others(gemm: Gemm) -> bool:
    """Whether its rows are, or may be, fewer than there are slots."""
    return gemm.tail or gemm.is_part


def _tiles_of_an_expert_each(gemm: Gemm) -> int:
    """How many tiles of 128 rows there are if no expert has more rows."""
    return gemm.linear.weight.meta.shape[0] * column_blocks(gemm, BY_TMA.h200[_TMA_TILE_ROWS])


def _tables(gemm: Gemm) -> Tables:
    return BY_TMA if gemm.weight_by_tma else BY_POINTER[gemm.linear.weight.meta.dtype]


def is_tuned(gpu: Gpu) -> bool:
    """Whether configurations were measured on such a GPU."""
    return gpu.capability == H200.capability


def rows_of_one_height(gemm: Gemm) -> int:
    """Rows of a product's tiles where all have as many."""
    return gemm.rows_per_tile or rows_per_tile(gemm.rows_per_expert)


def rows_per_tile(mean_rows: float, most_rows: tuple[float, float, float] = _MOST_ROWS) -> int:
    """Tile rows for the mean rows of an expert: room for its spread, since a second tile re-reads the weights.

    most_rows: the most that tiles of 16, 32 and 64 rows are for.
    """
    for block_m, most in zip((16, 32, 64), most_rows, strict=True):
        if mean_rows <= most:
            return block_m
    return 128


def loads_gradient_by_tma(grad: TensorMeta, x: TensorMeta, gradient: TensorMeta, gpu: Gpu) -> bool:
    """Whether a weight's gradient [E, B, A] and its operands go by TMA: an expert's rows fill a box.

    Where a CTA has less memory, as on sm_120, the kernel spills.
    """
    many = x.shape[0] >= _GRADIENT_ROWS * gradient.shape[0] and gpu.shared_memory >= H200.shared_memory
    boxes = (
        (grad, tma.boxed_rows(grad)),
        (x, tma.boxed_rows(x)),
        (gradient, tma.boxed_weight(gradient, False)),
    )
    return many and all(tma.allows(gpu, *each) for each in boxes)


def weight_gradient_config(grad: TensorMeta, x: TensorMeta, gpu: Gpu) -> LaunchConfig:
    """Blocks of the masked weight gradient: block_n x block_k outputs, block_m rows per step."""
    if x.dtype == torch.float64:
        return LaunchConfig(16, 32, 32, 4, 2)
    if x.dtype == torch.float32:
        return LaunchConfig(16, 64, 64, 8, 2)
    most = 128 if is_tuned(gpu) else 64  # elsewhere as many accumulators and odd rows at once spill
    block_n, block_k = _covering(grad.shape[1], 128), _covering(x.shape[1], most)
    return LaunchConfig(_GRADIENT_ROWS, block_n, block_k, 8 if block_n * block_k > 64 * most else 4, 3)


def weight_gradient_tma_config(grad: TensorMeta, x: TensorMeta, num_experts: int, gpu: Gpu) -> LaunchConfig:
    """The same by TMA. Of few rows the stores count: two CTAs hide each other's (18 % at 64 rows an expert)."""
    wide = is_tuned(gpu) and x.shape[0] >= _GRADIENT_WIDE_ROWS * num_experts
    block_n, block_k = _covering(grad.shape[1], 128), _covering(x.shape[1], 256 if wide else 128)
    num_warps, stages, ctas_per_sm = (8, 3, 1) if wide else (4, 2, 2)
    return LaunchConfig(_GRADIENT_ROWS, block_n, block_k, num_warps, stages, ctas_per_sm)


def _covering(size: int, most: int) -> int:
    return min(max(next_power_of_2(size), 16), most)


def persistent_programs(num_tiles: int, config: LaunchConfig, gpu: Gpu) -> int:
    """CTAs of the persistent kernel: what the GPU holds at once, never more than there can be tiles, so 0 for none."""
    # Two have room where there is as much memory as the blocks were made for.
    per_multiprocessor = config.ctas_per_sm if gpu.shared_memory >= H200.shared_memory else 1
    return min(num_tiles, gpu.multiprocessors * per_multiprocessor)


def column_blocks(gemm: Gemm, config: LaunchConfig) -> int:
    """Tiles across the output columns: a gated TMA tile has two weight rows for each."""
    halved = gemm.gated and gemm.weight_by_tma
    return cdiv(gemm.features, config.block_n // 2 if halved else config.block_n)
