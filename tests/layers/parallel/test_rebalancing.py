"""Experts that move between ranks while a model runs: it stays the same function, and each rank has as much to do."""

import copy
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from layers import (
    EplbState,
    ExpertPlacement,
    FusedMoE,
    MoEBlock,
    MoEConfig,
    SharedExpertConfig,
    rebalance_experts,
)
from layers.parallel import (
    AllGatherMonolithic,
    ExpertParallel,
    ExpertRanks,
    ExpertRebalancer,
    ParallelConfig,
    rebalancing,
)
from tests.helpers import assert_matches_oracle, usually
from tests.layers import oracle
from tests.layers.parallel.world import on_ranks

E, K, H, I, REDUNDANT = 8, 2, 16, 24, 4
STYLES = {
    "allgather": ExpertParallel("allgather"),
    "allgather_static": ExpertParallel("allgather", max_tokens=40),
    "alltoall": ExpertParallel("alltoall"),
    "alltoall_static": ExpertParallel("alltoall", max_tokens=40),
    "allreduce": ExpertParallel("allreduce"),
}
styles = pytest.mark.parametrize("style", STYLES)


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


class Blocks(nn.ModuleList):
    """One behind the other."""

    def forward(self, hidden):
        for block in self:
            hidden = hidden + block(hidden)
        return hidden


def make_blocks(num_layers=1, num_redundant=REDUNDANT, dtype=torch.float32) -> Blocks:
    """Whose first experts are chosen more often."""
    torch.manual_seed(5)
    shared = SharedExpertConfig(8)
    config = MoEConfig(E, K, H, I, has_bias=True, shared_experts=shared, num_redundant_experts=num_redundant)
    blocks = Blocks(MoEBlock(config, dtype=dtype) for _ in range(num_layers))
    for block in blocks:
        nn.init.normal_(block.gate.weight, std=0.3)
        with torch.no_grad():
            block.gate.weight[:, 0] = torch.linspace(2, 0, E)
    return blocks


def parallel(blocks, style="allgather"):
    blocks = copy.deepcopy(blocks)
    for block in blocks:
        parallelize_module(block, mesh_of_all(), {"experts": STYLES[style]})
    return blocks


def tokens_of(rank, style="allgather", count=33, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0 if style == "allreduce" else rank)
    hidden = torch.randn(count, H, generator=generator)
    hidden[:, 0] = 1
    return hidden.to(dtype)


def expected_of(blocks, hidden):
    hidden = hidden.double()
    for block in blocks:
        hidden = hidden + oracle.block(block, hidden)
    return hidden


def rebalanced(model, rebalancer, check):
    """With `check` between any two steps."""
    rebalancer.start()
    while rebalancer.step():
        check()
    check()


@on_ranks(2, 4)
@styles
def test_the_same_function_before_between_and_after(style):
    """Experts move first to where every place has one, then by load, a layer between two runs."""
    whole, hidden = make_blocks(3), tokens_of(dist.get_rank(), style)
    model, expected = parallel(whole, style), expected_of(whole, hidden)
    rebalancer = ExpertRebalancer(model)

    def check():
        with torch.no_grad():
            assert_matches_oracle(model(hidden), expected)

    check()
    before = rebalancer.imbalance()
    rebalancer.place("linear")
    check()
    rebalanced(model, rebalancer, check)
    assert (before > 1.3).all()
    assert (rebalancer.imbalance() < 1.25).all()


