"""Ways to compute a product: which there are, that wrong ones are found, and that times are of the right thing."""

import math
from dataclasses import replace

import pytest
import torch

from moe_ops import product_timing
from moe_ops.arguments import PairedLinear
from moe_ops.formula import Formula
from moe_ops.kernels import gemm_config
from moe_ops.kernels.gemm import Gemm, Operand, operands
from moe_ops.kernels.gemm_tables import BY_TMA_MIXED_FEW, LaunchConfig
from moe_ops.kernels.gpu import H200
from moe_ops.kernels.program import TensorMeta, describe
from moe_ops.product_timing import GroupedMm, Timed, fastest, measure, takes_grouped_mm, timed_as, ways
from moe_ops.types import Activation
from tests.kernels.catalogue import meta
from tests.kernels.conftest import INTERPRETED

EXPERTS, SLOTS = 5, 66


def _gemm(rows, depth, *, top_k=None, activation=None, bias=False, transposed=False, dtype=torch.bfloat16):
    weight = (
        meta(EXPERTS, depth, rows, dtype=dtype).mT if transposed else meta(EXPERTS, rows, depth, dtype=dtype)
    )
    linear = PairedLinear(describe(weight), describe(meta(EXPERTS, rows, dtype=dtype)) if bias else None)
    x = Operand("x", describe(meta(SLOTS // (top_k or 1), depth, dtype=dtype)))
    return Gemm(x, operands("weight", linear), "product", SLOTS, H200, top_k, activation)


PRODUCTS = {
    "plain": _gemm(64, 32),
    "gathered, gate and up rows": _gemm(64, 32, top_k=2, activation=Activation()),
    "transposed, in turns": _gemm(64, 32, top_k=3, transposed=True, activation=Activation(interleaved=True)),
    "ungated, with a bias": _gemm(40, 24, activation=Activation("relu2"), bias=True),
    "odd": _gemm(33, 30, top_k=2),
    "float32": _gemm(40, 24, dtype=torch.float32),
    "of a rank": replace(_gemm(64, 32, top_k=2, activation=Activation()), num_ids=4 * EXPERTS),
}


def in_turn(calls):
    """Microseconds that say how many were timed before."""
    return [float(index) for index, _ in enumerate(calls)]


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_way_is_right(name, device):
    gemm = PRODUCTS[name]
    timed = measure(gemm, ways(gemm), torch.device(device), in_turn)
    assert [each.failure for each in timed] == [""] * len(ways(gemm))
    assert [each.microseconds for each in timed] == [*range(len(timed))]
    assert timed[0].way == gemm_config.pick_config(gemm)


def test_most_slots_of_a_rank_have_their_expert_elsewhere():
    trial = product_timing.Trial.of(PRODUCTS["of a rank"], torch.device("cpu"))
    for routing in trial.routings:
        assert 0 < routing.expert_offsets[-1] < SLOTS / 2 and len(routing.sorted_slots) == SLOTS


def test_torchs_product_is_a_way_where_it_can_compute_it():
    by_library = {name for name, gemm in PRODUCTS.items() if GroupedMm() in ways(gemm)}
    assert by_library == {"plain", "gathered, gate and up rows", "transposed, in turns", "of a rank"}
    plain = PRODUCTS["plain"]
    formula = Formula("halves", (), (("mul", ("gate", "up")),), "t0")
    sliced = replace(plain.x, meta=plain.x.meta._replace(strides=(33, 1)))
    others = (
        replace(plain, max_tokens=11),
        replace(plain, rows_per_tile=64),
        replace(plain, activation=formula),
        replace(plain, x=sliced),
        replace(plain, x=replace(plain.x, meta=plain.x.meta._replace(aligned=False))),
        _gemm(60, 32),  # rows of 120 bytes come out
        _gemm(64, 32, dtype=torch.float16),
        replace(plain, gpu=replace(H200, capability=80)),
    )
    assert takes_grouped_mm(plain) and not any(map(takes_grouped_mm, others))
    assert takes_grouped_mm(replace(plain, x=sliced, top_k=2))  # copied before


def test_tiles_of_half_to_twice_the_rows():
    weight = meta(128, 1536, 2048)
    x = Operand("x", describe(meta(2048, 2048)))
    gemm = Gemm(x, operands("weight", PairedLinear(describe(weight))), "out", 2048, H200)
    configs = [way for way in ways(gemm) if isinstance(way, LaunchConfig)]
    assert configs[0] == BY_TMA_MIXED_FEW and {config.block_m for config in configs} == {16, 32, 64}
    assert len({*configs}) == len(configs) and {*configs} <= {*gemm_config.candidates(gemm)}


def test_rows_that_load_one_by_one_have_one_way():
    gemm = PRODUCTS["odd"]
    assert ways(gemm) == (gemm_config.pick_config(gemm),)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda out: out * 1.03, "is wrong: 3"),
        (
            lambda out: out.index_fill(0, torch.tensor([7], device=out.device), 0),
            "is wrong: 1.0e+00 of a row's norm",
        ),
        (lambda out: out.index_fill(1, torch.tensor([7], device=out.device), math.nan), "is wrong: nan"),
        (lambda out: out[:, :1].matmul(out), "does not run: RuntimeError: "),
    ],
    ids=["all of it", "one row", "nan", "an error"],
)
def test_a_wrong_way_is_dropped(monkeypatch, spoil, told):
    compute = product_timing._by_library
    monkeypatch.setattr(product_timing, "_by_library", lambda *args: spoil(compute(*args)))
    gemm = PRODUCTS["plain"]
    timed_calls = []

    def stopwatch(calls):
        timed_calls.extend(calls)
        return in_turn(calls)

    (wrong,) = measure(gemm, [GroupedMm()], torch.device("cpu"), stopwatch)
    assert wrong.failure.startswith(told) and wrong.microseconds == math.inf and not timed_calls


