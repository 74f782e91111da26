"""use_tuning: which block sizes grouped products take, from a table that was measured on the GPU at hand.

Without one they follow rules that were measured on an H200 (`kernels/gemm_config.py`). `python -m benchmarks tune`
makes a table.
"""

from os import PathLike
from pathlib import Path

from moe_ops import _library
from moe_ops.kernels import gpu
from moe_ops.kernels.tuning import Tuning


def use_tuning(table: Tuning | str | PathLike[str] | None) -> None:
    """Chooses block sizes of grouped products by `table` from now on, in this process; by rule where it has none.

    Calls of operators plan anew. What is compiled later is compiled with the table, which is in the key of Inductor's
    cache. What was compiled or captured before keeps its launches: call this first.

    Args:
        table: a table, or the path of its JSON file; None for no table.

    Raises:
        ValueError: a file that is no table, with its path, the key and what was expected there; or a table for a GPU
            that is not here. Where there is no GPU, tables for "NVIDIA H200" are taken: plans are made for one.
        TypeError: anything else.
        OSError: no file to read.

    Example:
        >>> moe_ops.use_tuning("tuning.json")
    """
    if isinstance(table, str | PathLike):
        tuning: Tuning | None = Tuning.from_json(Path(table).read_bytes(), str(table))
    elif table is None or isinstance(table, Tuning):
        tuning = table
    else:
        raise TypeError(f"table={table!r}: expected a Tuning, the path of a file, or None")
    if tuning is not None and tuning.gpu not in gpu.names():
        here = ", ".join(map(repr, dict.fromkeys(gpu.names())))
        raise ValueError(f"table={table!r}: its gpu is {tuning.gpu!r}: expected a table for {here}")
    gpu.use(tuning)
    _library.forget_launches()


def tuning_key() -> str:
    """What a compiler's cache must know of the table in use: its digest, empty without one."""
    tuning = gpu.in_use()
    return "" if tuning is None else tuning.digest
