"""Who exchanges rows over symmetric memory: buffers of all ranks that each of them can reach, by name.

A buffer holds, for each parity, how many rows every rank has pushed here, these rows, and sums that the others pull:

    counts [2, W] int64 | signals [2, W, M] int64 | rows [2, W, M] of `row_bytes` | sums [2, W, M] of `sum_bytes`

W ranks, M rows that are set aside for each pair of them (`max_tokens`). Counts and signals, one for each row, are
numbers that only grow. Exchanges take turns between two parities, so that it is enough to wait for the counts of all
ranks in each: whoever writes to a parity again has waited in the exchange between, and the others told theirs in that
one behind what they had to read.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moe_ops.errors import value_error

ALIGNMENT = 16


def aligned(num_bytes: int) -> int:
    """As many bytes, or a few more, that what follows starts on 16."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class ExchangeLayout:
    """Of the buffer of each rank, the same on all of them.

    Args:
        num_ranks: W.
        max_tokens: M.
        row_bytes: most bytes of a row and what goes with it, a multiple of 16.
        sum_bytes: most bytes of a row of sums, a multiple of 16.
    """

    num_ranks: int
    max_tokens: int
    row_bytes: int
    sum_bytes: int

    @property
    def signals_at(self) -> int:
        """Bytes before the signals."""
        return 2 * self.num_ranks * 8

    @property
    def rows_at(self) -> int:
        """Bytes before the rows."""
        return self.signals_at + 2 * self.num_ranks * self.max_tokens * 8

    @property
    def sums_at(self) -> int:
        """Bytes before the sums."""
        return self.rows_at + 2 * self.num_ranks * self.max_tokens * self.row_bytes

    @property
    def num_bytes(self) -> int:
        """Of all."""
        return self.sums_at + 2 * self.num_ranks * self.max_tokens * self.sum_bytes


class Fields(NamedTuple):
    """Where, in bytes of a row, lies what goes with it, and how long the row is."""

    weights_at: int
    ids_at: int
    extra_at: int
    num_bytes: int


def fields_of(row_bytes: int, weight_bytes: int, id_bytes: int, extra_bytes: int) -> Fields:
    """Of a row and what goes with it, each so many bytes."""
    weights_at = aligned(row_bytes)
    ids_at = weights_at + aligned(weight_bytes)
    extra_at = ids_at + aligned(id_bytes)
    return Fields(weights_at, ids_at, extra_at, extra_at + aligned(extra_bytes))


@dataclass(frozen=True, eq=False)
class Peers:
    """A rank and the buffers of all.

    Args:
        name: by which operators know it, the same on all ranks.
        rank: this one.
        layout: of each buffer.
        addresses: [W] int64, where the buffers start.
        turns: from `new_turns`, this rank's own.
        memory: what has to live as long.
    """

    name: str
    rank: int
    layout: ExchangeLayout
    addresses: Tensor
    turns: Tensor
    memory: Any = None

    def __post_init__(self) -> None:
        _PEERS[self.name] = self

    def __reduce__(self) -> Any:
        return peers_named, (self.name,)  # a copy exchanges through the same memory


def new_turns(timeout: float, device: torch.device | str) -> Tensor:
    """[3] int64, which kernels keep: exchanges before this one; CTAs of this one that are done; and nanoseconds that
    one waits for other ranks before the device raises an error.
    """
    return torch.tensor([0, 0, int(1e9 * timeout)], dtype=torch.int64, device=device)


_PEERS: WeakValueDictionary[str, Peers] = WeakValueDictionary()


def find_peers(name: str) -> Peers | None:
    """Those of this name, if there are any."""
    return _PEERS.get(name)


def peers_named(name: str) -> Peers:
    """Those of this name. Raises ValueError if there are none any more."""
    peers = _PEERS.get(name)
    if peers is None:
        value_error("peers={}: expected the name of an exchange of this process that still exists", name)
    return peers
