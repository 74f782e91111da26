"""A step captured as CUDA graphs, one for each of a list of batch sizes, and replayed with new contents.

Letters: T rows (tokens) of a call.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from layers._checks import expect_positive
from layers.graph_buffers import Bucket, Inputs, holders
from layers.graph_capture import CaptureError, CudaGraphs, Graphs, causes_named
from moe_ops.errors import describe

Output = TypeVar("Output")


class _Hazard(Protocol):
    @property
    def target(self) -> str: ...
    @property
    def reason(self) -> str: ...


class _Report(Protocol):
    @property
    def capture_hazards(self) -> Sequence[_Hazard]: ...


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """Device memory of a `CudaGraphRunner`, in bytes.

    Attributes:
        buffers: what the arguments are copied to.
        graphs: what the graph of each size took of the pool, beyond what those of larger sizes had: outputs and
            intermediate tensors. PyTorch takes memory in blocks of 2 MiB and more.
    """

    buffers: int
    graphs: dict[int, int]

    @property
    def total(self) -> int:
        """All of it."""
        return self.buffers + sum(self.graphs.values())


class CudaGraphRunner(Generic[Output]):
    """Runs `fn` by replaying CUDA graphs, captured at the first call or by `capture`.

    Every tensor among the arguments, in whatever containers, has T rows, and so has every tensor that `fn` returns.
    A call copies its rows to buffers, pads them to the next of `capture_sizes`, replays, and returns copies of the
    first T rows. What else `fn` needs, such as weights and caches, it holds itself and a graph reads where it was.
    Threads take turns, in the order of one stream: their buffers are the same.

    Padding: `topk_ids` (integers of that name: a keyword, a key, a field of `RouterOutput`) get -1, slots of nobody
    that load no weights. Everything else gets the last row once more: valid wherever rows are, and its experts are
    loaded anyway.

    Args:
        fn: a function or module, eager or compiled; not compiled with CUDA graphs of its own. It runs without grad, and
            twice for each size before it is captured; what it writes elsewhere it writes then, too.
        capture_sizes: numbers of rows. The largest is captured first, so that the others fit into its memory.
        explain: what reports the `capture_hazards` of a function and its arguments. Asked before the first capture,
            also for what a capture would not notice, such as a CPU tensor whose value would stay what it was.
        graphs: what captures; CUDA graphs.

    Raises:
        TypeError, ValueError: `fn` or `explain` cannot be called, `graphs` captures nothing; `capture_sizes` is empty
            or not of positive integers.

    Example:
        >>> with layers.CudaGraphRunner(block, [1, 2, 4, 8]) as run:
        ...     output = run(hidden_states)
    """

    def __init__(
        self,
        fn: Callable[..., Output],
        capture_sizes: Iterable[int],
        *,
        explain: Callable[..., _Report] | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn={fn!r}: expected a function or a module")
        if explain is not None and not callable(explain):
            raise TypeError(f"explain={explain!r}: expected a function, such as inductor_passes.explain")
        if graphs is not None and not callable(getattr(graphs, "capture", None)):
            raise TypeError(f"graphs={graphs!r}: expected what captures steps, or None for CUDA graphs")
        if not isinstance(capture_sizes, Iterable):
            raise TypeError(f"capture_sizes={capture_sizes!r}: expected numbers of rows")
        sizes = tuple(capture_sizes)
        if not sizes:
            raise ValueError("capture_sizes is empty: expected numbers of rows")
        for size in sizes:
            expect_positive("capture_sizes", size)
        self.capture_sizes = tuple(sorted(set(sizes)))
        self._fn, self._explain, self._graphs = fn, explain, graphs or CudaGraphs()
        self._inputs: Inputs | None = None
        self._captured: dict[int, Bucket] = {}
        self._is_closed, self._turn = False, threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        """What `fn(*args, **kwargs)` returns, in memory of the caller's.

        Raises:
            CaptureError: at the first call, the step cannot be captured.
            RuntimeError: the runner is closed.
            TypeError, ValueError: arguments that `fn` was not captured for, in structure, dtype, shape behind the rows,
                device, or values other than tensors; more rows than the largest size; a gradient is asked for.
        """
        with self._turn:
            inputs = self._inputs or self._capture(args, kwargs)
            tensors = inputs.checked(args, kwargs)
            rows = tensors[0].shape[0]
            size = next(size for size in self.capture_sizes if size >= rows)
            bucket = self._captured[size]
            with torch.no_grad():
                if rows:
                    inputs.fill(tensors, size)
                    bucket.replay()
                return bucket.first_rows(rows)

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Captures all sizes, with the rows of an example of any T from 1 to the largest size.

        Raises:
            CaptureError: the step cannot be captured, with its cause. Nothing is held then.
            RuntimeError: the runner is closed, or has captured.
            TypeError, ValueError: as a call does; T = 0.
        """
        with self._turn:
            self._capture(args, kwargs)

    @property
    def memory(self) -> GraphMemory:
        """What it holds now; nothing before the capture and after `close`."""
        graphs = {size: bucket.num_bytes for size, bucket in self._captured.items()}
        return GraphMemory(self._inputs.num_bytes if self._inputs else 0, graphs)

    def close(self) -> None:
        """Gives all memory back. Outputs stay valid, calls raise."""
        with self._turn:
            self._is_closed = True
            self._discard()

    def __enter__(self) -> "CudaGraphRunner[Output]":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _capture(self, args: tuple, kwargs: dict[str, Any]) -> Inputs:
        if self._is_closed or self._captured:
            raise RuntimeError("the CudaGraphRunner is closed" if self._is_closed else "captured already")
        inputs = Inputs(args, kwargs, self.capture_sizes[-1], self._graphs.device_type)
        inputs.fill(inputs.checked(args, kwargs), self.capture_sizes[-1])
        try:
            with torch.no_grad():
                self._refuse_hazards(inputs)
                for size in reversed(self.capture_sizes):
                    self._captured[size] = self._bucket(inputs, size)
                    self._captured[size].expect_numbers_of(self._captured[self.capture_sizes[-1]], size)
        except BaseException:
            self._discard()
            raise
        self._inputs = inputs
        return inputs

    def _bucket(self, inputs: Inputs, size: int) -> Bucket:
        args, kwargs = inputs.arguments(size)
        versions, runs = inputs.versions(), [[]]

        def step() -> Output:
            outputs = self._fn(*args, **kwargs)
            runs[:] = [runs[-1], holders(outputs)]
            return outputs

        with causes_named(size):
            captured = self._graphs.capture(step, inputs.device)
        written = [name for name, now, then in zip(inputs.names, inputs.versions(), versions) if now != then]
        if written:
            raise CaptureError(
                size, f"it writes into its argument {written[0]}, which is a buffer in the graph"
            )
        before, last = runs
        made = [each for each in last if not any(each is other for other in before)]
        return Bucket(captured, size, inputs.device, made)

    def _refuse_hazards(self, inputs: Inputs) -> None:
        if self._explain is None:
            return
        size = self.capture_sizes[-1]
        args, kwargs = inputs.arguments(size)
        report = self._explain(self._fn, *args, **kwargs)
        hazards = getattr(report, "capture_hazards", None)
        if hazards is None:
            found = describe(report)
            raise TypeError(f"explain returned {found}: expected a report that has capture_hazards")
        if hazards:
            raise CaptureError(size, "; ".join(f"{each.target}: {each.reason}" for each in hazards))

    def _discard(self) -> None:
        self._captured.clear()
        self._inputs = None
        self._graphs.release()
