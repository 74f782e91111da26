"""What ranks send each other: bytes and seconds of the collectives of `layers.parallel`, counted as they are called."""

import time
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from layers.parallel import collectives


class Wire:
    """Counts while it is entered, on this rank.

    It stands where `collectives` looks its operators up. As a dispatch mode, which would be the obvious way, it makes
    processes crash now and then: gloo's threads let go of tensors while Python has them in hand (torch 2.13).

    Args:
        rank: of this process, in the one group that exchanges.
        size: W.

    Attributes:
        sent: bytes to other ranks. A reduction counts as a ring would send it.
        seconds: in collectives and waiting for them.
        calls: of collectives.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent, self.seconds, self.calls = 0.0, 0.0, 0
        self._operators = collectives._ops
        self._replaced = mock.patch.object(collectives, "_ops", self)

    def __enter__(self) -> "Wire":
        self._replaced.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._replaced.stop()

    def __getattr__(self, name: str) -> Any:
        """The operator of this name, counted."""
        operator = getattr(self._operators, name)

        def counted(x: Tensor, *args: Any) -> Tensor:
            _synchronize(x)
            started = time.perf_counter()
            result = operator(x, *args)
            _synchronize(x)
            self.seconds += time.perf_counter() - started
            if name != "wait_tensor":
                self.calls += 1
                self.sent += self.bytes_of(name, x, *args)
            return result

        return counted

    def bytes_of(self, name: str, x: Tensor, *args: Any) -> float:
        """To other ranks, in one call of this collective."""
        others = self.size - 1
        if name == "all_gather_into_tensor":
            return x.nbytes * others
        if name == "reduce_scatter_tensor":
            return x.nbytes * others / self.size
        if name == "all_reduce":
            return 2 * x.nbytes * others / self.size
        if name == "all_to_all_single":
            rows = args[1]
            return x.nbytes * (1 - rows[self.rank] / max(sum(rows), 1))
        raise NotImplementedError(f"{name}: expected a collective of layers.parallel")


def _synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()
