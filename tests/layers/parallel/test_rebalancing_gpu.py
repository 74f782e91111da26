"""On a GPU: a captured layer that ranks share, here a group of one, sees experts that have moved at its next replay."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from layers.parallel import ExpertParallel, ExpertRebalancer
from tests.helpers import assert_matches_oracle
from tests.layers.parallel.test_rebalancing import E, H, expected_of, make_blocks

pytestmark = pytest.mark.gpu


@pytest.fixture
def mesh():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


@torch.no_grad()
def test_a_captured_graph_sees_each_new_placement(mesh):
    whole, hidden = make_blocks(2), torch.randn(40, H)
    model, static = copy.deepcopy(whole).cuda(), hidden.cuda()
    for block in model:
        parallelize_module(block, mesh, {"experts": ExpertParallel("allgather", max_tokens=40)})
    rebalancer = ExpertRebalancer(model)
    for _ in range(3):
        model(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(static)
    places = [model[0].experts.balancing.held().tolist()]
    for _ in range(2):
        static.normal_()
        expected = expected_of(whole, static.cpu())
        rebalancer.start()
        while rebalancer.step():
            graph.replay()
            assert_matches_oracle(output.cpu(), expected)
        graph.replay()
        assert_matches_oracle(output.cpu(), expected)
        places.append(model[0].experts.balancing.held().tolist())
    assert places[0] != places[1] and sorted(set(places[1])) == list(range(E))
    assert rebalancer.load_per_rank().min() > 0
