"""Few exact tokens times weights of 8 bits: programs of single rows, which nothing quantises."""

import itertools

import pytest
import torch

from moe_ops.kernels.gpu import H200, Gpu
from tests.helpers import mixed
from tests.kernels import test_scaled_exact as exact, test_scaled_fused as quantised
from tests.kernels.by_name import program_of
from tests.kernels.catalogue import meta
from tests.kernels.oracles import assert_close
from tests.kernels.test_scaled_fused import ACTIVATIONS, STORED

FLOAT8, INT8 = STORED
# Tokens, experts, K, H, I; sizes of blocks, as `test_scaled_fused` has them. Of its own:
SIZES = {
    "one step": (1, 3, 2, 2048, 16, (1, 2048), (1, 16)),
    "blocks within a step": (1, 3, 2, 1536, 36, (64, 128), (256, 36)),
    "a step too long": (1, 2, 1, 2056, 12, (1, 2056), (1, 12)),
    "T4": (4, 24, 3, 64, 40, (8, 32), (1, 40)),
}
FEW = {**{size: each for size, each in quantised.FEW.items() if size not in ("T2", "T4")}, **SIZES}
"""Of two tokens more there need to be twice as many experts as slots."""


def _layer(size, stored, dtype, name, monkeypatch):
    monkeypatch.setattr(quantised, "FEW", FEW)
    at = quantised._layer(size, stored, dtype, ACTIVATIONS[name])
    return at | {"rows": "exact", "shared": None}


