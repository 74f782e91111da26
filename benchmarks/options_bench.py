"""What options of the layer cost on a GPU: overlapped shared experts, balancing, chunks, own gates, pairs of weights.

Every result is compared with the one that it must equal before anything is timed.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import inductor_passes
import moe_ops
from benchmarks.arguments import listed, number, one_of, to_write
from benchmarks.report import machine
from benchmarks.timing import capture, time_in_turns
from benchmarks.workloads import WORKLOADS, Cell, Inputs, Weights, make_inputs, make_weights
from layers import EplbState, ExpertsConfig, FusedMoE, MoEConfig
from moe_ops import RoutingConfig
from moe_ops.arguments import LoadRecord, Replicas, Router
from moe_ops.route_and_record import route_and_record

Row = dict[str, object]
MAX_RELATIVE_ERROR = 8e-3  # bfloat16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks options`."""
    parser.add_argument(
        "--only",
        type=listed(one_of(MEASUREMENTS)),
        default=",".join(MEASUREMENTS),
        help=f"from {', '.join(MEASUREMENTS)}",
    )
    parser.add_argument(
        "--cell-ms", type=number, default=60.0, help="milliseconds of replays per measurement"
    )
    parser.add_argument(
        "--out", type=to_write, default=Path("build/options.json"), help="where the figures go"
    )


def main(arguments: argparse.Namespace) -> int:
    """Measures; raises ValueError for a wrong result."""
    if not torch.cuda.is_available():
        print("python -m benchmarks options needs a CUDA GPU")
        return 2
    print("  ".join(f"{name} {fact}" for name, fact in machine().items()), flush=True)
    found: dict[str, list[Row]] = {}
    for name in arguments.only.split(","):
        with torch.no_grad():
            found[name] = MEASUREMENTS[name](arguments.cell_ms)
        torch.cuda.empty_cache()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _tell(rows: list[Row], **row: object) -> None:
    rows.append(row)
    shown = (
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
    )
    print("  ".join(shown), flush=True)


def _expect_close(actual: Tensor, expected: Tensor) -> None:
    error = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
    if not error <= MAX_RELATIVE_ERROR:
        raise ValueError(f"relative error {error:.2e}: expected at most {MAX_RELATIVE_ERROR}")


def _timed(calls: dict[str, list[Callable[[], object]]], budget_ms: float) -> dict[str, float]:
    """Microseconds of one call of each kind, in turns; a graph holds the calls of a kind, on different inputs."""
    times = time_in_turns([capture(each) for each in calls.values()], budget_ms)
    return {name: 1000 * ms / len(calls[name]) for name, ms in zip(calls, times, strict=True)}


def overlap(budget_ms: float) -> list[Row]:
    """DeepSeek-V3's layer: routed and shared experts alone, one after the other, and overlapped, in microseconds."""
    workload, rows = WORKLOADS["W3"], []
    H, I = workload.hidden_size, workload.intermediate_size
    weights = make_weights(workload, 0, "cuda")
    shared13, shared2 = (
        torch.randn(shape, device="cuda").mul_(0.01).bfloat16() for shape in ((2 * I, H), (H, I))
    )

    def dense(x: Tensor) -> Tensor:
        return F.linear(moe_ops.gated_activation(F.linear(x, shared13), "silu"), shared2)

    def routed(x: Tensor, chosen: tuple[Tensor, Tensor], shared: Tensor | None = None) -> Tensor:
        return moe_ops.fused_experts(x, weights.w13, weights.w2, *chosen, shared=shared)

    def both(x: Tensor, chosen: tuple[Tensor, Tensor]) -> Tensor:
        return moe_ops.fused_experts_with_shared(x, weights.w13, weights.w2, *chosen, shared13, shared2)

    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        inputs = make_inputs(Cell(workload, tokens, "uniform"), "cuda")
        problems = [(each.hidden_states, _chosen(each, workload.top_k)) for each in inputs]
        for x, chosen in problems:
            _expect_close(both(x, chosen), routed(x, chosen, dense(x)))
        calls: dict[str, list[Callable[[], object]]] = {
            "routed": [partial(routed, *each) for each in problems],
            "shared": [partial(dense, x) for x, _ in problems],
            "sequential": [lambda x=x, c=c: routed(x, c, dense(x)) for x, c in problems],
            "overlapped": [partial(both, *each) for each in problems],
        }
        times = _timed(calls, budget_ms)
        ratio = times["overlapped"] / max(times["routed"], times["shared"])
        _tell(rows, tokens=tokens, **times, overlapped_over_longer=ratio)
    return rows


def _chosen(inputs: Inputs, top_k: int) -> tuple[Tensor, Tensor]:
    return moe_ops.topk_routing(inputs.router_logits, RoutingConfig(top_k))


