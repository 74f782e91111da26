"""gpt-oss read in the MXFP4 in which it is published, beside the same read into bfloat16: memory, and blocks in turns.

The checkpoint is written first: the sizes and names of gpt-oss, random bytes. What is read is compared before anything
is timed: weights to the bit, and logits.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import listed, number, whole
from benchmarks.report import machine, table
from benchmarks.timing import capture, time_in_turns
from layers import WeightScale, huggingface
from moe_ops import ScaledWeight, dequantise_weight

EXPERTS = {"gpt-oss-20b": 32, "gpt-oss-120b": 128}
_SIZES = {"hidden_size": 2880, "intermediate_size": 2880, "num_experts_per_tok": 4}
_GIB = 2**30
_MOST = 0.03  # difference of logits: what bfloat16 makes of other orders of sums


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks published`."""
    parser.add_argument("--model", choices=list(EXPERTS), default="gpt-oss-20b")
    parser.add_argument(
        "--layers", type=whole, default=12, help="of 0.4 GB each on disk, of gpt-oss-120b 1.6"
    )
    parser.add_argument("--tokens", type=listed(whole), default="1,8,64,512,2048", help="token counts")
    parser.add_argument(
        "--cell-ms", type=number, default=60.0, help="milliseconds of replays per measurement"
    )


@torch.no_grad()
def main(arguments: argparse.Namespace) -> int:
    """Prints what reading takes, then a table; raises ValueError where what was read is not the same."""
    if not torch.cuda.is_available():
        print("python -m benchmarks published needs a CUDA GPU")
        return 2
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, EXPERTS[arguments.model], arguments.layers)
        stock, ours = (_timed(way, read, folder) for way, read in READ.items())
    check(stock, ours)
    counts = [int(each) for each in arguments.tokens.split(",")]
    states = [
        torch.randn(1, count, _SIZES["hidden_size"], dtype=torch.bfloat16, device="cuda") for count in counts
    ]
    ways = {"stock bfloat16": _captured(stock, states), "MXFP4": _captured(ours, states)}
    huggingface.patch(stock)
    ways["patched bfloat16"] = _captured(stock, states)
    rows = []
    for count, replays in zip(counts, zip(*ways.values()), strict=True):
        times = [1000 * ms / arguments.layers for ms in time_in_turns(replays, arguments.cell_ms)]
        rows.append((str(count), *(f"{us:.1f}" for us in times), f"{times[0] / times[1]:.2f}"))
    print(f"\nMicroseconds of a block of {arguments.model}, as CUDA graphs in turns.\n")
    print(table(("tokens", *ways, "times faster"), rows))
    return 0


def write(folder: Path, num_experts: int, num_layers: int) -> None:
    """A checkpoint as gpt-oss is published."""
    from safetensors.torch import save_file
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(num_hidden_layers=num_layers, num_local_experts=num_experts, **_SIZES)
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in GptOssForCausalLM(config).state_dict().items()}
    state: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            size = shape[0], shape[2], shape[1] // 32
            state[f"{name}_blocks"] = torch.randint(256, (*size, 16), dtype=torch.uint8)
            state[f"{name}_scales"] = torch.randint(116, 120, size, dtype=torch.uint8)
        else:
            weight = torch.ones(shape) if "norm" in name else torch.randn(shape) * 0.02
            state[name] = weight.bfloat16()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    written = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(written))


def in_bfloat16(folder: Path, device: str) -> Any:
    """As transformers reads it where it has no kernels for MXFP4."""
    from transformers import GptOssForCausalLM, Mxfp4Config

    options = Mxfp4Config(dequantize=True)
    return GptOssForCausalLM.from_pretrained(
        folder, quantization_config=options, dtype=torch.bfloat16, device_map=device
    )


def in_mxfp4(folder: Path, device: str) -> Any:
    """As it is published, patched."""
    from transformers import AutoConfig, GptOssForCausalLM

    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    options = huggingface.quantisation(WeightScale.GROUP, (1, 32), dtype=torch.uint8)
    return GptOssForCausalLM.from_pretrained(
        folder, config=config, quantization_config=options, dtype=torch.bfloat16, device_map=device
    )


READ = {"bfloat16, by transformers": in_bfloat16, "MXFP4, as published": in_mxfp4}


def _timed(way: str, read: Callable[[Path, str], Any], folder: Path) -> Any:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    model = read(folder, "cuda").eval()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    held, most = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    print(
        f"{way}: {seconds:.1f} s, {held / _GIB:.2f} GiB, at most {most / _GIB:.2f} while it is read",
        flush=True,
    )
    return model


def check(stock: Any, ours: Any) -> None:
    """Raises ValueError where weights differ in a bit, or logits by more than bfloat16 explains."""
    for layer, mine in zip(stock.model.layers, ours.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            stored = getattr(mine.mlp.experts, name), getattr(mine.mlp.experts, f"{name}_scale_inv")
            meant = dequantise_weight(ScaledWeight(*stored, (1, 32)), torch.bfloat16)
            if not torch.equal(meant, getattr(layer.mlp.experts, name).mT):
                raise ValueError(f"{name} is not what was published")
    ids = torch.arange(64, device=stock.device)[None]
    expected, actual = (model(input_ids=ids, use_cache=False).logits.float() for model in (stock, ours))
    error = float((actual - expected).norm() / expected.norm())
    if not error < _MOST:
        raise ValueError(f"logits differ by {error}: expected less than {_MOST}")
    print(f"weights are the same to the bit, logits differ by {error:.4f}", flush=True)


def _captured(model: Any, states: list[Tensor]) -> list[Callable[[], object]]:
    """One graph of all blocks for each number of tokens, so that none finds its weights in the cache."""
    return [capture([partial(layer.mlp, each) for layer in model.model.layers]) for each in states]
