"""Is fused_moe captured in a CUDA graph without a host sync, and does the replay follow new contents and routing?"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.workloads import Cell, Inputs, Weights, Workload, make_inputs, make_weights, reference

CAPTURED = Workload("captured", num_experts=16, top_k=4, hidden_size=512, intermediate_size=256)


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """Relative Frobenius errors of replays against float32: the captured contents, new ones, and new routing."""

    tokens: int
    captured: float
    new_contents: float
    new_routing: float

    @property
    def worst(self) -> float:
        """The largest of the three; NaN when any is."""
        errors = torch.tensor([self.captured, self.new_contents, self.new_routing])
        return float(errors.max())


@torch.inference_mode()
def capture_and_replay(tokens: int) -> CaptureResult:
    """Captures one `fused_moe` call under sync debug mode "error", then replays it three times.

    Raises:
        RuntimeError: the call synchronises with the host or cannot be captured.
    """
    import moe_ops

    cell = Cell(CAPTURED, tokens, "uniform")
    weights = make_weights(CAPTURED, 1, "cuda")
    first, second = make_inputs(cell, "cuda")[:2]
    routing = moe_ops.RoutingConfig(top_k=CAPTURED.top_k)
    static = Inputs(first.hidden_states.clone(), first.router_logits.clone())

    def call() -> torch.Tensor:
        return moe_ops.fused_moe(static.hidden_states, static.router_logits, weights.w13, weights.w2, routing)

    call()  # compiles and loads kernels, which a capture may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with _host_syncs_raise():
        call()
        with torch.cuda.graph(graph):
            output = call()

    def replay() -> float:
        graph.replay()
        return _error(output, static, weights)

    captured = replay()
    static.hidden_states.copy_(second.hidden_states)
    new_contents = replay()
    # Everything to one expert and its neighbours: offsets, padding and tile counts all change.
    skewed = second.router_logits + torch.arange(CAPTURED.num_experts, device="cuda") * 3.0
    static.router_logits.copy_(skewed)
    return CaptureResult(tokens, captured, new_contents, replay())


def _error(output: torch.Tensor, inputs: Inputs, weights: Weights) -> float:
    expected = reference(inputs, weights, CAPTURED.top_k)
    return float((output.float() - expected).norm() / expected.norm())


@contextmanager
def _host_syncs_raise() -> Iterator[None]:
    """Within it, any host sync that PyTorch knows of raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
