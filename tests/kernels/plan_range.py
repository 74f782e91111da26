"""Every kind of launch that a plan can make on a GPU: what the configs return over dtypes, layouts, sizes and options.

`Range.WIDE` enumerates them; `Range.NARROW` takes of each table its largest blocks and heaviest options, for a run of
seconds. What only repeats a kernel already compiled costs nothing: launches are compiled once per signature.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch

from moe_ops.arguments import (
    DenseGemm,
    Epilogue,
    ExpertWeights,
    FusedExperts,
    GroupedLinear,
    PairedLinear,
    Placement,
    Router,
    SharedExpert,
)
from moe_ops.kernels import dense, gemm_config, grouped_gemm
from moe_ops.kernels.decode_plan import gemv_launches
from moe_ops.kernels.decode_routed import routed
from moe_ops.kernels.formula import gate_of
from moe_ops.kernels.gemm import Gemm, Operand, operands
from moe_ops.kernels.gpu import H200, KIB, Gpu
from moe_ops.kernels.program import Buffer, Launch, Program, TensorMeta, describe
from moe_ops.kernels.routing import routing_launches
from moe_ops.types import Activation, RoutingConfig
from tests.kernels import catalogue
from tests.kernels.by_name import program_of
from tests.kernels.catalogue import BESIDE, TENSORS, meta, replicas, shared_alone

GPUS = {
    "sm_80": Gpu(80, 108, 163 * KIB),
    "sm_89": Gpu(89, 142, 99 * KIB),
    "sm_90": H200,
    "sm_100": Gpu(100, 148, 227 * KIB),
    "sm_120": Gpu(120, 188, 99 * KIB),
}
FLOATS = (torch.bfloat16, torch.float32, torch.float64)  # float16 takes what bfloat16 takes
HALVES, UNGATED = Activation(), Activation("relu2")
GPT_OSS = Activation("swiglu_oai", interleaved=True)
SITU = Activation("situ", beta=4.0, linear_beta=25.0)  # the most arithmetic
ACTIVATIONS = (
    HALVES,
    GPT_OSS,
    UNGATED,
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("silu", limit=7.0),
    Activation("swiglustep"),
    SITU,
    Activation("gelu_tanh_no_mul"),
)


class Range(Enum):
    """How much to enumerate."""

    NARROW = "narrow"
    WIDE = "wide"

    @property
    def floats(self) -> tuple[torch.dtype, ...]:
        """float32 lies between what runs most and what takes most registers; products have it always."""
        return FLOATS if self is Range.WIDE else (torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Planned:
    """A launch and the dtypes of the tensors it names."""

    name: str
    launch: Launch
    dtypes: dict[str, torch.dtype]


def _planned(
    name: str, buffers: tuple[Buffer, ...], launches: tuple[Launch, ...], dtype
) -> Iterator[Planned]:
    floating = {name: dtype for name, kind in TENSORS.items() if kind == torch.bfloat16}
    dtypes = {**TENSORS, **floating, **{buffer.name: buffer.dtype for buffer in buffers}}
    yield from (Planned(name, launch, dtypes) for launch in launches)


def _weight(experts: int, rows: int, depth: int, dtype: torch.dtype, transposed: bool) -> TensorMeta:
    plain = meta(experts, rows, depth, dtype=dtype)
    return describe(meta(experts, depth, rows, dtype=dtype).transpose(1, 2) if transposed else plain)


def _metas(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[TensorMeta]:
    return [describe(meta(*shape, dtype=dtype)) for shape in shapes]


def decode(gpu: Gpu, size: Range) -> Iterator[Planned]:
    """The launches of a token: all numbers of routes, depths on both sides of every limit, even and odd widths."""
    wide = size is Range.WIDE
    top_ks = (1, 2, 4, 8, 10, 16, 32, 64, 100, 128) if wide else (128,)
    deep = (5, 37, 64, 256, 512, 1000, 2048, 4096, 7168, 14336)
    acts = ACTIVATIONS if wide else (SITU,)
    layouts = [(False, depth, 64) for depth in deep] + list(itertools.product((True,), deep, (64, 37)))
    few = ((False, 37, 64), (False, 14336, 64), (True, 14336, 64), (True, 14336, 37))
    kinds = [(torch.bfloat16, each) for each in few] + [(torch.float64, each) for each in few[1::2]]
    for dtype, (transposed, depth, width) in itertools.product(FLOATS, layouts) if wide else kinds:
        for top_k in top_ks:
            yield from _token(gpu, dtype, transposed, top_k, (width, depth), HALVES)[1:]
        for act in acts:
            yield from _token(gpu, dtype, transposed, 1, (depth, width), act)[: 2 if transposed else 1]
    for dtype, (top_k, *sizes, features) in itertools.product(size.floats, BESIDE if wide else BESIDE[:1]):
        yield from _token(gpu, dtype, False, top_k, sizes, HALVES, features)


def _token(gpu, dtype, transposed, top_k, sizes, act, features=0) -> list[Planned]:
    hidden, inner = sizes
    rows, experts = 2 * inner if act.is_gated else inner, 128
    x, shared, gate, residual = _metas(dtype, (1, hidden), (1, hidden), (1, 1), (1, hidden))
    w13 = _weight(experts, rows, hidden, dtype, transposed)
    w2 = _weight(experts, hidden, inner, dtype, transposed)
    (weights,) = _metas(torch.float32, (1, top_k))
    ids, expert_map = _metas(torch.int32, (1, top_k), (experts,))
    biases = _metas(dtype, (experts, rows), (experts, hidden))
    experts = ExpertWeights(PairedLinear(w13, biases[0]), GroupedLinear(w2, biases[1]))
    epilogue = Epilogue(gate, residual)
    args = FusedExperts(x, experts, weights, ids, Placement(expert_map), shared, act.spec, epilogue)
    name = f"{dtype} transposed={transposed} K={top_k} H={hidden} I={inner} {act.spec} beside {features}"
    half, down, scale = _metas(dtype, (features, hidden), (hidden, features), (1, 1))
    beside = SharedExpert(half, down, scale, act.spec, half) if features else None
    buffers, launches = gemv_launches(args._replace(shared=None) if features else args, gpu, beside)
    logits, correction = _metas(torch.float32, (1, 128), (128,))
    routes, routing = routing_launches(Router(logits, correction, RoutingConfig(top_k=top_k).spec))
    first = routed(launches[0], *routing, gate_of(args))
    return list(_planned(name, (*routes, *buffers), (*launches, first), dtype))


def products(gpu: Gpu, size: Range) -> Iterator[Planned]:
    """Every block size of every table, for gathered rows, rows in order, and rows by TMA."""
    wide = size is Range.WIDE
    acts = (None, *ACTIVATIONS)
    layouts = tuple(itertools.product((False, True), (2048, 2040, 511)))
    # Where there is little shared memory, what takes it.
    heaviest = _HEAVIEST_PRODUCTS if gpu is H200 else _HEAVIEST_PRODUCTS[:3]
    kinds = itertools.product(FLOATS, acts, layouts, (True, False)) if wide else heaviest
    for dtype, act, (transposed, depth), biased in kinds:
        for mean_rows in (4, 12, 40, 1024) if wide else (4, 40, 1024):
            yield from _product(gpu, dtype, act, (transposed, depth, mean_rows), biased, size)


_HEAVIEST_PRODUCTS = (
    (torch.bfloat16, None, (True, 2048), True),
    (torch.bfloat16, SITU, (True, 2048), True),
    (torch.bfloat16, GPT_OSS, (False, 2040), True),
    (torch.bfloat16, SITU, (False, 2040), True),
    (torch.bfloat16, SITU, (False, 511), True),
    (torch.float32, SITU, (False, 511), True),
    (torch.float64, SITU, (True, 2048), True),
)


def _product(gpu, dtype, act, sizes, biased, size) -> Iterator[Planned]:
    transposed, depth, mean_rows = sizes
    # Narrow ones of few rows have tiles of one height on an H200, see `mixed` for others.
    experts, rows = 64, 2 * (511 if depth == 511 else 1008 if mean_rows < 12 else 1024)
    (bias,) = _metas(dtype, (experts, rows))
    linear = PairedLinear(_weight(experts, rows, depth, dtype, transposed), bias if biased else None)
    slots = mean_rows * experts
    x, gathered = (Operand("x", rows) for rows in _metas(dtype, (slots, depth), (slots // 2, depth)))
    gemm = Gemm(x, operands("weight", linear), "out", slots, gpu, activation=act)
    kinds = {"in order": gemm} if size is Range.WIDE else {}
    kinds["in order, all rows"] = replace(gemm, tail=True)  # takes at least as much
    if act is not None:
        kinds = {"gathered": replace(gemm, x=gathered, top_k=2)}
        if gemm_config.sorts_rows_first(replace(gemm, num_slots=1 << 20)):
            kinds["in order"] = gemm
    for kind, each in kinds.items():
        name = f"{dtype} {kind} {act=!s} {transposed=} {depth=} rows={mean_rows} {biased=}"
        yield from _planned(name, *grouped_gemm.plan(each), dtype)


def mixed(gpu: Gpu, size: Range) -> Iterator[Planned]:
    """Products with tiles of mixed heights; narrow, the low: high ones are in `products`, GPT-OSS's in test_aot.py."""
    kinds = itertools.product((None, *ACTIVATIONS), (False, True), (512, 128))
    for act, transposed, slots in kinds if size is Range.WIDE else ((SITU, False, 128),):
        bias, x = _metas(torch.bfloat16, (8, 4096), (slots // 2, 2880))
        linear = operands("weight", PairedLinear(_weight(8, 4096, 2880, torch.bfloat16, transposed), bias))
        gemm = Gemm(Operand("x", x), linear, "out", slots, gpu, 2, act, tail=True)
        name = f"mixed act={act} transposed={transposed} slots={slots}"
        yield from _planned(name, *grouped_gemm.plan(gemm), torch.bfloat16)
        gemm = replace(gemm, num_slots=slots // 2, top_k=None, activation=None)
        yield from _planned(f"mixed, {slots} in order", *grouped_gemm.plan(gemm), torch.bfloat16)


def batches(gpu: Gpu, size: Range) -> Iterator[Planned]:
    """Rows set aside for each expert: the block sizes of few and of many, by TMA and not."""
    tokens, depths = ((4, 12, 40, 1024), (2048, 2040, 511)) if size is Range.WIDE else ((12, 1024), (2048,))
    for dtype, max_tokens, depth in itertools.product(size.floats, tokens, depths):
        x, weight = meta(8, max_tokens, depth, dtype=dtype), meta(8, 1024, depth, dtype=dtype)
        program = program_of("batched_gemm", x, weight, meta(8, dtype=torch.int32), gpu=gpu)
        yield from _programs(f"{dtype} M={max_tokens} depth={depth}", dtype, program)


def few_tokens(gpu: Gpu, size: Range) -> Iterator[Planned]:
    """Routers and wide products: a program's row and warps for every length of it."""
    sizes = ((1, 8), (8, 8), (1, 4096)) if size is Range.WIDE else ((8, 8),)
    depths = (511, 2880, 4096, 7168) if size is Range.WIDE else (511, 7168)
    for dtype, depth, (tokens, features) in itertools.product(size.floats, depths, sizes):
        args = DenseGemm(*_metas(dtype, (tokens, depth), (features, depth), (features,)), dtype)
        if dense.takes_product(args, gpu):
            name, program = f"{dtype} {tokens} x {depth} x {features}", dense.dense_gemm_program(args, gpu)
            yield from _programs(name, dtype, program)


def gradients(gpu: Gpu, size: Range) -> Iterator[Planned]:
    """Weight gradients: blocks follow the smaller sizes."""
    sides = (1, 20, 40, 100, 1000, 1024) if size is Range.WIDE else (100, 1024)
    for dtype, features, depth in itertools.product(size.floats, sides, sides):
        grad, x = meta(4096, features, dtype=dtype), meta(4096, depth, dtype=dtype)
        program = program_of("grouped_gemm_weight_backward", grad, x, meta(17, dtype=torch.int32), gpu=gpu)
        yield from _programs(f"{dtype} {features} x {depth}", dtype, program)


def _programs(name: str, dtype: torch.dtype, *programs: Program) -> Iterator[Planned]:
    for program in programs:
        yield from _planned(name, program.buffers, program.launches, dtype)


def rows(gpu: Gpu, size: Range) -> Iterator[Planned]:
    """permute, combine and activations with their gradients."""
    wide = size is Range.WIDE
    acts, top_ks = (ACTIVATIONS, (1, 2, 8, 128)) if wide else ((SITU,), (8, 128))
    for dtype, columns in itertools.product(size.floats, (40, 511, 4096) if wide else (511,)):
        tokens, slots = meta(64, columns, dtype=dtype), meta(64 * 8, dtype=torch.int32)
        by_slot, name = meta(64 * 8, columns, dtype=dtype), f"{dtype} {columns} columns"
        gathers = program_of("permute", tokens, slots), program_of("permute_backward", by_slot, slots, 64)
        yield from _programs(name, dtype, *gathers)
        for top_k in top_ks:
            inverse, weights = meta(64 * top_k, dtype=torch.int32), meta(64, top_k, dtype=torch.float32)
            out = meta(64 * top_k, columns, dtype=dtype)
            sums = program_of("combine", out, weights, inverse, tokens, meta(64, 1, dtype=dtype), tokens)
            backward = program_of("combine_backward", tokens, out, weights, inverse)
            yield from _programs(f"{name} K={top_k}", dtype, sums, backward)
        for act in acts:
            gate_up = meta(512, 2 * columns if act.is_gated else columns, dtype=dtype)
            forward = program_of("gated_activation", gate_up, act)
            backward = program_of("gated_activation_backward", by_slot, gate_up, act)
            scale = meta(512, dtype=torch.float32)
            weighted = program_of("weighted_activation_backward", by_slot, gate_up, scale, act)
            yield from _programs(f"{name} {act.spec}", dtype, forward, backward, weighted)


def routes(gpu: Gpu, size: Range) -> Iterator[Planned]:
    """Routing with its gradient, and the sort by expert."""
    wide = size is Range.WIDE
    sizes = ((1, 1), (8, 2), (60, 4), (128, 8), (256, 8), (512, 10), (1024, 128), (2000, 16))
    for dtype, (experts, top_k) in itertools.product(
        FLOATS if wide else FLOATS[2:], sizes if wide else sizes[3::4]
    ):
        logits, bias = meta(512, experts, dtype=dtype), meta(experts, dtype=torch.float32)
        weights, ids = meta(512, top_k, dtype=torch.float32), meta(512, top_k, dtype=torch.int32)
        for config in _routings(experts, top_k, wide):
            forward = program_of("topk_routing", logits, bias, config)
            backward = program_of("topk_routing_backward", weights, logits, weights, ids, config)
            yield from _programs(f"{dtype} E={experts} {config.spec}", dtype, forward, backward)
    for (experts, top_k), slots in itertools.product(
        sizes if wide else sizes[3::4], (1, 100, 500, 4096, 1 << 19)
    ):
        ids = meta(max(slots // top_k, 1), top_k, dtype=torch.int64 if slots == 500 else torch.int32)
        program = program_of("build_dispatch", ids, meta(2 * experts, dtype=torch.int32), experts)
        planned = _programs(f"E={experts} S={slots}", torch.bfloat16, program)
        yield from (replace(each, dtypes=each.dtypes | {"topk_ids": ids.dtype}) for each in planned)


def _routings(experts: int, top_k: int, wide: bool) -> Iterator[RoutingConfig]:
    grouped = {"num_groups": 8, "topk_groups": 4, "group_score": "top2_sum"}
    groups = grouped if experts % 8 == 0 and top_k <= experts // 2 else {}
    yield RoutingConfig(top_k, score_fn="sqrtsoftplus", scale=2.5, **groups)
    if wide:
        yield RoutingConfig(top_k)
        yield RoutingConfig(top_k, score_fn="sigmoid", **groups)
        yield RoutingConfig(top_k, order="topk_then_score", renormalize=False)


def placements(gpu: Gpu, size: Range) -> Iterator[Planned]:
    """Replicas chosen and counted: few and many physical experts, ids of both dtypes."""
    numbers = (8, 160, 1024, 4000) if size is Range.WIDE else (160, 4000)
    for physical, dtype in itertools.product(numbers, (torch.int32, torch.int64)):
        args = replicas(meta(512, 8, dtype=dtype), physical, 4, physical)
        planned = _programs(f"P={physical} {dtype}", torch.bfloat16, program_of("map_and_record", *args))
        yield from (replace(each, dtypes=each.dtypes | {"topk_ids": dtype}) for each in planned)
    chosen = program_of("map_replicas", *args[:3])
    yield from _programs("without load", torch.bfloat16, chosen)
    for tokens, experts in itertools.product((64, 4096), (8, 128, 256, 512)):
        logits, config = meta(tokens, experts, dtype=torch.float32), RoutingConfig(8)
        args = logits, *replicas(meta(1, 1, dtype=torch.int32), experts, 4, experts + 32)[1:4]
        yield from _programs(
            f"T={tokens} E={experts}", torch.float32, program_of("route_and_record", *args, routing=config)
        )


def shared(gpu: Gpu, size: Range) -> Iterator[Planned]:
    """A shared expert for a token or two."""
    depths = (37, 512, 1000, 2048, 4096, 7168) if size is Range.WIDE else (37, 7168)
    acts, numbers = (ACTIVATIONS, (1, 2)) if size is Range.WIDE else ((SITU,), (2,))
    for dtype, depth, act, tokens in itertools.product(size.floats, depths, acts, numbers):
        w13 = meta(2 * 104 if act.is_gated else 104, depth, dtype=dtype)
        x, w2, weights = meta(tokens, depth, dtype=dtype), meta(depth, 104, dtype=dtype), meta(tokens, 1)
        program = shared_alone(x, w13, w2, weights, activation=act, gpu=gpu)
        yield from _programs(f"{dtype} T={tokens} H={depth} {act.spec}", dtype, program)


def exchanges(gpu: Gpu, size: Range) -> Iterator[Planned]:
    """Rows between ranks: few and many, of few and many columns, of whole 16 bytes and not."""
    columns = (511, 2048, 7168, 16384) if size is Range.WIDE else (7168,)  # odd ones are in test_aot.py
    ranks = (2, 4, 8) if size is Range.WIDE else (2,)
    rows = (1, 128, 4096) if size is Range.WIDE else (1, 4096)
    for dtype, width, num_ranks, most in itertools.product(size.floats, columns, ranks, rows):
        for program in catalogue.exchanges(dtype, (num_ranks, most, width), gpu):
            name = f"{dtype} H={width} W={num_ranks} M={most}"
            for planned in _programs(name, dtype, program):
                yield replace(planned, dtypes={**catalogue.exchange_dtypes(dtype), **buffers_of(program)})
        ids, owners = meta(9, 8, dtype=torch.int32), meta(256, dtype=torch.int32)
        plan = program_of("plan_exchange", ids, owners, num_ranks, most, gpu=gpu)
        yield from _programs(f"W={num_ranks} M={most}", torch.bfloat16, plan)


def buffers_of(program: Program) -> dict[str, torch.dtype]:
    """Dtypes of what a program allocates."""
    return {buffer.name: buffer.dtype for buffer in program.buffers}


FAMILIES = {
    function.__name__: function
    for function in (
        decode,
        products,
        mixed,
        batches,
        few_tokens,
        gradients,
        rows,
        routes,
        placements,
        shared,
        exchanges,
    )
}
