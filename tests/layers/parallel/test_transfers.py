"""Who sends which expert to whom: tried on small placements, all of them, and on random ones."""

import itertools
import random

import pytest

from layers.parallel.transfers import RankTransfers, Transfer, transfers_between


def moved(before, transfers, num_ranks):
    """What places hold after every rank has done its part, each in memory of its own."""
    each = len(before) // num_ranks
    parts = [RankTransfers.of(rank, transfers, each, num_ranks) for rank in range(num_ranks)]
    memory = [list(before[rank * each : (rank + 1) * each]) for rank in range(num_ranks)]
    mail = {}
    for rank, part in enumerate(parts):
        leaving = iter([memory[rank][place] for place in part.sources])
        for other, count in enumerate(part.sent):
            mail[rank, other] = list(itertools.islice(leaving, count))
        assert next(leaving, None) is None
    for rank, part in enumerate(parts):
        assert part.received == [len(mail[other, rank]) for other in range(num_ranks)]
        arrived = [expert for other in range(num_ranks) for expert in mail[other, rank]]
        for place, row in zip(part.targets, part.rows, strict=True):
            memory[rank][place] = arrived[row]
    return [expert for held in memory for expert in held]


def check(before, after, num_ranks):
    transfers, each = transfers_between(before, after, num_ranks), len(before) // num_ranks
    assert moved(before, transfers, num_ranks) == list(after)
    written = [place for transfer in transfers for place in transfer.targets]
    assert sorted(written) == [place for place, expert in enumerate(after) if before[place] != expert]
    arrivals = [(before[source], rank) for source, rank, _ in transfers]
    assert len(set(arrivals)) == len(arrivals)  # once to each rank
    for source, rank, targets in transfers:
        assert {place // each for place in targets} == {rank}
        if before[source] in before[rank * each : (rank + 1) * each]:
            assert source // each == rank  # nothing comes from afar that is here


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_experts", [1, 2, 3])
def test_every_small_placement(num_experts, num_ranks):
    """Four places, every way to hold the experts before, some of them empty, and after."""
    experts = set(range(num_experts))
    held = [each for each in itertools.product(range(-1, num_experts), repeat=4) if experts <= set(each)]
    for before, after in itertools.product(held, held):
        if -1 not in after:
            check(before, after, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_random_placements(num_ranks):
    random.seed(num_ranks)
    for _ in range(200):
        num_experts = random.randint(1, 5 * num_ranks)
        places = num_ranks * random.randint(-(-num_experts // num_ranks), 8)
        before, after = (
            random.sample(range(num_experts), num_experts)
            + random.choices(range(num_experts), k=places - num_experts)
            for _ in range(2)
        )
        random.shuffle(before), random.shuffle(after)
        check(before, after, num_ranks)


def test_what_stays_is_not_sent():
    assert transfers_between([0, 1, 2, 3], [0, 1, 2, 3], 2) == []
    assert transfers_between([0, 1, 2, 3], [1, 0, 2, 3], 2) == [Transfer(1, 0, (0,)), Transfer(0, 0, (1,))]


def test_replicas_share_the_sending():
    """Experts 0 and 1 on ranks 0 and 1, both wanted on ranks 2 and 3: each of the first sends two of the four rows."""
    transfers = transfers_between([0, 1, 1, 0, 2, 3, 4, 5], [2, 3, 4, 5, 0, 1, 0, 1], 4)
    far = [transfer.source // 2 for transfer in transfers if transfer.rank > 1]
    assert sorted(far) == [0, 0, 1, 1]
