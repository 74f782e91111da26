"""A served model under load: transformers' continuous batching with stock layers and with ours, in turns.

Both compiled, on a GPU also captured as CUDA graphs, with the same options and the same weights. Before anything is
timed both answer the whole trace greedily, and their tokens are compared. Loads are multiples of the requests a second
that stock answers when all come at once.
"""

import argparse
import copy
import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.arguments import known_device, listed, number, to_read, to_write, whole
from benchmarks.report import machine, progress, table
from benchmarks.serving_attention import use_torch_flash
from benchmarks.serving_gate import Agreement, agreement
from benchmarks.serving_plot import draw
from benchmarks.serving_run import Engine, Replay, figures
from benchmarks.serving_trace import Mix, Request, at_rate, make_trace
from layers.huggingface import patch
from layers.serve.options import ServeOptions

SEED = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """A model of random weights and what it is asked.

    Args:
        model_type, sizes: of its config in transformers.
        mix: lengths of prompts and answers.
        step: the most tokens of a step.
        page, blocks: tokens of a block of the cache, and how many there are.
        kv_interval: tokens of the cache to which captured steps are padded.
    """

    model_type: str
    sizes: dict[str, Any]
    mix: Mix
    step: int
    page: int
    blocks: int
    kv_interval: int


_CHAT = Mix(((0.5, 32, 128), (0.35, 128, 512), (0.15, 512, 1536)), (32, 128))
_QWEN3 = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "intermediate_size": 6144, "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
_MIXTRAL = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
    "max_position_embeddings": 32768,
}  # fmt: skip
_SMALL = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 1024, "initializer_range": 0.1,
}  # fmt: skip
_SHORT = Mix(((0.6, 4, 16), (0.4, 16, 60)), (4, 12))
SETTINGS = {
    "qwen3-30b-a3b": Setting("qwen3_moe", _QWEN3, _CHAT, 1024, 64, 640, 8192),
    "mixtral-8x7b": Setting("mixtral", _MIXTRAL, _CHAT, 1024, 64, 640, 8192),
    "small": Setting("qwen3_moe", _SMALL, _SHORT, 128, 16, 64, 1024),
}
UNMEASURED = 2  # replays of a load: arrivals differ a little each time, and so do the sizes of steps
WAYS = {"stock": "inductor", "ours": "moe_inductor"}  # and how they are compiled


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks serving`."""
    has_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--device", type=known_device, metavar="cpu|cuda", default="cuda" if has_gpu else "cpu"
    )
    parser.add_argument("--model", choices=SETTINGS, default="qwen3-30b-a3b" if has_gpu else "small")
    parser.add_argument("--layers", type=whole, default=2, help="of the model, as many as there is time for")
    parser.add_argument("--requests", type=whole, default=64, help="of the trace")
    parser.add_argument(
        "--loads",
        type=listed(number),
        default="0.5,0.8,1.2,inf",
        help="times what stock can answer; inf is all at once",
    )
    parser.add_argument("--rounds", type=whole, default=2, help="measured replays of each")
    parser.add_argument(
        "--attention", choices=("sdpa", "flash"), default="sdpa", help="of both; flash is PyTorch's, on a GPU"
    )
    parser.add_argument("--eager", action="store_true", help="compile neither")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="capture neither on a GPU")
    parser.add_argument(
        "--out", type=to_write, default=Path("build/serving.json"), help="the plot lies beside it"
    )
    parser.add_argument(
        "--draw", type=to_read, metavar="FILE", help="only draw what FILE has, as --out was written"
    )


def main(arguments: argparse.Namespace) -> int:
    """Measures; raises ValueError for answers that differ by more than rounding."""
    if arguments.draw is not None:
        return _draw(json.loads(arguments.draw.read_text()), arguments.draw.with_suffix(".png"))
    facts = machine()
    print("  ".join(f"{name} {fact}" for name, fact in facts.items()), flush=True)
    setting = SETTINGS[arguments.model]
    trace = make_trace(arguments.requests, setting.mix, setting.sizes["vocab_size"], SEED)
    models = _models(setting, arguments.layers, arguments.device)
    engines = dict(_engines(models, setting, arguments))
    try:
        found, capacity = _gate(models, engines, trace)
        gc.collect()
        gc.freeze()  # as our server does before it answers
        rows: list[dict[str, Any]] = []
        told = {"machine": facts, "options": _options(arguments), "gate": asdict(found), "rows": rows}
        for load in arguments.loads.split(","):
            rows += measure(engines, at_rate(trace, float(load) * capacity), load, arguments.rounds)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(told, indent=1) + "\n")
    finally:
        for engine in engines.values():
            engine.close()
    print("\n" + summary(rows))
    return _draw(told, arguments.out.with_suffix(".png"))


def measure(
    engines: Mapping[str, Engine], trace: Sequence[Request], load: str, rounds: int
) -> Iterator[dict[str, Any]]:
    """A row for each engine: the trace in turns, `UNMEASURED` times to meet new sizes and `rounds` times measured."""
    replays: dict[str, list[Replay]] = {name: [] for name in engines}
    for turn in range(1 - UNMEASURED, rounds + 1):
        for name in (*engines,) if turn % 2 else (*reversed(engines),):
            with progress(f"load {load}, {name}, {f'round {turn}' if turn > 0 else 'not measured'}"):
                replays[name].append(engines[name].replay(trace))
    for name, engine in engines.items():
        yield {"load": load, "way": name, **figures(replays[name][UNMEASURED:]), "graphs": engine.graphs}


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each row, and for ours how many times stock's tokens a second and 99th percentiles it has."""
    stock = {row["load"]: row for row in rows if row["way"] == "stock"}
    compared = ("tokens/s", "first p99", "between p99")
    lines = [
        [_shown(value) for value in row.values()]
        + [f"{row[name] / stock[row['load']][name]:.2f}" for name in compared]
        for row in rows
    ]
    return table([*rows[0], *(f"x {name}" for name in compared)], lines)


def _shown(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _models(setting: Setting, layers: int, device: str) -> dict[str, nn.Module]:
    """Stock and ours, of the same weights; each has a twin ("stock alone") that no batch gets hold of."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(setting.model_type, num_hidden_layers=layers, **setting.sizes)
    # Stock's product of experts in float32 waits for the device: no graph can hold it.
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
    model.eval().requires_grad_(False)
    models = {name: _sharing(model) for name in ("stock", "ours", "stock alone", "ours alone")}
    print(patch(models["ours"]), flush=True)
    patch(models["ours alone"])
    return models


def _sharing(model: nn.Module) -> nn.Module:
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _engines(
    models: Mapping[str, nn.Module], setting: Setting, arguments: argparse.Namespace
) -> Iterator[tuple[str, Engine]]:
    if not arguments.eager:  # the layers of both models share code, which counts what it was compiled for
        torch.compiler.config.recompile_limit = 16 + 4 * arguments.layers
    for name, backend in WAYS.items():
        if arguments.attention == "flash":
            use_torch_flash(models[name])
        options = ServeOptions(
            model=name, backend=None if arguments.eager else backend, greedy=True,
            cuda_graphs=arguments.graphs and arguments.device == "cuda",
            max_batch_tokens=setting.step, num_blocks=setting.blocks, page_size=setting.page,
        )  # fmt: skip
        with progress(f"{name}, compiled and captured"):
            engine = Engine(models[name], options, setting.kv_interval)
        yield name, engine


def _gate(
    models: Mapping[str, nn.Module], engines: Mapping[str, Engine], trace: Sequence[Request]
) -> tuple[Agreement, float]:
    """How their answers agree, and the requests a second that stock answers when all come at once."""
    at_once, replays = at_rate(trace, inf), {}
    for name, engine in engines.items():
        with progress(f"{name}, the trace for the first time"):
            engine.replay(at_once)
        replays[name] = engine.replay(at_once)
    alone = models["stock alone"], models["ours alone"]
    found = agreement(
        alone, _exact(models["stock alone"]), trace, (replays["stock"].answers, replays["ours"].answers)
    )
    print(found, flush=True)
    return found, len(trace) / replays["stock"].seconds


def _exact(model: Any) -> nn.Module:
    """A copy in wider arithmetic, expert by expert."""
    copied = copy.deepcopy(model)
    copied.set_experts_implementation("eager")
    return copied.to(torch.float64 if model.dtype == torch.float32 else torch.float32)


def _options(arguments: argparse.Namespace) -> dict[str, str]:
    return {name: str(value) for name, value in vars(arguments).items() if name != "command"}


def _draw(told: Mapping[str, Any], path: Path) -> int:
    facts, options = told["machine"], told["options"]
    where = facts.get("gpu", facts["cpu"])
    title = f"{options['model']}, {options['layers']} layers, {options['requests']} requests, {where}"
    if draw(told["rows"], title, path):
        print(f"drawn: {path}")
    return 0
