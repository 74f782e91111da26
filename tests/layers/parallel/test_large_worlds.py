"""Shapes and bytes among more ranks than there are processes: groups whose collectives do nothing."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from layers import FusedMoE, ModularKernel, RouterOutput, StandardExperts
from layers.parallel import (
    AllGatherPrepareAndFinalize,
    AllReducePrepareAndFinalize,
    ExpertRanks,
    PaddedAllToAllPrepareAndFinalize,
)
from tests.layers.parallel.exchanges import H, config

T, K = 4, 8
GATHER = "all_gather_into_tensor_coalesced"


@pytest.fixture(params=[64, 4096])
def num_ranks(request):
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


class Sent(TorchDispatchMode):
    """Bytes that collectives are given, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        self.names.add(name)
        if name.startswith("_c10d_functional::") and "wait" not in name:
            size = sum(each.nbytes for each in pytree.tree_leaves(args[0]))
            self.bytes[name.split("::")[1]] = self.bytes.get(name.split("::")[1], 0) + size
        return function(*args, **(kwargs or {}))


def run(make_exchange, num_ranks):
    moe = config(num_experts=num_ranks, top_k=K)
    ranks = ExpertRanks(moe.num_experts, num_ranks)
    kernel = ModularKernel(make_exchange(ranks), StandardExperts(FusedMoE(moe, ranks.expert_map(3))))
    weights, ids = torch.rand(T, moe.num_experts).topk(K)
    with Sent() as sent, torch.no_grad():
        out = kernel(torch.randn(T, H), RouterOutput(weights, weights, ids.to(torch.int32)))
    assert out.shape == (T, H)
    return sent


ROUTED = 2 * T * K * 4  # weights and ids


def test_all_gather(num_ranks):
    sent = run(lambda ranks: AllGatherPrepareAndFinalize(dist.group.WORLD, max_tokens=T), num_ranks)
    rows = T * H * 4
    assert sent.bytes == {GATHER: rows + ROUTED, "reduce_scatter_tensor": num_ranks * rows}
    assert "aten::constant_pad_nd" not in sent.names, "a rank with as many tokens as it may have copies none"


def test_all_reduce(num_ranks):
    sent = run(lambda ranks: AllReducePrepareAndFinalize(dist.group.WORLD), num_ranks)
    sizes = 4 * 8  # compared on a CPU: tokens, and what one of them has
    assert sent.bytes == {"all_gather_into_tensor": sizes, "all_reduce": T * H * 4}


def test_padded_all_to_all(num_ranks):
    sent = run(
        lambda ranks: PaddedAllToAllPrepareAndFinalize(dist.group.WORLD, ranks, max_tokens=1), num_ranks
    )
    assert sent.bytes == {"all_to_all_single": num_ranks * (2 * H * 4 + 2 * K * 4)}
