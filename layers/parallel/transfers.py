"""Who sends which expert to whom, so that every place comes to hold what a placement says: functions of lists of ints.

Letters: P places (physical experts), W ranks, of which rank r has the r-th P / W places.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Transfer(NamedTuple):
    """One expert to one rank, maybe to other places of the rank that it is on.

    Attributes:
        source: a place that holds it.
        rank: where it goes, once, for however many places.
        targets: these places.
    """

    source: int
    rank: int
    targets: tuple[int, ...]


def transfers_between(before: Sequence[int], after: Sequence[int], num_ranks: int) -> list[Transfer]:
    """What has to move. A replica on the same rank is copied; else, of the ranks with one, the least busy so far sends.

    Args:
        before: [P] the expert that each place holds, -1 for none.
        after: [P] the one that it is to hold, each of which some place holds now.
        num_ranks: W.
    """
    each = len(after) // num_ranks
    holders: dict[int, list[int]] = {}
    for place, expert in enumerate(before):
        holders.setdefault(expert, []).append(place)
    wanted: dict[tuple[int, int], list[int]] = {}
    for place, expert in enumerate(after):
        if before[place] != expert:
            wanted.setdefault((place // each, expert), []).append(place)
    sends, transfers = [0] * num_ranks, []
    for (rank, expert), targets in wanted.items():
        cost = [sends[place // each] if place // each != rank else -1 for place in holders[expert]]
        source = holders[expert][cost.index(min(cost))]
        sends[source // each] += source // each != rank
        transfers.append(Transfer(source, rank, tuple(targets)))
    return transfers


class RankTransfers(NamedTuple):
    """What one rank does in an all-to-all; places count from its first one.

    Attributes:
        sources: the place of each row that it sends, in the order of ranks.
        sent, received: [W] rows to each rank and from each, itself among them.
        targets, rows: the places that are written, and of the rows that arrive the one for each.
    """

    sources: list[int]
    sent: list[int]
    received: list[int]
    targets: list[int]
    rows: list[int]

    @classmethod
    def of(cls, rank: int, transfers: Sequence[Transfer], each: int, num_ranks: int) -> "RankTransfers":
        """The part of `rank`, where every one of W ranks has so many places."""
        leaving = sorted((t for t in transfers if t.source // each == rank), key=lambda t: (t.rank, t.source))
        arriving = sorted((t for t in transfers if t.rank == rank), key=lambda t: t.source)
        written = [(place % each, row) for row, t in enumerate(arriving) for place in t.targets]
        return cls(
            [t.source % each for t in leaving],
            [sum(t.rank == other for t in leaving) for other in range(num_ranks)],
            [sum(t.source // each == other for t in arriving) for other in range(num_ranks)],
            [place for place, _ in written],
            [row for _, row in written],
        )