def balancing(budget_ms: float) -> list[Row]:
    """Routing alone, and with logical to physical ids and the record of load, in microseconds."""
    rows: list[Row] = []
    grouped = RoutingConfig(8, "sigmoid", num_groups=8, topk_groups=4, group_score="top2_sum")
    for router, num_experts, routing in (
        ("DeepSeek-V3", 256, grouped),
        ("softmax", 256, RoutingConfig(8)),
        ("Qwen3-30B-A3B", 128, RoutingConfig(8)),
    ):
        state = EplbState.initial(1, num_experts, 32, device="cuda")
        load, *places = (tensor[0] for tensor in state)
        real, recording = torch.tensor(4096, device="cuda"), torch.tensor(True, device="cuda")
        record = LoadRecord(load, real, recording)
        for tokens in (1, 64, 256, 1024, 2048, 4096):
            logits = [torch.randn(tokens, num_experts, device="cuda") for _ in range(8)]
            routers = [Router(each, None, routing.spec) for each in logits]
            _expect_counted(routers[0], Replicas(*places), record)
            calls: dict[str, list[Callable[[], object]]] = {
                "routing": [partial(moe_ops.topk_routing, each, routing) for each in logits],
                "with_balancing": [
                    partial(route_and_record, each, Replicas(*places), record) for each in routers
                ],
            }
            times = _timed(calls, budget_ms)
            added = times["with_balancing"] - times["routing"]
            _tell(rows, tokens=tokens, **times, added=added, router=router)
    return rows


def _expect_counted(router: Router, replicas: Replicas, record: LoadRecord) -> None:
    record.load.zero_()
    *_, physical = route_and_record(router, replicas, record)
    if not torch.equal(record.load.long(), physical.flatten().long().bincount(minlength=len(record.load))):
        raise ValueError("load is not how often each expert was chosen")


def chunks(budget_ms: float) -> list[Row]:
    """131,072 tokens of Qwen3-30B-A3B's layer, whole and in chunks: milliseconds, and MiB at the peak beside inputs."""
    workload, tokens, rows = WORKLOADS["W2"], 131072, []
    sizes = workload.num_experts, workload.top_k, workload.hidden_size, workload.intermediate_size
    inputs = make_inputs(Cell(workload, tokens, "uniform"), "cuda")[0]
    whole = FusedMoE(MoEConfig(*sizes), device="cuda", dtype=torch.bfloat16)
    expected = whole(*_given(inputs))
    replays, peaks = [], []
    chunk_sizes = (None, 65536, 32768, 16384, 8192)
    for chunk_size in chunk_sizes:
        layer = FusedMoE(MoEConfig(*sizes, experts=ExpertsConfig(chunk_size=chunk_size)), device="meta")
        layer.load_state_dict(whole.state_dict(), assign=True)
        _expect_close(layer(*_given(inputs)), expected)
        peaks.append(_peak_mib(partial(layer, *_given(inputs))))
        replays.append(partial(layer, *_given(inputs)))
    times = time_in_turns(replays, 10 * budget_ms)
    for chunk_size, ms, peak in zip(chunk_sizes, times, peaks, strict=True):
        _tell(rows, chunk_size=chunk_size, ms=ms, over_whole=ms / times[0], peak_mib=peak)
    _tell(rows, output_mib=expected.nbytes / 2**20, one_chunk_alone_mib=_alone(whole, inputs, 16384))
    return rows


