"""The program of a quantised layer whose rows are exact: weights of 8 and of 4 bits, and few tokens of the latter.

Few tokens and weights of 8 bits are in `test_exact_rows`.
"""

import itertools

import pytest
import torch

from moe_ops.kernels import pairs_decode_plan
from moe_ops.kernels.gpu import H200, Gpu
from moe_ops.kernels.program import describe
from moe_ops.types import Activation
from tests.helpers import mixed, usually
from tests.kernels import test_scaled_fused as quantised
from tests.kernels.by_name import launch, program_of
from tests.kernels.catalogue import meta
from tests.kernels.oracles import assert_close
from tests.kernels.test_scaled_fused import ACTIVATIONS, STORED
from tests.kernels.test_scaled_pairs import dense

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
FLOAT8 = STORED[0]
# Tokens, experts, K, H, I; sizes of blocks of both weights.
SIZES = {
    "a token": (1, 13, 3, 96, 64, (1, 32), (1, 32)),
    "more columns than a step has": (1, 3, 2, 512 + 64, 288, (1, 32), (1, 64)),
    "more than are written out": (1, 2, 2, 3072 + 160, 32, (1, 32), (1, 32)),
    "a last group cut short": (1, 5, 2, 160, 96, (1, 64), (1, 64)),
    "no whole words of 16 bytes": (1, 5, 2, 72, 40, (1, 32), (1, 32)),
    "blocks": (1, 5, 2, 128, 96, (4, 64), (8, 96)),
    "one group": (1, 4, 3, 32, 96, (1, 32), (1, 96)),
    "one word": (1, 2, 2, 32, 32, (1, 32), (1, 32)),
    "no words": (1, 3, 2, 36, 34, (1, 32), (1, 32)),
    "T2": (2, 13, 3, 96, 64, (1, 32), (1, 32)),
    "T7": (7, 61, 4, 64, 160, (1, 32), (2, 64)),
    "T7 in tiles": (7, 13, 4, 64, 34, (1, 32), (2, 64)),
    "hot": (90, 3, 2, 128, 160, (1, 32), (1, 32)),
}


