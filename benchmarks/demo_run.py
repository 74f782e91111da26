"""One model run one way: eager, stock torch.compile, or ours twice. Generates, counts compiles and takes times."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.generation import Generation, generate, next_token_logits, static_cache
from benchmarks.report import progress

BATCH = 2
CACHE_LENGTH = 256
PROMPT_LENGTH = 24
FURTHER_LENGTHS = (9, 40, 2, 17, 65)
Step = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class CompileLog:
    """A backend that counts what it compiles before handing the graph to `backend`."""

    backend: Callable[..., Callable[..., object]]
    graphs: int = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., object]:
        self.graphs += 1
        return self.backend(graph, example_inputs)


@dataclass(frozen=True, slots=True)
class Way:
    """How a step function is run. `wrap` compiles it, or returns it as it is.

    log: counts the graphs compiled so far, None where nothing is counted.
    further: lengths of the prompts it generates from after the first.
    """

    name: str
    wrap: Callable[[Step], Step]
    log: CompileLog | None = None
    further: tuple[int, ...] = FURTHER_LENGTHS


@dataclass(slots=True)
class Run:
    """What was seen of one model run one way; times in seconds, rates in tokens per second."""

    way: str
    first: Generation | None = None
    further: list[Generation] = field(default_factory=list)
    first_compiles: int = 0
    further_compiles: int = 0
    decode_compiles: int = 0
    cold_s: float | None = None
    warm_s: float | None = None
    prefill_rate: float = 0.0
    decode_rate: float = 0.0


def eager() -> Way:
    """The model as transformers runs it."""
    return Way("eager", lambda step: step)


def stock(mode: str | None = None) -> Way:
    """`torch.compile` as torch ships it.

    From the first prompt alone: no claim is made of what it does with others, for which it would compile 11 seconds.
    """
    return Way("torch.compile", lambda step: torch.compile(step, mode=mode), further=())


def ours(mode: str | None = None) -> Way:
    """`torch.compile` with our backend, in one graph: what a user changes of a stock model."""
    log = _counted(mode)
    return Way("ours, backend", lambda step: torch.compile(step, fullgraph=True, backend=log), log)


def ours_patched(mode: str | None = None) -> Way:
    """The same of a patched model, without guards on this library's own modules."""
    import inductor_passes

    log, options = _counted(mode), {"guard_filter_fn": inductor_passes.trust_library}
    return Way(
        "ours, patched",
        lambda step: torch.compile(step, fullgraph=True, backend=log, options=dict(options)),
        log,
    )


def _counted(mode: str | None) -> CompileLog:
    from inductor_passes.backend import moe_inductor

    return CompileLog(partial(moe_inductor, mode=mode) if mode else moe_inductor)


def prompts(vocab_size: int, length: int, device: str) -> Tensor:
    """[BATCH, length] token ids, the same for every way."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, vocab_size, (BATCH, length), generator=generator).to(device)


class Session:
    """A model with its cache and its step function, run one way."""

    def __init__(self, model: nn.Module, way: Way, steps: int) -> None:
        self.model, self.way, self.steps = model, way, steps
        self.cache = static_cache(model, BATCH, CACHE_LENGTH)
        self.compiled = way.wrap(next_token_logits(model, self.cache))
        self.device = next(model.parameters()).device.type
        self.run = Run(way.name)
        self._decode_compiles = 0
        self._prompt = self.prompt(PROMPT_LENGTH)
        self._token = self._prompt[:, :1].contiguous()

    def prompt(self, length: int) -> Tensor:
        return prompts(self.model.config.vocab_size, length, self.device)

    def step(self, input_ids: Tensor) -> Tensor:
        """One call, as a serving loop makes it; compiles made by a call of length 1 are decode's."""
        torch.compiler.cudagraph_mark_step_begin()
        before = self.graphs
        logits = self.compiled(input_ids)
        if input_ids.shape[1] == 1:
            self._decode_compiles += self.graphs - before
        return logits

    @property
    def graphs(self) -> int:
        return self.way.log.graphs if self.way.log else 0

    def generate(self, length: int, steps: int) -> Generation:
        return generate(self.step, self.cache, self.prompt(length), steps)

    @torch.no_grad()
    def compile_cold(self) -> None:
        """First prefill and decode with an empty cache on disk. Forgets what the ways before compiled."""
        if self.way.name == "eager":
            return
        torch.compiler.reset()
        before = self.graphs
        self.run.cold_s = self._first_calls(f"{self.way.name}: compiling, nothing cached")
        self.run.first_compiles = self.graphs - before

    @torch.no_grad()
    def compile_again(self) -> None:
        """The same where only the disk cache is left."""
        if self.way.name != "eager":
            self.run.warm_s = self._first_calls(f"{self.way.name}: compiling again, disk cache kept")

    def _first_calls(self, label: str) -> float:
        started = time.perf_counter()
        with progress(label):
            self.generate(PROMPT_LENGTH, 2)
        return time.perf_counter() - started

    @torch.no_grad()
    def generate_all(self) -> None:
        """The long generation, then one short one for each further prompt length."""
        with progress(f"{self.way.name}: generating"):
            self.run.first = self.generate(PROMPT_LENGTH, self.steps)
            before = self.graphs
            self.run.further = [self.generate(length, 4) for length in self.way.further]
            self.run.further_compiles = self.graphs - before
        self.run.decode_compiles = self._decode_compiles

    def warm_up(self) -> None:
        """Records CUDA graphs: a shape's second call is the first that replays."""
        for _ in range(3):
            self.prefill_seconds()
            self.decode_seconds(2)

    def prefill_seconds(self) -> float:
        """Time of one prefill."""
        self.cache.reset()
        return self._timed(lambda: self.step(self._prompt))

    def decode_seconds(self, steps: int) -> float:
        """Time of `steps` decode calls."""
        self.cache.reset()
        return self._timed(lambda: [self.step(self._token) for _ in range(steps)])

    def _timed(self, call: Callable[[], object]) -> float:
        self._synchronize()
        started = time.perf_counter()
        call()
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


@torch.no_grad()
def time_in_turns(sessions: Sequence[Session], repeats: int = 31, decode_steps: int = 16) -> None:
    """Fills in each run's rates: medians of turns, so that a busy moment of the machine falls on every way.

    Every other turn goes backwards, for what comes after a slow way meets a cold cache.
    """
    for session in sessions:
        session.warm_up()
    seen: list[list[tuple[float, float]]] = [[] for _ in sessions]
    for turn in range(repeats):
        for session, times in list(zip(sessions, seen))[:: -1 if turn % 2 else 1]:
            times.append((session.prefill_seconds(), session.decode_seconds(decode_steps)))
    for session, times in zip(sessions, seen, strict=True):
        prefill, decode = (statistics.median(seconds) for seconds in zip(*times))
        session.run.prefill_rate = BATCH * PROMPT_LENGTH / prefill
        session.run.decode_rate = BATCH * decode_steps / decode
