"""What `CudaGraphRunner` takes for the arguments that it has captured, and which of its own are none."""

import numpy
import pytest
import torch

from layers import CudaGraphRunner
from tests.layers.test_cuda_graphs import H, X, _double, _runner


@pytest.mark.parametrize(("held", "given"), [(1, 1.0), (1, True), (2.0, 2)])
def test_a_constant_of_another_type_is_another(held, given):
    run, rows = _runner(lambda x, factor: x * factor), torch.ones(1, H, dtype=torch.int32)
    run(rows, held)
    with pytest.raises(ValueError, match=rf"args\[1\] is {given}: expected {held}, as captured"):
        run(rows, given)


def test_not_a_number_is_a_constant():
    run, nan = _runner(lambda x, factor: x * factor), float("nan")
    run(X, nan)
    assert run(X, float("nan")).isnan().all()
    with pytest.raises(ValueError, match=r"args\[1\] is 1.0: expected nan"):
        run(X, 1.0)


def test_an_object_is_the_constant_that_it_was():
    """Though it cannot be compared, as what holds tensors."""

    class Cache:
        def __eq__(self, other):
            raise TypeError("as tensors are, by element")

        __hash__ = None

    run, cache = _runner(lambda x, cache: x * 2), Cache()
    run(X, cache)
    assert torch.equal(run(X, cache), 2 * X)


def test_keywords_come_in_any_order():
    run = _runner(lambda first, second: first - second)
    run(first=X, second=X)
    assert torch.equal(run(second=X, first=3 * X), 2 * X)


def test_arrays_are_no_constants():
    run = _runner(lambda x, factor: x * torch.as_tensor(factor))
    with pytest.raises(TypeError, match=r"args\[1\] is <ndarray>: expected a tensor of T rows"):
        run(X, numpy.ones(H))
    assert torch.equal(run(X, numpy.float64(2)), X * 2)


def test_a_report_without_hazards_is_none():
    with pytest.raises(TypeError, match="explain returned None: expected a report that has capture_hazards"):
        _runner(_double, explain=lambda *given: None)(X)


def test_what_captures_nothing():
    with pytest.raises(TypeError, match="graphs=3: expected what captures steps"):
        CudaGraphRunner(_double, [1], graphs=3)