def test_two_percent_are_worth_a_change():
    first, second = LaunchConfig(16, 64, 64, 4, 3), LaunchConfig(32, 64, 64, 4, 3)
    assert fastest([Timed(first, 100.0), Timed(second, 97.9), Timed(GroupedMm(), 99.0)]) == second
    assert fastest([Timed(first, 100.0), Timed(second, 98.1)]) == first
    assert fastest([Timed(first, 100.0), Timed(second, math.inf, "is wrong: ...")]) == first
    with pytest.raises(RuntimeError, match=r"the choice in use, LaunchConfig\(block_m=16.*, is wrong: nan"):
        fastest([Timed(first, math.inf, "is wrong: nan"), Timed(second, 1.0)])


def test_rows_are_spread_as_routers_do():
    weight = operands("weight", PairedLinear(describe(meta(64, 8, 8))))
    gemm = Gemm(Operand("x", describe(meta(512, 8))), weight, "out", 4096, H200, top_k=8)
    generator = torch.Generator().manual_seed(0)
    even, skewed = (product_timing._routing(gemm, skew, generator) for skew in (0.0, 1.0))
    for slots, offsets in (even, skewed):
        counts = offsets.diff()
        assert slots.sort().values.tolist() == list(range(4096)) and offsets[-1] == 4096 and offsets[0] == 0
        assert int(counts.max()) <= 512  # a token visits an expert once
        starts = [slots[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
        assert all((each.diff() > 0).all() for each in starts)
    assert 1.2 < even.expert_offsets.diff().max() / 64 < 2 < 4 < skewed.expert_offsets.diff().max() / 64
    assert skewed.expert_offsets.diff().min() < 32


def test_tensors_lie_as_described():
    described = TensorMeta((3, 5), (9, 1), torch.float32, aligned=False)
    tensor = product_timing._filled(described, torch.Generator().manual_seed(0), 1.0)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((3, 5), (9, 1), torch.float32)
    assert tensor.data_ptr() % 16 and 0.3 < tensor.std() < 3


def test_what_is_timed_once():
    """Products that differ in what takes no time are one: names, tails, gates without a name."""
    plain, gated = PRODUCTS["plain"], PRODUCTS["gathered, gate and up rows"]
    formula = Formula("halves", (), (("mul", ("gate", "up")),), "t0")
    assert timed_as(replace(plain, tail=True, out="other", num_ids=EXPERTS)) == timed_as(plain)
    assert timed_as(replace(plain, num_ids=2 * EXPERTS)) != timed_as(plain)
    assert timed_as(replace(gated, activation=formula)) == timed_as(gated)
    turns = timed_as(replace(gated, activation=replace(formula, layout="interleaved"))).activation
    assert turns == Activation("silu", interleaved=True)
    ungated = Formula("ungated", (), (("neg", ("gate",)),), "t0")
    assert timed_as(replace(gated, activation=ungated)).activation == Activation("relu2")
    assert timed_as(replace(gated, activation=Activation("gelu"))) != timed_as(gated)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_take_as_long_as_what_is_in_them():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    one, four = product_timing.graph_times([[lambda: x @ x] * 2, [lambda: x @ x @ x @ x @ x] * 2])
    assert 3 < four / one < 5 and 50 < one < 2000
    gemm = replace(PRODUCTS["plain"], out="out")
    timed = measure(gemm, ways(gemm), torch.device("cuda"))
    assert all(0 < each.microseconds < 1000 and not each.failure for each in timed)
