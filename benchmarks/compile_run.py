"""One compile for `benchmarks.compile_bench`: `python -m benchmarks.compile_run WAY LAYERS TOKENS DEVICE`."""

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inductor_passes import _compat, options, pipeline

WAYS = ("stock", "backend", "patched")


def main() -> None:
    """Prints what it measured as JSON, after checking the result."""
    way, layers, tokens, device = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    before = _machine_code()
    model = make_model(layers, device)
    prompt = torch.arange(tokens, device=device)[None]
    with torch.no_grad():
        expected = model(prompt, use_cache=False).logits
        run, watch = _compiled(model, way), Watch()
        start, cpu = time.perf_counter(), _cpu_seconds()
        logits = run(prompt, use_cache=False).logits
        seconds, cpu = time.perf_counter() - start, _cpu_seconds() - cpu
    error = float((logits.double() - expected.double()).norm() / expected.double().norm())
    if not error <= 2e-2:
        raise ValueError(f"{way}: relative error {error:.1e}, expected at most 2e-2")
    found = {"seconds": round(seconds, 2), "cpu_s": round(cpu, 2), **watch.found(seconds)}
    files = _machine_code() - before
    print(json.dumps({**found, "kernels": sum(map(_kernels_in, files)), "files": len(files), "error": error}))


def make_model(layers: int, device: str) -> nn.Module:
    """Qwen3-MoE with random weights and small sizes, in bfloat16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=4,
        max_position_embeddings=8192, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval().to(device, torch.bfloat16)
    return model.requires_grad_(False)


def _compiled(model: nn.Module, way: str) -> Callable[..., Any]:
    fixed: dict[str, Any] = {"fullgraph": True, "dynamic": False}
    if way == "stock":
        return torch.compile(model, **fixed)
    from layers import huggingface

    if way == "patched":
        huggingface.patch(model)
    return torch.compile(model, options=options(), **fixed)


class Watch:
    """Notes when Inductor starts, and what our passes do and take."""

    def __init__(self) -> None:
        self.passes_s, self.inductor_before = 0.0, _compat.inductor_seconds()
        self.runs = self.shared = 0
        self.layers: dict[str, None] = {}
        self.passes, self.share, self.finish = (
            pipeline.run_passes,
            pipeline.share_layers,
            _compat.finish_region,
        )
        pipeline.run_passes = self._run_passes
        pipeline.share_layers = self._share
        _compat.finish_region = self._finish

    def _run_passes(self, *args: Any) -> Any:
        start = time.perf_counter()
        log = self.passes(*args)
        self.passes_s += time.perf_counter() - start
        self.runs += 1
        self.layers |= log.layers
        return log

    def _share(self, *args: Any) -> int:
        start = time.perf_counter()
        self.shared = self.share(*args)
        self.passes_s += time.perf_counter() - start
        return self.shared

    def _finish(self, *args: Any) -> None:
        start = time.perf_counter()
        self.finish(*args)
        self.passes_s -= time.perf_counter() - start  # Inductor's own passes

    def found(self, seconds: float) -> dict[str, Any]:
        """Seconds before Inductor and in our passes, how often these ran, how many layers' code was written."""
        inductor = _compat.inductor_seconds() - self.inductor_before
        return {
            "before_inductor_s": round(seconds - inductor, 2),
            "passes_s": round(self.passes_s, 2),
            "passes_runs": self.runs,
            "layers_written": len(self.layers) - max(self.shared - 1, 0),
        }


def _cpu_seconds() -> float:
    """Of this process and of the compilers it has waited for."""
    each = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in each)


def _machine_code() -> set[Path]:
    """Files in the caches: C++ libraries, and Triton's kernels."""
    folders = [Path(os.environ[name]) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    found = {path for folder in folders for kind in ("*.so", "*.cubin") for path in folder.rglob(kind)}
    return {path for path in found if not path.name.startswith(("cuda_utils", "__triton"))}


def _kernels_in(path: Path) -> int:
    """Each kernel of a C++ library is a Python module."""
    return len(set(re.findall(rb"PyInit_\w+", path.read_bytes()))) if path.suffix == ".so" else 1


if __name__ == "__main__":
    main()
