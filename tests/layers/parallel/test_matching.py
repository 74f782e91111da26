"""A plan whose ranks have other names: the same load on each, and fewer experts that move."""

import itertools

import pytest
import torch

from layers import rebalance_experts
from layers.parallel.matching import kept_in_place
from layers.parallel.transfers import transfers_between


def moved(before, after, num_ranks):
    """Experts that cross the wire."""
    each = len(before) // num_ranks
    return sum(one.source // each != one.rank for one in transfers_between(before, after, num_ranks))


def ranks_of(places, num_ranks):
    return [tuple(sorted(part.tolist())) for part in torch.tensor(places).chunk(num_ranks)]


def test_ranks_that_only_change_names_move_nothing():
    before = list(range(12))
    for order in itertools.permutations(range(3)):
        after = [before[4 * rank + (place + 1) % 4] for rank in order for place in range(4)]
        assert kept_in_place(before, after, 3) == before


def test_nodes_stay_together():
    before, after = list(range(8)), [4, 6, 5, 7, 0, 2, 3, 1]
    kept = kept_in_place(before, after, 4, num_nodes=2)
    assert kept == [0, 2, 1, 3, 4, 6, 5, 7]


def plans(num_ranks, num_replicas, seed):
    """Two of one layer, whose load has drifted in between."""
    generator = torch.Generator().manual_seed(seed)
    load = torch.randn(64, generator=generator).exp() * 1000
    drift = torch.randn(64, generator=generator).mul(0.3).exp()
    return [
        rebalance_experts(each, num_replicas, 1, 1, num_ranks).physical_to_logical.flatten().tolist()
        for each in (load, load * drift)
    ]


@pytest.mark.parametrize("num_ranks, num_replicas", [(2, 64), (4, 64), (8, 64), (4, 72), (8, 96)])
def test_fewer_experts_move_and_ranks_hold_the_same_together(num_ranks, num_replicas):
    totals = [0, 0]
    for seed in range(5):
        before, after = plans(num_ranks, num_replicas, seed)
        kept = kept_in_place(before, after, num_ranks)
        assert sorted(ranks_of(kept, num_ranks)) == sorted(ranks_of(after, num_ranks))
        each = num_replicas // num_ranks
        for rank in range(num_ranks):  # what a rank keeps stays in its place
            old, new = before[each * rank :][:each], kept[each * rank :][:each]
            stay = sum(min(old.count(expert), new.count(expert)) for expert in set(old))
            assert sum(a == b for a, b in zip(old, new, strict=True)) == stay
        for number, plan in enumerate((after, kept)):
            totals[number] += moved(before, plan, num_ranks)
    assert totals[1] < totals[0]


def test_places_that_hold_nothing_are_filled():
    assert kept_in_place([0, -1, 1, -1], [1, 0, 0, 1], 2) == [0, 1, 1, 0]
