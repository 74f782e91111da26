"""Loading takes no second copy of the weights, whatever has to be done to them on the way."""

import os
import subprocess
import sys

import torch
from safetensors.torch import save_file

LAYOUTS = ("per expert", "stacked", "transposed")
# Loads files, each in a process of its own, forked when everything is imported: that takes longer than loading.
SCRIPT = """
import os, resource, sys, threading, traceback
import torch
from layers import MoEBlock, MoEConfig, load_checkpoint

def check(path):
    torch.set_num_threads(1)
    threading.stack_size(1 << 18)
    block = MoEBlock(MoEConfig(16, 2, 1024, 1024), dtype=torch.bfloat16, device="meta").to_empty(device="cpu")
    load_checkpoint(block, path, prefix="small", progress=False)  # everything is imported
    size = sum(p.numel() * p.element_size() for p in block.parameters())
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size // 2, resource.RLIM_INFINITY))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    load_checkpoint(block, path, prefix="big", progress=False)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    assert grown < size // 2, f"{path}: {grown} of {size}"
    assert block.experts.w2_weight[-1].eq(2).all() and block.experts.w13_weight[0].eq(2).all()
    print(size, flush=True)

def status_of(path):
    if (pid := os.fork()) == 0:
        try:
            check(path)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

sys.exit(any([status_of(path) for path in sys.argv[1:]]))
"""


def test_there_is_never_a_second_copy_of_the_experts(tmp_path):
    """In a process for each layout, whose memory may grow by a fraction of the checkpoint while it loads."""
    paths = [str(tmp_path / f"{layout}.safetensors") for layout in LAYOUTS]
    for layout, path in zip(LAYOUTS, paths, strict=True):
        save_file({**_weights("small", layout, 1.0), **_weights("big", layout, 2.0)}, path)
    command = [sys.executable, "-c", SCRIPT, *paths]
    # The limit is one of address space, of which every thread may reserve 64 MiB for its heap and 8 for its stack.
    # What is freed has to go back at once: how a heap is broken up depends on which thread comes first.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = [int(line) for line in done.stdout.split()]
    assert len(sizes) == len(LAYOUTS) and min(sizes) > 90e6


def _weights(layer, layout, value):
    def full(*shape):
        return torch.full(shape, value, dtype=torch.bfloat16)

    at = f"{layer}.mlp.experts"
    gate = {f"{layer}.mlp.gate.weight": full(16, 1024)}
    if layout == "per expert":
        return gate | {
            f"{at}.{expert}.{name}_proj.weight": full(1024, 1024)
            for expert in range(16)
            for name in ("gate", "up", "down")
        }
    gate_up = full(16, 1024, 2048) if layout == "transposed" else full(16, 2048, 1024)
    return gate | {f"{at}.gate_up_proj": gate_up, f"{at}.down_proj": full(16, 1024, 1024)}
