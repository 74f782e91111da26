"""What every result carries: where it ran, and a table a person can read."""

import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch


def machine() -> dict[str, str]:
    """The machine and versions behind a figure. `commit` ends in "+" when the tree had uncommitted changes."""
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "cpu": f"{_cpu_name()}, {torch.get_num_threads()} threads",
        "commit": _commit(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts["cuda"] = str(torch.version.cuda)
    return facts


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns padded to their widest cell: the first left-aligned, the rest right-aligned."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
        for row in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


@contextmanager
def progress(label: str, interval: float = 5.0) -> Iterator[None]:
    """Says what is going on, every few seconds how long it has taken, and at the end the time it took."""
    started, done = time.perf_counter(), threading.Event()

    def tick() -> None:
        while not done.wait(interval):
            print(f"    {label} ... {time.perf_counter() - started:.0f} s", flush=True)

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()
        print(f"  {label}: {time.perf_counter() - started:.1f} s", flush=True)


def _version(distribution: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    commit = _first_line("git", "rev-parse", "--short=12", "HEAD")
    changed = _first_line("git", "status", "--porcelain", "--untracked-files=no")
    return commit + ("+" if changed not in ("", "unknown") else "")


def _cpu_name() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _first_line(*command: str) -> str:
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return output.strip().partition("\n")[0]
