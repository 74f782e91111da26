"""Many problems of `python -m benchmarks parallel`: ragged ones, gradients, replays each routed otherwise."""

import random
import time

import torch
from torch import Tensor

from benchmarks.parallel_exchange import exchanges
from benchmarks.parallel_state import (
    MAX_RELATIVE_ERROR,
    Row,
    State,
    captured,
    expect_close,
    make_layer,
    routed,
    seeded,
    slowest,
    synchronize,
    tell,
)
from benchmarks.workloads import Workload
from layers import FusedMoE, ModularKernel, RouterOutput, StandardExperts
from layers.parallel import ExpertRanks

RAGGED = Workload("ragged", 13, 4, 256, 128)
RAGGED_MOST = 64


def kernels(state: State, whole: FusedMoE, most: int) -> dict[str, ModularKernel]:
    """The layer behind every exchange, each rank with its experts."""
    workload = whole.config
    owners = ExpertRanks(workload.num_experts, state.size)
    expert_map = owners.expert_map(state.rank)
    part = FusedMoE(workload, expert_map, device=state.device, dtype=whole.w13_weight.dtype)
    held = torch.arange(workload.num_experts) if expert_map is None else (expert_map >= 0).nonzero().flatten()
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(whole.get_parameter(name)[held.to(state.device)])
    made = exchanges(state, owners, most, workload.hidden_size, workload.top_k)
    return {name: ModularKernel(each, StandardExperts(part)) for name, each in made.items()}


