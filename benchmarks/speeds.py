"""What a GPU does at best: bytes it reads in a second, and products of bfloat16 that go on for a while."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.timing import capture

_READ_BYTES = 1 << 32
_SIZE = 8192  # of the square matrices
_WARM_UP, _ROUNDS = 150, 15  # products in a row until clocks have fallen to what they stay at


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes and floating-point operations a second."""

    bytes_per_s: float
    flops_per_s: float

    def __str__(self) -> str:
        return f"{self.bytes_per_s / 1e12:.2f} TB/s read, {self.flops_per_s / 1e12:.0f} TFLOP/s"

    def floor_us(self, num_bytes: float, flops: float) -> float:
        """Microseconds of the longer of the two."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s) * 1e6


H200 = Speed(4.59e12, 700e12)


def measure() -> Speed:
    """Of the GPU at hand, some seconds long."""
    data = torch.empty(_READ_BYTES // 4, dtype=torch.float32, device="cuda").normal_()
    seconds_read = _median_seconds(data.max, 0)
    a, b = (torch.randn(_SIZE, _SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    seconds = _median_seconds(lambda: a @ b, _WARM_UP)
    return Speed(_READ_BYTES / seconds_read, 2.0 * _SIZE**3 / seconds)


def here() -> Speed:
    """Of the GPU at hand: as recorded for an H200, else measured."""
    return H200 if is_h200() else measure()


def is_h200() -> bool:
    """Whether figures recorded on an H200 hold for the GPU at hand."""
    return "H200" in torch.cuda.get_device_name()


def _median_seconds(run: Callable[[], object], warm_up: int) -> float:
    replay, times = capture([run]), []
    for _ in range(warm_up):
        replay()
    for _ in range(_ROUNDS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return statistics.median(times)
