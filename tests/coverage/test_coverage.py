"""The recorded table of all families, what it has to show, and a few of its rows measured again."""

import dataclasses

import pytest
import torch

from tests.coverage.cases import CASES, is_installed
from tests.coverage.measure import Row, measure
from tests.coverage.page import PAGE, count, page
from tests.coverage.table import recorded
from tests.helpers import usually

IS_NEWEST = is_installed("lara_mini")
CHEAP = ("mixtral", "gemma4", "axk2", "dbrx", "openai_privacy_filter", "longcat_flash")
"""One of each way to be patched, and quick to build."""
ALLOWED = {"eager": 1e-5, "compiled_error": 1e-5, "gradient": 1e-4}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(row: Row) -> None:
    """Whatever runs is right, and matters."""
    assert row.effect > 0.1
    for name, allowed in ALLOWED.items():
        assert getattr(row, name) <= allowed, name


def test_every_configuration_is_recorded():
    rows = recorded()
    assert [row.name for row in rows] == list(CASES)
    assert len({row.family for row in rows}) == 77
    for row in rows:
        check(row)


def test_the_bars():
    rows = recorded()
    assert count(rows, lambda row: row.experts > 0) >= 75
    assert count(rows, lambda row: row.routers > 0) >= 74
    assert count(rows, lambda row: row.is_fused) >= 74


def test_a_family_counts_if_all_its_configurations_do():
    rows = [dataclasses.replace(recorded()[0], name=name, experts=n) for name, n in (("a", 2), ("a.b", 0))]
    assert count(rows, lambda row: row.experts > 0) == 0
    assert count(rows[:1], lambda row: row.experts > 0) == 1


@pytest.mark.parametrize(
    ("compiled", "is_fused"),
    [
        ("2 fused_moe", True),
        ("2 fused_experts, 2 topk_routing", True),
        ("1 fused_moe, 1 grouped_gemm", False),
        ("2 topk_routing", False),
        ("", False),
    ],
)
def test_one_operator(compiled, is_fused):
    assert dataclasses.replace(recorded()[0], compiled=compiled).is_fused == is_fused


def test_the_page_is_that_of_the_record():
    assert PAGE.read_text() == page(recorded())


def measured_again(name: str) -> None:
    if not is_installed(name):
        pytest.skip("not in this transformers")
    row, before = measure(name), {row.name: row for row in recorded()}[name]
    check(row)
    if IS_NEWEST:  # the record is of it
        assert (row.experts, row.routers, row.is_fused) == (before.experts, before.routers, before.is_fused)


@pytest.mark.parametrize("name", usually(CHEAP, CHEAP[:2] + CHEAP[3:5]))
def test_some_again(name):
    measured_again(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in CASES if name not in CHEAP])
def test_all_again(name):
    measured_again(name)
