"""The one program of a layer in 8 bits: bit for bit that of its stages' kernels, but for few tokens."""

import pytest
import torch
import triton

from moe_ops.kernels import plans, scaled_decode
from moe_ops.kernels.program import describe
from moe_ops.scaled_arguments import ScaledFusedExperts
from moe_ops.types import Activation
from moe_ops.values import ScaledLinear
from tests.helpers import mixed, usually
from tests.kernels import test_scaled
from tests.kernels.by_name import launch, program_of, record
from tests.kernels.catalogue import meta
from tests.kernels.test_scaled import STORED

# Tokens, experts, K, H, I; sizes of blocks.
FEW = {
    "T2": (2, 13, 3, 48, 40, (1, 48), (1, 40)),
    "T4": (4, 13, 3, 96, 64, (32, 32), (32, 32)),
    "rows": (1, 13, 3, 48, 40, (1, 48), (1, 40)),
    "steps": (1, 3, 2, 1100, 36, (128, 128), (32, 8)),
    "one scale over steps": (1, 3, 2, 1100, 36, (1, 1100), (1, 36)),
    "deep": (1, 2, 1, 2100, 12, (24, 128), (128, 12)),
    "a last block that is cut short": (1, 5, 3, 136, 72, (48, 128), (128, 64)),
    "groups": (1, 7, 2, 64, 33, (1, 32), (1, 8)),
    "rows between": (1, 7, 3, 64, 30, (6, 16), (64, 30)),
    "matrices": (1, 5, 1, 40, 24, (48, 40), (40, 24)),
    "a half that begins within": (1, 5, 2, 64, 30, (8, 16), (64, 30)),
    "a pair in a block": (1, 5, 2, 64, 32, (4, 16), (64, 32)),
}
SIZES = {
    "T5": (5, 13, 2, 48, 40, (1, 48), (1, 40)),
    "T2, more slots than experts": (2, 5, 3, 48, 40, (1, 48), (1, 40)),
    "T7": (7, 13, 4, 96, 64, (32, 32), (32, 32)),
    "T33": (33, 13, 4, 64, 33, (64, 64), (7, 5)),
    "hot": (90, 3, 2, 128, 160, (128, 128), (128, 128)),
}
UNUSUAL = ("rows that are not finite", "columns apart", "rows apart")
LIKE = dict.fromkeys(UNUSUAL, "one scale over steps") | {"rows apart": "T2"}
ACTIVATIONS = {
    "silu": Activation("silu"),
    "clamped": Activation("swiglu_oai", interleaved=True),
    "ungated": Activation("relu2"),
    "bounded": Activation("silu", limit=0.5),
}


def _weights(experts, rows, columns, block, stored):
    weight = test_scaled._stored((experts, rows, columns), stored)
    blocks = -(-rows // block[0]), -(-columns // block[1])
    return weight, test_scaled._scale(experts, *blocks) / (400 if stored == torch.int8 else 80) / columns**0.5


def _layer(size, stored, dtype, activation):
    tokens, experts, top_k, hidden, features, up_block, down_block = (SIZES | FEW)[size]
    rows = (2 if activation.is_gated else 1) * features
    w13, w13_scale = _weights(experts, rows, hidden, up_block, stored)
    w2, w2_scale = _weights(experts, hidden, features, down_block, stored)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    if top_k > 1:
        ids[-1, -1] = -1
    return {
        "hidden_states": torch.randn(tokens, hidden).to(dtype),
        "w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale,
        "topk_weights": torch.rand(tokens, top_k), "topk_ids": ids,
        "w13_bias": torch.randn(experts, rows).to(dtype), "w2_bias": (torch.randn(experts, hidden) / 10).to(dtype),
        "expert_map": None, "shared": torch.randn(tokens, hidden).to(dtype),
        "w13_block_rows": up_block[0], "w13_block_columns": up_block[1],
        "w2_block_rows": down_block[0], "w2_block_columns": down_block[1],
        "activation": activation.spec, "rows": "quantised",
    }  # fmt: skip


def _stored_as(activated, dtype):
    """What a kernel stores: the interpreter cuts bfloat16 off instead of rounding."""
    if triton.knobs.runtime.interpret and dtype == torch.bfloat16 and activated.dtype == torch.float32:
        activated = (activated.view(torch.int32) & -65536).view(torch.float32)
    return activated.to(dtype)


def _stages(at, of_gate=None):
    """Launch by launch. of_gate: the dtype that gate and up are rounded to, the tokens' unless it is given."""
    dtype = at["hidden_states"].dtype
    slots, inverse, offsets = launch("build_dispatch", at["topk_ids"], at["expert_map"], at["w13"].shape[0])

    def product(x, name, index, dtype):
        block = at[f"{name}_block_rows"], at[f"{name}_block_columns"]
        rows, scale = launch("quantise_rows", x, at.get(f"{name}_input_scale"), block[1], at[name].dtype)
        stored = at[name], at[f"{name}_scale"]
        given = rows, *stored, offsets, scale, at[f"{name}_bias"], None, None, index, *block, dtype
        return launch("scaled_grouped_gemm", *given)

    gate_up = product(at["hidden_states"], "w13", slots, of_gate or dtype)
    activated = _stored_as(launch("gated_activation", gate_up, at["activation"]), dtype)
    expert_out = product(activated, "w2", None, dtype)
    return launch("combine", expert_out, at["topk_weights"], inverse, at["shared"], None, None)


@pytest.mark.parametrize(
    ("size", "stored", "dtype", "name"),
    mixed(SIZES, STORED, (torch.bfloat16, torch.float32, torch.float16), ACTIVATIONS),
    ids=str,
)
def test_bits_are_those_of_the_stages(size, stored, dtype, name, device):
    at = _layer(size, stored, dtype, ACTIVATIONS[name])
    at = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in at.items()}
    found, expected = launch("scaled_fused_experts", **at), _stages(at)
    assert expected.isfinite().all() and torch.equal(found, expected)


