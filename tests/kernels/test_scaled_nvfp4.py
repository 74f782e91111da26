"""Kernels of NVFP4 weights: numbers of 4 bits, scales in float8 of 16 columns, a global scale of each matrix."""

from dataclasses import replace

import pytest
import torch

from moe_ops.kernels.dequantise_weight import takes
from moe_ops.kernels.gpu import H200, Gpu
from moe_ops.pairs import PAIRS
from tests.helpers import mixed, usually
from tests.kernels import oracles, test_scaled_exact as of_layers
from tests.kernels.by_name import launch, program_of, record
from tests.kernels.catalogue import meta
from tests.kernels.oracles import assert_close
from tests.kernels.test_scaled_fused import ACTIVATIONS
from tests.kernels.test_scaled_pairs import number

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
FLOAT8 = torch.float8_e4m3fn
# Features, depth, block: by TMA and not, depths that end within a step, a group, a pair of groups.
SIZES = {
    "as published": (130, 256, (1, 16)),
    "a short last step": (72, 176, (1, 16)),
    "a short last group": (34, 84, (1, 16)),
    "blocks": (40, 288, (8, 48)),
    "pairs of groups": (40, 192, (1, 32)),
    "one block": (16, 50, (16, 50)),
    "one pair": (2, 2, (1, 16)),
    "no depth": (8, 0, (1, 16)),
}
EXPERTS = 4
OFFSETS = {"ragged": [0, 5, 5, 9, 20], "none": [0, 0, 0, 0, 0], "one expert": [0, 0, 23, 23, 23]}
SLOTS = 23


def float8(byte: int) -> float:
    """What the bits of a float8_e4m3fn that is a number stand for."""
    exponent, fraction = (byte >> 3) & 15, byte & 7
    magnitude = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
    return -magnitude if byte & 128 else magnitude