@on_ranks(2)
@pytest.mark.parametrize("style", usually(["allgather_static", "alltoall", "allreduce"], ["alltoall"]))
def test_a_compiled_function_sees_each_new_placement(style):
    whole, hidden = make_blocks(), tokens_of(dist.get_rank(), style)
    model, expected = parallel(whole, style), expected_of(whole, hidden)
    rebalancer, counter = ExpertRebalancer(model), CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    held = []

    def check():
        held.append(model[0].experts.balancing.held().tolist())
        with torch.no_grad():
            assert_matches_oracle(run(hidden), expected)

    check()
    num_graphs = counter.frame_count
    rebalancer.place("round_robin")
    check()
    rebalanced(model, rebalancer, check)
    assert counter.frame_count == num_graphs
    assert held[0] != held[1] != held[-1]


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_place_has_the_expert_that_the_maps_say(dtype):
    """Written into the memory that parameters had."""
    whole = make_blocks(2, dtype=dtype)
    model = parallel(whole)
    rebalancer = ExpertRebalancer(model)
    memory = [parameter.to_local().data_ptr() for parameter in model[0].experts.parameters()]
    model(tokens_of(dist.get_rank(), dtype=dtype))
    for _ in range(2):
        rebalancer.start(), rebalancer.finish()
        for block, plain in zip(model, whole, strict=True):
            held = block.experts.balancing.held()
            assert held.min() == 0 and len(held.unique()) == E
            mine = held.chunk(2)[dist.get_rank()]
            stored = zip(block.experts.get_expert_weights(), plain.experts.get_expert_weights(), strict=True)
            assert all(torch.equal(part, logical[mine]) for part, logical in stored)
        model(tokens_of(1 - dist.get_rank(), dtype=dtype))
    assert memory == [parameter.to_local().data_ptr() for parameter in model[0].experts.parameters()]


@on_ranks(4)
def test_every_rank_chooses_the_same_replica():
    """Where ranks have the same tokens, one that chose another would add an expert twice, and another never."""
    whole = make_blocks()
    model = parallel(whole, "allreduce")
    ExpertRebalancer(model).place("linear")
    balancing, ids = model[0].experts.balancing, torch.randint(0, E, (50, K), dtype=torch.int32)
    dist.broadcast(ids, 0)
    chosen = [None] * 4
    dist.all_gather_object(chosen, balancing(ids).tolist())
    assert chosen[0] == chosen[1] == chosen[2] == chosen[3]
    assert (balancing(ids) >= E).any()  # replicas are used
    logits, hidden = torch.randn(5 + dist.get_rank(), E), torch.randn(5 + dist.get_rank(), H)
    layer = FusedMoE(whole[0].experts.config, ExpertRanks(E + REDUNDANT, 4).expert_map(dist.get_rank()))
    for parameter, stored in zip(layer.parameters(), model[0].experts.parameters(), strict=True):
        parameter.data.copy_(stored.to_local())
    layer.balancing = balancing
    out = AllGatherMonolithic(dist.group.WORLD, layer)(hidden, logits)
    assert_matches_oracle(out, oracle.experts(whole[0].experts, hidden, logits))


@on_ranks(2)
def test_the_model_runs_while_the_first_rank_plans():
    whole, hidden = make_blocks(), tokens_of(dist.get_rank())
    model, expected, may_go_on = parallel(whole), expected_of(whole, hidden), threading.Event()
    rebalancer, threads = ExpertRebalancer(model), []

    def plan(*arguments):
        threads.append(threading.current_thread())
        may_go_on.wait(30)
        return rebalance_experts(*arguments)

    with mock.patch.object(rebalancing, "rebalance_experts", plan):
        rebalancer.start()
        for _ in range(3):
            assert rebalancer.step() and rebalancer.is_moving
            assert_matches_oracle(model(hidden), expected)
        assert model[0].experts.balancing.is_initial()
        may_go_on.set()
        rebalancer.finish()
    assert threading.current_thread() not in threads and len(threads) == (dist.get_rank() == 0)
    assert not rebalancer.is_moving and not rebalancer.step()
    assert not model[0].experts.balancing.is_initial()
    assert_matches_oracle(model(hidden), expected)


@on_ranks(2)
def test_a_plan_is_made_of_the_load_of_all():
    model = parallel(make_blocks(2))
    rebalancer, seen = ExpertRebalancer(model), []
    model(tokens_of(dist.get_rank()))
    model[1].experts.balancing.load.mul_(2**31)  # of many forwards
    mine = torch.stack([block.experts.balancing.load_per_expert() for block in model])
    dist.all_reduce(mine)

    def plan(load, *arguments):
        seen.append(load.clone())
        return rebalance_experts(load, *arguments)

    with mock.patch.object(rebalancing, "rebalance_experts", plan):
        rebalancer.start(), rebalancer.finish()
    if dist.get_rank() == 0:
        assert torch.equal(torch.stack(seen), mine)
    assert mine.sum() == 2 * 33 * K * (1 + 2**31)
    assert (rebalancer.load_per_rank() == 0).all() and (rebalancer.imbalance() == 1).all()


