"""Many rows in 8 bits: which kernel they get, and its values over blocks, steps, layouts and sizes of tiles."""

import pytest
import torch

from moe_ops.kernels.gpu import H200, Gpu
from moe_ops.kernels.scaled import scaled_grouped_gemm_kernel
from moe_ops.kernels.scaled_rows import FEW_ROWS, MANY_ROWS, WIDE, scaled_rows_kernel
from tests.helpers import mixed
from tests.kernels import oracles, test_scaled
from tests.kernels.by_name import program_of
from tests.kernels.catalogue import meta
from tests.kernels.oracles import assert_close
from tests.kernels.test_scaled import EXPERTS, STORED

# Features, depth, block.
SIZES = {
    "blocks": (260, 256, (128, 128)),
    "a short last block": (136, 2 * 128 + 64, (256, 128)),
    "several steps of a block": (72, 512, (128, 256)),
    "short steps": (130, 192, (128, 64)),
    "steps of a quarter": (130, 288, (128, 96)),
    "blocks as high as the weight": (72, 256, (72, 128)),
    "rows": (300, 144, (1, 144)),
    "rows of steps that fit": (130, 256, (1, 256)),
    "a matrix": (136, 256, (136, 256)),
    "heights within a tile": (136, 256, (48, 256)),
}
ROWS = {"few": 30, "many": 99}  # of an expert, on average


class Many(test_scaled.Product):
    """As `Product`, of these sizes."""

    sizes = SIZES


def _offsets(rows: int) -> list[int]:
    """An empty expert, one of a row, and some slots that no expert has."""
    slots = rows * EXPERTS
    return [0, 2 * rows + 3, 2 * rows + 3, 2 * rows + 4, slots - 5]


@pytest.mark.parametrize(
    ("size", "stored", "dtype", "rows", "top_k"),
    mixed(SIZES, STORED, (torch.bfloat16, torch.float32, torch.float16), ROWS, (None, 1, 3), rounds=2),
    ids=str,
)
def test_values(size, stored, dtype, rows, top_k, device):
    product, slots = Many(size, stored), ROWS[rows] * EXPERTS
    offsets, columns = torch.tensor(_offsets(ROWS[rows]), dtype=torch.int32), product.block[1]
    tokens, depth = slots // (top_k or 1), product.weight.shape[2]
    order = None if top_k is None else torch.randperm(slots, dtype=torch.int32)
    x, x_scale = (
        test_scaled._stored((tokens, depth), stored),
        test_scaled._scale(tokens, -(-depth // columns)),
    )
    bias = product.bias.to(dtype)
    out = product.launch(x, offsets, dtype, device, x_scale=x_scale / 1e4, slots=order, bias=bias)
    assert out.dtype == dtype
    dense = x.double() * test_scaled._spread(x_scale / 1e4, (1, columns), (tokens, depth))
    dense = dense if order is None else dense[order.long() // top_k]
    expected = oracles.grouped_gemm(dense, product.dense, offsets, bias)
    assert_close(out, expected, test_scaled._tolerance(stored, dtype, device))
    assert not out[offsets[-1] :].any()


def test_strange_slots_and_the_rows_of_others(device):
    """A row is zeros where its slot is no token's; what is not a number stays in its row."""
    product, slots = Many("blocks", torch.float8_e4m3fn), 30 * EXPERTS
    offsets = torch.tensor(_offsets(30), dtype=torch.int32)
    order = torch.arange(slots, dtype=torch.int32)
    order[[3, 40, 63]] = torch.tensor([-1, 1 << 30, slots], dtype=torch.int32)
    x, x_scale = test_scaled._stored((slots, 256), torch.float8_e4m3fn), test_scaled._scale(slots, 2)
    x_scale[7, 1] = float("nan")
    (x if device == "cuda" else x_scale)[5, 1] = float("nan")  # the interpreter has no such float8
    out = product.launch(x, offsets, torch.float32, device, x_scale=x_scale, slots=order).cpu()
    assert out[5].isnan().all() and out[7].isnan().all() and not out[[3, 40]].any()
    assert not out[torch.arange(slots)[:, None].ne(torch.tensor([5, 7])).all(1)].isnan().any()


def _planned(
    rows,
    features=256,
    depth=256,
    block=(128, 128),
    gpu=H200,
    stored=torch.int8,
    stride=None,
    transposed=False,
):
    blocks, slots = (-(-features // block[0]), -(-depth // block[1])), 8 * rows
    x = meta(slots, stride or depth, dtype=stored)[:, :depth]
    weight = meta(8, *((depth, features) if transposed else (features, depth)), dtype=stored)
    scale = meta(8, *blocks, dtype=torch.float32)
    offsets, x_scale = meta(9, dtype=torch.int32), meta(slots, blocks[1], dtype=torch.float32)
    weight = weight.transpose(1, 2) if transposed else weight
    given = x, weight, scale, offsets, x_scale, *(None,) * 4, *block, torch.bfloat16
    launch = program_of("scaled_grouped_gemm", *given, gpu=gpu).launches[-1]
    return launch.kernel, *(launch.args[f"BLOCK_{size}"] for size in "MNK")


@pytest.mark.parametrize("stored", STORED)
def test_tiles(stored):
    left, wide = scaled_rows_kernel, WIDE if stored.is_floating_point else MANY_ROWS
    for rows, features, depth, block, config in (
        (9, 256, 256, (128, 128), FEW_ROWS),
        (1, 256, 2880, (1, 2880), FEW_ROWS),
        (8, 256, 576, (128, 64), FEW_ROWS),
        (300, 256, 256, (128, 128), FEW_ROWS),
        (300, 256, 4096, (128, 128), FEW_ROWS),
        (60, 256, 256, (1, 256), FEW_ROWS),
        (60, 256, 4096, (1, 4096), FEW_ROWS),
        (81, 256, 256, (1, 256), MANY_ROWS),
        (81, 256, 4096, (1, 4096), wide),
        (81, 256, 2880, (1, 2880), wide),
    ):
        found = _planned(rows, features, depth, block, stored=stored)
        step = 64 if block[1] == 64 else 128
        assert found == (left, config.block_m, config.block_n, step), (rows, depth, block)


def test_steps_divide_blocks():
    for depth, columns, step in (
        (2880, 128, 128),
        (512, 256, 128),
        (192, 64, 64),
        (288, 144, 32),
        (96, 96, 128),
    ):
        assert _planned(30, 256, depth, (128, columns))[3] == step, (depth, columns)


@pytest.mark.parametrize(
    "other",
    [
        {"rows": 8},
        {"block": (64, 128)},
        {"block": (128, 40), "depth": 320},
        {"block": (128, 144), "depth": 288},
        {"depth": 250},
        {"stride": 259},
        {"transposed": True},
        {"gpu": Gpu(100, 148, 227 << 10)},
    ],
    ids=str,
)
def test_what_the_weight_is_on_the_left_of(other):
    """Few rows, several scales of a tile, weights that come in no boxes and rows in no pieces."""
    assert _planned(**{"rows": 30} | other)[0] is scaled_grouped_gemm_kernel
