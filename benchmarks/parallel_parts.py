"""What `python -m benchmarks parallel` measures, by name. A wrong result ends a part before a time is taken."""

from collections.abc import Callable
from typing import Any

from benchmarks.parallel_exchange import exchange
from benchmarks.parallel_layers import decode, layer
from benchmarks.parallel_many import backward, problems, replays
from benchmarks.parallel_quantised import quantised
from benchmarks.parallel_rebalancing import rebalancing
from benchmarks.parallel_state import State, start

__all__ = ["PARTS", "PARTS_ON_CPU", "start"]

PARTS: dict[str, Callable[[State], Any]] = {
    "exchange": exchange,
    "replays": replays,
    "problems": problems,
    "backward": backward,
    "decode": decode,
    "layer": layer,
    "quantised": quantised,
    "rebalancing": rebalancing,
}
PARTS_ON_CPU = ("exchange", "problems", "backward", "decode", "layer", "quantised", "rebalancing")
