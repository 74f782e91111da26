"""A step captured as a CUDA graph, or the reason why it cannot be."""

import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = (__file__, str(Path(__file__).with_name("cuda_graphs.py")))
# What PyTorch and CUDA say, and what that means for a step; the first that is found counts.
_CAUSES = {
    "called a synchronizing CUDA operation": (
        "it waits for the device: .item(), .cpu(), nonzero, a tensor from host memory or as a condition"
    ),
    "Cannot copy between CPU and CUDA tensors": "it moves a CPU tensor to the device, or back",
    "data-dependent": "a size or a branch depends on values of tensors (an unbacked size)",
    "unbacked": "a size or a branch depends on values of tensors (an unbacked size)",
    "Offset increment outside graph capture": "it draws random numbers of a generator that no graph knows",
    "not permitted when stream is capturing": (
        "it waits for the device, allocates past PyTorch, or captures or replays a CUDA graph of its own"
    ),
    "depend on a capturing blocking stream": "it uses the default stream beside the one that is captured",
    "uncaptured work in another stream": "it waits for a stream that is not part of the capture",
    "unjoined work": "a stream that it starts is not waited for",
}
_BROKEN_OFF = "previous error during capture"


class CaptureError(RuntimeError):
    """A step that a CUDA graph cannot hold, or that would be wrong in one.

    Attributes:
        size: rows of the bucket that was captured.
        cause: the hazard, in words.
        where: the line of the step, "step.py:12: count = ids.max().item()"; "" where it is not known.
    """

    def __init__(self, size: int, cause: str, where: str = "") -> None:
        at = f" ({where})" if where else ""
        super().__init__(f"cannot capture the step for capture_sizes={size}: {cause}{at}")
        self.size, self.cause, self.where = size, cause, where


@contextmanager
def causes_named(size: int) -> Iterator[None]:
    """Raises CaptureError for what PyTorch says of a capture; any other error of the step is its own, and passes."""
    handled = sys.exception()  # what the caller is about is in the context of whatever is raised
    try:
        yield
    except Exception as error:
        chain = list(_chain(error, handled))[::-1]
        for each in chain:  # where it began says more than what followed
            cause = next((cause for text, cause in _CAUSES.items() if text in str(each)), None)
            if cause is not None:
                raise CaptureError(size, cause, _line_of_step(each)) from error
        if _BROKEN_OFF in str(error):
            cause = f"it raises {type(chain[0]).__name__}: {chain[0]}"
            raise CaptureError(size, cause, _line_of_step(chain[0])) from error
        raise


def _chain(error: BaseException | None, handled: BaseException | None) -> Iterator[BaseException]:
    while error is not None and error is not handled:
        yield error
        error = error.__cause__ or error.__context__


def _line_of_step(error: BaseException) -> str:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_TORCH) and frame.filename not in _OURS:
            return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return ""


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured step.

    Attributes:
        outputs: what it returned; `replay` computes their contents anew.
        replay: enqueues the step on the current stream.
        num_bytes: what the capture took of the device's memory, beyond what captures before it had.
    """

    outputs: Any
    replay: Callable[[], None]
    num_bytes: int


class Graphs(Protocol):
    """What captures steps, one after another."""

    device_type: str

    def capture(self, step: Callable[[], Any], device: torch.device) -> Captured:
        """Runs `step` as often as it needs, on the memory that it reads at each replay."""
        ...

    def release(self) -> None:
        """Gives back the memory of all that was captured; none of it is replayed any more."""
        ...


class CudaGraphs:
    """CUDA graphs that share one memory pool: what a graph needs within a replay, others use at theirs."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._pool: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._device: torch.device | None = None

    def capture(self, step: Callable[[], Any], device: torch.device) -> Captured:
        # A capture that fails leaves its stream the current one: the outer `stream` puts the caller's back.
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
            _rehearse(step, device)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            before = self._pool_bytes()
            graph = torch.cuda.CUDAGraph()
            self._graphs.append(graph)  # also of a capture that fails, whose pool goes with it
            self._device = device
            # Other threads of a server may go on allocating.
            try:
                with torch.cuda.graph(graph, self._pool, _stream(device), capture_error_mode="thread_local"):
                    outputs = step()
            except BaseException:
                _free_generator(device)
                raise
            return Captured(outputs, graph.replay, self._pool_bytes() - before)

    def release(self) -> None:
        if not self._graphs:
            return
        torch.cuda.synchronize(self._device)  # replays that are under way
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._pool = None
        torch.cuda.empty_cache()

    def _pool_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(each["total_size"] for each in segments if each["segment_pool_id"] == self._pool)


def _rehearse(step: Callable[[], Any], device: torch.device) -> None:
    """Compiles, loads kernels and makes workspaces, which a capture may not; then any wait for the device raises."""
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        with _host_syncs_raise():
            step()
    torch.cuda.synchronize()


def _free_generator(device: torch.device) -> None:
    """A capture that breaks off leaves the device's generator captured: it draws nothing until a capture ends."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=_stream(device)):
        torch.zeros(1, device=device)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures on a device: cuBLAS keeps a workspace for each stream that it has seen."""
    return torch.cuda.Stream(device)


@contextmanager
def _host_syncs_raise() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
