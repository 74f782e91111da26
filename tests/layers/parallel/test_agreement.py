"""What ranks have to agree on is compared before anything is exchanged, and the error has the names of the ranks."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from layers import BatchedExperts, FusedMoE, ModularKernel, RouterOutput, StandardExperts
from layers.parallel import (
    AllGatherPrepareAndFinalize,
    AllReducePrepareAndFinalize,
    AllToAllPrepareAndFinalize,
    BatchedExchange,
    ExpertRanks,
    Group,
    HierarchicalPrepareAndFinalize,
    PaddedAllToAllPrepareAndFinalize,
)
from tests.layers.parallel.exchanges import (
    ALL,
    E,
    H,
    K,
    all_gather,
    all_reduce,
    config,
    make_layer,
    owners,
    tokens_of,
    variable,
)
from tests.layers.parallel.world import on_ranks


def world_group():
    return dist.group.WORLD


@on_ranks(2, 4)
def test_options_that_differ():
    with pytest.raises(ValueError) as caught:
        AllGatherPrepareAndFinalize(world_group(), max_tokens=8 + (dist.get_rank() == 1))
    others = "ranks 0, 2, 3" if dist.get_world_size() == 4 else "rank 0"
    assert str(caught.value) == (
        f"max_tokens differs between ranks: 8 on {others}; 9 on rank 1; expected the same on all"
    )


@on_ranks(2)
def test_kinds_that_differ():
    kinds = [AllGatherPrepareAndFinalize, AllReducePrepareAndFinalize]
    with pytest.raises(
        ValueError, match=r"dispatcher differs between ranks: .*Gather.* on rank 0; .*on rank 1;"
    ):
        kinds[dist.get_rank()](world_group())


@on_ranks(2)
def test_exchanges_with_others_that_differ():
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    others = AllGatherPrepareAndFinalize(alone) if dist.get_rank() == 0 else None
    with pytest.raises(
        ValueError, match=r"others differs between ranks: 'AllGather.*' on rank 0; None on rank 1"
    ):
        AllReducePrepareAndFinalize(world_group(), others)


@on_ranks(2)
def test_experts_that_differ():
    ranks = ExpertRanks(E + dist.get_rank(), 2)
    with pytest.raises(
        ValueError, match=r"owners differs between ranks: .*num_experts=8.* on rank 0; .*on rank 1;"
    ):
        AllToAllPrepareAndFinalize(world_group(), ranks)


@on_ranks(2)
@pytest.mark.parametrize("make", [all_gather, variable, all_reduce])
@pytest.mark.parametrize("what", ["hidden size", "top_k"])
def test_sizes_that_differ(make, what):
    is_odd = dist.get_rank() == 1
    hidden_size, top_k = (H + is_odd, K) if what == "hidden size" else (H, K + is_odd)
    layer = make_layer(config(hidden_size=hidden_size))
    ids = torch.zeros(5, top_k, dtype=torch.int32)
    routed = RouterOutput(torch.zeros(5, E), torch.ones(5, top_k), ids)
    numbers = (H, H + 1) if what == "hidden size" else (K, K + 1)
    with pytest.raises(ValueError) as caught:
        make(layer)(torch.randn(5, hidden_size), routed)
    expected = f"{what} differs between ranks: {numbers[0]} on rank 0; {numbers[1]} on rank 1; "
    assert str(caught.value) == expected + "expected the same on all"
    dist.barrier()  # nothing is left on its way


@on_ranks(2)
def test_more_tokens_than_set_aside():
    kernel = all_gather(make_layer(config()), max_tokens=3)
    hidden, routed = tokens_of(0, "all_gather")
    message = rf"hidden_states has 5 tokens on rank {dist.get_rank()}: expected at most max_tokens=3"
    with pytest.raises(ValueError, match=message):
        kernel(hidden, routed)


@on_ranks(4)
def test_groups():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    group = Group.of(mesh["ep"])
    assert (group.size, group.rank) == (2, dist.get_rank() % 2)
    assert group == Group.of(mesh["ep"].get_group()) == Group.of(group)
    with pytest.raises(
        ValueError, match=r"group is a mesh of 2 dimensions: expected one, such as mesh\['ep'\]"
    ):
        Group.of(mesh)
    with pytest.raises(TypeError, match="group='ep': expected ProcessGroup or DeviceMesh, got str"):
        Group.of("ep")
    with pytest.raises(ValueError, match=r"owners.num_ranks=2: expected 4, the ranks of the group"):
        AllToAllPrepareAndFinalize(world_group(), ExpertRanks(E, 2))
    pair, mesh_of_pair = dist.new_group([0, 1]), DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        with pytest.raises((ValueError, TypeError), match="expected"):
            Group.of(pair)
        expected = rf"group is a mesh of ranks \[0, 1\]: expected one with rank {dist.get_rank()}"
        with pytest.raises(ValueError, match=expected):
            Group.of(mesh_of_pair)


@on_ranks(2)
@pytest.mark.parametrize("name", ALL)
def test_copies_and_pickles_exchange_as_well(name):
    kernel = ALL[name](make_layer(config()))
    hidden, routed = tokens_of(dist.get_rank(), name)
    for twin in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert torch.equal(twin(hidden, routed), kernel(hidden, routed))


@on_ranks(2)
def test_what_exchanges_say_of_themselves():
    padded = PaddedAllToAllPrepareAndFinalize(world_group(), owners(config()), max_tokens=5)
    assert (padded.num_dispatchers, padded.max_num_tokens_per_rank, padded.output_is_reduced) == (2, 5, True)
    variable = AllToAllPrepareAndFinalize(world_group(), owners(config()))
    assert (variable.num_dispatchers, variable.max_num_tokens_per_rank) == (2, None)
    assert AllReducePrepareAndFinalize(world_group()).num_dispatchers == 1
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
    both = AllReducePrepareAndFinalize(alone, padded)
    assert (both.num_dispatchers, both.max_num_tokens_per_rank) == (2, 5)


@on_ranks(2)
def test_two_exchanges_among_the_same_ranks():
    """Experts would be nobody's, or outputs summed twice."""
    over_all = AllToAllPrepareAndFinalize(world_group(), owners(config()))
    within = AllToAllPrepareAndFinalize(world_group(), ExpertRanks(E // 2, 2))
    message = r" is over ranks \[0, 1\]: expected one of \[0, 1\], which exchange already"
    with pytest.raises(ValueError, match=rf"within{message}"):
        HierarchicalPrepareAndFinalize(over_all, within)
    with pytest.raises(ValueError, match=rf"others{message}"):
        AllReducePrepareAndFinalize(world_group(), over_all)


@on_ranks(2)
@pytest.mark.parametrize("name", ALL)
def test_shared_output_of_another_length_is_refused(name):
    hidden, routed = tokens_of(dist.get_rank(), name, sizes="even")
    with pytest.raises(ValueError, match=r"shared has shape .*1, 16.*: expected"):
        ALL[name](make_layer(config()))(hidden, routed, torch.zeros(1, H))


@pytest.mark.parametrize("strategy", ["balanced", "linear", "round_robin"])
@pytest.mark.parametrize("num_experts, num_ranks", [(8, 1), (8, 4), (7, 3), (11, 4), (5, 5), (13, 8)])
def test_owners_are_those_of_the_expert_maps(strategy, num_experts, num_ranks):
    ranks = ExpertRanks(num_experts, num_ranks, strategy)
    found = ranks.of(torch.arange(-1, num_experts + 1, dtype=torch.int32))
    assert found[0] == found[-1] == -1
    for rank in range(num_ranks):
        expert_map = ranks.expert_map(rank)
        if expert_map is not None:
            assert torch.equal(found[1:-1] == rank, expert_map >= 0)
        else:
            assert (found[1:-1] == 0).all()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_experts": 0, "num_ranks": 2}, "num_experts=0: expected at least 1"),
        ({"num_experts": 2, "num_ranks": "2"}, "num_ranks='2': expected an int"),
        ({"num_experts": 2, "num_ranks": 3}, "global_num_experts=2: expected at least ep_size=3"),
        ({"num_experts": 2, "num_ranks": 2, "strategy": "x"}, "strategy='x': expected one of"),
    ],
)
def test_owners_that_make_no_sense(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ExpertRanks(**options)


@on_ranks(1)
@pytest.mark.parametrize(
    "kind, options, message",
    [
        (AllGatherPrepareAndFinalize, {"max_tokens": 0}, "max_tokens=0: expected at least 1"),
        (AllGatherPrepareAndFinalize, {"order": "x"}, "order='x': expected one of 'ranks', 'slots'"),
        (AllToAllPrepareAndFinalize, {"owners": None}, "owners=None: expected ExpertRanks"),
        (
            PaddedAllToAllPrepareAndFinalize,
            {"owners": ExpertRanks(2, 1), "max_tokens": 0},
            "max_tokens=0: expected",
        ),
    ],
)
def test_options_that_make_no_sense(kind, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        kind(world_group(), **options)


OTHERS = {  # experts of other ranks, of more, all of them; and those that fit, or of which nothing is known
    "round robin": ("expert_map", lambda rank: ExpertRanks(E, 2, "round_robin").expert_map(rank)),
    "of the other rank": (r"expert_map\[[04]\]=", lambda rank: ExpertRanks(E, 2).expert_map(1 - rank)),
    "all": ("expert_map", lambda rank: None),
    "more": (
        rf"experts are {E + 2} in all: expected {E}",
        lambda rank: ExpertRanks(E + 2, 2).expert_map(rank),
    ),
    "fitting": (None, lambda rank: ExpertRanks(E, 2).expert_map(rank)),
    "on the meta device": (None, lambda rank: ExpertRanks(E, 2).expert_map(1 - rank)),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", ["all to all", "batched", "two steps", "of shared tokens"])
@pytest.mark.parametrize("held", OTHERS)
def test_experts_that_tokens_are_not_sent_for(held, kind):
    """Their tokens would be lost, or weighed twice."""
    message, placement = OTHERS[held]
    exchange = AllToAllPrepareAndFinalize(world_group(), ExpertRanks(E, 2))
    experts = BatchedExperts if kind == "batched" else StandardExperts
    if kind == "batched":
        exchange = BatchedExchange(exchange)
    if kind == "of shared tokens":
        alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"]
        exchange = AllReducePrepareAndFinalize(alone, exchange)
    if kind == "two steps":
        one = init_device_mesh("cpu", (1, 2), mesh_dim_names=("node", "local"))
        across = AllToAllPrepareAndFinalize(one["node"], ExpertRanks(E, 1))
        exchange = HierarchicalPrepareAndFinalize(across, exchange)
    moe = config(num_redundant_experts=2 if held == "more" else 0)
    layer = FusedMoE(moe, placement(dist.get_rank()), device="meta" if "meta" in held else "cpu")
    if message is None:
        assert isinstance(ModularKernel(exchange, experts(layer)), ModularKernel)
        return
    with pytest.raises(ValueError, match=message):
        ModularKernel(exchange, experts(layer))
