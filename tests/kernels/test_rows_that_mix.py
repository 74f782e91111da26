"""Which products have tiles of mixed heights with more rows than low ones are for, by kind of layer."""

from dataclasses import replace

import pytest

from moe_ops.kernels import gemm_config
from moe_ops.kernels.gpu import H200
from moe_ops.types import Activation
from tests.kernels.catalogue import meta, product

H100 = replace(H200, memory_speed=3.35e12)
EDGES = (20, 64, 80, 112, 128, 160, 176, 200)
"""Rows of an expert around which choices differ."""

WIDE_DEEP, WIDE_SHALLOW = (8, 4096, 3088), (8, 4096, 3072)
LONG_AND_DEEP, LONG, LONG_BACK = (128, 3072, 3088), (128, 3072, 3072), (128, 3072, 1536)
SHORT, SHORT_BACK, FEW, NARROW = (66, 1536, 2048), (66, 2048, 768), (65, 1536, 2048), (512, 1008, 2048)


def _mixing(weight: tuple[int, int, int], gathered: bool, gpu=H200) -> list[int]:
    """The rows of an expert with tiles of 128 and fewer rows, of those just at and above each edge."""
    gemm = product(meta(*weight), weight[0], Activation() if gathered else None, gpu)
    if gathered:
        gemm = replace(gemm, top_k=1)
    rows = [edge + more for edge in EDGES for more in (0, 1)]
    products = [replace(gemm, num_slots=each * weight[0]) for each in rows]
    configs = [gemm_config.mixed_config(each) for each in products]
    return [each for each, config in zip(rows, configs) if config is not None and config.block_m == 128]


def _halved(weight: tuple[int, int, int], gpu=H200, **others) -> list[int]:
    """The rows of an expert, of those, with tiles of 64 rows by TMA."""
    rows = [edge + more for edge in EDGES for more in (0, 1)]
    products = [replace(product(meta(*weight), each * weight[0], gpu=gpu), **others) for each in rows]
    picked = [gemm_config.pick_config(each) == gemm_config.BY_TMA_IN_ORDER for each in products]
    return [each for each, halved in zip(rows, picked) if halved]


@pytest.mark.parametrize(
    ("weight", "gathered", "least", "most"),
    [
        (WIDE_DEEP, False, 21, 128),
        (WIDE_SHALLOW, False, 21, 176),
        ((8, 8192, 3072), True, 21, 176),
        (LONG_AND_DEEP, True, 21, 80),
        (LONG, True, 21, 160),
        (LONG_BACK, False, 21, 80),
        ((128, 3064, 1536), False, 0, 0),
        (SHORT, True, 65, 160),
        (SHORT_BACK, False, 0, 0),
        (FEW, True, 0, 0),
        (NARROW, True, 0, 0),
    ],
    ids=str,
)
def test_on_an_h200(weight: tuple[int, int, int], gathered: bool, least: int, most: int) -> None:
    rows = [edge + more for edge in EDGES for more in (0, 1)]
    assert _mixing(weight, gathered) == [each for each in rows if least <= each <= most]


@pytest.mark.parametrize(
    ("weight", "gathered"), [(SHORT, True), (SHORT_BACK, False), (FEW, True), (WIDE_SHALLOW, False)], ids=str
)
def test_where_memory_is_slow_up_to_128_rows(weight: tuple[int, int, int], gathered: bool) -> None:
    assert _mixing(weight, gathered, H100) == [21, 64, 65, 80, 81, 112, 113, 128]
    assert not _mixing((512, 504, 2048), False, H100)


def test_few_tiles_in_order_are_halved() -> None:
    """Of the second product of a wide layer of few experts, such as Mixtral's."""
    some = [65, 80, 81, 112, 113, 128, 129, 160]
    for weight in ((8, 4096, 14336), (16, 5120, 8192), (44, 2304, 2048)):
        assert _halved(weight) == some
    for weight in ((45, 2304, 2048), (8, 2048, 5632), (128, 2880, 2880)):
        assert not _halved(weight)
    assert _halved((16, 4096, 1024)) == [*some[2:], 161, 176, 177, 200, 201]  # narrow
    assert not _halved((8, 4096, 14336), H100)
    assert not _halved((8, 4096, 14336), tail=True) and not _halved((8, 4096, 14336), num_ids=9)
