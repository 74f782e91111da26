"""The kernel of weights of 4 bits: every number and power, tiles of every height, depths that nothing divides."""

import pytest
import torch

from moe_ops.kernels import scaled_pairs
from moe_ops.kernels.gpu import H200, Gpu
from moe_ops.kernels.scaled_pairs import (
    IN_16_BITS,
    IN_32_BITS,
    LONG_STEPS,
    MIXED,
    ONE_BY_ONE,
    scaled_pairs_kernel,
)
from tests.helpers import mixed
from tests.kernels import oracles
from tests.kernels.by_name import launch, program_of
from tests.kernels.catalogue import meta
from tests.kernels.oracles import assert_close

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
# Features, depth, block: by TMA and not, depths that end within a step, a group, a pair of groups.
SIZES = {
    "as published": (130, 256, (1, 32)),
    "a short last step": (72, 160, (1, 32)),
    "a short last group": (33, 84, (1, 32)),
    "blocks": (40, 288, (8, 96)),
    "pairs of groups": (40, 192, (1, 64)),
    "one block": (16, 50, (16, 50)),
    "one pair": (1, 2, (1, 32)),
    "no depth": (8, 0, (1, 32)),
}
EXPERTS = 4
OFFSETS = {"ragged": [0, 5, 5, 9, 20], "none": [0, 0, 0, 0, 0], "one expert": [0, 0, 23, 23, 23]}
SLOTS = 23


def number(code: int) -> float:
    """What 4 bits stand for."""
    return (-1 if code & 8 else 1) * MAGNITUDES[code & 7]


