"""Expert maps and the placement of replicas, against brute force and against what they promise."""

import itertools

import pytest
import torch

from layers import determine_expert_map, rebalance_experts, spread_experts
from layers.placement import ExpertPlacement

STRATEGIES = ("balanced", "linear", "round_robin")


@pytest.mark.parametrize(
    ("strategy", "held"),
    [
        ("balanced", [[0, 1, 2], [3, 4, 5], [6, 7]]),
        ("linear", [[0, 1], [2, 3], [4, 5, 6, 7]]),
        ("round_robin", [[0, 3, 6], [1, 4, 7], [2, 5]]),
    ],
)
def test_each_rank_holds_what_the_strategy_says(strategy, held):
    for rank, experts in enumerate(held):
        count, expert_map = determine_expert_map(3, rank, 8, strategy)
        expected = torch.full((8,), -1, dtype=torch.int32)
        expected[experts] = torch.arange(len(experts), dtype=torch.int32)
        assert count == len(experts)
        assert expert_map.dtype == torch.int32
        assert torch.equal(expert_map, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("size", "experts"), [(2, 2), (3, 7), (4, 64), (5, 33), (7, 7)])
def test_every_expert_has_one_rank(strategy, size, experts):
    maps = [determine_expert_map(size, rank, experts, strategy) for rank in range(size)]
    assert sum(count for count, _ in maps) == experts
    held = torch.stack([expert_map >= 0 for _, expert_map in maps])
    assert torch.equal(held.sum(0), torch.ones(experts, dtype=torch.int64))
    for count, expert_map in maps:
        assert expert_map[expert_map >= 0].tolist() == list(range(count))


def test_balanced_is_the_default_and_one_rank_needs_no_map():
    assert torch.equal(determine_expert_map(3, 0, 8)[1], determine_expert_map(3, 0, 8, "balanced")[1])
    assert determine_expert_map(1, 0, 8) == (8, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 8), "ep_size=0: expected at least 1"),
        ((2, 2, 8), r"ep_rank=2: expected an int in \[0, ep_size=2\)"),
        ((2, -1, 8), r"ep_rank=-1: expected an int in \[0, ep_size=2\)"),
        ((2, 0, 0), "global_num_experts=0: expected at least 1"),
        ((4, 0, 3), "global_num_experts=3: expected at least ep_size=4"),
        ((2, 0, 8, "random"), "strategy='random': expected one of 'balanced', 'linear', 'round_robin'"),
    ],
)
def test_maps_that_cannot_be_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        determine_expert_map(*arguments)


def _loads(load, placement: ExpertPlacement, ranks: int):
    """[L, ranks]: the work of every rank when the replicas of an expert share its load evenly."""
    share = (load.double() / placement.replica_count).gather(1, placement.physical_to_logical)
    return share.unflatten(1, (ranks, -1)).sum(-1)


def _check_consistent(placement: ExpertPlacement, experts: int):
    for slots, table, counts in zip(*placement, strict=True):
        assert torch.equal(counts, slots.bincount(minlength=experts))
        assert counts.min() >= 1
        for expert in range(experts):
            expected = (slots == expert).nonzero().flatten().tolist()
            assert table[expert].tolist() == expected + [-1] * (table.shape[1] - len(expected))


def test_the_published_example():
    # The example of DeepSeek's EPLB repository: 12 experts in 4 groups, 16 replicas on 2 nodes of 4 devices.
    load = torch.tensor(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ]
    )
    placement = rebalance_experts(load, 16, 4, 2, 8)
    assert placement.physical_to_logical.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    _check_consistent(placement, 12)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("redundant", [16, 32, 128])
def test_ranks_are_balanced(sigma, redundant):
    torch.manual_seed(0)
    load = torch.exp(sigma * torch.randn(20, 128))
    placement = rebalance_experts(load, 128 + redundant, 1, 1, 4)
    _check_consistent(placement, 128)
    ranks = _loads(load, placement, 4)
    assert (ranks.amax(1) / ranks.mean(1)).max() <= 1.05


def test_ranks_are_balanced_without_replicas():
    torch.manual_seed(0)
    load = torch.exp(torch.randn(20, 128))
    ranks = _loads(load, rebalance_experts(load, 128, 1, 1, 4), 4)
    assert (ranks.amax(1) / ranks.mean(1)).max() <= 1.05


def _best_share(load, replicas):
    """The smallest possible load of the busiest replica."""
    extra = replicas - len(load)
    choices = itertools.combinations_with_replacement(range(len(load)), extra)
    return min(max(w / (1 + chosen.count(e)) for e, w in enumerate(load)) for chosen in choices)


def _best_packing(weights, ranks):
    """The smallest possible load of the busiest rank, with equally many items on each."""
    room = len(weights) // ranks

    def best(items, totals):
        if not items:
            return max(totals)
        first, rest = items[0], items[1:]
        return min(
            best(
                [i for i in rest if i not in others],
                [*totals, weights[first] + sum(weights[i] for i in others)],
            )
            for others in itertools.combinations(rest, room - 1)
        )

    return best(list(range(len(weights))), [])


