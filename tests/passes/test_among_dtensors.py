"""Layers of plain tensors in training graphs that hold DTensors: those of tensor parallelism around, say."""

import pytest
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.helpers import relative_error
from tests.layers.test_fsdp import mesh  # noqa: F401
from tests.passes import stock
from tests.passes.test_before_autograd import ALLOWED, RAISED, Run, float32, grads


def test_a_layer_behind_tensor_parallelism_is_raised(mesh):  # noqa: F811
    args = float32()
    size = args[0].shape[1]
    before = nn.Sequential(nn.Linear(size, 12), nn.ReLU(), nn.Linear(12, size)).double()

    def function(x, *weights):
        return stock.batched(x + before(x), *weights)

    exact = grads(function, [each.double() for each in args])
    parallelize_module(before.float(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    run = Run()
    found = grads(run.compile(function), args)
    assert run.raised == RAISED and not run.refused
    for ours, expected in zip(found, exact, strict=True):
        assert relative_error(ours, expected) <= ALLOWED


@pytest.mark.parametrize("change", [lambda x: x.mul_(2.0), lambda x: x.__imul__(2.0)], ids=["mul_", "imul"])
def test_where_a_dtensor_changes_in_place_nothing_is_raised(mesh, change, caplog):  # noqa: F811
    def function(x, *weights):
        rows = x * 3.0
        wrapped = DTensor.from_local(rows, mesh, [Replicate()])
        change(wrapped)
        return stock.batched(rows, *weights)  # the same memory

    run = Run()
    found = grads(run.compile(function), float32())
    assert not run.raised and "changes a DTensor in place" in caplog.text
    exact = grads(lambda x, *weights: stock.batched(x * 6.0, *weights), float32())
    assert relative_error(found[0], exact[0]) <= ALLOWED
