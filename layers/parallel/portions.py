"""How many tokens go into one exchange: all of a forward, or chunks of them, and these in batches that take turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from layers._checks import expect_positive


@dataclass(frozen=True, slots=True)
class Portions:
    """Of the T tokens of a rank.

    Args:
        max_tokens: the most tokens that a rank has in a forward, or None for any number.
        batches: how many parts of the tokens are exchanged at once: one is on its way while experts run another.
        chunk_tokens: the most tokens of a rank that are under way at once; what is more waits. None for all.

    Raises:
        TypeError, ValueError: a number is no int of at least 1.
    """

    max_tokens: int | None = None
    batches: int = 1
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        expect_positive("batches", self.batches)
        for name in ("max_tokens", "chunk_tokens"):
            if getattr(self, name) is not None:
                expect_positive(name, getattr(self, name))

    @property
    def of_one_exchange(self) -> int | None:
        """The most tokens of a rank in one exchange."""
        if self.max_tokens is None:
            return None
        chunk = self.max_tokens if self.chunk_tokens is None else min(self.chunk_tokens, self.max_tokens)
        return -(-chunk // self.batches)

    def rows(self, num_tokens: int) -> list[list["Rows"]]:
        """Of each batch of each chunk."""
        if self.chunk_tokens is None:
            return [[ALL_ROWS]] if self.batches == 1 else [self._batches(Rows(0, num_tokens))]
        starts = range(0, max(num_tokens, 1), self.chunk_tokens)
        return [self._batches(chunk) for chunk in _rows_between([*starts, num_tokens])]

    def _batches(self, chunk: "Rows") -> list["Rows"]:
        """As many rows in each, or one more."""
        start, count = chunk.start, chunk.stop - chunk.start
        starts = [start + count * part // self.batches for part in range(self.batches)]
        return _rows_between([*starts, chunk.stop])


class Rows(NamedTuple):
    """Those from `start` to `stop`."""

    start: int
    stop: int


ALL_ROWS = Rows(0, -1)
"""However many there are: they are not cut."""


def _rows_between(bounds: Sequence[int]) -> list[Rows]:
    return [Rows(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


WHOLE = Portions()
