"""The grouped product on both paths, every weight layout, and the weight gradient."""

import itertools
from dataclasses import replace

import pytest
import torch

from moe_ops.arguments import PairedLinear
from moe_ops.kernels import gemm_config, grouped_gemm
from moe_ops.kernels.gemm import Gemm, Operand, operands
from moe_ops.kernels.gemm_mixed import grouped_gemm_mixed_kernel
from moe_ops.kernels.gpu import H200, Gpu
from moe_ops.kernels.program import Program, describe
from moe_ops.types import Activation
from tests.helpers import mixed
from tests.kernels import oracles
from tests.kernels.by_name import launch, program_of
from tests.kernels.catalogue import meta, product
from tests.kernels.oracles import assert_close

OFFSETS = {  # empty experts, one hot expert, dropped rows at the end
    "ragged": [0, 3, 3, 17, 18, 18, 30],
    "one_hot": [0, 0, 33, 33, 33, 33, 33],
    "none": [0, 0, 0, 0, 0, 0, 0],
}
EXPERTS, ROWS = 6, 33


def _weight(shape: tuple[int, int, int], dtype: torch.dtype, layout: str) -> torch.Tensor:
    experts, features, depth = shape
    if layout == "transposed":
        return torch.randn(experts, depth, features).to(dtype).transpose(1, 2)
    if layout == "misaligned":
        return torch.randn(experts * features * depth + 1).to(dtype)[1:].view(shape)
    return torch.randn(shape).to(dtype)


def _on(device: str, tensor: torch.Tensor) -> torch.Tensor:
    """Like `.to(device)`, keeping a misaligned start misaligned."""
    if tensor.storage_offset() == 0:
        return tensor.to(device)
    base = torch.zeros(tensor.numel() + tensor.storage_offset(), dtype=tensor.dtype, device=device)
    moved = base[tensor.storage_offset() :].view(tensor.shape)
    return moved.copy_(tensor)


@pytest.mark.parametrize(
    ("dtype", "layout", "case"),
    mixed(
        (torch.bfloat16, torch.float32, torch.float64),
        ("plain", "transposed", "misaligned"),
        OFFSETS,
        rounds=3,
    ),
    ids=str,
)
def test_matches_the_oracle(dtype: torch.dtype, layout: str, case: str, device: str) -> None:
    weight = _weight((EXPERTS, 48, 72), dtype, layout)
    x, bias = torch.randn(ROWS, 72).to(dtype), torch.randn(EXPERTS, 48).to(dtype)
    offsets = torch.tensor(OFFSETS[case], dtype=torch.int32)
    args = x.to(device), _on(device, weight), offsets.to(device)
    assert product(args[1]).weight_by_tma == (dtype == torch.bfloat16 and layout != "misaligned")
    expected = oracles.grouped_gemm(x, weight, OFFSETS[case], bias)
    assert_close(launch("grouped_gemm", *args, bias.to(device)), expected)
    plain = oracles.grouped_gemm(x, weight, OFFSETS[case])
    out = launch("grouped_gemm", *args, None)
    assert_close(out, plain)
    assert torch.equal(out, launch("grouped_gemm", *args, None))


