"""What the compiled graph of one mixture-of-experts block looks like: operator calls, and launches, on a GPU."""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.checkpoints import moe_blocks

TOKENS = 2  # a decode step of two sequences


@dataclass(slots=True)
class NodeCount:
    """An Inductor pass that changes nothing and remembers how many operator calls it saw."""

    nodes: int = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        calls = (node for node in graph.nodes if node.op == "call_function")
        self.nodes += sum(node.target is not operator.getitem for node in calls)


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """nodes: operator calls in the final graph of one block; launches: GPU kernels it starts."""

    nodes: int
    launches: int


def stock_block(model: nn.Module) -> BlockFacts:
    """The first MoE block under stock `torch.compile`."""
    return _facts(model, lambda count: {"post_grad_custom_post_pass": count})


def our_block(model: nn.Module) -> BlockFacts:
    """The first MoE block of a model, patched or not, under our passes."""
    import inductor_passes

    return _facts(model, lambda count: inductor_passes.options(post_grad_custom_post_pass=count))


@torch.no_grad()
def _facts(model: nn.Module, options: Callable[[NodeCount], dict[str, object]]) -> BlockFacts:
    block = next(iter(moe_blocks(model).values()))
    parameter = next(model.parameters())
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    hidden = torch.randn(1, TOKENS, hidden_size, device=parameter.device, dtype=parameter.dtype)
    count = NodeCount()
    compiled = torch.compile(block, dynamic=False, options=options(count))
    compiled(hidden)
    return BlockFacts(count.nodes, launches(lambda: compiled(hidden)))


def launches(call: Callable[[], object]) -> int:
    """GPU kernels one call starts (copies and fills by the driver are not kernels)."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        call()
        torch.cuda.synchronize()
    on_gpu = [event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in on_gpu)