def _layer(size, dtype, activation):
    tokens, experts, top_k, hidden, features, *blocks = SIZES[size]
    rows = (2 if activation.is_gated else 1) * features
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    if top_k > 1:
        ids[-1, -1] = -1
    at = {
        "hidden_states": torch.randn(tokens, hidden).to(dtype), "topk_ids": ids,
        "topk_weights": torch.rand(tokens, top_k),
        "w13_bias": torch.randn(experts, rows).to(dtype), "w2_bias": (torch.randn(experts, hidden) / 10).to(dtype),
        "expert_map": None, "activation": activation.spec, "rows": "exact",
    }  # fmt: skip
    for name, sizes, block in (("w13", (rows, hidden), blocks[0]), ("w2", (hidden, features), blocks[1])):
        groups = -(-sizes[0] // block[0]), -(-sizes[1] // block[1])
        at[name] = torch.randint(0, 256, (experts, sizes[0], sizes[1] // 2), dtype=torch.uint8)
        at[f"{name}_scale"] = torch.randint(118, 124, (experts, *groups), dtype=torch.uint8)
        at |= {f"{name}_block_rows": block[0], f"{name}_block_columns": block[1]}
    return at


def _weight(at, name):
    return dense(
        at[name].cpu(), at[f"{name}_scale"].cpu(), (at[f"{name}_block_rows"], at[f"{name}_block_columns"])
    )


def _expected(at, activation):
    """In float64, slot by slot."""
    import moe_ops

    double = {name: each.double() for name, each in at.items() if name in ("hidden_states", "topk_weights")}
    biases = {name: at[name].double() for name in ("w13_bias", "w2_bias") if at[name] is not None}
    return moe_ops.fused_experts(
        double["hidden_states"], _weight(at, "w13"), _weight(at, "w2"), double["topk_weights"], at["topk_ids"],
        activation, expert_map=at["expert_map"], **biases,
    )  # fmt: skip


def _launched(at, device):
    on_device = {
        name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in at.items()
    }
    return launch("scaled_fused_experts", **on_device)


LONG = (
    "more columns than a step has",
    "more than are written out",
)  # of these each once: seconds interpreted
OTHERS = mixed([size for size in SIZES if size not in LONG], DTYPES, ACTIVATIONS)
LONGER = usually(
    itertools.product(LONG, DTYPES, ACTIVATIONS),
    [(LONG[0], torch.float16, "clamped"), (LONG[1], torch.float32, "bounded")],
)


@pytest.mark.parametrize(("size", "dtype", "name"), OTHERS + LONGER, ids=str)
def test_layers_in_4_bits(size, dtype, name, device):
    at = _layer(size, dtype, ACTIVATIONS[name])
    assert_close(_launched(at, device), _expected(at, ACTIVATIONS[name]))


@pytest.mark.parametrize("size", ["a token", "T7"])
def test_experts_that_are_elsewhere(size, device):
    at = _layer(size, torch.float32, ACTIVATIONS["silu"])
    experts = torch.arange(at["w13"].shape[0], dtype=torch.int32)
    at["expert_map"] = experts.where(experts % 3 != 1, -1)
    at |= {"w13_bias": None}
    assert_close(_launched(at, device), _expected(at, ACTIVATIONS["silu"]))


@pytest.mark.parametrize("name", ["w13", "w2"])
@pytest.mark.parametrize("layout", ["columns", "gaps", "every other", "begins within a word"])
def test_layouts_of_a_token(layout, name, device):
    at = _layer("a token", torch.float32, ACTIVATIONS["clamped"])
    weight = at[name]
    if layout == "columns":
        at[name] = weight.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "every other":
        at[name] = weight.repeat_interleave(2, 2)[:, :, ::2]
    else:
        start, width = (2, 64) if layout == "begins within a word" else (0, weight.shape[2] + 16)
        wide = torch.full((*weight.shape[:2], width), 0xFF, dtype=torch.uint8)
        wide[:, :, start : start + weight.shape[2]] = weight
        at[name] = wide.to(device)[:, :, start : start + weight.shape[2]]
    at["hidden_states"] = torch.randn(96, 1).t()
    assert_close(_launched(at, device), _expected(at, ACTIVATIONS["clamped"]))


def test_what_is_shared_joins(device):
    at = _layer("a token", torch.float32, ACTIVATIONS["silu"])
    shared = torch.randn(1, 96)
    joined = _launched(at | {"shared": shared}, device) - _launched(at, device)
    assert torch.allclose(joined.cpu(), shared, atol=1e-4)


def test_powers_of_a_token(device):
    """From 2**-63 to 2**64, as in tiles; larger ones are NaN, and in nobody else's sum."""
    at = _layer("one word", torch.float32, ACTIVATIONS["ungated"]) | {"w13_bias": None, "w2_bias": None}
    at["topk_ids"], at["topk_weights"] = torch.tensor([[0]], dtype=torch.int32), torch.ones(1, 1)
    at["hidden_states"] = torch.zeros(1, 32)
    at["hidden_states"][0, 0] = 1
    at["w13"], at["w13_scale"] = torch.full_like(at["w13"], 0x02), torch.full_like(at["w13_scale"], 127)
    at["w2"] = torch.zeros_like(at["w2"])
    at["w2"][0, :, 0] = 0x02  # one times what the gate makes of one
    powers = torch.tensor([64, 65, 100, 127, 190, 191, 192, 255], dtype=torch.uint8)
    at["w2_scale"][0, :8, 0] = powers
    out = _launched(at, device).cpu()[0, :8].double()
    exact = torch.pow(2.0, powers.double() - 127)
    assert torch.equal(out[:6], exact[:6]) and out[6:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinite_numbers_of_a_token(dtype, device):
    """They stay what they are, also where a number has several parts."""
    at = _layer("one word", dtype, ACTIVATIONS["ungated"]) | {"w13_bias": None, "w2_bias": None}
    at["topk_ids"], at["topk_weights"] = torch.tensor([[0]], dtype=torch.int32), torch.ones(1, 1)
    at["hidden_states"] = torch.ones(1, 32, dtype=dtype)
    at["hidden_states"][0, 3] = float("inf")
    at["w13"], at["w2"] = torch.full_like(at["w13"], 0x22), torch.full_like(at["w2"], 0x22)  # ones
    assert (_launched(at, device).cpu() == float("inf")).all()


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("size", ["T7", "T33"])
def test_layers_in_8_bits(size, stored, device):
    at = quantised._layer(size, stored, torch.float32, ACTIVATIONS["silu"]) | {
        "rows": "exact",
        "shared": None,
    }
    on_device = {
        name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in at.items()
    }
    slots, inverse, offsets = launch("build_dispatch", on_device["topk_ids"], None, at["w13"].shape[0])
    x = on_device["hidden_states"]
    for name, index in (("w13", slots), ("w2", None)):
        block = at[f"{name}_block_rows"], at[f"{name}_block_columns"]
        given = on_device[name], on_device[f"{name}_scale"], offsets, None, on_device[f"{name}_bias"]
        x = launch("scaled_grouped_gemm", x, *given, None, None, index, *block, torch.float32)
        x = launch("gated_activation", x, "silu") if name == "w13" else x
    expected = launch("combine", x, on_device["topk_weights"], inverse, None, None, None)
    assert torch.equal(launch("scaled_fused_experts", **on_device), expected)


def _kernels(tokens, hidden=256, gpu=H200, experts=8):
    weights, ids = meta(tokens, 2, dtype=torch.float32), meta(tokens, 2, dtype=torch.int32)
    named = {
        "hidden_states": meta(tokens, hidden),
        "topk_weights": weights,
        "topk_ids": ids,
        "activation": "silu",
    }
    for name, rows, columns in (("w13", 512, hidden), ("w2", hidden, 256)):
        scale = meta(experts, rows, -(-columns // 32), dtype=torch.uint8)
        named |= {name: meta(experts, rows, columns // 2, dtype=torch.uint8), f"{name}_scale": scale}
        named |= {f"{name}_block_rows": 1, f"{name}_block_columns": 32}
    launches = program_of("scaled_fused_experts", gpu=gpu, rows="exact", **named).launches
    return [each.kernel.__name__.strip("_").removesuffix("_kernel") for each in launches]


def test_launches():
    tiles = ["rank", "tile_map", "scaled_pairs", "activation", "scaled_pairs", "combine"]
    rows = ["pairs_gemv", "pairs_gemv", "combine"]
    assert _kernels(1) == _kernels(2) == _kernels(8, experts=32) == rows
    assert _kernels(5) == _kernels(9, experts=64) == tiles  # more slots than experts, and tokens
    assert _kernels(1, hidden=260) == _kernels(1, gpu=Gpu(75, 72, H200.shared_memory)) == tiles
    assert _kernels(1, gpu=Gpu(80, 108, H200.shared_memory)) == rows


def _first(tokens, slots, scale=torch.uint8, dtype=torch.bfloat16, short=0, gpu=H200, of=(64, 64), down=None):
    """The first kernel that reads weights. of: experts here, and in all. down: scales of w2, if others."""
    (here, everywhere), inner = of, 1024 - short
    ids = meta(tokens, slots // tokens, dtype=torch.int32)
    named = {"hidden_states": meta(tokens, 2048, dtype=dtype), "topk_ids": ids, "activation": "silu"}
    named |= {"topk_weights": meta(*ids.shape, dtype=torch.float32), "rows": "exact"}
    named |= {"expert_map": None if here == everywhere else meta(everywhere, dtype=torch.int32)}
    for name, rows, depth, of_one in (("w13", 2 * inner, 2048, scale), ("w2", 2048, inner, down or scale)):
        columns = 16 if of_one == FLOAT8 else 32
        named |= {name: meta(here, rows, depth // 2, dtype=torch.uint8)}
        named |= {f"{name}_scale": meta(here, rows, -(-depth // columns), dtype=of_one)}
        named |= {f"{name}_block_rows": 1, f"{name}_block_columns": columns}
    launches = program_of("scaled_fused_experts", gpu=gpu, **named).launches
    names = [each.kernel.__name__ for each in launches]
    return next(name for name in names if name.startswith(("pairs", "scaled"))).removesuffix("_kernel")


def test_several_tokens_of_many_numbers_are_tiles():
    """750 million, of integers twice that, in NVFP4 two thousand: 119.2, 238.4 and 317.9 slots of these.

    Not a token, nor what is not in 16 bits.
    """
    rows, tiles, many = "pairs_gemv", "scaled_pairs", (512, 512)
    assert _first(2, 118, of=many) == rows and _first(2, 120, of=many) == _first(8, 128, of=many) == tiles
    assert _first(1, 120, of=many) == _first(1, 512, of=many) == rows == _first(2, 120, short=64, of=many)
    assert _first(2, 316, FLOAT8, of=many) == rows and _first(2, 318, FLOAT8, of=many) == tiles
    assert _first(2, 316, down=FLOAT8, of=many) == _first(2, 316, FLOAT8, down=torch.uint8, of=many) == rows
    assert (
        _first(2, 238, torch.bfloat16, of=many) == rows and _first(2, 240, torch.bfloat16, of=many) == tiles
    )
    assert _first(2, 120, torch.bfloat16, down=torch.uint8, of=many) == tiles
    for scale, dtype, kernel in (
        (torch.uint8, torch.float16, rows),
        (torch.uint8, torch.float32, rows),
    ):
        assert _first(2, 120, scale, dtype, of=many) == kernel
    assert _first(2, 120, of=(256, 512)) == rows and _first(2, 240, of=(256, 512)) == tiles
    assert _first(2, 240, torch.bfloat16, gpu=Gpu(80, 108, H200.shared_memory), of=many) == rows  # no boxes


def test_several_tokens_that_share_experts_are_tiles():
    """With more slots than half the experts that ids can name; in NVFP4 with more than there are."""
    rows, tiles = "pairs_gemv", "scaled_pairs"
    assert _first(2, 32) == rows and _first(2, 34) == tiles and _first(1, 64) == rows
    assert _first(2, 34, torch.bfloat16) == tiles
    assert _first(2, 34, of=(64, 128)) == rows
    assert _first(2, 64, FLOAT8) == rows and _first(2, 66, FLOAT8) == tiles


def test_integers_beside_float32_are_tiles():
    """Others than in 16 bits this kernel unpacks none to."""
    assert _first(1, 8, torch.bfloat16, torch.float32) == "scaled_pairs"
    assert _first(1, 8, torch.bfloat16, torch.float16) == "pairs_gemv"


def _launches_of_a_token(slots, hidden, inner, scale=torch.uint8, columns=32, activation="silu"):
    weights, ids = meta(1, slots, dtype=torch.float32), meta(1, slots, dtype=torch.int32)
    named = {
        "hidden_states": meta(1, hidden),
        "topk_weights": weights,
        "topk_ids": ids,
        "activation": activation,
    }
    halves = 2 if Activation(activation).is_gated else 1
    for name, rows, depth in (("w13", halves * inner, hidden), ("w2", hidden, inner)):
        named |= {name: meta(64, rows, depth // 2, dtype=torch.uint8)}
        named |= {f"{name}_scale": meta(64, rows, depth // columns, dtype=scale)}
        named |= {f"{name}_block_rows": 1, f"{name}_block_columns": columns}
    return program_of("scaled_fused_experts", rows="exact", **named).launches[:2]


def test_how_many_warps_share_a_depth():
    """As many as 132 multiprocessors have registers for, with some steps of 128 columns each, from two to eight."""

    def parts(*layer, **gate):
        launches = _launches_of_a_token(*layer, **gate)
        assert all(each.num_warps == each.args["PARTS"] for each in launches)
        return [each.num_warps for each in launches]

    assert parts(2, 4096, 14336) == [2, 8]  # Mixtral: 1792 and 512 programs, of a depth of whole steps
    assert parts(2, 4096, 14336, torch.bfloat16, 128) == [2, 4]  # integers take more registers
    assert parts(2, 4096, 6400) == [2, 4]  # and so do steps behind whole ones
    assert parts(4, 2880, 2880) == [2, 4]  # gpt-oss: 720 and 720
    assert parts(8, 2048, 768) == [4, 2]  # Qwen3-30B-A3B: 384 and 1024, whose depth is six parts
    assert parts(6, 2048, 1408) == [4, 4]  # DeepSeek-V2-Lite: 528 and 768
    assert parts(1, 512, 512) == [2, 2]  # four parts of a depth
    assert parts(8, 7168, 2048) == [2, 2]
    assert parts(4, 2880, 2880, activation="relu2") == [4, 4]  # without a gate the first is as the second


def test_how_a_depth_is_gone_through():
    """At once two steps, or four of gates, but of deep ones in NVFP4, are of whole parts; then the rest."""

    def steps(*layer, **gate):
        names, launches = ("AT_ONCE", "WHOLE", "REST"), _launches_of_a_token(*layer, **gate)
        return [[each.args[name] for name in names] for each in launches]

    assert steps(4, 2880, 2880) == [[4, 16, 4], [2, 16, 2]]
    assert steps(4, 2880, 2880, FLOAT8, 16) == [[4, 16, 4], [2, 16, 2]]
    assert steps(8, 4096, 1536, FLOAT8, 16) == [[2, 32, 0], [2, 12, 0]]
    assert steps(8, 4096, 1536, torch.bfloat16, 128) == [[4, 32, 0], [2, 12, 0]]
    assert steps(2, 64, 64) == [[4, 0, 1], [2, 0, 1]]
    assert steps(4, 2880, 2880, activation="relu2") == [[2, 16, 2], [2, 16, 2]]


def test_scales_of_a_part():
    """Eight of NVFP4, in pairs where rows of them begin with one; one of 128 columns or more; else four."""

    def scales(*layer):
        return [each.args["GROUPS"] for each in _launches_of_a_token(*layer)]

    assert scales(4, 2880, 2880, FLOAT8, 16) == [8, 8]
    assert scales(4, 2880, 2880) == [4, 4] == scales(4, 512, 512, torch.bfloat16, 64)
    assert scales(4, 512, 512, torch.bfloat16, 128) == [1, 1] == scales(4, 512, 512, torch.bfloat16, 512)
    paired = pairs_decode_plan._are_even
    assert paired(describe(meta(8, 64, 180))) and not paired(describe(meta(8, 64, 181)[..., :180]))
    assert not paired(describe(meta(8, 64, 360)[..., ::2])) and not paired(
        describe(meta(8, 64, 182)[..., 1:181])
    )
