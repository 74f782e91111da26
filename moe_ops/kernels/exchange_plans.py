"""Launches that other ranks take part in: made once per metadata, and the memory of ranks."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from moe_ops import arguments as of, records
from moe_ops.kernels import exchange
from moe_ops.kernels.gpu import Gpu, gpu_of
from moe_ops.kernels.program import Program, describe
from moe_ops.peers import ExchangeLayout, Peers

_PROGRAMS: dict[type, Callable[[Any, ExchangeLayout, int, Gpu], Program]] = {
    of.PushRows: exchange.push_program,
    of.PullSums: exchange.pull_program,
}


def program(arguments: Any, layout: ExchangeLayout, rank: int, gpu: Gpu) -> Program:
    """The launches of the operator that takes `arguments`, whose tensors are contiguous and may be fake."""
    leaves = (
        describe(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in records.flatten(arguments)
    )
    return _program(type(arguments), tuple(leaves), layout, rank, gpu)


@lru_cache(maxsize=1024)
def _program(record: type, leaves: tuple[Any, ...], layout: ExchangeLayout, rank: int, gpu: Gpu) -> Program:
    return _PROGRAMS[record](records.builder(record)(*leaves), layout, rank, gpu)


def launch(arguments: Any, peers: Peers) -> dict[str, torch.Tensor]:
    """Runs them on the current stream: outputs by name."""
    device = peers.addresses.device
    plan = program(arguments, peers.layout, peers.rank, gpu_of(device))
    tensors = tensors_of({**records.named(arguments), "addresses": peers.addresses, "turns": peers.turns})
    return dict(zip(plan.outputs, plan.filled.run(tensors), strict=True))


def tensors_of(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor | None]:
    """Those arguments that are tensors, or missing."""
    return {name: each for name, each in arguments.items() if each is None or isinstance(each, torch.Tensor)}
