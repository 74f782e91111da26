"""Which rank takes which part of a plan. A plan says which experts belong together; who has most of them keeps them.

Letters: P places (physical experts), W ranks, of which rank r has the r-th P / W places; nodes have as many ranks each.
"""

from collections import Counter
from collections.abc import Sequence

Places = Sequence[int]


def kept_in_place(before: Places, after: Places, num_ranks: int, num_nodes: int = 1) -> list[int]:
    """`after`, in which nodes, ranks of a node and places of a rank change names so that more experts stay.

    Nodes and ranks are matched one by one, those first that have most in common: no best matching, but at least half
    of what that would keep.

    Args:
        before, after: [P] the expert that each place holds, and is to hold; -1 for none.
        num_ranks: W.
        num_nodes: a divisor of W.
    """
    kept: list[int] = []
    for old_node, new_node in _matched(_parts(before, num_nodes), _parts(after, num_nodes)):
        each = num_ranks // num_nodes
        for old, new in _matched(_parts(old_node, each), _parts(new_node, each)):
            kept += _same_places(old, new)
    return kept


def _parts(places: Places, number: int) -> list[Places]:
    size = len(places) // number
    return [places[size * part : size * (part + 1)] for part in range(number)]


def _matched(before: list[Places], after: list[Places]) -> list[tuple[Places, Places]]:
    """Each of `before` with one of `after`."""
    had, wanted = [Counter(each) for each in before], [Counter(each) for each in after]
    pairs = [((a & b).total(), old, new) for old, a in enumerate(had) for new, b in enumerate(wanted)]
    matched: dict[int, int] = {}
    for _, old, new in sorted(pairs, key=lambda pair: (-pair[0], pair[1] != pair[2])):
        if old not in matched and new not in matched.values():
            matched[old] = new
    return [(before[old], after[matched[old]]) for old in range(len(before))]


def _same_places(before: Places, after: Places) -> list[int]:
    """`after` in an order in which what both have stays where it is."""
    left, kept = Counter(after), list[int | None]()
    for expert in before:
        stays = left[expert] > 0
        left[expert] -= stays
        kept.append(expert if stays else None)
    others = left.elements()
    return [next(others) if expert is None else expert for expert in kept]
