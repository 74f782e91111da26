"""Which grouped-GEMM kernel and block sizes a problem gets: a pure function of shapes, strides and dtypes."""

from dataclasses import dataclass

import torch

from moe_ops.kernels.common import cdiv, next_power_of_2
from moe_ops.kernels.program import TensorMeta

_TMA_ALIGNMENT = 16
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


def takes_tma(weight: TensorMeta) -> bool:
    """Whether host TMA descriptors can address the weight [E, B, A]."""
    if weight.dtype not in (torch.bfloat16, torch.float16) or not weight.aligned:
        return False
    outer = [stride for stride in outer_strides(weight) if stride % (_TMA_ALIGNMENT // 2) or stride == 0]
    return 1 in weight.strides[1:] and not outer


def loads_rows_by_tma(x: TensorMeta, weight: TensorMeta, config: LaunchConfig) -> bool:
    """Whether rows [S, A] that lie in order come by TMA (up to 4 % faster on an H200) or by cp.async."""
    addressable = x.aligned and x.strides[1] == 1 and x.strides[0] * x.dtype.itemsize % _TMA_ALIGNMENT == 0
    suits = x.shape[1] <= _DEEP or _is_compute_bound(x.shape[0], weight)
    return addressable and suits and config.block_m >= _TMA_TILE_ROWS


def sorts_rows_first(num_slots: int, w13: TensorMeta) -> bool:
    """Whether copying the rows into expert order pays: TMA saves ~5 % of a GEMM this wide, the copy costs less."""
    return _is_compute_bound(num_slots, w13) and w13.shape[1] >= _WIDE_FEATURES and takes_tma(w13)


def _is_compute_bound(num_slots: int, weight: TensorMeta) -> bool:
    return num_slots >= _COMPUTE_BOUND_ROWS * weight.shape[0]


def is_transposed(weight: TensorMeta) -> bool:
    """Whether the output dimension of the weight [E, B, A] is the contiguous one."""
    return weight.strides[2] != 1


def outer_strides(weight: TensorMeta) -> tuple[int, int]:
    """Strides of the expert and of the non-contiguous matrix dimension."""
    return weight.strides[0], weight.strides[2 if is_transposed(weight) else 1]


def candidates(weight: TensorMeta) -> tuple[LaunchConfig, ...]:
    """The configurations worth timing for this weight, those `pick_config` chooses from first."""
    return tuple(_table(weight).values()) + (_TMA_ALTERNATIVES if takes_tma(weight) else ())


def pick_config(num_slots: int, weight: TensorMeta) -> LaunchConfig:
    """Configuration for `num_slots` rows spread over the experts of `weight` [E, B, A]."""
    table = _table(weight)
    wanted = _rows_per_tile(num_slots / weight.shape[0])
    config = table[min(wanted, max(table))]
    depth = weight.shape[2]
    if config.block_k > 64 and takes_tma(weight) and depth % config.block_k:
        config = _with_short_k(config)
    return config


def _table(weight: TensorMeta) -> dict[int, LaunchConfig]:
    if takes_tma(weight):
        return _TMA_CONFIGS
    if weight.dtype == torch.float64:
        return _F64_CONFIGS
    return _F32_CONFIGS if weight.dtype == torch.float32 else _HALF_CONFIGS


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


def persistent_programs(num_tiles: int, config: LaunchConfig, sms: int) -> int:
    """CTAs of the persistent kernel: what the GPU holds at once, never more than there can be tiles."""
    return max(min(num_tiles, sms * config.ctas_per_sm), 1)


def output_block(config: LaunchConfig, weight: TensorMeta, gated: bool) -> int:
    """Output columns per tile: half the weight rows of a gated TMA tile."""
    return config.block_n // 2 if gated and takes_tma(weight) else config.block_n


def column_blocks(features: int, config: LaunchConfig, weight: TensorMeta, gated: bool) -> int:
    """Tiles across the output columns."""
    return cdiv(features, output_block(config, weight, gated))
