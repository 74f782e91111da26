"""What `CudaGraphRunner` takes for the arguments that it has captured, and which of its own are none."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn

from layers import CaptureError, CudaGraphRunner
from tests.layers.test_cuda_graphs import H, OnCpu, X, _double, _runner


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


@dataclass
class Row:
    values: torch.Tensor


def test_another_object_is_another_constant():
    """Also where comparing it compares its tensors."""
    run = _runner(lambda x, row: x * row.values)
    run(X, Row(torch.ones(H)))
    with pytest.raises(
        ValueError, match=r"args\[1\] is <Row>: expected the object that was there, as captured"
    ):
        run(X, Row(torch.ones(H)))


@dataclass(slots=True)
class Slotted:
    values: list[torch.Tensor]


class Layers:
    def __init__(self, values):
        self.layers = [Row(values)]


class Both:
    """As transformers' EncoderDecoderCache holds two."""

    def __init__(self, values):
        self.own = Layers(values)


@pytest.mark.parametrize("kind", [Row, lambda values: Slotted([values]), Layers, Both])
def test_objects_that_hold_tensors_are_no_outputs(kind):
    """Nobody takes their first rows, and each replay would write over them."""
    with pytest.raises(
        CaptureError, match=r"output\['cache'\] is a (Row|Slotted|Layers|Both), in which every replay"
    ):
        _runner(lambda x: {"cache": kind(x * 2)})(X)


class Rehearsed(OnCpu):
    """As CUDA graphs are, a step runs before it is captured."""

    def capture(self, step, device):
        step()
        return super().capture(step, device)


def test_objects_that_the_step_holds_are_outputs_as_they_were():
    """A static cache, say, which a model returns."""
    cache, runner = (
        Layers(torch.ones(4, H)),
        CudaGraphRunner(lambda x: (x * 2, cache), [4], graphs=Rehearsed()),
    )
    assert runner(X[:3])[1] is cache
    with pytest.raises(CaptureError, match=r"output\[1\] is a Layers"):
        CudaGraphRunner(lambda x: (x, Layers(x * 2)), [4], graphs=Rehearsed())(X[:3])


def test_modules_are_outputs_as_they_were():
    module = nn.Linear(2, 3)
    assert _runner(lambda x: (x * 2, module))(X)[1] is module


def test_threads_take_turns():
    def waiting(x):
        time.sleep(0.005)  # for another thread to write its rows
        return x * 2

    run, most = _runner(waiting), 4

    def asked(number):
        given = torch.full((3, H), float(number))
        return all(torch.equal(run(given), 2 * given) for _ in range(10))

    with ThreadPoolExecutor(most) as threads:
        assert all(threads.map(asked, range(most)))


def test_one_of_the_threads_captures():
    def waiting(x):
        time.sleep(0.005)
        return x * 2

    run, most = _runner(waiting), 4

    with ThreadPoolExecutor(most) as threads:
        results = [threads.submit(run.capture, X) for _ in range(most)]
    errors = [each.exception() for each in results]
    assert errors.count(None) == 1 and {type(each) for each in errors} == {type(None), RuntimeError}


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