def test_replication_is_optimal():
    torch.manual_seed(0)
    for _ in range(30):
        load = torch.rand(1, 5).exp()
        # As many ranks as replicas: a rank's load is a replica's.
        ranks = _loads(load, rebalance_experts(load, 9, 1, 1, 9), 9)
        assert ranks.max().item() == pytest.approx(_best_share(load[0].double().tolist(), 9))


def test_packing_is_near_the_optimum():
    torch.manual_seed(0)
    for experts, ranks in [(6, 2), (6, 3), (8, 2), (8, 4), (9, 3)] * 6:
        load = (2 * torch.randn(1, experts)).exp()
        busiest = _loads(load, rebalance_experts(load, experts, 1, 1, ranks), ranks).max().item()
        # What greedy packing guarantees: 4/3 - 1/(3 ranks) of the optimum.
        assert busiest <= (4 / 3 - 1 / (3 * ranks)) * _best_packing(load[0].double().tolist(), ranks)


def test_groups_stay_on_their_node():
    torch.manual_seed(0)
    load = torch.exp(torch.randn(8, 32))
    placement = rebalance_experts(load, 48, 8, 2, 4)
    _check_consistent(placement, 32)
    for slots in placement.physical_to_logical:
        first, second = ({int(e) // 4 for e in half} for half in slots.chunk(2))
        assert len(first) == len(second) == 4
        assert not first & second


def test_groups_that_do_not_divide_among_nodes_are_ignored():
    torch.manual_seed(0)
    load = torch.exp(torch.randn(3, 12))
    assert torch.equal(
        rebalance_experts(load, 16, 3, 2, 4).physical_to_logical,
        rebalance_experts(load, 16, 1, 1, 4).physical_to_logical,
    )


def test_one_layer_and_integers():
    load = torch.tensor([5, 1, 1, 1], dtype=torch.int32)
    one = rebalance_experts(load, 6, 1, 1, 2)
    many = rebalance_experts(load.unsqueeze(0), 6, 1, 1, 2)
    for a, b in zip(one, many, strict=True):
        assert torch.equal(a, b[0])
    assert one.replica_count.tolist() == [3, 1, 1, 1]


def test_no_load_at_all_is_placed():
    placement = rebalance_experts(torch.zeros(1, 4), 6, 1, 1, 2)
    _check_consistent(placement, 4)


@pytest.mark.parametrize(
    ("load", "counts", "error", "message"),
    [
        ([1, 2], (4, 1, 1, 2), TypeError, "load="),
        (torch.ones(2, 2, 2), (4, 1, 1, 2), ValueError, r"load has shape \(2, 2, 2\): expected \[E\]"),
        (torch.tensor([1.0, -1.0]), (4, 1, 1, 2), ValueError, "negative or not finite"),
        (torch.tensor([1.0, float("nan")]), (4, 1, 1, 2), ValueError, "negative or not finite"),
        (torch.ones(4), (3, 1, 1, 1), ValueError, "num_replicas=3: expected at least E=4"),
        (torch.ones(4), (5, 1, 1, 2), ValueError, "num_replicas=5: expected a multiple of num_ranks=2"),
        (torch.ones(4), (4, 3, 1, 2), ValueError, "num_groups=3: expected a divisor of E=4"),
        (torch.ones(4), (4, 1, 3, 2), ValueError, "num_nodes=3: expected a divisor of num_ranks=2"),
        (torch.ones(4), (4, 1, 1, 0), ValueError, "num_ranks=0: expected at least 1"),
    ],
)
def test_loads_and_counts_that_cannot_be_are_named(load, counts, error, message):
    with pytest.raises(error, match=message):
        rebalance_experts(load, *counts)


@pytest.mark.parametrize(
    ("counts", "strategy", "held"),
    [
        ((8, 12, 4), "linear", [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]),
        ((8, 12, 4), "round_robin", [0, 4, 0, 1, 5, 1, 2, 6, 2, 3, 7, 3]),
        ((4, 4, 2), "round_robin", [0, 2, 1, 3]),
        ((2, 6, 3), "linear", [0, 1, 0, 1, 0, 1]),
    ],
)
def test_experts_are_spread_before_any_load_is_known(counts, strategy, held):
    placement = spread_experts(*counts, strategy)
    assert placement.physical_to_logical.tolist() == held
    _check_consistent(ExpertPlacement(*(each.unsqueeze(0) for each in placement)), counts[0])


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ((0, 4, 2), ValueError, "num_experts=0: expected at least 1"),
        ((4, 3, 1), ValueError, "num_replicas=3: expected at least E=4"),
        ((4, 5, 2), ValueError, "num_replicas=5: expected a multiple of num_ranks=2"),
        ((4, 4, 2, "balanced"), ValueError, "strategy='balanced': expected one of 'linear', 'round_robin'"),
    ],
)
def test_counts_that_cannot_be_spread(counts, error, message):
    with pytest.raises(error, match=message):
        spread_experts(*counts)