def dense(pairs: torch.Tensor, exponents: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """In float64, by a loop over columns."""
    values = torch.tensor(
        [[number(byte & 15), number(byte >> 4)] for byte in range(256)], dtype=torch.float64
    )
    weight = values[pairs.long()].flatten(-2)
    powers = torch.pow(2.0, exponents.double() - 127)
    rows = torch.arange(weight.shape[1]) // block[0]
    for column in range(weight.shape[2]):
        weight[:, :, column] *= powers[:, rows, column // block[1]]
    return weight


class Product:
    """Weights and what they stand for."""

    def __init__(self, size: str, transposed: bool = False) -> None:
        features, depth, self.block = SIZES[size]
        self.depth = depth
        self.weight = torch.randint(0, 256, (EXPERTS, features, depth // 2), dtype=torch.uint8)
        if transposed:
            self.weight = self.weight.transpose(1, 2).contiguous().transpose(1, 2)
        blocks = -(-features // self.block[0]), -(-depth // self.block[1])
        self.scale = torch.randint(120, 131, (EXPERTS, *blocks), dtype=torch.uint8)
        self.dense = dense(self.weight, self.scale, self.block)
        self.bias = torch.randn(EXPERTS, features)

    def launch(self, x, offsets, device, slots=None, bias=None):
        tensors = x, self.weight, self.scale, offsets, None, bias, None, None, slots
        on_device = (None if each is None else each.to(device) for each in tensors)
        return launch("scaled_grouped_gemm", *on_device, *self.block, x.dtype)


@pytest.mark.parametrize(
    ("size", "dtype", "case", "with_bias"), mixed(SIZES, DTYPES, OFFSETS, (True, False), rounds=2), ids=str
)
def test_rows_in_order(size, dtype, case, with_bias, device):
    product, offsets = Product(size), torch.tensor(OFFSETS[case], dtype=torch.int32)
    x, bias = torch.randn(SLOTS, product.depth).to(dtype), product.bias.to(dtype) if with_bias else None
    out = product.launch(x, offsets, device, bias=bias)
    assert out.dtype == dtype
    assert_close(out, oracles.grouped_gemm(x, product.dense, offsets, bias))
    assert not out[OFFSETS[case][-1] :].any()


def test_few_rows_in_few_tiles(device, monkeypatch):
    """As on a rank of many: tiles are mixed, and all low."""
    monkeypatch.setattr(scaled_pairs, "FEW_TILES", 3)
    product, offsets = Product("as published"), torch.tensor([0, 5, 5, 14, 20]).int()
    x = torch.randn(29, product.depth).bfloat16()  # no other test caches a plan for so many
    out = product.launch(x, offsets, device)
    assert_close(out, oracles.grouped_gemm(x, product.dense, offsets, None))
    assert not out[20:].any()


@pytest.mark.parametrize(("size", "dtype", "top_k"), mixed(SIZES, DTYPES, (1, 3), rounds=2), ids=str)
def test_tokens_that_are_gathered(size, dtype, top_k, device):
    product, tokens = Product(size), 8
    slots = torch.randperm(tokens * top_k, dtype=torch.int32)
    offsets = torch.tensor(OFFSETS["ragged"], dtype=torch.int32).clamp(max=tokens * top_k)
    x = torch.randn(tokens, product.depth).to(dtype)
    out = product.launch(x, offsets, device, slots=slots)
    assert_close(out, oracles.grouped_gemm(x[slots.long() // top_k], product.dense, offsets, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["transposed", "columns apart", "tokens transposed", "tokens apart"])
def test_layouts(layout, dtype, device):
    product, offsets = (
        Product("a short last step", layout == "transposed"),
        torch.tensor([0, 5, 5, 9, 20]).int(),
    )
    if layout == "columns apart":
        apart = torch.full((EXPERTS, 72, 160), 255, dtype=torch.uint8)
        apart[:, :, ::2] = product.weight
        product.weight = apart[:, :, ::2]
    x = torch.randn(SLOTS, 160).to(dtype)
    x = x.t().contiguous().t() if layout == "tokens transposed" else x
    if layout == "tokens apart":
        x = torch.full((SLOTS, 320), float("nan"), dtype=dtype)[:, :160].copy_(x)
    assert_close(product.launch(x, offsets, device), oracles.grouped_gemm(x, product.dense, offsets, None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number(dtype, device):
    """A product with ones on a diagonal gives each number of a weight, exactly."""
    pairs = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    scale = torch.full((1, 16, 1), 127, dtype=torch.uint8)
    eye = torch.eye(32).to(dtype)
    given = (each.to(device) for each in (eye, pairs, scale, torch.tensor([0, 32], dtype=torch.int32)))
    out = launch("scaled_grouped_gemm", *given, *(None,) * 5, 1, 32, dtype).cpu()
    expected = torch.tensor([[number(byte & 15), number(byte >> 4)] for byte in range(256)]).view(16, 32).t()
    assert torch.equal(out.double(), expected.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_power(dtype, device):
    """From 2**-63 to 2**64 exactly; smaller ones may vanish, larger ones are NaN, and nobody else's."""
    pairs = torch.full((1, 256, 16), 0x21, dtype=torch.uint8)  # 0.5 and 1
    scale = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    x = torch.zeros(2, 32).to(dtype)
    x[0, 0], x[1, 1] = 1, 1
    given = (each.to(device) for each in (x, pairs, scale, torch.tensor([0, 2], dtype=torch.int32)))
    out = launch("scaled_grouped_gemm", *given, *(None,) * 5, 1, 32, dtype).cpu().double()
    exact = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - 127)
    assert torch.equal(out[0, 65:192], exact[65:192] / 2) and torch.equal(out[1, 64:192], exact[64:192])
    assert out[:, 192:].isnan().all()
    assert ((out[0, :65] == exact[:65] / 2) | (out[0, :65] == 0)).all()


@pytest.mark.parametrize(
    ("rows", "dtype", "size"), mixed((7, 17, 40, 200), DTYPES, ("blocks", "as published"), rounds=3), ids=str
)
def test_tiles_of_every_height(rows, dtype, size, device):
    product, slots = Product(size), rows * EXPERTS
    offsets = torch.tensor([0, rows - 1, rows, 3 * rows + 5, slots - 2], dtype=torch.int32)
    x = torch.randn(slots, product.depth).to(dtype)
    assert_close(product.launch(x, offsets, device), oracles.grouped_gemm(x, product.dense, offsets, None))


def test_nan_in_rows_of_others_is_not_met(device):
    product, offsets = Product("a short last group"), torch.tensor([0, 4, 4, 9, 12], dtype=torch.int32)
    x = torch.randn(SLOTS, product.depth)
    x[5], x[12:] = float("nan"), float("nan")
    out = product.launch(x, offsets, device).cpu()
    assert out[5].isnan().all() and not out[torch.arange(SLOTS) != 5].isnan().any() and not out[12:].any()


def _planned(features=256, depth=256, rows=64, dtype=torch.bfloat16, gpu=H200):
    weight, scale = (meta(8, features, depth // each, dtype=torch.uint8) for each in (2, 32))
    tensors = meta(rows, depth, dtype=dtype), weight, scale, meta(9, dtype=torch.int32)
    return program_of("scaled_grouped_gemm", *tensors, *(None,) * 5, 1, 32, dtype, gpu=gpu).launches[-1]


def test_weights_come_in_boxes_where_they_can():
    assert _planned(depth=192).args["weight_desc"].block == (1, 128, 32)
    assert _planned(depth=256).args["weight_desc"].block == (1, 128, 64)
    assert _planned(depth=2880).args["weight_desc"] is not None
    assert _planned(depth=48).args["weight_desc"] is None  # rows of 24 bytes
    assert _planned(gpu=Gpu(89, 142, H200.shared_memory)).args["weight_desc"] is None


def test_tiles_are_as_high_as_experts_have_rows():
    in_16_bits = {16: LONG_STEPS, 32: MIXED, 64: MIXED, 128: IN_16_BITS[128]}
    in_32_bits = IN_32_BITS | dict.fromkeys((64, 128), IN_32_BITS[32])
    for dtype, table in (
        (torch.bfloat16, in_16_bits),
        (torch.float16, in_32_bits),
        (torch.float32, in_32_bits),
    ):
        for rows, height in ((1, 16), (8 * 20, 32), (8 * 40, 64), (8 * 81, 128), (8 * 500, 128)):
            planned, config = _planned(rows=rows, dtype=dtype), table[height]
            assert planned.kernel is scaled_pairs_kernel and planned.num_warps == config.num_warps
            for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"):
                assert planned.args[name] == getattr(config, name.lower())
            assert (planned.args["STAGES"], planned.args["MIXED"]) == (config.num_stages, config.is_mixed)


def test_tiles_are_low_of_few_rows_and_many_tiles(monkeypatch):
    monkeypatch.setattr(scaled_pairs, "FEW_TILES", 3)
    for features, rows, config in (
        (50 * 128, 8 * 12, LONG_STEPS),
        (50 * 128, 8 * 12 + 1, MIXED),
        (49 * 128, 8 * 12, MIXED),
        (49 * 128 + 1, 1, LONG_STEPS),
        (49 * 128, 8 * 80, MIXED),
        (49 * 128, 8 * 80 + 1, IN_16_BITS[128]),
    ):
        planned = _planned(features, rows=rows)
        assert (planned.args["BLOCK_M"], planned.args["MIXED"]) == (config.block_m, config.is_mixed)


def test_steps_are_long_where_a_load_brings_their_scales():
    """The four of MXFP4 that lie in a word; of low tiles."""

    def of(depth=256, **changed):
        weight, scale = (meta(8, 256, depth // each, dtype=torch.uint8) for each in (2, 32))
        named = {"x": meta(8, depth), "weight": weight, "scale": scale, "block_rows": 1, "block_columns": 32}
        named |= {"expert_offsets": meta(9, dtype=torch.int32), "dtype": torch.bfloat16} | changed
        args = program_of("scaled_grouped_gemm", **named, gpu=H200).launches[-1].args
        return args["BLOCK_K"], args["TOGETHER"]

    assert of() == of(2048) == (128, True) and of(192) == of(2880) == (64, True) and of(288) == (64, False)
    assert of(block_columns=64, scale=meta(8, 256, 4, dtype=torch.uint8)) == (64, False)
    assert of(scale=meta(8, 256, 10, dtype=torch.uint8)[:, :, :8]) == (64, True)
    assert of(scale=meta(8, 256, 16, dtype=torch.uint8)[:, :, ::2]) == (64, False)
    assert of(scale=meta(8, 256, 8)) == (64, True) and of(x=meta(8 * 40, 256)) == (64, True)


def test_steps_are_even_where_they_divide_the_depth():
    for depth, rows, even in (
        (256, 8, True),
        (192, 8, True),
        (224, 8, False),
        (2880, 8 * 200, True),
        (0, 8, False),
    ):
        assert _planned(depth=depth, rows=rows).args["EVEN"] is even, (depth, rows)


def test_without_depth_a_group_has_a_column():
    """Triton divides by constants while it compiles."""
    assert _planned(depth=0).args["BLOCK_COLUMNS"] == 1 and _planned().args["BLOCK_COLUMNS"] == 32


def test_rows_by_words_lie_side_by_side():
    assert _planned().args["BY_WORDS"]
    assert not _planned(depth=48).args["BY_WORDS"]  # no boxes
    apart = meta(64, 512)[:, ::2], meta(8, 256, 128, dtype=torch.uint8), meta(8, 256, 8, dtype=torch.uint8)
    offsets = meta(9, dtype=torch.int32)
    given = *apart, offsets, *(None,) * 5, 1, 32, torch.bfloat16
    assert not program_of("scaled_grouped_gemm", *given, gpu=H200).launches[-1].args["BY_WORDS"]


def test_rows_that_come_one_by_one():
    one_by_one = _planned(depth=2034, rows=8 * 80).args
    assert (one_by_one["BLOCK_M"], one_by_one["BLOCK_N"]) == (32, ONE_BY_ONE[32].block_n)