def _assert_near(at, device):
    """As far as a sum in another order can turn a rounding: programs of single rows do not round gate and up.

    Of experts alone: beside what is shared an error of theirs would be small.
    """
    at = at | {"shared": None}
    at = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in at.items()}
    of_gate = torch.float32 if at["w13"].dtype.is_floating_point else None  # those of int8 are their stages
    found, expected = launch("scaled_fused_experts", **at).double(), _stages(at, of_gate).double()
    assert found.isfinite().all() and (found - expected).norm() <= 3e-3 * expected.norm()


@pytest.mark.parametrize(
    ("size", "stored", "dtype", "name"),
    mixed(FEW, STORED, (torch.bfloat16, torch.float32, torch.float16), ACTIVATIONS),
    ids=str,
)
def test_few_tokens(size, stored, dtype, name, device):
    _assert_near(_layer(size, stored, dtype, ACTIVATIONS[name]), device)


@pytest.mark.parametrize(
    "size", usually([*FEW, *UNUSUAL], ["T4", "one scale over steps", "groups", *UNUSUAL])
)
def test_rows_that_a_program_quantises_have_the_bits_of_those_of_a_launch(size, device, monkeypatch):
    at = _layer(LIKE.get(size, size), STORED[0], torch.bfloat16, ACTIVATIONS["silu"])
    if size == "rows that are not finite":
        at["hidden_states"][0, 1027], at["hidden_states"][0, 700] = float("nan"), float("inf")
    if size == "columns apart":
        at["hidden_states"] = torch.randn(1, 2 * 1100).bfloat16()[:, ::2]
    if size == "rows apart":
        at["hidden_states"] = torch.randn(2, 48 + 16).bfloat16()[:, :48]
    at = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in at.items()}
    found = launch("scaled_fused_experts", **at)
    monkeypatch.setattr(scaled_decode, "_MOST_OF_TOKEN", 0)
    monkeypatch.setattr(scaled_decode, "_MOST_OF_SLOT", 0)
    monkeypatch.setattr(plans, "_PLANS", dict(plans._PLANS))
    plans._PLANS[ScaledFusedExperts] = plans._plan(ScaledFusedExperts, plans.PROGRAMS[ScaledFusedExperts])
    expected = launch("scaled_fused_experts", **at)
    assert expected.isfinite().all() == (size != "rows that are not finite")
    assert torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("depth", "columns", "of_tokens", "of_slots"),
    [
        (1024, 1024, True, True),
        (1024, 128, False, True),
        (1032, 1032, True, False),
        (2048, 2048, True, False),
        (2056, 2056, False, False),
        (96, 24, False, False),
    ],
)
def test_which_rows_a_program_quantises(depth, columns, of_tokens, of_slots):
    weight, blocks = meta(4, 64, depth, dtype=STORED[0]), -(-depth // columns)
    linear = ScaledLinear(describe(weight), describe(meta(4, 1, blocks)), None, 64, columns)
    args = record("scaled_fused_experts", **_of_tokens(1, STORED[0]))._replace(w13=linear, w2=linear)
    assert [scaled_decode.reads_plain_rows(args, name) for name in ("w13", "w2")] == [of_tokens, of_slots]


@pytest.mark.parametrize(
    ("size", "name"), [("a half that begins within", "silu"), ("a pair in a block", "clamped")]
)
def test_rows_of_a_program_share_scales(size, name, device):
    """A program takes single rows where the up rows begin within a block, or a block has as many rows as gate rows."""
    _assert_near(_layer(size, STORED[0], torch.float32, ACTIVATIONS[name]), device)


@pytest.mark.parametrize("size", ["T7", "rows", "rows between"])
def test_experts_that_are_elsewhere(size, device):
    at = _layer(size, STORED[0], torch.float32, ACTIVATIONS["silu"])
    experts = torch.arange(at["w13"].shape[0], dtype=torch.int32)
    at["expert_map"] = experts.where(experts % 3 != 1, -1)
    _assert_near(at, device)


def test_what_is_shared_joins(device):
    at = _layer("rows", STORED[0], torch.float32, ACTIVATIONS["silu"])
    at = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in at.items()}
    joined = launch("scaled_fused_experts", **at) - launch("scaled_fused_experts", **at | {"shared": None})
    assert torch.allclose(joined, at["shared"], atol=1e-5)