def _given(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return inputs.hidden_states, inputs.router_logits


def _alone(layer: FusedMoE, inputs: Inputs, size: int) -> float:
    """MiB at the peak of a chunk of its own."""
    return _peak_mib(lambda: layer(inputs.hidden_states[:size], inputs.router_logits[:size]))


def _peak_mib(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The built-in gate, by hand."""
    return F.silu(gate) * up


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def scaled(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    """With numbers that each expert learns."""
    return F.silu(gate) * up * scale


GATES: dict[str, Callable[..., Tensor] | str] = {
    "silu by name": "silu",
    "swiglu": swiglu,
    "clamped": clamped,
    "scale per expert": scaled,
}


def gate_layer(gate: Callable[..., Tensor] | str, weights: Weights, top_k: int) -> Callable[..., Tensor]:
    """A layer of hidden states and logits, with this gate."""
    per_expert = [weights.w2.new_ones(weights.w2.shape[0], weights.w2.shape[2])] if gate is scaled else []

    def layer(hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        routing = RoutingConfig(top_k)
        given = hidden_states, router_logits, weights.w13, weights.w2, routing, gate
        return moe_ops.fused_moe(*given, per_expert=per_expert, emit="stages")

    return layer


def gates(budget_ms: float) -> list[Row]:
    """Gates that a pass inlines over the built-in SwiGLU: microseconds of a compiled layer, and how much more."""
    rows: list[Row] = []
    for workload in (WORKLOADS["W2"], WORKLOADS["W1"]):
        weights = make_weights(workload, 0, "cuda")
        layers = {name: gate_layer(gate, weights, workload.top_k) for name, gate in GATES.items()}
        for tokens in (1, 4, 32, 256, 1024, 4096):
            inputs = make_inputs(Cell(workload, tokens, "uniform"), "cuda")
            torch.compiler.reset()  # layers share their code, of which Dynamo compiles only so many forms
            compiled = {name: _inlined(layer, inputs[0]) for name, layer in layers.items()}
            for name in ("swiglu", "scale per expert"):  # its scale is one
                _expect_close(
                    compiled[name](*_given(inputs[0])), compiled["silu by name"](*_given(inputs[0]))
                )
            calls: dict[str, list[Callable[[], object]]] = {
                name: [partial(layer, *_given(each)) for each in inputs] for name, layer in compiled.items()
            }
            times = _timed(calls, budget_ms)
            more = {f"{name} over silu": times[name] / times["silu by name"] for name in (*GATES,)[1:]}
            _tell(rows, workload=workload.name, tokens=tokens, **times, **more)
    return rows


def _inlined(layer: Callable[..., Tensor], inputs: Inputs) -> Callable[..., Tensor]:
    """The layer compiled; raises ValueError if a kernel does not hold its gate."""
    report = inductor_passes.explain(layer, *_given(inputs))
    if report.kept or report.refused:
        raise ValueError(f"the gate is not inlined:\n{report}")
    return torch.compile(layer, fullgraph=True, dynamic=False, options=inductor_passes.options())


def apart(x: Tensor, logits: Tensor, halves: tuple[Tensor, Tensor], w2: Tensor, top_k: int) -> Tensor:
    """A layer with gate and up in two tensors as torchtitan writes it, weighing what its experts give."""
    weights, ids = logits.float().softmax(-1).topk(top_k, dim=-1)
    ranked, order = ids.reshape(-1).sort(stable=True)
    weights = (weights / weights.sum(-1, keepdim=True)).reshape(-1)[order].unsqueeze(-1)
    counted = ranked.int() if ranked.is_cuda else ranked.float()  # neither takes the other's
    counts = torch.histc(counted, bins=w2.shape[0], min=0, max=w2.shape[0] - 1)
    rows, offsets = x[order // top_k], counts.cumsum(0, dtype=torch.int32)
    gate, up = (torch.ops.aten._grouped_mm(rows, half.transpose(-2, -1), offsets) for half in halves)
    out = torch.ops.aten._grouped_mm(swiglu(gate, up), w2.transpose(-2, -1), offsets) * weights
    return torch.zeros_like(x, dtype=out.dtype).index_add(0, order // top_k, out).to(x.dtype)


def pair_layers(weights: Weights, top_k: int) -> dict[str, Callable[..., Tensor]]:
    """Layers of hidden states and logits that compute the same: ours with both in one tensor, in two, and stock's."""
    routing, w2 = RoutingConfig(top_k), weights.w2
    gate, up = (half.clone() for half in weights.w13.chunk(2, 1))

    def ours(w13: Tensor | tuple[Tensor, Tensor]) -> Callable[..., Tensor]:
        return lambda x, logits: moe_ops.fused_moe(x, logits, w13, w2, routing, emit="stages")

    stock = lambda x, logits: apart(x, logits, (gate, up), w2, top_k)  # noqa: E731
    return {"packed": ours(weights.w13), "pair": ours((gate, up)), "raised": stock, "stock": stock}


def pairs(budget_ms: float) -> list[Row]:
    """Gate and up in two tensors over one: microseconds of compiled layers, also of stock `torch.compile`."""
    rows: list[Row] = []
    for workload in (WORKLOADS["W2"], WORKLOADS["W1"]):
        layers = pair_layers(make_weights(workload, 0, "cuda"), workload.top_k)
        for tokens in (1, 8, 64, 512, 4096):
            inputs = make_inputs(Cell(workload, tokens, "uniform"), "cuda")
            torch.compiler.reset()
            compiled = {name: _inlined(layer, inputs[0]) for name, layer in layers.items() if name != "stock"}
            compiled["stock"] = torch.compile(layers["stock"], fullgraph=True, dynamic=False)
            for layer in compiled.values():
                _expect_close(layer(*_given(inputs[0])), compiled["packed"](*_given(inputs[0])))
            calls: dict[str, list[Callable[[], object]]] = {
                name: [partial(layer, *_given(each)) for each in inputs] for name, layer in compiled.items()
            }
            times = _timed(calls, budget_ms)
            more = {
                f"{name} over packed": times[name] / times["packed"] for name in ("pair", "raised", "stock")
            }
            _tell(rows, workload=workload.name, tokens=tokens, **times, **more)
    return rows


MEASUREMENTS: dict[str, Callable[[float], list[Row]]] = {
    "overlap": overlap,
    "balancing": balancing,
    "chunks": chunks,
    "gates": gates,
    "pairs": pairs,
}
