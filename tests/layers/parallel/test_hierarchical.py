"""Nodes and their ranks, as a mesh of two dimensions: values and gradients, one copy to a node, bytes of each step."""

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from layers import BatchedExperts, FusedMoE, ModularKernel, RouterOutput, StandardExperts
from layers.parallel import (
    AllGatherPrepareAndFinalize,
    AllToAllPrepareAndFinalize,
    BatchedExchange,
    ExpertRanks,
    HierarchicalPrepareAndFinalize,
    PaddedAllToAllPrepareAndFinalize,
)
from tests.helpers import assert_matches_oracle, assert_same, mixed
from tests.layers.parallel import test_large_worlds
from tests.layers.parallel.exchanges import MOST, ROUTINGS, E, H, config, held_by, make_layer, tokens_of
from tests.layers.parallel.test_exchanges import differentiable, loss, oracle
from tests.layers.parallel.test_large_worlds import Sent
from tests.layers.parallel.world import on_ranks

num_ranks = test_large_worlds.num_ranks
N = 2


def variable(mesh, experts, most):
    return AllToAllPrepareAndFinalize(mesh, ExpertRanks(experts, mesh.size()))


def padded(mesh, experts, most):
    return PaddedAllToAllPrepareAndFinalize(mesh, ExpertRanks(experts, mesh.size()), max_tokens=most)


def gathered(mesh, experts, most):
    return AllGatherPrepareAndFinalize(mesh, max_tokens=most)


WAYS = {"variable": (variable, variable), "padded": (padded, padded), "gathered": (padded, gathered)}


