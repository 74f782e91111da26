"""TimeProducts: under max-autotune each grouped product is computed in the way that was the fastest on this GPU.

The ways are the configurations of our kernels that are worth timing and, where it can compute the product, torch's own
`_grouped_mm`. Where ours is the fastest, the operator stays and its launches are planned with what was timed. Where
`_grouped_mm` is, the operator becomes stages around an ATen call:

activated = gather_gemm_act(hidden_states, w13, sorted_slots, expert_offsets)
->
rows = permute(hidden_states, sorted_slots)
activated = gated_activation(_grouped_mm(rows, w13.T, expert_offsets[1:]))

Products are timed once in a process, however many layers have them. A graph out of Inductor's cache holds what was
chosen when it was compiled. What cannot be timed is computed as without max-autotune, and the compile's log line says
why.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes import _compat, _compat_options
from inductor_passes.base import PassLog, Refusal
from inductor_passes.graph_tools import (
    arguments,
    call,
    expect_same_value,
    find,
    pick,
    rewrite_each,
    write_out,
)
from inductor_passes.lowerings.packaged import finish, multiply
from inductor_passes.lowerings.programs import TIMED, expect_static, metadata, on_cuda
from moe_ops import arguments as of, records
from moe_ops.values import GroupedLinear, PairedLinear

Timer = Callable[[Any, torch.device], Sequence[Any]]
"""Of a `moe_ops.kernels.gemm.Gemm`, a `moe_ops.product_timing.Timed` for each way, the choice in use first."""


def time_here(gemm: Any, device: torch.device) -> Sequence[Any]:
    """The `Timer` that runs them on `device`."""
    from moe_ops import product_timing

    return product_timing.measure(gemm, product_timing.ways(gemm), device)


class TimeProducts:
    """Grouped products are computed as was the fastest, under max-autotune and on CUDA."""

    name = "time_products"
    requires: tuple[str, ...] = (
        *("grouped_gemm", "gather_gemm", "gather_gemm_act", "gather_gemm_formula"),
        *("gemm_combine", "act_gemm_combine"),
        *("fused_experts", "fused_experts_formula", "fused_moe", "fused_moe_formula"),
    )
    inference_only = False

    def __init__(self, timer: Timer = time_here) -> None:
        self.timer = timer

    def run(self, graph: Graph, log: PassLog) -> None:
        """Times the products of every operator with static sizes, and writes out those that torch's is faster for."""
        if not _compat_options.times_products():
            return
        nodes = [node for node in find(graph, *self.requires) if on_cuda(node)]
        rewrite_each(graph, nodes, partial(_rewrite, timer=self.timer), log, log.leave_untimed)


