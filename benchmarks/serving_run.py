"""One model behind transformers' continuous batching, in this process, and traces replayed through it."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig

from benchmarks.serving_trace import Request, percentile
from layers.serve.batching import batching_config, begun
from layers.serve.options import ServeOptions

_PATIENCE = 600  # seconds for one more answer


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got: its tokens, seconds from its arrival to the first, and between one and the next."""

    tokens: tuple[int, ...]
    first: float
    between: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace that was answered.

    Args:
        answers: in the order of the trace.
        seconds: from the first arrival to the last token.
        real, padded: tokens that went through the model, without and with padding.
        captured: graphs that were captured on the way.
    """

    answers: tuple[Answer, ...]
    seconds: float
    real: int
    padded: int
    captured: int

    @property
    def tokens_per_second(self) -> float:
        """Generated, of all requests together."""
        return sum(len(answer.tokens) for answer in self.answers) / self.seconds


@dataclass(slots=True)
class _Padding:
    """Counts what the runner is asked to pad, and to what."""

    ask: Any
    real: int = 0
    padded: int = 0

    def __call__(self, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        padded = self.ask(num_q_tokens, max_kv_read, use_decode_fast_path)
        self.real += num_q_tokens
        self.padded += padded[0]
        return padded


@dataclass(slots=True)
class Engine:
    """A running batch of `model`, compiled and captured as `options` say; `close` ends it."""

    model: Any
    options: ServeOptions
    kv_interval: int
    manager: Any = field(init=False)
    padding: _Padding = field(init=False)

    def __post_init__(self) -> None:
        config = batching_config(self.options)
        config.allow_block_sharing = False  # or a prompt would be read once, however often it is replayed
        if self.options.cuda_graphs:
            config.kv_padding_interval_size = self.kv_interval
        config.max_blocks_per_request = 0  # no step of its own for decoding, which not every attention has
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, use_cache=False)
        self.manager = begun(self.model, greedy, config)
        runner = self.manager.batch_processor.model_runner
        self.padding = runner.maybe_pad_inputs = _Padding(runner.maybe_pad_inputs)

    @property
    def graphs(self) -> int:
        """How many it holds."""
        steps = self.manager.batch_processor.inputs_and_outputs
        each = [pair.device_io for pair in getattr(steps, "io_pairs", ())] or [steps]
        return sum(len(one.graphs._storage) for one in each)

    def replay(self, trace: Sequence[Request]) -> Replay:
        """Answers a trace, each request at its time. Raises RuntimeError where one failed."""
        self.padding.real = self.padding.padded = 0
        held, start = self.graphs, time.perf_counter()
        for number, request in enumerate(trace):
            time.sleep(max(start + request.arrival - time.perf_counter(), 0))
            self.manager.add_request(
                list(request.prompt), request_id=str(number), max_new_tokens=request.answer,
                eos_token_id=-1, record_timestamps=True,
            )  # fmt: skip
        results = dict(self._result() for _ in trace)
        answers = [
            _answer(results[str(number)], start + request.arrival) for number, request in enumerate(trace)
        ]
        end = max(result.timestamps[-1] for result in results.values())
        return Replay(tuple(answers), end - start, self.padding.real, self.padding.padded, self.graphs - held)

    def _result(self) -> tuple[str, Any]:
        result = self.manager.get_result(timeout=_PATIENCE)
        if result is None or result.error is not None:
            fatal = self.manager.background_thread_status.fatal_error
            raise RuntimeError(f"a request was not answered: {fatal or (result and result.error)}")
        return result.request_id, result

    def close(self) -> None:
        """Ends it and gives back its cache."""
        self.manager.stop(block=True, timeout=5, hard_stop=True)


def _answer(result: Any, arrival: float) -> Answer:
    times = result.timestamps
    between = tuple(later - sooner for sooner, later in zip(times, times[1:]))
    return Answer(tuple(result.generated_tokens), times[0] - arrival, between)


def figures(replays: Sequence[Replay]) -> dict[str, float]:
    """Of replays of one trace: the median of tokens a second, and latencies of all of them in milliseconds."""
    answers = [answer for replay in replays for answer in replay.answers]
    first = [1000 * answer.first for answer in answers]
    between = [1000 * gap for answer in answers for gap in answer.between]
    return {
        "tokens/s": statistics.median(replay.tokens_per_second for replay in replays),
        "first p50": percentile(first, 50),
        "first p99": percentile(first, 99),
        "between p50": percentile(between, 50),
        "between p99": percentile(between, 99),
        "padding %": 100 * (1 - sum(each.real for each in replays) / sum(each.padded for each in replays)),
        "captured": sum(replay.captured for replay in replays),
    }