@pytest.mark.parametrize("transposed", ["w13", "w2"])
def test_weights_in_columns(transposed, device):
    at = _layer("groups", torch.float8_e4m3fn, torch.float32, ACTIVATIONS["silu"])
    at[transposed] = at[transposed].transpose(1, 2).contiguous().transpose(1, 2)
    _assert_near(at, device)


def test_blocks_wider_than_a_program_has_columns(device):
    """Then what the gate makes is computed twice, for the largest and for the rows."""
    gate_up = torch.randn(1, 2 * 9000)
    w13, w13_scale = _weights(1, 2 * 9000, 4, (1, 4), torch.int8)
    w2, w2_scale = _weights(1, 3, 9000, (1, 9000), torch.int8)
    named = {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}
    named |= {
        "hidden_states": torch.randn(2, 4),
        "topk_weights": torch.rand(2, 1),
        "topk_ids": torch.zeros(2, 1, dtype=torch.int32),
    }
    named |= {"w13_bias": gate_up, "w2_bias": None, "expert_map": None, "shared": None}
    named = {key: value if value is None else value.to(device) for key, value in named.items()}
    named |= dict.fromkeys(("w13_block_rows", "w2_block_rows"), 1)
    at = named | {"w13_block_columns": 4, "w2_block_columns": 9000, "activation": "silu", "rows": "quantised"}
    assert torch.equal(launch("scaled_fused_experts", **at), _stages(at))


def _stored(of):
    named = {"activation": "silu", "rows": "quantised"}
    for name, rows, columns in (("w13", 512, 256), ("w2", 256, 256)):
        blocks = {f"{name}_block_rows": 128, f"{name}_block_columns": 128}
        scale = meta(8, rows // 128, columns // 128, dtype=torch.float32)
        named |= {name: meta(8, rows, columns, dtype=of), f"{name}_scale": scale, **blocks}
    return named


def _of_tokens(tokens, of, dtype=torch.bfloat16):
    weights, ids = meta(tokens, 2, dtype=torch.float32), meta(tokens, 2, dtype=torch.int32)
    tokens = {"hidden_states": meta(tokens, 256, dtype=dtype), "topk_weights": weights, "topk_ids": ids}
    return _stored(of) | tokens


def _names(tokens, of):
    launches = program_of("scaled_fused_experts", **_of_tokens(tokens, of)).launches
    return [launch.kernel.__name__.strip("_").removesuffix("_kernel") for launch in launches]


def test_launches():
    """Products share a tile map; few tokens in float8 need none, nor a sort."""
    product = "scaled_grouped_gemm"
    tiles = ["rank", "quantise_rows", "tile_map", product, "quantise_rows", product, "combine"]
    for tokens, stored in ((16, STORED[0]), (5, STORED[0]), (1, torch.int8)):
        assert _names(tokens, stored) == tiles
    for tokens in (1, 2, 4):
        assert _names(tokens, STORED[0]) == ["quantise_rows", "scaled_gemv", "scaled_gemv", "combine"]


def test_which_layers_of_few_tokens_are_single_rows():
    def of(tokens, experts=64, top_k=8, hidden=2048, features=1024, **changed):
        given = _of_tokens(tokens, STORED[0])
        given |= {"w13": meta(experts, 2 * features, hidden, dtype=STORED[0])}
        given |= {"w2": meta(experts, hidden, features, dtype=STORED[0])}
        given |= {"topk_ids": meta(tokens, top_k, dtype=torch.int32)} | changed
        return scaled_decode.multiplies_rows(record("scaled_fused_experts", **given))

    assert of(1) and of(3) and not of(4)  # 201 MB
    assert of(4, features=1016) and not of(5, features=512)
    assert of(4, experts=32, features=512) and not of(4, experts=31, features=512)
    assert of(1, hidden=7168, features=2048) and of(1, experts=4)
    elsewhere = meta(128, dtype=torch.int32)
    assert of(1, expert_map=elsewhere) and not of(2, expert_map=elsewhere)
    assert not of(1, w13=meta(64, 2048, 2048, dtype=torch.int8))


def _is_taken(**changed):
    return plans.is_taken(record("scaled_fused_experts", **_of_tokens(2, STORED[0]) | changed))


def test_what_is_not_for_the_kernels():
    """float64, as `scaled.takes` says of products, and layers of nothing."""
    assert _is_taken()
    assert not _is_taken(hidden_states=meta(2, 256, dtype=torch.float64))
    nothing = {"topk_ids": meta(2, 0, dtype=torch.int32)}, {"w13": meta(8, 0, 256, dtype=STORED[0])}
    for each in (*nothing, {"w2": meta(8, 0, 256, dtype=STORED[0])}):
        assert not _is_taken(**each)
