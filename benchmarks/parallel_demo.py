"""Many devices: a checkpoint whose experts ranks share generates what one process does, while experts move.

    make demo-parallel                                                  four ranks
    torchrun --nproc-per-node 4 -m benchmarks demo-parallel             the same
    torchrun --nproc-per-node 2 -m benchmarks demo-parallel --model PATH

The ranks run on GPUs (NCCL) if there is one for each, else on CPUs (gloo). Every claim is checked: the exit status is 1
when one does not hold.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ParallelStyle

from benchmarks.arguments import whole
from benchmarks.checkpoints import check_checkpoint, load, write_small_checkpoint
from benchmarks.generation import (
    Agreement,
    Generation,
    compare,
    exact_float32,
    generate,
    next_token_logits,
    static_cache,
)
from benchmarks.report import machine, table
from benchmarks.wire import Wire

FOLDER = Path("build/demo-parallel")
BATCH, PROMPT_LENGTH = 2, 24


@dataclass(frozen=True, slots=True)
class Way:
    """How ranks share the experts, and whether each generates from prompts of its own."""

    name: str
    style: Callable[[], ParallelStyle]
    own_prompts: bool


@dataclass(frozen=True, slots=True)
class Run:
    """What one rank saw of one way: whether tokens are those of one process, bytes sent and seconds exchanging."""

    way: str
    agreement: Agreement
    sent: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of all ranks.

    runs: of each way, one for each rank; before, after: [L, W] load of each rank, for the same prompts, before experts
    moved and behind that.
    """

    runs: dict[str, list[Run]]
    before: Tensor
    after: Tensor
    steps: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks demo-parallel`."""
    parser.add_argument("--model", type=Path, help="a local checkpoint instead of the small Qwen3-MoE")
    parser.add_argument("--steps", type=whole, default=32, help="tokens to generate and compare (default 32)")


def main(arguments: argparse.Namespace) -> int:
    """Runs one rank of the demo and returns the exit status, the same on all."""
    if not dist.is_initialized() and "LOCAL_WORLD_SIZE" not in os.environ:
        print("one process alone: expected several, by `make demo-parallel` or torchrun")
        return 2
    with _joined() as device, exact_float32(), torch.no_grad():
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("ep",))
        path = _checkpoint(arguments.model)
        outcome = run_demo(path, mesh["ep"], arguments.steps)
        if dist.get_rank() == 0:
            print("  ".join(f"{name} {fact}" for name, fact in machine().items()))
            print(f"\n{path}: {dist.get_world_size()} ranks on {device}, {dist.get_backend()}\n")
            print(summary(outcome), flush=True)
    status = int(not all(holds for _, holds in claims(outcome)))
    if not dist.is_initialized():
        _leave(status)
    return status


def run_demo(path: Path, mesh: DeviceMesh, steps: int) -> Outcome:
    """All ways on this rank of the mesh, and what the others saw."""
    rank, ways = _Rank(path, mesh, steps), _ways()
    for way in ways:
        rank.run(way.name, _shared(path, mesh, way.style()), rank.seed_of(way))
    before, after = rank.rebalance(_shared(path, mesh, ways[-1].style()), rank.seed_of(ways[-1]))
    told: list[Any] = [None] * mesh.size()
    dist.all_gather_object(told, rank.runs)
    return Outcome({each[0].way: list(each) for each in zip(*told)}, before, after, steps)


def claims(outcome: Outcome) -> Iterator[tuple[str, bool]]:
    """What the demo promises, and whether it held."""
    for way, runs in outcome.runs.items():
        yield f"{way}: the tokens of one process", all(run.agreement.same for run in runs)
    before, after = (busiest(slots).mean() for slots in (outcome.before, outcome.after))
    yield "rebalanced ranks have more even loads", bool(after < before)


def summary(outcome: Outcome) -> str:
    """The claims and the figures, as text."""
    failed = "".join(f"\nFAILED: {claim}" for claim, holds in claims(outcome) if not holds)
    return (
        f"{table(*_exchanges(outcome))}\n\n"
        "MB: of this float32 model, sent by the busiest rank to others. Exchange: time in collectives, with waits.\n\n"
        f"{table(*_loads(outcome))}\n\n"
        "Load: slots (token and chosen expert) that the experts of a rank got, of the prompts of all ranks."
        + failed
    )


def _exchanges(outcome: Outcome) -> tuple[list[str], list[list[str]]]:
    header = ["", "tokens as of one process", "MB sent", "exchange ms per step"]
    rows = []
    for way, runs in outcome.runs.items():
        is_same = all(run.agreement.same for run in runs)
        tokens = f"{min(run.agreement.compared for run in runs)} of {outcome.steps}" + (
            "" if is_same else " FAILED"
        )
        sent = max(run.sent for run in runs) / 1e6
        rows.append(
            [way, tokens, f"{sent:.2f}", f"{max(run.seconds for run in runs) / outcome.steps * 1e3:.2f}"]
        )
    return header, rows


def _loads(outcome: Outcome) -> tuple[list[str], list[list[str]]]:
    header = ["load", *(f"rank {rank}" for rank in range(outcome.before.shape[1])), "busiest / mean"]
    rows = []
    for layer in range(len(outcome.before)):
        for when, slots in (("before", outcome.before), ("after", outcome.after)):
            cells = *map(str, slots[layer].tolist()), f"{busiest(slots)[layer]:.2f}"
            rows.append([f"layer {layer} {when}", *cells])
    return header, rows


def busiest(slots: Tensor) -> Tensor:
    """[L] the busiest rank's over the mean."""
    return slots.amax(1) / slots.double().mean(1)


def _ways() -> tuple[Way, ...]:
    from layers.parallel import ExpertParallel, ExpertTensorParallel

    return (
        Way("TP, all-reduce", ExpertTensorParallel, own_prompts=False),
        Way("EP, all-reduce", lambda: ExpertParallel("allreduce"), own_prompts=False),
        Way("EP, all-gather", lambda: ExpertParallel("allgather"), own_prompts=True),
        Way("EP, all-to-all", lambda: ExpertParallel("alltoall"), own_prompts=True),
    )


def _shared(path: Path, mesh: DeviceMesh, style: ParallelStyle) -> nn.Module:
    import layers.huggingface

    model = load(path, mesh.device_type, torch.float32)
    layers.huggingface.patch(model, mesh=mesh, style=style)
    return model


def _nothing() -> None:
    pass


class _Rank:
    """Generates on one rank, and compares with what it generated alone."""

    def __init__(self, path: Path, mesh: DeviceMesh, steps: int) -> None:
        self.mesh, self.steps = mesh, steps
        self.runs: list[Run] = []
        alone = load(path, mesh.device_type, torch.float32)
        self.references = {seed: self.generate(alone, seed) for seed in (0, self._own_seed)}

    @property
    def _own_seed(self) -> int:
        return 1 + self.mesh.get_local_rank()

    def seed_of(self, way: Way) -> int:
        """Of the prompts: this rank's own, or those of all ranks."""
        return self._own_seed if way.own_prompts else 0

    def generate(self, model: Any, seed: int, after_each: Callable[[], object] = _nothing) -> Generation:
        """Calls `after_each` behind each forward."""
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(0, model.config.vocab_size, (BATCH, PROMPT_LENGTH), generator=generator)
        cache = static_cache(model, BATCH, PROMPT_LENGTH + self.steps)
        forward = next_token_logits(model, cache)

        def step(input_ids: Tensor) -> Tensor:
            logits = forward(input_ids)
            after_each()
            return logits

        return generate(step, cache, prompt.to(self.mesh.device_type), self.steps)

    def run(self, way: str, model: nn.Module, seed: int, after_each: Callable[[], object] = _nothing) -> None:
        """Remembers how the tokens compare, and what it cost."""
        with Wire(self.mesh.get_local_rank(), self.mesh.size()) as wire:
            generated = self.generate(model, seed, after_each)
        self.runs.append(Run(way, compare(self.references[seed], generated), wire.sent, wire.seconds))

    def rebalance(self, model: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
        """Loads before and after. Generates while load is recorded, while experts move, and from their new places."""
        from layers.parallel import ExpertRebalancer

        rebalancer = ExpertRebalancer(model)
        self.generate(model, seed)
        before = rebalancer.load_per_rank()
        rebalancer.start()
        self.run("EP, experts moving", model, seed, rebalancer.step)
        rebalancer.finish()
        rebalancer.forget_load()
        self.run("EP, rebalanced", model, seed)
        return before, rebalancer.load_per_rank()


@contextmanager
def _joined() -> Iterator[str]:
    """The device type of this rank, which is in a process group for so long."""
    if dist.is_initialized():
        yield "cpu" if dist.get_backend() == "gloo" else "cuda"
        return
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus else "gloo")
    yield "cuda" if on_gpus else "cpu"
    dist.barrier()  # who ends first would break the others' connections
    dist.destroy_process_group()


def _leave(status: int) -> None:
    """Ends the process at once: while Python ends on gloo, C++ now and then terminates it (seen with torch 2.13)."""
    sys.stdout.flush()
    os._exit(status)


def _checkpoint(model: Path | None) -> Path:
    """Written by the first rank."""
    if model is not None:
        check_checkpoint(model)
        return model
    if dist.get_rank() == 0:
        write_small_checkpoint("qwen3_moe", FOLDER / "checkpoints")
    dist.barrier()
    return FOLDER / "checkpoints" / "qwen3_moe"