def ragged(rank: int, problem: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's tokens: any number of them, none too, routed evenly, to one expert, to one rank, or not at all."""
    draw = random.Random(1000003 * problem + rank)
    tokens = draw.choice((0, 1, draw.randint(0, RAGGED_MOST), draw.randint(0, RAGGED_MOST), RAGGED_MOST))
    generator = seeded(7919 * problem + rank)
    hidden = torch.randn(tokens, RAGGED.hidden_size, generator=generator)
    weights, ids = torch.rand(tokens, RAGGED.num_experts, generator=generator).topk(RAGGED.top_k, dim=1)
    kind = random.Random(problem).choice(("even", "even", "one expert", "few", "padding"))
    if kind == "one expert":
        ids[:] = random.Random(problem).randrange(RAGGED.num_experts)
    elif kind == "few":
        ids %= 5
    elif kind == "padding":
        ids[torch.rand(ids.shape, generator=generator) < 0.5] = -1
    return hidden.to(device), weights.to(device), ids.to(device, torch.int32)


@torch.no_grad()
def problems(state: State) -> Row:
    """Random ragged problems through every dispatcher, against one device. Counts what is wrong."""
    state = state.float32
    whole = make_layer(state, RAGGED)
    every = kernels(state, whole, RAGGED_MOST)
    wrong = {name: torch.zeros((), dtype=torch.int64, device=state.device) for name in every}
    started = time.perf_counter()
    for problem in range(state.options["problems"]):
        hidden, weights, ids = ragged(state.rank, problem, state.device)
        chosen = RouterOutput(hidden, weights, ids)
        expected = whole(hidden, chosen)
        limit = MAX_RELATIVE_ERROR[torch.float32] * expected.double().norm() + 1e-12
        for name, kernel in every.items():
            error = (kernel(hidden, chosen).double() - expected.double()).norm()
            wrong[name] += ~(error <= limit)
        if state.rank == 0 and (problem + 1) % 500 == 0:
            print(f"  {problem + 1} problems, {time.perf_counter() - started:.0f} s", flush=True)
    counts = {name: int(slowest(state, each.item())) for name, each in wrong.items()}
    rows: list[Row] = []
    tell(
        state, rows, problems=state.options["problems"], **{f"{name} wrong": n for name, n in counts.items()}
    )
    return rows[0]


def backward(state: State) -> list[Row]:
    """Outputs and gradients of every dispatcher against those of one device with the tokens of all ranks."""
    state, rows = state.float32, []
    whole = make_layer(state, RAGGED)
    every = kernels(state, whole, RAGGED_MOST)
    for problem in range(4):
        given = [ragged(rank, problem, state.device) for rank in range(state.size)]
        expected = [_differentiable(*each) for each in given]
        outputs = [whole(hidden, chosen) for hidden, chosen in expected]
        whole.zero_grad()
        torch.autograd.backward([_loss(out) for out in outputs])
        own = expected[state.rank]
        for name, kernel in every.items():
            part = kernel.experts.layer
            part.zero_grad()
            hidden, chosen = _differentiable(*given[state.rank])
            out = kernel(hidden, chosen)
            _loss(out).backward()
            expect_close(state, out, outputs[state.rank], f"{name}, output")
            expect_close(state, hidden.grad, own[0].grad, f"{name}, gradient of hidden states")
            weights = chosen.topk_weights.grad, own[1].topk_weights.grad
            expect_close(state, *weights, f"{name}, gradient of weights")
            held = slice(None) if part.expert_map is None else (part.expert_map >= 0).nonzero().flatten()
            for what, parameter in part.named_parameters():
                grad = whole.get_parameter(what).grad[held]
                expect_close(state, parameter.grad, grad, f"{name}, gradient of {what}")
            if problem == 3:
                tell(state, rows, dispatcher=name, problems=4, wrong=0)
    return rows


def _differentiable(hidden: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, RouterOutput]:
    hidden = hidden.clone().requires_grad_()
    return hidden, RouterOutput(hidden, weights.clone().requires_grad_(), ids)


def _loss(out: Tensor) -> Tensor:
    return (out * torch.linspace(0.5, 1.5, out.numel(), device=out.device).view(out.shape)).sum()


REPLAYED, REPLAYED_TOKENS, NUM_SETS = Workload("replayed", 16, 4, 1024, 256), 48, 128


@torch.no_grad()
def replays(state: State) -> list[Row]:
    """A captured layer, replayed with other tokens and another routing each time; mismatches are counted to the bit.

    What a replay has to give was computed eagerly, and compared with one device. Tokens, routing and the count of
    mismatches are read and written on the device, by the graph itself.
    """
    rows: list[Row] = []
    whole = make_layer(state, REPLAYED)
    sets = [routed(state, REPLAYED_TOKENS, REPLAYED, 100 + number) for number in range(NUM_SETS)]
    hidden, weights, ids = (torch.stack(each) for each in zip(*sets, strict=True))
    for number in range(0, NUM_SETS, 3):
        ids[number, number % REPLAYED_TOKENS :] = -1  # fewer tokens, as padding
    for name in ("symmetric", "allgather", "padded"):
        kernel = kernels(state, whole, REPLAYED_TOKENS)[name]
        replayed = _Replayed(state, kernel, (hidden, weights, ids))
        for number, out in enumerate(replayed.expected):
            chosen = RouterOutput(hidden[number], weights[number], ids[number])
            expect_close(state, out, whole(hidden[number], chosen), name)
        count = max(state.options["replays"] // (1 if name == "symmetric" else 10), 1)
        tell(state, rows, dispatcher=name, **replayed.run(count))
    return rows


class _Replayed:
    """A layer whose graph takes the next set of tokens itself, and compares with what it gave eagerly."""

    def __init__(self, state: State, kernel: ModularKernel, sets: tuple[Tensor, ...]) -> None:
        self.state, self.kernel, self.sets = state, kernel, sets
        self.turn = torch.zeros(1, dtype=torch.int64, device=state.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=state.device)
        outputs = [kernel(each[0], RouterOutput(*each)) for each in zip(*sets, strict=True)]
        self.expected = torch.stack(outputs)

    def once(self) -> None:
        at = (self.turn * self.turn * 5 + self.turn * 3) % NUM_SETS
        given = [each.index_select(0, at).squeeze(0) for each in self.sets]
        out = self.kernel(given[0], RouterOutput(*given))
        self.wrong.add_((out != self.expected.index_select(0, at).squeeze(0)).any())
        self.turn.add_(1)

    def run(self, count: int) -> Row:
        replay = captured(self.state, self.once, 1)
        before, started = torch.cuda.memory_allocated(), time.perf_counter()
        for number in range(count):
            replay()
            if number % 2000 == 1999:
                synchronize(self.state)  # or a rank could be thousands of launches ahead
        synchronize(self.state)
        seconds, grown = time.perf_counter() - started, torch.cuda.memory_allocated() - before
        mismatches = int(slowest(self.state, self.wrong.item()))
        return {"replays": count, "mismatches": mismatches, "grown_bytes": grown, "seconds": seconds}
