"""Every box that a plan loads by TMA starts on 16 bytes, over a wide product of shapes and layouts.

Recomputed here from what reaches the GPU: the descriptors of the launches, and the columns at which the kernel's tiles
start. Hardware stops a kernel whose box starts elsewhere with an illegal instruction.
"""

import itertools
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch
import triton

from moe_ops.kernels import tma
from moe_ops.kernels.gpu import H200, Gpu
from moe_ops.kernels.program import Descriptor, Launch, Program, describe
from moe_ops.types import Activation
from tests.helpers import mixed
from tests.kernels.by_name import program_of
from tests.kernels.catalogue import product

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="plans are the same when interpreted")
EXPERTS, TOP_K = 2, 2
SIZES = list(itertools.product((8, 20, 64, 72, 101, 136), (8, 12, 52, 64, 100, 101, 104)))
ACTIVATIONS = [Activation(), Activation(interleaved=True), Activation("relu2")]


def _view(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    memory = torch.empty(1 << 24, dtype=torch.bfloat16, device="meta")
    return memory.as_strided(shape, strides, offset)


def _padded(experts: int, rows: int, depth: int, by: int, offset: int = 0) -> torch.Tensor:
    row = depth + by
    return _view((experts, rows, depth), (rows * row, row, 1), offset)


WEIGHTS = {  # of the shape [experts, rows, depth]
    "standard": lambda e, b, a: _padded(e, b, a, 0),
    "rows of 8 more": lambda e, b, a: _padded(e, b, a, 8),
    "rows of 3 more": lambda e, b, a: _padded(e, b, a, 3),
    "starts at 1": lambda e, b, a: _padded(e, b, a, 0, 1),
    "starts at 4": lambda e, b, a: _padded(e, b, a, 0, 4),
    "starts at 8": lambda e, b, a: _padded(e, b, a, 0, 8),
    "transposed": lambda e, b, a: _padded(e, a, b, 0).transpose(1, 2),
    "transposed, rows of 8 more": lambda e, b, a: _padded(e, a, b, 8).transpose(1, 2),
    "transposed, rows of 4 more": lambda e, b, a: _padded(e, a, b, 4).transpose(1, 2),
    "transposed, starts at 4": lambda e, b, a: _padded(e, a, b, 0, 4).transpose(1, 2),
    "one expert for all": lambda e, b, a: _view((e, b, a), (0, a, 1)),
    "one row for all": lambda e, b, a: _view((e, b, a), (b * a, 0, 1)),
    "experts inside rows": lambda e, b, a: _view((e, b, a), (a, e * a, 1)),
    "transposed, experts inside": lambda e, b, a: _view((e, b, a), (b, 1, e * b)),
    "experts that overlap": lambda e, b, a: _view((e, b, a), (b // 2 * a, a, 1)),
    "every other column": lambda e, b, a: _view((e, b, a), (2 * b * a, 2 * a, 2)),
    "rows that overlap": lambda e, b, a: _view((e, b, a), (b * a, 8, 1)),
}
ROWS = {  # of the shape [rows, columns]
    "contiguous": lambda s, a: _view((s, a), (a, 1)),
    "of a wider matrix": lambda s, a: _view((s, a), (2 * a, 1)),
    "starts at 4": lambda s, a: _view((s, a), (2 * a, 1), 4),
    "column-major": lambda s, a: _view((s, a), (1, s)),
    "one row for all": lambda s, a: _view((s, a), (0, 1)),
    "every other column": lambda s, a: _view((s, a), (2 * a, 2)),
    "overlap": lambda s, a: _view((s, a), (8, 1)),
}


def _programs(
    weights: str, rows: str, hidden: int, inner: int, act: Activation, tokens: int
) -> list[tuple[Program, dict[str, torch.Tensor]]]:
    slots, up_rows = tokens * TOP_K, 2 * inner if act.is_gated else inner
    w13, w2 = WEIGHTS[weights](EXPERTS, up_rows, hidden), WEIGHTS[weights](EXPERTS, hidden, inner)
    x, up, down = ROWS[rows](tokens, hidden), ROWS[rows](slots, inner), ROWS[rows](slots, hidden)
    index = torch.empty(slots, dtype=torch.int32, device="meta")
    offsets = torch.empty(EXPERTS + 1, dtype=torch.int32, device="meta")
    routes = (
        torch.empty(tokens, TOP_K, device="meta"),
        torch.empty(tokens, TOP_K, dtype=torch.int32, device="meta"),
    )
    return [
        (
            program_of("gather_gemm_act", x, w13, index, offsets, activation=act),
            {"hidden_states": x, "w13": w13},
        ),
        (program_of("gemm_combine", up, w2, offsets, routes[0], index), {"x": up, "w2": w2}),
        (program_of("grouped_gemm", down, w13, offsets, None), {"x": down, "weight": w13}),
        (
            program_of("fused_experts", x, w13, w2, *routes, activation=act),
            {"hidden_states": x, "w13": w13, "w2": w2},
        ),
    ]


def _first_columns(name: str, descriptor: Descriptor, launch: Launch) -> Iterator[int]:
    """Where boxes start in the last dimension: what `grouped_gemm_tma_kernel` computes."""
    args = launch.args
    depths = range(0, args["depth"], args["BLOCK_K"])
    if name == "x_desc" or not args["TRANSPOSED"]:
        yield from depths
        return
    halves = args["GATED"] and not args["INTERLEAVED"]
    width = args["BLOCK_N"] // 2 if args["GATED"] else args["BLOCK_N"]
    for column in range(0, args["features"], width):
        yield 2 * column if args["GATED"] and args["INTERLEAVED"] else column
        if halves:
            yield args["features"] + column


def _expect_aligned(program: Program, tensors: dict[str, torch.Tensor]) -> int:
    """How many descriptors there are; fails if one of their boxes may start off 16 bytes or shares elements."""
    buffers = {b.name: torch.empty(b.shape, dtype=b.dtype, device="meta") for b in program.buffers}
    found = [
        (name, argument, launch)
        for launch in program.launches
        for name, argument in launch.args.items()
        if isinstance(argument, Descriptor)
    ]
    for name, descriptor, launch in found:
        source = {**tensors, **buffers}[descriptor.source]
        size = source.element_size()
        assert source.storage_offset() * size % 16 == 0
        assert descriptor.strides[-1] == 1 and descriptor.block[-1] * size % 16 == 0
        assert all(stride * size % 16 == 0 for stride in descriptor.strides[:-1])
        assert all(column * size % 16 == 0 for column in _first_columns(name, descriptor, launch))
        last = sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
        _expect_each_element_once(descriptor.shape, descriptor.strides, source.numel(), last)
    return len(found)


@lru_cache(maxsize=None)
def _expect_each_element_once(
    shape: tuple[int, ...], strides: tuple[int, ...], elements: int, last: int
) -> None:
    """A descriptor addresses as many elements as its tensor has, all different, none past the last one."""
    addresses = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(shape, strides, strict=True):
        addresses = (addresses[:, None] + torch.arange(size) * stride).flatten()
    assert addresses.numel() == elements and int(addresses.max()) == last
    assert addresses.unique().numel() == elements


@pytest.mark.parametrize(("weights", "rows"), mixed(WEIGHTS, ROWS, rounds=2))
def test_boxes_start_on_16_bytes(weights: str, rows: str) -> None:
    for (hidden, inner), act, tokens in itertools.product(SIZES, ACTIVATIONS, (3, 200)):
        for program, tensors in _programs(weights, rows, hidden, inner, act, tokens):
            _expect_aligned(program, tensors)


HALVES, INTERLEAVED, UNGATED = ACTIVATIONS


@pytest.mark.parametrize(
    "weights, inner, act, expected",
    [
        ("standard", 100, HALVES, True),  # start columns are those of the depth
        ("standard", 101, INTERLEAVED, True),
        ("transposed", 104, HALVES, True),
        ("transposed", 100, HALVES, False),  # up columns start at 200 bytes
        ("transposed", 100, INTERLEAVED, True),
        ("transposed", 104, UNGATED, True),
        ("transposed", 100, UNGATED, False),  # rows of 200 bytes
        ("rows of 8 more", 64, HALVES, True),
        ("transposed, rows of 8 more", 64, HALVES, True),
        ("starts at 8", 64, HALVES, True),
        ("starts at 4", 64, HALVES, False),
        ("every other column", 64, HALVES, False),
        ("one expert for all", 64, HALVES, False),
        ("one row for all", 64, HALVES, False),
        ("experts inside rows", 64, HALVES, False),
        ("experts that overlap", 64, HALVES, False),
    ],
)
def test_tma_takes_what_is_aligned_and_no_more(weights, inner, act, expected) -> None:
    rows = 2 * inner if act.is_gated else inner
    weight = WEIGHTS[weights](EXPERTS, rows, 64)
    assert product(weight, activation=act).weight_by_tma is expected
    assert not product(weight, activation=act, gpu=Gpu(89, 142, H200.shared_memory)).weight_by_tma


@pytest.mark.parametrize(
    "dtype, expected", [(torch.float16, True), (torch.float32, False), (torch.float64, False)]
)
def test_tma_takes_half_precision(dtype: torch.dtype, expected: bool) -> None:
    assert product(torch.empty(2, 64, 64, dtype=dtype, device="meta")).weight_by_tma is expected


@pytest.mark.parametrize("shape", [(0, 64, 64), (2, 0, 64), (2, 64, 0)])
def test_tma_takes_nothing_without_elements(shape: tuple[int, int, int]) -> None:
    meta = describe(torch.empty(shape, dtype=torch.bfloat16, device="meta"))
    for halves in (False, True):
        assert not tma.allows(H200, meta, tma.boxed_weight(meta, halves))


def test_a_stride_longer_than_a_descriptor_holds_is_refused() -> None:
    far = torch.empty_strided((2, 64, 64), (1 << 39, 64, 1), dtype=torch.bfloat16, device="meta")
    near = torch.empty_strided((2, 64, 64), (1 << 38, 64, 1), dtype=torch.bfloat16, device="meta")
    assert (product(far).weight_by_tma, product(near).weight_by_tma) == (False, True)


@pytest.mark.parametrize(
    "rows, expected",
    [
        ("contiguous", True),
        ("of a wider matrix", True),
        ("starts at 4", False),
        ("column-major", False),
        ("one row for all", False),
        ("every other column", False),
        ("overlap", False),
    ],
)
def test_rows_by_tma(rows: str, expected: bool) -> None:
    x, w2 = ROWS[rows](400, 64), WEIGHTS["standard"](EXPERTS, 64, 64)
    index = torch.empty(400, dtype=torch.int32, device="meta")
    program = program_of("gemm_combine", x, w2, index[:3], torch.empty(200, 2, device="meta"), index)
    (launch,) = (launch for launch in program.launches if "x_desc" in launch.args)
    assert (launch.args["x_desc"] is not None) is expected