@pytest.mark.parametrize("features, depth", [(13, 511), (1, 1), (130, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_odd_sizes(features: int, depth: int, dtype: torch.dtype, device: str) -> None:
    weight, x = torch.randn(3, features, depth).to(dtype), torch.randn(9, depth).to(dtype)
    offsets = [0, 4, 4, 7]
    out = launch(
        "grouped_gemm",
        x.to(device),
        weight.to(device),
        torch.tensor(offsets, dtype=torch.int32).to(device),
        None,
    )
    assert_close(out, oracles.grouped_gemm(x, weight, offsets))


def test_nan_rows_stay_where_they_are(device: str) -> None:
    weight, x = torch.randn(2, 64, 64).bfloat16().to(device), torch.randn(12, 64).bfloat16().to(device)
    offsets = torch.tensor([0, 5, 9], dtype=torch.int32).to(device)
    clean = launch("grouped_gemm", x, weight, offsets, None)
    x[2], x[10] = float("nan"), float("nan")
    out = launch("grouped_gemm", x, weight, offsets, None)
    assert out[2].isnan().all()
    kept = [row for row in range(12) if row != 2]
    assert torch.equal(out[kept], clean[kept])


def test_offsets_that_make_no_sense_touch_nothing(device: str) -> None:
    weight, x = torch.randn(3, 64, 64).bfloat16().to(device), torch.randn(20, 64).bfloat16().to(device)
    for values in ([0, 1 << 30, -5, 7], [1 << 20, 0, 1 << 20, 0], [0, 20, 0, 20]):
        launch("grouped_gemm", x, weight, torch.tensor(values, dtype=torch.int32).to(device), None)
    offsets = torch.tensor([0, 5, 9, 20], dtype=torch.int32).to(device)
    out = launch("grouped_gemm", x, weight, offsets, None)
    assert_close(out, oracles.grouped_gemm(x, weight, offsets.tolist()))


def _mixed(weight: torch.Tensor, rows: int, activation: Activation | None = None) -> Gemm:
    gemm = product(weight, rows, activation)
    x = Operand("x", describe(meta(rows // 2, weight.shape[2])))
    return replace(gemm, x=x, top_k=2, tail=True)


def _halves(weight: torch.Tensor) -> list[torch.Tensor]:
    turned = weight.stride(2) != 1
    return [half.mT.contiguous().mT if turned else half.contiguous() for half in weight.chunk(2, 1)]


def _apart(weight: torch.Tensor, rows: int, activation: Activation | None = None) -> Gemm:
    """The same of gate and up rows as a tensor each."""
    gate, up = map(describe, _halves(weight))
    linear = operands("weight", PairedLinear(gate, None, up))
    return replace(_mixed(weight, rows, activation), linear=linear)


def test_offsets_that_make_no_sense_of_mixed_heights(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile map names no more row blocks than it has room for, and rows that there are."""
    monkeypatch.setattr(gemm_config, "_MIXED_FEATURES", 32)
    rows, experts = 1000, 9
    buffers, launches = grouped_gemm.plan(replace(_mixed(meta(experts, 80, 80), rows), tail=False))
    assert launches[-1].kernel is grouped_gemm_mixed_kernel
    program = Program(buffers, launches, ("out", "split_tiles_128"))
    tensors = {
        "x": torch.randn(rows // 2, 80).bfloat16().to(device),
        "weight": torch.randn(experts, 80, 80).bfloat16().to(device),
        "sorted_slots": torch.randperm(rows).int().to(device),
    }
    alternating = [0, rows] * 5
    for values in (alternating, [rows, 0] * 5, [1 << 30, -5] * 5, [0, 1 << 30, -5, 7, 0, 40, 0, 999, 3, -1]):
        offsets = torch.tensor(values, dtype=torch.int32).to(device)
        _, tiles = program.filled.run(tensors | {"expert_offsets": offsets})
        (blocks, several, *_), *records = tiles.view(-1, 4).tolist()
        assert several <= blocks <= len(records)
        for expert, _, start, end in records[:blocks]:
            assert 0 <= expert < experts and 0 <= start < end <= rows
    sensible = [0, 5, 9, 9, 300, 500, 501, 900, 950, rows]
    offsets = torch.tensor(sensible, dtype=torch.int32).to(device)
    out, _ = program.filled.run(tensors | {"expert_offsets": offsets})
    x = tensors["x"][tensors["sorted_slots"].long() // 2]
    assert_close(out, oracles.grouped_gemm(x, tensors["weight"], sensible))


GPT_OSS = Activation("swiglu_oai", interleaved=True)


@pytest.mark.parametrize(
    ("activation", "layout"),
    [
        *itertools.product((None, Activation(), GPT_OSS), ("plain", "transposed")),
        *itertools.product((None, Activation()), ("apart", "transposed, apart")),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("counts", "highest"),
    [
        ((0, 16, 17, 64, 65, 128, 129, 144, 193, 0, 20), 128),
        ((0, 600, 0, 3, 0, 0, 257, 1, 0), 128),
        ((0, 16, 17, 32, 33, 64, 65, 97, 0, 1, 20, *[0] * 30), 64),
    ],
)
def test_tiles_of_mixed_heights(
    activation: Activation | None,
    layout: str,
    counts: tuple[int, ...],
    highest: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows up to and past each height, experts of one tile and of several, and rows of none, which are zeros."""
    monkeypatch.setattr(gemm_config, "_MIXED_FEATURES", 32)
    offsets = [0, *itertools.accumulate(counts)]
    rows = offsets[-1] + 74 + offsets[-1] % 2
    weight, x = torch.randn(len(counts), 80, 80).bfloat16(), torch.randn(rows // 2, 80).bfloat16()
    if "transposed" in layout:
        weight = weight.mT.contiguous().mT
    slots, gemm = (
        torch.randperm(rows).int(),
        (_apart if "apart" in layout else _mixed)(weight, rows, activation),
    )
    buffers, launches = grouped_gemm.plan(gemm)
    assert launches[-1].kernel is grouped_gemm_mixed_kernel and launches[-1].args["BLOCK_M"] == highest
    halves = _halves(weight) if "apart" in layout else [weight]
    tensors = {"x": x, "sorted_slots": slots, **dict(zip(("weight", "up"), halves, strict=False))}
    tensors["expert_offsets"] = torch.tensor(offsets, dtype=torch.int32)
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    (out,) = Program(buffers, launches, ("out",)).filled.run(moved)
    expected = oracles.grouped_gemm(x[slots.long() // 2], weight, offsets)
    assert_close(out, expected if activation is None else oracles.activate(expected, activation))


def _heights(gemm: Gemm) -> int | None:
    """Rows of the highest of a product's mixed tiles."""
    config = gemm_config.mixed_config(gemm)
    return None if config is None else config.block_m


def test_which_products_have_tiles_of_mixed_heights() -> None:
    wide, narrow = meta(4, 4096, 4096), meta(4, 4096, 2032)
    columns = meta(4, 2032, 4096).mT
    assert [_heights(_mixed(wide, rows)) for rows in (2, 80, 81, 512, 513)] == [64, 64, 128, 128, None]
    assert _heights(_mixed(wide, 256, Activation())) == 128
    gemm = _mixed(wide, 256)
    others = [
        _mixed(narrow, 256),
        _mixed(meta(4, 2048, 4096), 256, Activation()),
        _mixed(columns, 256),
        _mixed(columns, 512 * 4, Activation("swiglu_oai", interleaved=True)),
        replace(_mixed(columns, 512 * 4, Activation()), rows_per_tile=64),
    ]
    others += [
        other
        for each in (gemm, _mixed(wide, 80))
        for other in (
            replace(each, linear=operands("weight", PairedLinear(describe(wide.float())))),
            replace(each, gpu=Gpu(80, 108, 163 * 1024)),
            replace(each, rows_per_tile=64),
            replace(each, max_tokens=64),
            replace(each, x=Operand("x", describe(meta(128, 4098)[:, :4096]))),
        )
    ]
    assert not any(map(_heights, others))
    assert _heights(_mixed(meta(4, 2048, 4096).mT, 256)) == 128


def test_another_choice_for_such_a_product_has_tiles_of_one_height() -> None:
    gemm = _mixed(meta(4, 4096, 2048), 64)
    for config in gemm_config.alternatives(gemm):
        kernel = grouped_gemm.plan(gemm, config)[1][-1].kernel
        assert (kernel is grouped_gemm_mixed_kernel) == (config == gemm_config.mixed_config(gemm))


def test_narrow_products_have_low_tiles_from_seven_rows_on() -> None:
    for depth, least in ((1024, 2), (1008, 26)):
        rows = [rows for rows in range(2, 84, 2) if _heights(_mixed(meta(4, 4096, depth), rows)) == 64]
        assert rows == [*range(least, 82, 2)]


def test_a_tile_of_two_products_has_one_of_mixed_heights() -> None:
    """Whatever its size, where it gathers rows: of wide pairs rows are sorted, and come by TMA."""
    columns, rows = meta(4, 512, 3072).mT, meta(4, 3072, 512)
    for gemm in (_mixed(columns, 80, Activation()), _apart(rows, 80, Activation()), _apart(rows, 80)):
        assert [_heights(replace(gemm, num_slots=each)) for each in (80, 81, 2047)] == [64, 128, 128]
    many = [
        make(each, 4 * 512, Activation())
        for make in (_mixed, _apart)
        for each in (columns, meta(4, 512, 5120).mT)
    ]
    assert [*map(_heights, many)] == [128, 128, 128, None]
    assert [*map(gemm_config.sorts_rows_first, many)] == [False, False, False, True]


def test_where_weights_come_slowly_narrower_products_have_tiles_of_mixed_heights() -> None:
    h100 = replace(H200, memory_speed=3.35e12)
    products = [replace(_mixed(meta(4, 4096, depth), 480), gpu=h100) for depth in (504, 512)]
    assert [*map(_heights, products)] == [None, 128]
    in_order = [replace(each, top_k=None, tail=False) for each in products]
    halved = gemm_config.BY_TMA_IN_ORDER
    assert [gemm_config.pick_config(each) == halved for each in in_order] == [True, False]
    # An H20 has as much memory for fewer multiprocessors.
    assert not _heights(replace(products[1], gpu=replace(h100, multiprocessors=78)))


@pytest.mark.parametrize("config", gemm_config.candidates(product(meta(1, 8, 8))))
def test_every_block_size(config: gemm_config.LaunchConfig, device: str) -> None:
    rows, offsets = 200, [0, 129, 129, 190]
    weight, x = torch.randn(3, 264, 200).bfloat16().to(device), torch.randn(rows, 200).bfloat16().to(device)
    x[offsets[-1] :] = float("nan")  # rows of dropped slots become zeros
    gemm = replace(product(weight, rows, gpu=Gpu(90, 5, H200.shared_memory)), tail=True)
    tensors = {
        "x": x,
        "weight": weight,
        "expert_offsets": torch.tensor(offsets, dtype=torch.int32).to(device),
    }
    (out,) = Program(*grouped_gemm.plan(gemm, config), ("out",)).filled.run(tensors)
    assert_close(out, oracles.grouped_gemm(x, weight, offsets))


@pytest.mark.parametrize("case", OFFSETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_weight_gradient(dtype: torch.dtype, case: str, device: str) -> None:
    grad, x = torch.randn(ROWS, 40).to(dtype), torch.randn(ROWS, 70).to(dtype)
    offsets = OFFSETS[case]
    grad[offsets[-1] :] = float("nan")  # rows of dropped slots take no part
    expected = torch.zeros(EXPERTS, 40, 70, dtype=torch.float64)
    for expert, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        expected[expert] = grad[start:end].double().T @ x[start:end].double()
    on_device = torch.tensor(offsets, dtype=torch.int32).to(device)
    assert_close(launch("grouped_gemm_weight_backward", grad.to(device), x.to(device), on_device), expected)
    ones = torch.ones(ROWS, 1).to(dtype)
    bias_grad = launch("grouped_gemm_weight_backward", grad.to(device), ones.to(device), on_device)
    expected_bias = torch.stack(
        [grad[a:b].double().sum(0) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    )
    assert_close(bias_grad.squeeze(2), expected_bias)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    mixed(
        (
            ([0, 64, 64, 209], 240, 40, 264, 128),  # no row, none at all and 17 beside full blocks
            ([0, 63, 64, 1537], 1600, 1160, 264, 256),  # more blocks of features than run side by side
            ([0, 1600, 1600, 1600], 1600, 136, 72, 128),
        ),
        (torch.bfloat16, torch.float16),
    ),
)
def test_weight_gradient_by_tma(sizes: tuple, dtype: torch.dtype, device: str) -> None:
    offsets, rows, features, depth, block_k = sizes
    grad, x = torch.randn(rows, features).to(dtype), torch.randn(rows, depth).to(dtype)
    grad[offsets[-1] :], x[offsets[-1] :] = float("nan"), float("nan")  # a box must not bring them
    pairs = zip(offsets[:-1], offsets[1:], strict=True)
    expected = torch.stack([grad[a:b].double().T @ x[a:b].double() for a, b in pairs])
    given = grad.to(device), x.to(device), torch.tensor(offsets, dtype=torch.int32).to(device)
    gpu = Gpu(90, 5, H200.shared_memory)  # several tiles to a program
    program = program_of("grouped_gemm_weight_backward", *given, gpu=gpu)
    assert program.launches[0].args["BLOCK_K"] == block_k
    tensors = dict(zip(("grad", "x", "expert_offsets"), given, strict=True))
    (out,) = program.filled.run(tensors)
    assert_close(out, expected)
    assert torch.equal(out, program.filled.run(tensors)[0])


def test_weight_gradient_of_few_rows_or_odd_ones_is_masked() -> None:
    offsets = meta(9, dtype=torch.int32)
    for grad, x in (
        (meta(511, 64), meta(511, 64)),
        (meta(512, 36), meta(512, 64)),
        (meta(512, 64), meta(512, 1)),
        (meta(512, 64), meta(512, 72)[:, :60]),  # loads by boxes, but rows of the gradient start off 16 bytes
        (meta(512, 64, dtype=torch.float32), meta(512, 64, dtype=torch.float32)),
    ):
        (only,) = program_of("grouped_gemm_weight_backward", grad, x, offsets).launches
        assert only.kernel.__name__ == "weight_gradient_kernel"
    (only,) = program_of("grouped_gemm_weight_backward", meta(512, 64), meta(512, 64), offsets).launches
    assert only.kernel.__name__ == "weight_gradient_tma_kernel"
