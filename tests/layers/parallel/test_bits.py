"""The order of slots: one token's output is the same to the bit, whatever the number of ranks."""

import numpy
import pytest
import torch
import torch.distributed as dist

from layers import RouterOutput
from tests.layers.parallel.exchanges import E, H, K, all_gather, config, make_layer
from tests.layers.parallel.world import run_on_ranks

TOKENS = 32


def all_tokens():
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, H, generator=generator)
    weights, ids = torch.randn(TOKENS, E, generator=generator).softmax(1).topk(K, dim=1)
    return hidden, weights, ids.to(torch.int32)


def outputs(order: str) -> numpy.ndarray:
    """Of this rank's share of the tokens."""
    hidden, weights, ids = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in all_tokens())
    kernel = all_gather(make_layer(config()), max_tokens=hidden.shape[0], order=order)
    with torch.no_grad():
        return kernel(hidden, RouterOutput(hidden, weights, ids)).numpy()


def of_world(size: int, order: str) -> numpy.ndarray:
    return numpy.concatenate(run_on_ranks(size, __name__, "outputs", {"order": order}))


@pytest.mark.parametrize("size", [2, 4])
def test_the_order_of_slots_does_not_depend_on_the_number_of_ranks(size):
    assert numpy.array_equal(of_world(size, "slots"), of_world(1, "slots"))


def test_the_order_of_ranks_does():
    assert not numpy.array_equal(of_world(4, "ranks"), of_world(1, "ranks"))
