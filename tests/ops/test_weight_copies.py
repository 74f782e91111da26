"""Copies of quantised weights by slabs: how many features each has, and layers and products that are made of them."""

import weakref

import pytest
import torch

import moe_ops
from moe_ops import scaled, scaled_experts, slabs, weight_copies
from moe_ops.arguments import Epilogue
from moe_ops.pairs import PAIRS
from moe_ops.scaled_arguments import ScaledGroupedGemm
from moe_ops.slabs import features_at_once
from moe_ops.types import Activation
from moe_ops.values import ScaledLinear
from moe_ops.weight_formats import quantised_weight
from tests.helpers import assert_matches_oracle
from tests.ops.test_dequantise_weight import FORMATS, A, E, I, T, layer_of, linear


def _weight(experts, features, depth, block_rows, stored=torch.int8):
    weight = torch.empty(
        experts, features, depth // (2 if stored == PAIRS else 1), dtype=stored, device="meta"
    )
    return ScaledLinear(weight, weight, None, block_rows, 32)


# Experts, features, depth, rows of a block, halves: features at once.
SIZES = {
    "Mixtral, w13": (8, 28672, 4096, 1, 2, 14336),
    "as large as may be": (8, 32768, 4096, 1, 2, 16384),
    "gpt-oss-120b, alternating": (128, 5760, 2880, 1, 1, 1920),
    "gpt-oss-120b, w2": (128, 2880, 2880, 1, 1, 2880),
    "DeepSeek-V3, w13": (256, 4096, 7168, 128, 2, 256),
    "DeepSeek-V3, w2": (256, 7168, 2048, 128, 1, 1792),
    "a scale for all": (256, 4096, 7168, 4096, 2, 256),
    "a scale for each half": (256, 4096, 7168, 2048, 2, 256),
    "blocks of no power of two": (256, 7200, 2048, 96, 1, 1920),
    "a tile at once": (1024, 256, 8192, 1, 1, 128),
    "blocks that start in the other half": (256, 4096, 7168, 100, 2, 0),
    "blocks as tall as two thirds": (256, 4096, 7168, 3000, 2, 0),
    "blocks that are too large": (256, 7168, 2048, 4000, 1, 0),
    "experts that are too many": (2**17, 256, 128, 1, 1, 0),
    "no experts": (0, 256, 128, 1, 2, 128),
}


@pytest.mark.parametrize("case", SIZES)
def test_features_at_once(case):
    *sizes, halves, expected = SIZES[case]
    assert features_at_once(_weight(*sizes), torch.bfloat16, halves) == expected
    assert features_at_once(_weight(*sizes, stored=PAIRS), torch.bfloat16, halves) == expected


@pytest.fixture(params=[12, 16, 10_000])
def most_features(request, monkeypatch):
    """Of a weight as deep as `A`; the first two are fewer than each weight of these tests has."""
    most = request.param * E * A * torch.float64.itemsize
    monkeypatch.setattr(slabs, "_MOST_BYTES", most)
    monkeypatch.setattr(slabs, "_TILE", 2)
    alive, largest, copy = weakref.WeakSet(), [0], weight_copies.copied

    def copied(*args):
        made = copy(*args)
        alive.add(made.weight.untyped_storage())
        largest[0] = max(largest[0], sum(storage.nbytes() for storage in alive))
        return made

    monkeypatch.setattr(weight_copies, "copied", copied)
    yield request.param
    assert 0 < largest[0] <= most


GATES = {
    "halves": Activation("swiglu_oai"),
    "alternating": Activation("swiglu_oai", interleaved=True),
    "none": Activation("relu2"),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", FORMATS)
def test_layers(name, gate, most_features):
    """Are those of their stages, with all that joins a token's sum."""
    rows, spec = (2 * I if GATES[gate].is_gated else I), GATES[gate].spec
    w13 = linear(_blocks_of_two(name, rows, A), torch.randn(E, rows, dtype=torch.float64))
    w2 = linear(_blocks_of_two(name, A, I), torch.randn(E, A, dtype=torch.float64))
    joined = Epilogue(torch.randn(T, 1).double(), torch.randn(T, A).double())
    args = layer_of(name, torch.float64, w13=w13, w2=w2, activation=spec, epilogue=joined)
    assert_matches_oracle(scaled_experts._of_copies(args), scaled_experts.run_stages(args))


def _blocks_of_two(name, rows, columns):
    """Two rows have a scale."""
    stored, (_, width) = FORMATS[name]
    weight = torch.randn(E, rows, columns, dtype=torch.float64) / 8
    return quantised_weight(weight, (2, min(width, columns)), stored, name.endswith("zeros"))


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_products(name, gathers, most_features):
    args = layer_of(name, torch.float64)
    slots, _, offsets = moe_ops.build_dispatch(args.topk_ids, E)
    x = args.hidden_states if gathers else moe_ops.permute(args.hidden_states, slots)
    weight = linear(_blocks_of_two(name, 2 * I, A), torch.randn(E, 2 * I))
    product = ScaledGroupedGemm(x, None, weight, offsets, slots if gathers else None, x.dtype)
    found, whole = scaled._copied(product), scaled._reference(product)
    assert found.is_contiguous()
    assert_matches_oracle(found, whole)