def _weight(at, name):
    """In float64, by a loop over blocks."""
    weight = at[name].double()
    rows, columns = (at[f"{name}_block_{side}"] for side in ("rows", "columns"))
    for row, column in itertools.product(range(0, weight.shape[1], rows), range(0, weight.shape[2], columns)):
        scale = at[f"{name}_scale"][:, row // rows, column // columns].double()
        weight[:, row : row + rows, column : column + columns] *= scale[:, None, None]
    return weight


def _assert_right(at, name, device, monkeypatch):
    monkeypatch.setattr(exact, "_weight", _weight)
    assert_close(exact._launched(at, device), exact._expected(at, ACTIVATIONS[name]))


@pytest.mark.parametrize(
    ("size", "stored", "dtype", "name"),
    mixed(FEW, STORED, (torch.bfloat16, torch.float32, torch.float16), ACTIVATIONS),
    ids=str,
)
def test_few_tokens(size, stored, dtype, name, device, monkeypatch):
    at = _layer(size, stored, dtype, name, monkeypatch)
    assert _kernels(at)[0] == "scaled_gemv"
    _assert_right(at, name, device, monkeypatch)


@pytest.mark.parametrize("stored", STORED)
def test_tokens_keep_what_8_bits_lose(stored, device, monkeypatch):
    """Columns of a row that differ a thousandfold, of which rows in 8 bits would keep the largest."""
    at = _layer("rows", stored, torch.float32, "silu", monkeypatch)
    at["hidden_states"] *= torch.logspace(-4, 0, 48)
    at["w13_bias"] = at["w2_bias"] = None
    at["w13_scale"] = at["w13_scale"].expand(-1, -1, 48) / torch.logspace(-4, 0, 48)
    at |= {"w13_block_columns": 1}
    _assert_right(at, "silu", device, monkeypatch)


@pytest.mark.parametrize("size", ["T4", "rows"])
def test_experts_that_are_elsewhere(size, device, monkeypatch):
    at = _layer(size, FLOAT8, torch.bfloat16, "silu", monkeypatch)
    experts = torch.arange(at["w13"].shape[0], dtype=torch.int32)
    at["expert_map"] = experts.where(experts % 3 != 1, -1)
    _assert_right(at, "silu", device, monkeypatch)


def test_a_token_that_is_not_finite(device, monkeypatch):
    """Nobody else's row has anything of it."""
    at = _layer("T4", FLOAT8, torch.float32, "silu", monkeypatch)
    clean = exact._launched(at, device)
    at["hidden_states"][2, 5] = float("nan")
    found = exact._launched(at, device)
    assert found[2].isnan().all() and torch.equal(found[[0, 1, 3]], clean[[0, 1, 3]])


def _of(tokens, experts=64, top_k=8, stored=FLOAT8, block=None, **changed):
    named = {"hidden_states": meta(tokens, 256), "rows": "exact", "activation": "silu"}
    named |= {"topk_weights": meta(tokens, top_k, dtype=torch.float32)}
    named |= {"topk_ids": meta(tokens, top_k, dtype=torch.int32)}
    for name, rows in (("w13", 512), ("w2", 256)):
        sizes = block or (1, 256)
        scale = meta(experts, rows // sizes[0], 256 // sizes[1], dtype=torch.float32)
        named |= {name: meta(experts, rows, 256, dtype=stored), f"{name}_scale": scale}
        named |= {f"{name}_block_rows": sizes[0], f"{name}_block_columns": sizes[1]}
    return named | changed


def _kernels(at):
    launches = program_of("scaled_fused_experts", **at, gpu=H200).launches
    return [each.kernel.__name__.strip("_").removesuffix("_kernel") for each in launches]


def _are_rows(*args, **named):
    return _kernels(_of(*args, **named))[0] == "scaled_gemv"


def test_which_layers_are_single_rows():
    """A token; of more those with twice as many experts as slots, up to eight in float8 and up to four in int8."""
    assert _are_rows(1, experts=2, top_k=2) and _are_rows(4) and not _are_rows(5)
    assert _are_rows(8, experts=128) and not _are_rows(8, experts=127) and not _are_rows(9, experts=256)
    assert _are_rows(4, stored=INT8) and not _are_rows(5, experts=128, stored=INT8)
    for block in ((1, 128), (1, 32)):
        assert _are_rows(1, block=block) and not _are_rows(2, block=block)
    assert _are_rows(8, experts=128, block=(128, 128))
    elsewhere = meta(128, dtype=torch.int32)
    assert _are_rows(1, expert_map=elsewhere) and not _are_rows(2, expert_map=elsewhere)


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_other_weights_are_tiles(name):
    """In 4 bits beside one in 8, and in columns; one product's scales of groups keep both to one token."""
    pairs = {name: meta(64, 512 if name == "w13" else 256, 128, dtype=torch.uint8)}
    scale = {f"{name}_scale": meta(*pairs[name].shape[:2], 8, dtype=torch.uint8), f"{name}_block_columns": 32}
    assert not _are_rows(1, **pairs, **scale)
    assert not _are_rows(1, **{name: meta(64, 256, pairs[name].shape[1], dtype=FLOAT8).transpose(1, 2)})
    groups = meta(*pairs[name].shape[:2], 2, dtype=torch.float32)
    named = {f"{name}_scale": groups, f"{name}_block_columns": 128}
    assert _are_rows(1, **named) and not _are_rows(2, **named)


def test_a_gpu_that_does_not_read_float8():
    named = {"w2": meta(64, 256, 256, dtype=FLOAT8), "gpu": Gpu(80, 108, H200.shared_memory)}
    with pytest.raises(
        ValueError, match=r"^weight has dtype torch.float8_e4m3fn: expected torch.int8 on sm_80$"
    ):
        program_of("scaled_fused_experts", **_of(1, stored=INT8, **named))


def test_launches():
    for tokens, stored in ((1, INT8), (4, INT8), (8, FLOAT8)):
        assert _kernels(_of(tokens, 128, stored=stored)) == ["scaled_gemv", "scaled_gemv", "combine"]


@pytest.mark.parametrize(
    ("depth", "rows", "step", "features"),
    [(2048, "exact", 2048, 2), (2056, "exact", 1024, 2), (64, "exact", 64, 2), (2048, "quantised", 1024, 4)],
)
def test_a_program_reads_four_rows_at_once(depth, rows, step, features):
    """Rows that are quantised are more, and come in shorter steps."""
    named = _of(1, 4, 2) | {"hidden_states": meta(1, depth), "rows": rows}
    for name, sizes in (("w13", (64, depth)), ("w2", (depth, 32))):
        named |= {name: meta(4, *sizes, dtype=FLOAT8), f"{name}_scale": meta(4, 1, 1, dtype=torch.float32)}
        named |= {f"{name}_block_rows": sizes[0], f"{name}_block_columns": sizes[1]}
    launches = program_of("scaled_fused_experts", **named, gpu=H200).launches
    first = next(each for each in launches if "gemv" in each.kernel.__name__)
    assert (first.args["BLOCK_K"], first.args["BLOCK_N"]) == (step, features)
    assert first.args["EXACT"] == (rows == "exact")
