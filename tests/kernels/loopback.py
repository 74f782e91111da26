"""Exchanges between ranks of one process: their launches take turns where ranks would wait for each other."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_ops import records
from moe_ops.arguments import PlanExchange, PullSums, PushRows
from moe_ops.kernels import exchange_plans, plans
from moe_ops.kernels.gpu import KIB, Gpu
from moe_ops.kernels.program import Program
from moe_ops.peers import ExchangeLayout, new_turns
from moe_ops.pull_sums import contiguous
from moe_ops.push_rows import Pushed, as_integers, as_pushed
from moe_ops.values import ExchangePlan
from tests.kernels import memory

FEW = Gpu(90, 3, 227 * KIB)
"""Of few multiprocessors, so that each has several rows to move."""


class Loopback:
    """The buffers of W ranks on one device; what nobody has written there is NaN, or a huge number."""

    def __init__(self, layout: ExchangeLayout, device: str) -> None:
        self.layout, self.device = layout, device
        self.buffers = [self._buffer() for _ in range(layout.num_ranks)]
        self.addresses = torch.tensor([buffer.data_ptr() for buffer in self.buffers]).to(device)
        self.turns = [new_turns(60.0, device) for _ in self.buffers]

    def _buffer(self) -> Tensor:
        # 16 bytes more, to start on 16 wherever the allocator does
        memory = torch.full((self.layout.num_bytes + 16,), 0xFF, dtype=torch.uint8, device=self.device)
        start = -memory.data_ptr() % 16
        memory[start : start + self.layout.rows_at] = 0
        return memory[start : start + self.layout.num_bytes]

    def plan(self, ids: Tensor, owners: Tensor) -> ExchangePlan:
        """That of one rank."""
        given = ids.to(self.device), owners.to(self.device), self.layout.num_ranks, self.layout.max_tokens
        return ExchangePlan(*plans.launch(PlanExchange(*given)))

    def push(self, given: list[PushRows]) -> list[Pushed]:
        """What each rank gets."""
        moved = self._run([as_integers(each) for each in given])
        return [as_pushed(each, outputs) for each, outputs in zip(given, moved, strict=True)]

    def pull(self, given: list[PullSums]) -> list[Tensor]:
        """The sums of each rank."""
        return [outputs["sums"] for outputs in self._run([contiguous(each) for each in given])]

    def _run(self, given: list[Any]) -> list[dict[str, Tensor]]:
        programs = [
            in_halves(exchange_plans.program(each, self.layout, rank, FEW)) for rank, each in enumerate(given)
        ]
        shared = [{"addresses": self.addresses, "turns": turns} for turns in self.turns]
        bound = [
            program.filled.bind(
                exchange_plans.tensors_of({**records.named(each), **own}), torch.device(self.device)
            )
            for program, each, own in zip(programs, given, shared, strict=True)
        ]
        with memory.reachable(self.buffers):
            for step in range(len(programs[0].filled.steps)):
                for each in bound:
                    each.launch(step, step + 1)
        return [dict(zip(programs[0].outputs, each.results, strict=True)) for each in bound]


def in_halves(program: Program) -> Program:
    """CTAs that write to other ranks in a launch of their own, before those that wait for what others write."""
    (launch,) = program.launches
    ctas = launch.args["CTAS"]
    halves = (replace(launch, grid=(ctas,), args={**launch.args, "first": first}) for first in (0, ctas))
    return replace(program, launches=tuple(halves))