@on_ranks(4)
def test_experts_of_a_node_stay_together():
    """Though more would stay if ranks of other nodes took each other's parts."""
    model = parallel(make_blocks())
    rebalancer, balancing = ExpertRebalancer(model, num_groups=2, num_nodes=2), model[0].experts.balancing
    rebalancer.place("linear")
    first, second, third, fourth = balancing.held().chunk(4)
    plan = ExpertPlacement.of(torch.cat([first, third, second, fourth]), E)
    with mock.patch.object(rebalancing, "rebalance_experts", return_value=plan):
        rebalancer.start(), rebalancer.finish()
    nodes = [sorted(node.tolist()) for node in balancing.held().chunk(2)]
    expected = [sorted([*first.tolist(), *third.tolist()]), sorted([*second.tolist(), *fourth.tolist()])]
    assert sorted(nodes) == sorted(expected)


@on_ranks(2)
def test_ranks_keep_what_they_hold():
    """Of a plan in which they only change names, nothing moves."""
    model = parallel(make_blocks())
    rebalancer, balancing = ExpertRebalancer(model), model[0].experts.balancing
    rebalancer.place("linear")
    held = balancing.held()
    swapped = ExpertPlacement.of(torch.cat(held.chunk(2)[::-1]), E)
    with mock.patch.object(rebalancing, "rebalance_experts", return_value=swapped):
        rebalancer.start(), rebalancer.finish()
    assert torch.equal(balancing.held(), held) and not torch.equal(
        held, swapped.physical_to_logical.flatten()
    )


@on_ranks(2)
def test_a_layer_keeps_the_state_it_has():
    model, state = parallel(make_blocks(2)), EplbState.initial(1, E, REDUNDANT)
    model[0].experts.set_eplb_state(0, *state)
    rebalancer = ExpertRebalancer(model, num_real_tokens=torch.tensor(5))
    model(tokens_of(dist.get_rank()))
    assert state.expert_load_view.sum() == 33 * K
    assert rebalancer.load_per_rank().sum(1).tolist() == [2 * 33 * K, 2 * 5 * K]
    state.expert_load_view[0, 0] = -1000
    with pytest.raises(ValueError, match=r"load overflowed: expected a start\(\) before, or int64"):
        rebalancer.start()


@on_ranks(2)
def test_without_redundant_experts():
    """Dealt out, balanced, and back to where a state dict has them in order."""
    whole, hidden = make_blocks(num_redundant=0), tokens_of(dist.get_rank())
    model, expected = parallel(whole, "alltoall"), expected_of(whole, hidden)
    rebalancer, balancing = ExpertRebalancer(model), model[0].experts.balancing

    def check():
        with torch.no_grad():
            assert_matches_oracle(model(hidden), expected)

    rebalancer.place("round_robin")
    assert balancing.held().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    check()
    rebalanced(model, rebalancer, check)
    rebalancer.place("linear")
    assert balancing.is_initial()
    check()
    for name, tensor in model.state_dict().items():
        stored = tensor.full_tensor() if "experts.w" in name and "shared" not in name else tensor
        assert torch.equal(stored, whole.state_dict()[name]), name


@on_ranks(4)
def test_experts_over_data_and_tensor_parallel_ranks():
    whole, around = make_blocks(), ParallelConfig(dp=2, ep=True, tp=2)
    model, mesh = copy.deepcopy(whole), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    around.parallelize(model[0].experts, mesh)
    hidden = tokens_of(dist.get_rank() // 2)
    expected, rebalancer = expected_of(whole, hidden), ExpertRebalancer(model)
    rebalanced(model, rebalancer, lambda: assert_matches_oracle(model(hidden), expected))
    assert rebalancer.load_per_rank().sum() == 2 * 2 * 33 * K  # tokens count on each rank that has them
    with pytest.raises(ValueError, match=r"num_groups=3: expected a divisor of E=8"):
        ExpertRebalancer(model, num_groups=3)
