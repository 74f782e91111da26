"""Collectives as functions of tensors: several of any dtype as one, with gradients."""

import pytest
import torch
import torch.distributed as dist

from layers.parallel.collectives import start_all_gathers
from layers.parallel.group import Group
from tests.layers.parallel.test_overlap import Order
from tests.layers.parallel.world import on_ranks

SHAPES = {
    torch.bfloat16: (4,),
    torch.float64: (),
    torch.int32: (2, 3),
    torch.bool: (1,),
    torch.float8_e4m3fn: (5,),
    torch.int64: (0,),
}


def rows_of(rank, count):
    generator = torch.Generator().manual_seed(rank)
    drawn = [torch.randint(0, 2, (count, *shape), generator=generator) for shape in SHAPES.values()]
    return [(each + rank).to(dtype) for each, dtype in zip(drawn, SHAPES, strict=True)]


@on_ranks(2, 3)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_tensors_of_any_dtype_are_one_collective(count):
    group = Group.of(dist.group.WORLD)
    with Order() as order:
        started = start_all_gathers(rows_of(group.rank, count), group)
        found = [receive() for receive in started]
    assert [name for name in order.names if "gather" in name] == ["all_gather_into_tensor_coalesced"]
    ranks = [rows_of(rank, count) for rank in range(group.size)]
    for rows, *parts in zip(found, *ranks, strict=True):
        expected = torch.cat(parts)
        assert rows.dtype == expected.dtype and rows.shape == expected.shape
        assert torch.equal(rows.float(), expected.float())


@on_ranks(2)
def test_a_gradient_of_each():
    group = Group.of(dist.group.WORLD)
    given = [torch.randn(3, 4, requires_grad=True), torch.randn(3, dtype=torch.float64, requires_grad=True)]
    numbers = torch.arange(3)
    first, second, third = (
        receive() for receive in start_all_gathers([given[0].t().contiguous().t(), numbers, given[1]], group)
    )
    assert torch.equal(second, numbers.repeat(2))
    factor = 1.0 + group.rank
    (first * factor).sum().backward()
    (third * factor * torch.arange(6)).sum().backward()
    assert torch.equal(given[0].grad, torch.full((3, 4), 3.0))
    assert torch.equal(given[1].grad, 3.0 * torch.arange(6.0).double()[3 * group.rank :][:3])