def exchange_of(name, num_experts, nodes=N, most=MOST):
    """Over nodes of as many ranks each, and the experts that this rank holds."""
    across, within = WAYS[name]
    shape = (nodes, dist.get_world_size() // nodes)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "local"))
    inner = within(mesh["local"], num_experts // nodes, nodes * most)
    exchange = HierarchicalPrepareAndFinalize(across(mesh["node"], num_experts, most), inner)
    of_node = ExpertRanks(num_experts // nodes, shape[1]).expert_map(mesh["local"].get_local_rank())
    return exchange, exchange.expert_map(of_node)


def kernel_of(name, layer, batched=False):
    exchange, expert_map = exchange_of(name, layer.config.num_experts)
    part = FusedMoE(layer.config, expert_map, dtype=layer.w13_weight.dtype)
    with torch.no_grad():
        for each, parameter in part.named_parameters():
            parameter.copy_(layer.get_parameter(each)[held_by(expert_map)])
    if batched:
        return ModularKernel(BatchedExchange(exchange), BatchedExperts(part))
    return ModularKernel(exchange, StandardExperts(part))


@on_ranks(2, 4)
@pytest.mark.parametrize(("name", "routing", "batched"), mixed(WAYS, ROUTINGS, (False, True), rounds=3))
def test_values(name, routing, batched):
    """Six experts on two nodes: of two ranks three each, of four two and one."""
    layer = make_layer(config(num_experts=6))
    hidden, routed = tokens_of(dist.get_rank(), "padded", routing)
    routed.topk_ids[routed.topk_ids >= 6] = -1
    shared = torch.randn(hidden.shape)
    with torch.no_grad():
        out = kernel_of(name, layer, batched)(hidden, routed, shared)
    assert_matches_oracle(out, oracle(layer, hidden, routed) + shared.double())


@on_ranks(4)
@pytest.mark.parametrize("name", WAYS)
def test_gradients(name):
    layer = make_layer(config(has_bias=True), torch.float64)
    kernel, rank = kernel_of(name, layer), dist.get_rank()
    hidden, routed = differentiable(*tokens_of(rank, "padded", dtype=torch.float64))
    loss(kernel(hidden, routed)).backward()
    expected = [differentiable(*tokens_of(each, "padded", dtype=torch.float64)) for each in range(4)]
    for each in expected:
        loss(layer(*each)).backward()
    own, weights = expected[rank][0].grad, expected[rank][1].topk_weights.grad
    assert_same([hidden.grad, routed.topk_weights.grad], [own, weights])
    part = kernel.experts.layer
    for each, parameter in part.named_parameters():
        assert_same([parameter.grad], [layer.get_parameter(each).grad[held_by(part.expert_map)]])


@on_ranks(4)
@pytest.mark.slow
def test_one_graph_for_every_routing():
    layer = make_layer(config())
    kernel, counter = kernel_of("padded", layer), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(kernel, fullgraph=True, backend=counter, dynamic=False)
    for routing in ROUTINGS:
        hidden, routed = tokens_of(dist.get_rank(), "padded", routing, sizes="even")
        with torch.no_grad():
            assert_matches_oracle(compiled(hidden, routed), oracle(layer, hidden, routed))
    assert counter.frame_count == 1


@on_ranks(4)
def test_one_copy_of_a_token_crosses_to_a_node():
    kernel, rank = kernel_of("variable", make_layer(config())), dist.get_rank()
    hidden, routed = tokens_of(rank, "variable")
    prepared = kernel.start(hidden, routed).wait()
    node, place = divmod(rank, 2)
    crossed, there = prepared.way_back.across.hidden_states, []
    for sender in (place, 2 + place):  # the ranks at this place in their nodes
        tokens, theirs = tokens_of(sender, "variable")
        there.append(tokens[(theirs.topk_ids // (E // 2) == node).any(1)])
    assert torch.equal(crossed, torch.cat(there))


@on_ranks(4)
def test_extra_tensors_arrive_with_their_tokens():
    kernel, rank = kernel_of("padded", make_layer(config())), dist.get_rank()
    hidden, routed = tokens_of(rank, "padded")
    marks = hidden[:, 0] * 2, hidden.sum(1, keepdim=True)
    prepared = kernel.prepare_finalize.prepare(hidden, routed.topk_weights, routed.topk_ids, 2, None, marks)
    rows, (first, second) = prepared.hidden_states, prepared.extra_tensors
    assert_same([first, second], [rows[:, 0] * 2, rows.sum(1, keepdim=True)])
    assert rows.any()


def test_bytes_of_each_step(num_ranks):
    """Of 64 and 4096 ranks in 8 and 64 nodes: each step sends to as many ranks as it has, not to all."""
    nodes, tokens = int(num_ranks**0.5), 4
    moe = config(num_experts=num_ranks, top_k=8)
    exchange, expert_map = exchange_of("padded", num_ranks, nodes, tokens)
    kernel = ModularKernel(exchange, StandardExperts(FusedMoE(moe, expert_map)))
    weights, ids = torch.rand(tokens, num_ranks).topk(8)
    with Sent() as sent, torch.no_grad():
        out = kernel(torch.randn(tokens, H), RouterOutput(weights, weights, ids.to(torch.int32)))
    assert out.shape == (tokens, H) and exchange.num_dispatchers == num_ranks
    across, within = nodes * tokens, nodes * nodes * tokens  # rows of a rank
    assert sent.bytes == {"all_to_all_single": (across + within) * (2 * H * 4 + 2 * 8 * 4)}


@on_ranks(2)
def test_refused():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("node", "local"))
    within = padded(mesh["local"], 3, 2 * MOST)
    with pytest.raises(TypeError, match=r"across.owners=None: expected"):
        HierarchicalPrepareAndFinalize(gathered(mesh["node"], 6, MOST), within)
    with pytest.raises(ValueError, match=r"num_experts=7.*: expected as many experts on each node, in a row"):
        HierarchicalPrepareAndFinalize(padded(mesh["node"], 7, MOST), within)
    scattered = PaddedAllToAllPrepareAndFinalize(
        mesh["node"], ExpertRanks(6, 2, "round_robin"), max_tokens=MOST
    )
    with pytest.raises(ValueError, match="in a row"):
        HierarchicalPrepareAndFinalize(scattered, within)
    with pytest.raises(TypeError, match="within=3: expected"):
        HierarchicalPrepareAndFinalize(padded(mesh["node"], 6, MOST), 3)
    across = padded(mesh["node"], 6, MOST)
    with pytest.raises(ValueError, match=r"within.owners=ExpertRanks\(num_experts=6.*: expected 3 experts"):
        HierarchicalPrepareAndFinalize(across, variable(mesh["local"], 6, None))
    for few in (padded, gathered):
        with pytest.raises(ValueError, match=r"within.max_tokens=17: expected at least 18, those that nodes"):
            HierarchicalPrepareAndFinalize(across, few(mesh["local"], 3, 2 * MOST - 1))
    with pytest.raises(ValueError, match=r"of_node has shape \[6\]: expected \[3\]"):
        HierarchicalPrepareAndFinalize(across, within).expert_map(torch.arange(6))
