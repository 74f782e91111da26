"""What ranks send each other: bytes and seconds of torch's functional collectives, counted as they are called."""

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Wire(TorchDispatchMode):
    """Counts while it is entered, on this rank.

    Args:
        rank: of this process, in the one group that exchanges.
        size: W.

    Attributes:
        sent: bytes to other ranks. A reduction counts as a ring would send it.
        seconds: in collectives and waiting for them.
        calls: of collectives.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.sent, self.seconds, self.calls = 0.0, 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator."""
        if func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        sent = args[0] if isinstance(args[0], list) else [args[0]]
        _synchronize(sent[0])
        started = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        _synchronize(sent[0])
        self.seconds += time.perf_counter() - started
        name = func._schema.name.partition("::")[2]
        if name != "wait_tensor":
            self.calls += 1
            self.sent += sum(self.bytes_of(name, each, *args[1:]) for each in sent)
        return result

    def bytes_of(self, name: str, x: Tensor, *args: Any) -> float:
        """To other ranks, in one call of this collective."""
        others = self.size - 1
        if name in ("all_gather_into_tensor", "all_gather_into_tensor_coalesced"):
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