def dense(
    pairs: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], global_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """In float64, by a loop over columns."""
    values = torch.tensor([[number(byte & 15), number(byte >> 4)] for byte in range(256)]).double()
    weight = values[pairs.long()].flatten(-2)
    scales = torch.tensor([float8(byte) for byte in range(256)]).double()[scale.view(PAIRS).long()]
    rows = torch.arange(weight.shape[1])
    for column in range(weight.shape[2]):
        weight[:, :, column] *= scales[:, rows // block[0], column // block[1]]
    if global_scale is not None:
        weight *= global_scale.double()[:, rows // (len(rows) // global_scale.shape[1]), None]
    return weight


def made(experts: int, features: int, depth: int, block: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Bytes and scales, which are no powers of two."""
    pairs = torch.randint(0, 256, (experts, features, depth // 2), dtype=PAIRS)
    blocks = -(-features // block[0]), -(-depth // block[1])
    return pairs, torch.randint(36, 64, (experts, *blocks)).to(PAIRS).view(FLOAT8)


def scales_for(experts: int, parts: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Global ones, of strides that are no multiples of each other."""
    return (torch.rand(parts, experts + 3) + 0.5).to(dtype).t()[:experts]


def _product(x, pairs, scale, outer, offsets, block, device, bias=None, slots=None):
    tensors = x, pairs, scale, torch.tensor(offsets, dtype=torch.int32), None, bias, None, outer, slots
    on_device = (None if each is None else each.to(device) for each in tensors)
    return launch("scaled_grouped_gemm", *on_device, *block, x.dtype)


@pytest.mark.parametrize(
    ("size", "dtype", "case", "parts"), mixed(SIZES, DTYPES, OFFSETS, (0, 1, 2), rounds=2), ids=str
)
def test_rows_in_order(size, dtype, case, parts, device):
    features, depth, block = SIZES[size]
    pairs, scale = made(EXPERTS, features, depth, block)
    outer = scales_for(EXPERTS, parts) if parts else None
    x, bias = torch.randn(SLOTS, depth).to(dtype), torch.randn(EXPERTS, features).to(dtype)
    out = _product(x, pairs, scale, outer, OFFSETS[case], block, device, bias)
    offsets = torch.tensor(OFFSETS[case], dtype=torch.int32)
    assert_close(out, oracles.grouped_gemm(x, dense(pairs, scale, block, outer), offsets, bias))
    assert out.dtype == dtype and not out[OFFSETS[case][-1] :].any()


@pytest.mark.parametrize(("size", "dtype", "top_k"), mixed(SIZES, DTYPES, (1, 3)), ids=str)
def test_tokens_that_are_gathered(size, dtype, top_k, device):
    features, depth, block = SIZES[size]
    pairs, scale = made(EXPERTS, features, depth, block)
    slots = torch.randperm(8 * top_k, dtype=torch.int32)
    offsets = torch.tensor(OFFSETS["ragged"], dtype=torch.int32).clamp(max=8 * top_k)
    x, outer = torch.randn(8, depth).to(dtype), scales_for(EXPERTS, features)
    out = _product(x, pairs, scale, outer, offsets.tolist(), block, device, slots=slots)
    exact = dense(pairs, scale, block, outer)
    assert_close(out, oracles.grouped_gemm(x[slots.long() // top_k], exact, offsets, None))


@pytest.mark.parametrize("layout", ["transposed", "columns apart", "scales apart"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(layout, dtype, device):
    features, depth, block = SIZES["a short last step"]
    pairs, scale = made(EXPERTS, features, depth, block)
    expected = dense(pairs, scale, block)
    if layout == "transposed":
        pairs = pairs.mT.contiguous().mT
    elif layout == "columns apart":
        pairs = torch.full((EXPERTS, features, depth), 255, dtype=PAIRS)[:, :, ::2].copy_(pairs)
    else:
        scale = scale.view(PAIRS).mT.contiguous().mT.view(FLOAT8)
    x, offsets = torch.randn(SLOTS, depth).to(dtype), OFFSETS["ragged"]
    out = _product(x, pairs, scale, None, offsets, block, device)
    assert_close(out, oracles.grouped_gemm(x, expected, torch.tensor(offsets), None))


@pytest.mark.parametrize("rows", [32, 100, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_and_scale(dtype, rows, device):
    """Exactly, in rows of 16 bits too: a product with ones on a diagonal, by words and by bytes."""
    pairs = torch.arange(256, dtype=PAIRS).view(1, 1, 256).repeat(1, 256, 1)[:, :, ::16].contiguous()
    pairs = pairs + torch.arange(256, dtype=PAIRS)[None, :, None]
    scale = torch.arange(256).view(256, 1).repeat(1, 2).to(PAIRS).view(FLOAT8)[None]
    x = torch.eye(32).repeat(-(-rows // 32), 1)[:rows].to(dtype)
    out = _product(x, pairs, scale, None, [0, rows], (1, 16), device).cpu()
    is_nan = scale.view(PAIRS)[0, :, 0] % 128 == 127
    exact = dense(pairs, scale, (1, 16))[0].t().repeat(-(-rows // 32), 1)[:rows]
    assert torch.equal(out[:, ~is_nan].double(), exact[:, ~is_nan])
    assert out[:, is_nan].isnan().all()


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [*((rows, torch.bfloat16) for rows in (7, 17, 100, 200, 320)), (40, torch.float16)],
    ids=str,
)
def test_tiles_of_every_height(rows, dtype, device):
    features, depth, block = SIZES["as published"]
    pairs, scale = made(EXPERTS, features, depth, block)
    outer, offsets = scales_for(EXPERTS, 2), [0, rows - 1, rows, 3 * rows + 5, 4 * rows - 2]
    x = torch.randn(4 * rows, depth).to(dtype)
    expected = oracles.grouped_gemm(x, dense(pairs, scale, block, outer), torch.tensor(offsets), None)
    assert_close(_product(x, pairs, scale, outer, offsets, block, device), expected)


def test_scales_of_others_and_their_rows_are_not_met(device):
    features, depth, block = SIZES["a short last group"]
    pairs, scale = made(EXPERTS, features, depth, block)
    outer = scales_for(EXPERTS, 2)
    scale.view(PAIRS)[2, 7, 1], scale.view(PAIRS)[3], outer[3] = 127, 127, float("inf")
    x = torch.randn(SLOTS, depth)
    x[5], x[12:] = float("nan"), float("nan")
    out = _product(x, pairs, scale, outer, [0, 4, 4, 9, 9], block, device).cpu()
    assert out[5].isnan().all() and out[4:9, 7].isnan().all() and not out[9:].any()
    assert not out[:4].isnan().any() and not out[[4, 6, 7, 8]][:, torch.arange(features) != 7].isnan().any()


def _layer(size, dtype, activation, parts):
    """What `test_scaled_exact` has, NVFP4 in its place, and its weights."""
    at, weights = of_layers._layer(size, dtype, ACTIVATIONS[activation]), {}
    for name in ("w13", "w2"):
        experts, rows, half = at[name].shape
        block = at[f"{name}_block_rows"], at[f"{name}_block_columns"] // 2
        at[name], at[f"{name}_scale"] = made(experts, rows, 2 * half, block)
        at[f"{name}_scale"] = (at[f"{name}_scale"].view(PAIRS) - 24).view(FLOAT8)  # float16 has to hold sums
        at[f"{name}_block_columns"] = block[1]
        outer = scales_for(experts, parts if name == "w13" else 1) if parts else None
        at[f"{name}_global_scale"] = outer
        weights[name] = dense(at[name], at[f"{name}_scale"], block, outer)
    return at, weights


@pytest.mark.parametrize(
    ("size", "dtype", "activation", "parts"),
    mixed(
        ("a token", "more columns than a step has", "a last group cut short", "blocks", "no words", "T7", "hot"),
        DTYPES,
        ACTIVATIONS,
        (2, 1, 0),
    )
    + usually([("more than are written out", torch.bfloat16, "ungated", 1)], ()),
    ids=str,
)  # fmt: skip
def test_layers(size, dtype, activation, parts, device, monkeypatch):
    at, weights = _layer(size, dtype, activation, parts)
    monkeypatch.setattr(of_layers, "_weight", lambda at, name: weights[name])
    expected = of_layers._expected(at, ACTIVATIONS[activation])
    assert_close(of_layers._launched(at, device), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_copies(size, dtype, device):
    """`dequantise_weight`; the global scale counts before a number is rounded."""
    features, depth, block = SIZES[size]
    pairs, scale = made(EXPERTS, features, depth, block)
    outer = scales_for(EXPERTS, 2, torch.bfloat16)
    given = (each.to(device) for each in (pairs, scale))
    found = launch("dequantise_weight", *given, None, outer.to(device), *block, dtype).cpu()
    exact = dense(pairs, scale, block, outer)
    assert found.dtype == dtype and (exact.any() or not depth)
    if device == "cpu" and dtype == torch.bfloat16:  # the interpreter cuts bits off
        assert torch.allclose(found.double(), exact, rtol=2.0**-7, atol=0)
    else:
        assert torch.equal(found, exact.float().to(dtype))


def test_gpus_that_do_not_read_float8():
    """Before Ada: a copy is made by PyTorch there, a product refused. Exponents of MXFP4 are read."""
    old = replace(H200, capability=80)
    for scale, columns in ((FLOAT8, 16), (PAIRS, 32)):
        weight, scales = meta(8, 64, 32, dtype=PAIRS), meta(8, 64, 64 // columns, dtype=scale)
        args = record("dequantise_weight", weight, scales, None, None, 1, columns, torch.bfloat16)
        assert takes(args, H200) and takes(args, old) == (scale == PAIRS)
        given = meta(16, 64), weight, scales, meta(9, dtype=torch.int32), *(None,) * 5, 1, columns
        assert program_of("scaled_grouped_gemm", *given, torch.bfloat16, gpu=H200).launches
        if scale == PAIRS:
            assert program_of("scaled_grouped_gemm", *given, torch.bfloat16, gpu=old).launches
            continue
        with pytest.raises(
            ValueError, match=r"scale has dtype torch\.float8_e4m3fn: expected torch\.uint8 on sm_80"
        ):
            program_of("scaled_grouped_gemm", *given, torch.bfloat16, gpu=old)


def test_many_rows_are_high_tiles():
    """What becomes of scales is worth so many rows more than of other formats."""
    weight, offsets = meta(8, 256, 128, dtype=PAIRS), meta(9, dtype=torch.int32)

    def height(rows, scale, dtype=torch.bfloat16, gpu=H200):
        given = meta(rows, 256, dtype=dtype), weight, scale, offsets, *(None,) * 5, 1, 256 // scale.shape[2]
        args = program_of("scaled_grouped_gemm", *given, dtype, gpu=gpu).launches[-1].args
        return args["BLOCK_M"], args["MIXED"]

    scale = meta(8, 256, 16, dtype=FLOAT8)
    assert height(8 * 160, scale) == (128, False) and height(8 * 160 + 1, scale) == (256, True)
    for each in (meta(8, 256, 8, dtype=PAIRS), meta(8, 256, 8), meta(8, 256, 2, dtype=torch.float32)):
        assert height(8 * 200, each) == (128, False)
    assert height(8 * 200, scale, torch.float32) == (32, False)
    assert height(8 * 200, scale, gpu=Gpu(120, 188, 99 * 1024)) == (128, False)


def _planned(depth=256, block=(1, 16), scale=None, x=None):
    groups = -(-depth // block[1])
    scale = meta(8, 256, groups, dtype=FLOAT8) if scale is None else scale
    x = meta(64, depth) if x is None else x
    given = x, meta(8, 256, depth // 2, dtype=PAIRS), scale, meta(9, dtype=torch.int32), *(None,) * 5, *block
    return program_of("scaled_grouped_gemm", *given, x.dtype, gpu=H200).launches[-1].args["TOGETHER"]


def test_where_one_load_takes_scales():
    """Those of a step, of which there are two or four, side by side where words begin."""
    assert _planned() and _planned(192) and not _planned(block=(1, 32)) and not _planned(288)
    assert _planned(block=(1, 32), scale=meta(8, 256, 8, dtype=PAIRS))
    assert _planned(block=(1, 32), scale=meta(8, 256, 8)) and _planned(
        block=(1, 32), x=meta(64, 256).half(), scale=meta(8, 256, 8)
    )
    assert not _planned(block=(1, 32), scale=meta(8, 256, 8, dtype=torch.float32))
    assert not _planned(block=(1, 64), scale=meta(8, 256, 4, dtype=PAIRS))
    apart = meta(8, 256, 32, dtype=FLOAT8)
    assert not _planned(scale=apart[:, :, ::2]) and not _planned(scale=apart[:, :, 1:17])
    assert not _planned(scale=meta(8, 256, 18, dtype=FLOAT8)[:, :, :16]) and _planned(scale=apart[:, :, 16:])
    assert not _planned(scale=meta(8, 256 * 16 + 2, dtype=FLOAT8)[:, : 256 * 16].unflatten(1, (256, 16)))
