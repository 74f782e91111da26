"""Programs of weights of 4 bits, for tests that look at every kernel: `catalogue` has the others."""

import torch

from moe_ops.kernels.program import Program
from tests.kernels.by_name import program_of
from tests.kernels.catalogue import TENSORS, meta, strided

FLOAT8 = torch.float8_e4m3fn


def in_pairs(scale: torch.dtype, has_zeros: bool = False) -> tuple[list[Program], dict[str, torch.dtype]]:
    """Programs of weights of 4 bits, whose format the dtype of scales says, and of what dtypes their tensors are."""
    dtypes = dict.fromkeys(("weight", "w13", "w2", "zero", "w13_zero", "w2_zero"), torch.uint8)
    dtypes |= dict.fromkeys(("global_scale", "w13_global_scale", "w2_global_scale"), torch.float32)
    dtypes |= dict.fromkeys(("scale", "w13_scale", "w2_scale"), scale)
    programs = [_scaled_pairs(scale, has_zeros), _token_in_pairs(scale, has_zeros)]
    if has_zeros or scale == FLOAT8:
        programs.append(_dequantised_pairs(scale, has_zeros))
    return programs, TENSORS | dtypes


def pairs_args(
    name: str, rows: int, depth: int, scale_dtype: torch.dtype, has_zeros: bool
) -> dict[str, torch.Tensor | int | None]:
    """What belongs to the weight of that name, of any strides but for itself."""
    columns = 16 if scale_dtype == FLOAT8 else 32
    shape = 8, rows, -(-depth // columns)
    prefix = "" if name == "weight" else f"{name}_"
    return {
        f"{prefix}scale": strided(*shape, dtype=scale_dtype),
        f"{prefix}zero": strided(*shape, dtype=torch.uint8) if has_zeros else None,
        f"{prefix}global_scale": strided(8, 2, dtype=torch.float32) if scale_dtype == FLOAT8 else None,
        f"{prefix}block_rows": 1,
        f"{prefix}block_columns": columns,
    }


def _dequantised_pairs(scale_dtype: torch.dtype, has_zeros: bool) -> Program:
    """A copy of weights with something beside their scales, of any strides."""
    beside = pairs_args("weight", 128, 96, scale_dtype, has_zeros)
    weight = strided(8, 128, 48, dtype=torch.uint8)
    return program_of("dequantise_weight", weight, **beside, dtype=torch.bfloat16)


def _scaled_pairs(scale_dtype: torch.dtype, has_zeros: bool) -> Program:
    """Rows of 16 bits times weights of 4, of any strides."""
    named = {"sorted_slots": meta(1024, dtype=torch.int32), "bias": strided(8, 128), "dtype": torch.bfloat16}
    named |= pairs_args("weight", 128, 96, scale_dtype, has_zeros)
    named |= {"weight": strided(8, 128, 48, dtype=torch.uint8), "expert_offsets": meta(9, dtype=torch.int32)}
    return program_of("scaled_grouped_gemm", strided(512, 96), **named)


def _token_in_pairs(scale_dtype: torch.dtype, has_zeros: bool) -> Program:
    """A token's layer in 4 bits, of rows with gaps."""
    weights = meta(1, 2, dtype=torch.float32), meta(1, 2, dtype=torch.int32)
    named = {"hidden_states": strided(1, 96), "topk_weights": weights[0], "topk_ids": weights[1]}
    for name, rows, columns in (("w13", 256, 48), ("w2", 96, 64)):
        named[name] = meta(8, rows, 80, dtype=torch.uint8)[:, :, :columns]
        named |= {f"{name}_bias": strided(8, rows)}
        named |= pairs_args(name, rows, 2 * columns, scale_dtype, has_zeros)
    return program_of("scaled_fused_experts", activation="silu", rows="exact", **named)
