"""Stock MoE blocks of transformers, at the sizes of real models: eager, torch.compile, and ours, on a GPU.

Ours twice: with nothing but the backend changed, and patched. Every result is compared with the block in float32 before
anything is timed; all are captured into CUDA graphs and take turns.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import inductor_passes
from benchmarks.arguments import listed, number, one_of, to_write, whole
from benchmarks.report import machine, table
from benchmarks.timing import capture, time_in_turns
from layers import huggingface

TOKEN_COUNTS = (1, 32, 4096)
NUM_INPUTS = 6  # in one graph, so that none finds what the one before it read
ALLOWED_ERROR = 2.0  # times stock's own, against float32

Call = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """One MoE block: where transformers has it, and its sizes."""

    module: str
    cls: str
    config: str
    options: dict[str, Any]


_DEEPSEEK = {
    "hidden_size": 7168, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
_QWEN3_NEXT = {
    "hidden_size": 2048, "moe_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
_GLM_AIR = {
    "hidden_size": 4096, "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
_QWEN1_5 = {
    "hidden_size": 2048, "moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 5632,
}  # fmt: skip
BLOCKS = {
    "qwen3_moe": Block(
        "qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    ),
    "mixtral": Block(
        "mixtral", "MixtralSparseMoeBlock", "MixtralConfig",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "gpt_oss": Block(
        "gpt_oss", "GptOssMLP", "GptOssConfig",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4},
    ),
    "deepseek_v3": Block("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", _DEEPSEEK),
}  # fmt: skip
MORE_BLOCKS = {  # whose shared experts differ in width
    "qwen3_next": Block("qwen3_next", "Qwen3NextSparseMoeBlock", "Qwen3NextConfig", _QWEN3_NEXT),
    "glm4_moe": Block("glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig", _GLM_AIR),
    "qwen2_moe": Block("qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig", _QWEN1_5),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks stock`."""
    parser.add_argument(
        "--only",
        type=listed(one_of(BLOCKS | MORE_BLOCKS)),
        default=",".join(BLOCKS),
        help=f"from {', '.join(BLOCKS | MORE_BLOCKS)}",
    )
    parser.add_argument(
        "--tokens", type=listed(whole), default=",".join(map(str, TOKEN_COUNTS)), help="token counts"
    )
    parser.add_argument(
        "--cell-ms", type=number, default=60.0, help="milliseconds of replays per measurement"
    )
    parser.add_argument("--out", type=to_write, default=Path("build/stock.json"), help="where the figures go")


def main(arguments: argparse.Namespace) -> int:
    """Measures; raises ValueError for a wrong result."""
    if not torch.cuda.is_available():
        print("python -m benchmarks stock needs a CUDA GPU")
        return 2
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    for name in arguments.only.split(","):
        block = make_block((BLOCKS | MORE_BLOCKS)[name], "cuda")
        for tokens in map(int, arguments.tokens.split(",")):
            for row in measure(block, tokens, arguments.cell_ms):
                rows.append({"block": name, **row})
                print("  ".join(f"{key} {_shown(value)}" for key, value in rows[-1].items()), flush=True)
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
        del block
        torch.cuda.empty_cache()
    print(summary(rows))
    return 0


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each cell: microseconds of stock and of ours, both with the faster implementation of the experts."""
    cells: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        best = cells.setdefault((row["block"], row["tokens"]), {})
        way = row["way"].removesuffix(" grouped_mm").removesuffix(" batched_mm")
        best[way] = min(best.get(way, float("inf")), row["us"])
    ways = ("stock eager", "stock compile", "backend", "patched")
    lines = [
        [*cell, *(f"{best[way]:.1f}" for way in ways), f"{best['stock compile'] / best['backend']:.2f}"]
        for cell, best in cells.items()
    ]
    return table(("block", "tokens", *ways, "times faster"), lines)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def make_block(block: Block, device: str) -> nn.Module:
    """A block with random weights in bfloat16."""
    import importlib

    import transformers

    module = importlib.import_module(f"transformers.models.{block.module}.modeling_{block.module}")
    config = getattr(transformers, block.config)(**block.options)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        made = getattr(module, block.cls)(config).bfloat16().eval()
    made = made.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.data.normal_(0, 0.03, generator=generator)
    return made


def measure(block: nn.Module, tokens: int, budget_ms: float) -> Iterator[dict[str, object]]:
    """A row for each way to run `tokens` tokens: microseconds of a call, error against float32, seconds to compile."""
    hidden = next(block.parameters()).shape[-1]
    device = next(block.parameters()).device
    inputs = [torch.randn(1, tokens, hidden, device=device).bfloat16() for _ in range(NUM_INPUTS)]
    found: dict[str, tuple[Callable[[], object], float, float]] = {}
    with torch.no_grad():
        expected = in_float32(block, inputs[0])
        for name, call in ways(block, tokens):
            torch.compiler.reset()
            start = time.perf_counter()
            first = output(call(inputs[0]))
            seconds = time.perf_counter() - start
            error = ((first.double() - expected).norm() / expected.norm()).item()
            found[name] = capture([partial(call, each) for each in inputs]), error, seconds
        expect_close({name: error for name, (_, error, _) in found.items()})
        times = time_in_turns([replay for replay, *_ in found.values()], budget_ms)
    for (name, (_, error, seconds)), ms in zip(found.items(), times, strict=True):
        yield {
            "tokens": tokens, "way": name, "us": 1000 * ms / NUM_INPUTS, "error": error, "compile_s": seconds,
        }  # fmt: skip


def expect_close(errors: dict[str, float]) -> None:
    """Ours may be off by twice what stock is: raises ValueError beyond."""
    allowed = ALLOWED_ERROR * min(error for name, error in errors.items() if name.startswith("stock"))
    for name, error in errors.items():
        if not error <= allowed:
            raise ValueError(f"{name}: relative error {error:.2e}, expected at most {allowed:.2e}")


def ways(block: nn.Module, tokens: int) -> Iterator[tuple[str, Call]]:
    """Stock in every form a user has, then ours: the block as it is, and patched."""
    implementations = ("grouped_mm", "batched_mm") if tokens <= 32 else ("grouped_mm",)
    for implementation in implementations:
        stock = sharing(block)
        set_implementation(stock, implementation)
        yield f"stock eager {implementation}", stock
        yield f"stock compile {implementation}", torch.compile(stock, fullgraph=True, dynamic=False)
        options = inductor_passes.options()
        yield (
            f"backend {implementation}",
            torch.compile(stock, options=options, fullgraph=True, dynamic=False),
        )
    patched = sharing(block)
    huggingface.patch(patched)
    yield "patched", torch.compile(patched, options=inductor_passes.options(), fullgraph=True, dynamic=False)


def sharing(block: nn.Module) -> nn.Module:
    """A copy of `block` with its parameters, and a config of its own."""
    return copy.deepcopy(block, {id(tensor): tensor for tensor in (*block.parameters(), *block.buffers())})


def set_implementation(block: nn.Module, implementation: str) -> None:
    """Names what runs the experts."""
    for module in block.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = implementation


def in_float32(block: nn.Module, x: Tensor) -> Tensor:
    """What the block should give."""
    exact = copy.deepcopy(block).float()
    set_implementation(exact, "eager")
    return output(exact(x.float())).double()


def output(result: Any) -> Tensor:
    """A block's output, beside which it may give logits."""
    return result if isinstance(result, Tensor) else result[0]
