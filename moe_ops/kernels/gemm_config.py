"""Which grouped-GEMM kernel and block sizes a problem gets: a pure function of shapes, strides and dtypes."""

from dataclasses import dataclass

import torch

from moe_ops.kernels import tma
from moe_ops.kernels.common import cdiv, next_power_of_2
from moe_ops.kernels.gemm import Gemm
from moe_ops.kernels.gpu import Gpu

_TMA_TILE_ROWS = 128  # tiles of fewer rows are bound by weight traffic, not by arithmetic
_DEEP = (
    4096  # beyond it rows by TMA need the many rows below: 6 % slower at depth 14336 and 256 rows an expert
)
_COMPUTE_BOUND_ROWS = 512  # per expert
_WIDE_FEATURES = 5120  # copying S x H rows costs as much as so many columns of the product gain by TMA


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Block sizes and launch parameters. block_n counts weight rows on the TMA path, output columns on the other."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1


# Keyed by rows per tile. Small tiles stream weights (two CTAs per SM keep enough bytes in flight); 128 rows fill
# the tensor cores. All are spill-free on sm_90, which the ahead-of-time tests assert.
_TMA_CONFIGS = {
    16: LaunchConfig(16, 128, 128, 4, 3, 2),
    32: LaunchConfig(32, 128, 128, 4, 3, 2),
    64: LaunchConfig(64, 128, 64, 4, 4, 2),
    128: LaunchConfig(128, 256, 64, 8, 4, 1),
}
# Worth timing against the choice above on a shape of its own.
_TMA_ALTERNATIVES = (
    LaunchConfig(16, 64, 128, 4, 4, 2),
    LaunchConfig(16, 64, 256, 4, 3, 1),
    LaunchConfig(32, 64, 128, 4, 4, 2),
    LaunchConfig(64, 256, 64, 4, 4, 1),
    LaunchConfig(128, 128, 64, 8, 3, 2),
    LaunchConfig(128, 256, 64, 8, 3, 1),
)
_HALF_CONFIGS = {
    16: LaunchConfig(16, 64, 64, 4, 3),
    32: LaunchConfig(32, 64, 64, 4, 3),
    64: LaunchConfig(64, 64, 32, 8, 3),
}
_F32_CONFIGS = {
    16: LaunchConfig(16, 64, 32, 4, 2),
    32: LaunchConfig(32, 64, 32, 4, 2),
    64: LaunchConfig(64, 64, 16, 8, 2),
}
_F64_CONFIGS = {16: LaunchConfig(16, 32, 16, 4, 2), 32: LaunchConfig(32, 32, 16, 4, 2)}


def loads_rows_by_tma(gemm: Gemm, config: LaunchConfig) -> bool:
    """Whether rows [S, A] that lie in order come by TMA (up to 4 % faster on an H200) or by cp.async."""
    x = gemm.x.meta
    in_order = gemm.top_k is None and not gemm.tail
    suits = x.shape[1] <= _DEEP or _is_compute_bound(gemm)
    many = config.block_m >= _TMA_TILE_ROWS
    return in_order and suits and many and tma.allows(gemm.gpu, x, tma.boxed_rows(x))


def sorts_rows_first(gemm: Gemm) -> bool:
    """Whether copying the rows into expert order pays: TMA saves ~5 % of a GEMM this wide, the copy costs less."""
    wide = gemm.weight.meta.shape[1] >= _WIDE_FEATURES
    return wide and _is_compute_bound(gemm) and gemm.weight_by_tma


def _is_compute_bound(gemm: Gemm) -> bool:
    return gemm.num_slots >= _COMPUTE_BOUND_ROWS * gemm.weight.meta.shape[0]


def candidates(gemm: Gemm) -> tuple[LaunchConfig, ...]:
    """The configurations worth timing for this product, those `pick_config` chooses from first."""
    return tuple(_table(gemm).values()) + (_TMA_ALTERNATIVES if gemm.weight_by_tma else ())


def pick_config(gemm: Gemm) -> LaunchConfig:
    """Configuration for rows spread over the experts of the weight [E, B, A]."""
    table, (num_experts, _, depth) = _table(gemm), gemm.weight.meta.shape
    wanted = _rows_per_tile(gemm.num_slots / num_experts)
    config = table[min(wanted, max(table))]
    if config.block_k > 64 and gemm.weight_by_tma and depth % config.block_k:
        config = _with_short_k(config)
    return config


def _table(gemm: Gemm) -> dict[int, LaunchConfig]:
    dtype = gemm.weight.meta.dtype
    if gemm.weight_by_tma:
        return _TMA_CONFIGS
    if dtype == torch.float64:
        return _F64_CONFIGS
    return _F32_CONFIGS if dtype == torch.float32 else _HALF_CONFIGS


def _with_short_k(config: LaunchConfig) -> LaunchConfig:
    # Half the depth per stage and twice the stages: the same bytes in flight, no masked tail in K.
    return LaunchConfig(
        config.block_m, config.block_n, 64, config.num_warps, 2 * config.num_stages, config.ctas_per_sm
    )


def _rows_per_tile(mean_rows: float) -> int:
    """Tile rows for the mean rows of an expert: room for its spread, since a second tile re-reads the weights."""
    for block_m, most in ((16, 8.0), (32, 20.0), (64, 80.0)):
        if mean_rows <= most:
            return block_m
    return 128


def weight_gradient_config(dtype: torch.dtype, features: int, depth: int) -> LaunchConfig:
    """Blocks of the weight gradient: block_n x block_k outputs, block_m rows per step."""
    if dtype == torch.float64:
        return LaunchConfig(16, 32, 32, 4, 2)
    if dtype == torch.float32:
        return LaunchConfig(16, 64, 64, 8, 2)
    block_n, block_k = (min(max(next_power_of_2(size), 16), 128) for size in (features, depth))
    return LaunchConfig(64, block_n, block_k, 8 if block_n * block_k > 64 * 128 else 4, 3)


def persistent_programs(num_tiles: int, config: LaunchConfig, gpu: Gpu) -> int:
    """CTAs of the persistent kernel: what the GPU holds at once, never more than there can be tiles."""
    return max(min(num_tiles, gpu.multiprocessors * config.ctas_per_sm), 1)


def column_blocks(gemm: Gemm, config: LaunchConfig) -> int:
    """Tiles across the output columns: a gated TMA tile has two weight rows for each."""
    halved = gemm.gated and gemm.weight_by_tma
    return cdiv(gemm.features, config.block_n // 2 if halved else config.block_n)