def _rewrite(graph: Graph, node: Node, log: PassLog, timer: Timer) -> None:
    expect_static(node)
    gemms = _products(node)
    if any(gemm.linear.up is not None for gemm in gemms):
        raise Refusal(node, "gate and up are two weights, and products of one are timed")
    fastest = [_fastest(gemm, node, timer) for gemm in gemms]
    if not gemms:
        return  # few tokens, whose kernels are chosen by shape alone
    gpu = _tuned(gemms, fastest)
    log.lower(f"timed: {', '.join(map(str, fastest))}", node)
    if all(map(_is_ours, fastest)):
        node.meta[TIMED] = gpu
        return
    args = arguments(node)
    with graph.inserting_before(node):
        result = _WRITERS[type(args)](_Writer(graph, node, gpu, [*map(_is_ours, fastest)]), args)
    expect_same_value(result, node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _products(node: Node) -> Sequence[Any]:
    try:
        from moe_ops.kernels import plans

        return plans.products_of(records.transform(metadata, arguments(node)))
    except Exception as error:
        raise Refusal(node, f"the kernels make no launch plan: {error!r}") from error


def _is_ours(way: Any) -> bool:
    return hasattr(way, "block_m")


def _fastest(gemm: Any, node: Node, timer: Timer) -> Any:
    from moe_ops import product_timing

    device = next(iter(node.all_input_nodes)).meta["val"].device
    timed = _timed(timer, product_timing.timed_as(gemm), device)
    if isinstance(timed, str):
        raise Refusal(node, timed)
    packs_all = not _compat.is_packaging() or _compat.packages_grouped_mm()
    takes_all = packs_all and product_timing.takes_grouped_mm(gemm)  # what was timed has a gate with a name
    return product_timing.fastest([each for each in timed if takes_all or _is_ours(each.way)])


@lru_cache(maxsize=None)
def _timed(timer: Timer, gemm: Any, device: torch.device) -> tuple[Any, ...] | str:
    """Times of the ways to compute `gemm`; why there are none where the choice in use fails or nothing can be timed."""
    try:
        with _compat.real_tensors():
            timed = tuple(timer(gemm, device))
    except Exception as error:  # no GPU, no memory beside the model's, ...
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return f"the choice in use, {timed[0].way}, {timed[0].failure}" if timed[0].failure else timed


def _tuned(gemms: Sequence[Any], fastest: Sequence[Any]) -> Any:
    """The GPU of the products with a table of their fastest configurations."""
    from moe_ops.kernels.tuning import Choice, Tuning, nearest_rows

    choices = [
        Choice(gemm.product, nearest_rows(gemm.rows_per_expert), way)
        for gemm, way in zip(gemms, fastest, strict=True)
        if _is_ours(way)
    ]
    return replace(gemms[0].gpu, tuning=Tuning("the one that compiles", tuple(choices)))


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes an operator's products in front of it, each as it is the fastest: by kernels of ours, or by torch's."""

    graph: Graph
    like: Node
    gpu: Any
    ours: Sequence[bool]
    """Of each of its products, in order."""

    def call(self, args: Any) -> Node:
        return call(self.graph, args, self.like)

    def timed(self, args: Any) -> Node:
        node = self.call(args)
        node.meta[TIMED] = self.gpu
        return node

    def multiply(self, x: Any, linear: GroupedLinear | PairedLinear, expert_offsets: Any) -> Node:
        """Rows times their experts' weights; rows behind the last expert's hold anything."""
        return multiply(self.graph, (x, linear.weight, expert_offsets), self.like)  # type: ignore[arg-type]

    def multiply_all(self, x: Any, linear: GroupedLinear | PairedLinear, expert_offsets: Any) -> Node:
        """The same with zeros there."""
        product = self.multiply(x, linear, expert_offsets)
        return write_out(self.graph, finish, [product, expert_offsets], self.like)[0]

    def gather_gemm(self, args: Any) -> Node:
        rows = self.call(of.Permute(args.hidden_states, args.sorted_slots))
        return self.multiply_all(rows, args.w13, args.expert_offsets)

    def first_half(self, args: Any) -> Node:
        return self.call(of.GatedActivation(self.gather_gemm(args), args.activation))  # type: ignore[arg-type]

    def second_half(self, args: of.GemmCombine) -> Node:
        product = self.multiply(args.x, args.w2, args.expert_offsets)
        return self.call(of.Combine(product, args.topk_weights, args.inverse, args.shared, args.epilogue))  # type: ignore[arg-type]

    def activated_half(self, args: of.ActGemmCombine) -> Node:
        activated: Any = self.call(of.GatedActivation(args.gate_up, args.activation))
        return self.second_half(
            of.GemmCombine(
                activated,
                args.w2,
                args.expert_offsets,
                args.topk_weights,
                args.inverse,
                args.shared,
                args.epilogue,
            )
        )

    def experts(self, args: Any) -> Node:
        experts = args.experts
        plan = self.call(of.BuildDispatch(args.topk_ids, args.placement, _num_experts(experts.w13)))
        parts: list[Any] = [pick(self.graph, plan, index) for index in range(3)]
        sorted_slots, inverse, offsets = parts
        first = args.first_half(sorted_slots, offsets)
        activated: Any = self.timed(first) if self.ours[0] else self.first_half(first)
        second = of.GemmCombine(
            activated,
            experts.w2,
            offsets,
            args.topk_weights,
            inverse,
            args.shared,
            args.epilogue,  # type: ignore[arg-type]
        )
        return self.timed(second) if self.ours[1] else self.second_half(second)

    def layer(self, args: Any) -> Node:
        routed = self.call(of.TopkRouting(args.router))
        return self.experts(args.routed(*(pick(self.graph, routed, index) for index in range(2))))


def _num_experts(linear: Any) -> int:
    return linear.weight.meta["val"].shape[0]


_WRITERS: dict[type, Callable[[_Writer, Any], Node]] = {
    of.GroupedGemm: lambda writer, args: writer.multiply_all(*args),
    of.GatherGemm: _Writer.gather_gemm,
    of.GatherGemmAct: _Writer.first_half,
    of.GemmCombine: _Writer.second_half,
    of.ActGemmCombine: _Writer.activated_half,
    of.FusedExperts: _Writer.experts,
    of.FusedExpertsFormula: _Writer.experts,
    of.FusedMoe: _Writer.layer,
    of.FusedMoeFormula: _Writer.layer,
}
