"""Plans of quantised rows and weights, as `plan_range` has those of all else."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from moe_ops.kernels.gpu import Gpu
from tests.kernels.by_name import program_of
from tests.kernels.catalogue import meta
from tests.kernels.plan_range import ACTIVATIONS, SITU, Planned, Range, _planned, _programs

FLOAT8 = torch.float8_e4m3fn
SCALES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)  # of weights of 4 bits, besides
FORMATS = (*((scale, False) for scale in (*SCALES, FLOAT8)), *((scale, True) for scale in SCALES[1:]))
"""The same, and whether there are zero points."""
_LIGHTER = ((torch.int8, torch.bfloat16), (torch.float8_e4m3fn, torch.float32))
"""Stored dtype and that of exact rows: what the other stored dtype takes at least as much for."""


def quantised(gpu: Gpu, size: Range) -> Iterator[Planned]:
    """Rows and weights of 8 bits: every block size, blocks of every kind, and rows that are quantised."""
    wide = size is Range.WIDE
    some = ((128, 128), (1, 4080))
    blocks = (*some, (1, 2048), (1, 4096), (1, 32), (7, 10), (256, 144)) if wide else some
    stored = (torch.int8,) if gpu.capability < 89 else (torch.float8_e4m3fn, torch.int8)
    for dtype, block, rows in itertools.product(stored, blocks, (4, 16, 50, 200) if wide else (4, 200)):
        for x_dtype in (dtype, torch.bfloat16, torch.float32):
            if wide or ((dtype, x_dtype) not in _LIGHTER and (rows == 200 or block == some[0])):
                yield from _quantised(gpu, dtype, x_dtype, block, 8 * rows)
    for dtype, columns in itertools.product(stored, (5, 128, 2048, 16384) if wide else (128, 16384)):
        for given in (None, meta(200, dtype=torch.float32))[: 2 if wide or columns == 128 else 1]:
            program = program_of("quantise_rows", meta(8, max(columns, 512)), given, columns, dtype, gpu=gpu)
            for each in _programs(f"{dtype} rows of {columns}, {given is None}", torch.bfloat16, program):
                yield replace(each, dtypes=each.dtypes | {"input_scale": torch.float32})
    formats = FORMATS if gpu.capability >= 89 else tuple(each for each in FORMATS if each[0] != FLOAT8)
    odd = ((7, 96),) if wide else ()
    for dtype, block in itertools.product((torch.bfloat16, torch.float16), ((1, 128), *odd)):
        for of in stored if wide else stored[:1]:
            if wide or dtype == torch.bfloat16:
                yield from _dequantised(gpu, (of, torch.float32), False, dtype, block)
        for of, zeros in formats:
            if wide or (dtype == torch.bfloat16 and of in (SCALES[0], FLOAT8)):
                of_groups = (1, 16) if of == FLOAT8 and block[0] == 1 else block
                yield from _dequantised(gpu, (torch.uint8, of), zeros, dtype, of_groups)
    for dtype, act in itertools.product(stored, ACTIVATIONS if wide else (SITU,)):
        for tokens in (1, 64):
            if wide or (dtype, tokens) != (torch.float8_e4m3fn, 64):  # int8 has the same tiles
                yield from _layer(gpu, dtype, tokens, act)
        if wide or dtype == torch.float8_e4m3fn:  # int8 has no programs of few tokens in 8 bits
            yield from _layer(gpu, dtype, 1, act, meta(200, dtype=torch.float32))
        yield from _layer(gpu, dtype, 1, act, rows="exact")
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    usual = [
        *itertools.product(SCALES[:1], (4, 50, 200, 2880)),
        *((SCALES[1], n) for n in (200, 7168)),
        *((FLOAT8, n) for n in (4, 50, 200, 7168)),
    ]
    heaviest = [form for form in formats if form != (SCALES[1], False)]  # zero points take at least as much
    for dtype, form, rows in itertools.product(dtypes, formats, (4, 25, 50, 200)):
        if wide or (dtype == torch.bfloat16 and form in heaviest and (form[0], rows) in usual):
            yield from _in_pairs(gpu, dtype, form, *((2034, 64) if wide else (2880, 32)), 8 * rows)
    for form, sizes in itertools.product(formats, ((2880, 2880), (7168, 2048), (264, 1000))):
        if wide or (form in heaviest and (form[0], sizes[0]) in usual):
            yield from _token_in_pairs(gpu, form, *sizes)


def _zero_of(scale, has_zeros):
    return meta(*scale.shape, dtype=torch.uint8) if has_zeros else None


def _global_of(scale):
    return meta(scale.shape[0], 2, dtype=torch.float32) if scale.dtype == FLOAT8 else None


def _dequantised(gpu, of, has_zeros, dtype, block) -> Iterator[Planned]:
    """Of weights and scales of these dtypes."""
    stored, scale = of
    weight = meta(8, 768, 2880 // 2 if stored == torch.uint8 else 2880, dtype=stored)
    scales = meta(8, -(-768 // block[0]), -(-2880 // block[1]), dtype=scale)
    beside = _zero_of(scales, has_zeros), _global_of(scales)
    program = program_of("dequantise_weight", weight, scales, *beside, *block, dtype, gpu=gpu)
    name = f"{of}, zeros={has_zeros} in {dtype}, block={block}"
    dtypes = {"weight": stored, "scale": scale, "zero": torch.uint8, "global_scale": torch.float32}
    for each in _planned(name, program.buffers, program.launches, dtype):
        yield replace(each, dtypes=each.dtypes | dtypes)


def _token_in_pairs(gpu, form, hidden, features) -> Iterator[Planned]:
    scale_dtype, has_zeros = form
    named = {
        "hidden_states": meta(1, hidden),
        "topk_ids": meta(1, 4, dtype=torch.int32),
        "topk_weights": meta(1, 4, dtype=torch.float32),
        "activation": SITU.spec,
        "rows": "exact",
    }
    for name, rows, columns in (("w13", 2 * features, hidden), ("w2", hidden, features)):
        group = 16 if scale_dtype == FLOAT8 else 32
        scale = meta(16, rows, -(-columns // group), dtype=scale_dtype)
        named |= {name: meta(16, rows, columns // 2, dtype=torch.uint8), f"{name}_scale": scale}
        named |= {f"{name}_block_rows": 1, f"{name}_block_columns": group}
        named |= {f"{name}_zero": _zero_of(scale, has_zeros), f"{name}_global_scale": _global_of(scale)}
    program = program_of("scaled_fused_experts", gpu=gpu, **named)
    stored = dict.fromkeys(("w13", "w2", "w13_zero", "w2_zero"), torch.uint8)
    stored |= dict.fromkeys(("w13_scale", "w2_scale"), scale_dtype)
    stored |= dict.fromkeys(("w13_global_scale", "w2_global_scale"), torch.float32)
    name = f"a token in pairs times {scale_dtype}, zeros={has_zeros}, {hidden} by {features}"
    for each in _programs(name, torch.bfloat16, program):
        yield replace(each, dtypes=each.dtypes | stored)


def _in_pairs(gpu, dtype, form, depth, columns, slots) -> Iterator[Planned]:
    scale_dtype, has_zeros = form
    columns = columns // 2 if scale_dtype == FLOAT8 else columns
    weight = meta(8, 5760, depth // 2, dtype=torch.uint8)
    scale = meta(8, 5760, -(-depth // columns), dtype=scale_dtype)
    index = {"expert_offsets": meta(9, dtype=torch.int32), "sorted_slots": meta(slots, dtype=torch.int32)}
    named = {
        "x": meta(slots // 2, depth, dtype=dtype),
        "weight": weight,
        "scale": scale,
        "zero": _zero_of(scale, has_zeros),
        "global_scale": _global_of(scale),
        **index,
        "dtype": dtype,
    }
    named |= {"bias": meta(8, 5760, dtype=dtype), "block_rows": 1, "block_columns": columns}
    program = program_of("scaled_grouped_gemm", gpu=gpu, **named)
    name = f"pairs times {scale_dtype}, zeros={has_zeros} times {dtype} depth={depth} slots={slots}"
    stored = {"weight": torch.uint8, "scale": scale_dtype, "zero": torch.uint8, "global_scale": torch.float32}
    for each in _planned(name, program.buffers, program.launches, dtype):
        yield replace(each, dtypes=each.dtypes | stored)


def _layer(gpu, stored, tokens, act, input_scale=None, rows="quantised") -> Iterator[Planned]:
    ids, weights = meta(tokens, 8, dtype=torch.int32), meta(tokens, 8, dtype=torch.float32)
    named = {
        "hidden_states": meta(tokens, 2048),
        "topk_ids": ids,
        "topk_weights": weights,
        "activation": act.spec,
        "rows": rows,
    }
    for name, features, columns in (("w13", 1536 if act.is_gated else 768, 2048), ("w2", 2048, 768)):
        scale = meta(16, features // 128, columns // 128, dtype=torch.float32)
        named |= {name: meta(16, features, columns, dtype=stored), f"{name}_scale": scale}
        named |= {f"{name}_block_rows": 128, f"{name}_block_columns": 128}
    scales = dict.fromkeys(("w13_input_scale", "w2_input_scale"), input_scale)
    program = program_of("scaled_fused_experts", gpu=gpu, **named, **scales)
    dtypes = {"w13": stored, "w2": stored} | dict.fromkeys(scales, torch.float32)
    for each in _programs(f"{stored} layer of {tokens} {rows}, {act.spec}", torch.bfloat16, program):
        yield replace(each, dtypes=each.dtypes | dtypes)


def _quantised(gpu, stored, x_dtype, block, slots) -> Iterator[Planned]:
    depth = {10: 511, 144: 2032}.get(block[1], max(block[1], 2048))
    blocks, is_stored = (-(-1536 // block[0]), -(-depth // block[1])), x_dtype == stored
    dtype = torch.bfloat16 if is_stored else x_dtype
    x, x_scale = meta(slots // 2, depth, dtype=x_dtype), meta(slots // 2, blocks[1], dtype=torch.float32)
    weight, scale = meta(8, 1536, depth, dtype=stored), meta(8, *blocks, dtype=torch.float32)
    index = {"expert_offsets": meta(9, dtype=torch.int32), "sorted_slots": meta(slots, dtype=torch.int32)}
    named = {"x": x, "x_scale": x_scale if is_stored else None, "weight": weight, "scale": scale, **index}
    named |= {"bias": meta(8, 1536, dtype=dtype), "dtype": dtype}
    named |= {"block_rows": block[0], "block_columns": block[1]}
    program = program_of("scaled_grouped_gemm", gpu=gpu, **named)
    name = f"{stored} times {x_dtype} block={block} slots={slots}"
    dtypes = {"x": x_dtype, "weight": stored}
    for each in _planned(name, program.buffers, program.launches, dtype):
        yield replace(each, dtypes=each.dtypes | dtypes)
