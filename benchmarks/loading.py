"""Loading a checkpoint from a warm page cache, beside reading its bytes with safetensors alone.

The checkpoint has the names of Qwen3-MoE, a tensor for each matrix of each expert, in shards of 1 GiB or so. Reading
means that every byte of what `safetensors.torch.load_file` returns is looked at; it returns pages of the file. Copying
puts them elsewhere, as loading does, and so moves twice as many bytes.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.arguments import whole
from benchmarks.report import machine, table
from layers import MoEBlock, MoEConfig, load_checkpoint

HIDDEN, INTERMEDIATE, EXPERTS = 2048, 768, 128  # a layer of Qwen3-30B-A3B: 1.2 GB in bfloat16
LEAST = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks loading`."""
    parser.add_argument("--layers", type=whole, default=3, help="of 1.2 GB each, in memory and on disk")
    parser.add_argument("--rounds", type=whole, default=7, help="each way once in every round")


def main(arguments: argparse.Namespace) -> int:
    """Prints the table; the status is 1 when loading has less than half the speed of reading."""
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
    torch.set_num_threads(1)  # more than that wait for each other when they sum small tensors
    with tempfile.TemporaryDirectory() as folder:
        shards = write_checkpoint(Path(folder), arguments.layers)
        config = MoEConfig(EXPERTS, 8, HIDDEN, INTERMEDIATE)
        model = nn.ModuleList(MoEBlock(config, dtype=torch.bfloat16) for _ in shards)
        ways: dict[str, Callable[[], None]] = {
            "read": lambda: read(shards),
            "copy": lambda: copy(shards),
            "load": lambda: load_checkpoint(model, folder, progress=False),
        }
        ways["load"]()
        check(model, shards)
        seconds = in_turns(ways, arguments.rounds)
        size = sum(shard.stat().st_size for shard in shards) / 1e9
    speed = {way: size / statistics.median(times) for way, times in seconds.items()}
    ratios = {
        way: statistics.median(other / load for other, load in zip(seconds[way], seconds["load"]))
        for way in ("read", "copy")
    }
    row = (
        f"{size:.1f}",
        *(f"{speed[way]:.1f}" for way in ways),
        *(f"{ratio:.2f}" for ratio in ratios.values()),
    )
    print(table(("GB", *(f"{way} GB/s" for way in ways), *(f"load / {way}" for way in ratios)), [row]))
    return int(ratios["read"] < LEAST)


def write_checkpoint(folder: Path, num_layers: int) -> list[Path]:
    """One shard for each layer, and their index."""
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    for layer in range(num_layers):
        name = f"model-{layer:05d}.safetensors"
        prefix = f"model.layers.{layer}.mlp"
        tensors = {f"{prefix}.gate.weight": weight(EXPERTS, HIDDEN)}
        for expert in range(EXPERTS):
            at = f"{prefix}.experts.{expert}"
            for projection in ("gate_proj", "up_proj"):
                tensors[f"{at}.{projection}.weight"] = weight(INTERMEDIATE, HIDDEN)
            tensors[f"{at}.down_proj.weight"] = weight(HIDDEN, INTERMEDIATE)
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return [folder / name for name in sorted(set(weight_map.values()))]


def weight(rows: int, columns: int) -> torch.Tensor:
    """Random numbers in bfloat16."""
    return torch.empty(rows, columns, dtype=torch.bfloat16).uniform_(-1, 1)


def read(shards: list[Path]) -> None:
    """Looks at every byte."""
    from safetensors.torch import load_file

    for shard in shards:
        for tensor in load_file(shard).values():
            tensor.view(torch.int64).sum()


def copy(shards: list[Path]) -> None:
    """Puts every tensor into memory of its own."""
    from safetensors.torch import load_file

    kept = [tensor.clone() for shard in shards for tensor in load_file(shard).values()]
    assert kept


def check(model: nn.ModuleList, shards: list[Path]) -> None:
    """That the last expert of every layer has arrived."""
    from safetensors import safe_open

    for layer, (block, shard) in enumerate(zip(model, shards, strict=True)):
        with safe_open(shard, "pt") as file:
            stored = file.get_tensor(f"model.layers.{layer}.mlp.experts.{EXPERTS - 1}.up_proj.weight")
        assert torch.equal(block.experts.w13_weight[-1, INTERMEDIATE:], stored), shard  # type: ignore[union-attr]


def in_turns(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - start)
    return seconds
