"""moe_ops.warmup_step on a GPU, in fresh processes: later calls compile nothing, stall nowhere, and plan quickly."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

MOST = 4096
CODE = """
import gc, json, random, sys, time
import torch, triton, moe_ops
from moe_ops import RoutingConfig

from moe_ops.kernels import plans

layout, most = sys.argv[1], int(sys.argv[2])
E, H, I = 128, 2048, 768  # Qwen3-30B-A3B
routing = RoutingConfig(top_k=8)
bf16 = dict(device="cuda", dtype=torch.bfloat16)
def weight(rows, columns):
    if layout == "columns":
        return (torch.randn(E, columns, rows, **bf16) * columns ** -0.5).transpose(1, 2)
    return torch.randn(E, rows, columns, **bf16) * columns ** -0.5
w13, w2, gate = weight(2 * I, H), weight(H, I), torch.randn(E, H, **bf16)
hidden, shared = torch.randn(most, H, **bf16), torch.randn(most, H, **bf16)

@torch.inference_mode()
def step(tokens):
    x = hidden[:tokens]
    logits = moe_ops.dense_gemm(x, gate, dtype=torch.float32)
    return moe_ops.fused_moe(x, logits, w13, w2, routing, shared=shared[:tokens] if layout == "shared" else None)

compiled = []
triton.knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: compiled.append(kwargs.get("repr"))
begun = time.perf_counter()
moe_ops.warmup_step(step, most)
torch.cuda.synchronize()
gc.collect()
gc.freeze()  # as docs/serving.md has it: Python's collector takes 0.15 s through all that torch has loaded
spent, loaded = time.perf_counter() - begun, len(compiled)
random.seed(0)
counts = random.sample(range(9, most - 2), 200) + list(range(4, 9))
def timed(tokens):
    torch.cuda.synchronize()
    begun = time.perf_counter()
    step(tokens)
    issued = time.perf_counter() - begun
    torch.cuda.synchronize()
    return issued, time.perf_counter() - begun
timed_of = lambda counts: [timed(tokens) for tokens in counts]
planned = lambda: sum(plan.templates.plan.cache_info().misses for plan in plans._PLANS.values())
before = planned()
first = timed_of(counts)
planned_later = planned() - before
logits = torch.randn(most, E, device="cuda")
shared_of = lambda tokens: shared[:tokens] if layout == "shared" else None

@torch.inference_mode()
def step(tokens):  # without a library's product, which spends 0.2 ms on a new size
    moe_ops.fused_moe(hidden[:tokens], logits[:tokens], w13, w2, routing, shared=shared_of(tokens))

met, others = counts[:100], random.sample(sorted(set(range(9, most - 2)) - set(counts)), 100)
timed_of(met)
new, again = timed_of(others), timed_of(others)
middle = lambda times: sorted(issued for issued, _ in times)[len(times) // 2] * 1e6
print(json.dumps({"warmup_s": spent, "loaded": loaded, "compiled_later": compiled[loaded:],
    "planned_later": planned_later,
    "longest_ms": max(total for _, total in first) * 1e3, "new_us": middle(new), "known_us": middle(again)}))
"""


@pytest.mark.parametrize("layout", ["rows", "columns", "shared"])
def test_no_count_compiles_or_stalls(layout):
    result = subprocess.run(
        [sys.executable, "-c", CODE, layout, str(MOST)], capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stderr[-3000:]
    told = json.loads(result.stdout.splitlines()[-1])
    print(told)
    assert told["loaded"] > 10
    assert told["compiled_later"] == []
    assert told["planned_later"] == 0
    assert told["longest_ms"] < 50
    assert told["new_us"] - told["known_us"] <= 150
