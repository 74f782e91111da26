"""ExpandPointwise: the stages that are index arithmetic and formulas become ATen.

A gate, a gather or a weighted sum that no pass could fuse (something stands between the stages) is written out, so
that Inductor fuses it with that something instead of calling an operator.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.base import PassLog, Refusal
from inductor_passes.graph_tools import arguments, find, operator_name, rewrite_each
from inductor_passes.lowerings.written import Written
from inductor_passes.repeats import is_call
from moe_ops import records
from moe_ops.activation import reference as gated_activation
from moe_ops.arguments import Combine, Permute
from moe_ops.combine import with_joined

MAX_UNROLLED_EXPERTS = 16  # beyond it the written-out sum is longer than the kernel it replaces


class ExpandPointwise:
    """permute, gated_activation and combine become ATen."""

    name = "expand_pointwise"
    requires: tuple[str, ...] = ("permute", "gated_activation", "combine")
    inference_only = False

    def run(self, graph: Graph, log: PassLog) -> None:
        """Writes out every pointwise stage that is left."""
        stages = [stage for stage in find(graph, *self.requires) if not _is_between_kernels(stage)]
        rewrite_each(graph, stages, partial(_rewrite, Written()), log, log.keep)


def _is_between_kernels(stage: Node) -> bool:
    """Whether a gather on a GPU melts into nothing, as operators read it: Inductor would write it once for each."""
    is_gather = operator_name(stage) == "permute" and stage.meta["val"].is_cuda
    return is_gather and all(is_call(user) for user in stage.users)


def _rewrite(written: Written, graph: Graph, stage: Node, log: PassLog) -> None:
    args, formula = arguments(stage), _FORMULAS[operator_name(stage)]
    nodes = [leaf for leaf in records.flatten(args) if isinstance(leaf, Node)]
    _expect_static(stage, args)

    def expanded(*tensors: Tensor) -> Tensor:
        values = dict(zip(nodes, tensors, strict=True))
        return formula(records.transform(lambda leaf: values.get(leaf, leaf), args))

    (result,) = written.inline(graph, expanded, nodes, stage, (stage,))
    log.lower("ATen", stage)
    stage.replace_all_uses_with(result)
    graph.erase_node(stage)


def _expect_static(stage: Node, args: Any) -> None:
    """Columns and experts per token must be numbers; the token count need not be."""
    values = {name: leaf.meta["val"] for name, leaf in records.named(args).items() if isinstance(leaf, Node)}
    if "gate_up" in values and not isinstance(values["gate_up"].shape[1], int):
        raise Refusal(stage, "the number of gate_up columns is symbolic; it stays an operator call")
    if "topk_weights" in values:
        top_k = values["topk_weights"].shape[1]
    elif "sorted_slots" in values:
        top_k = slots_per_token(values["sorted_slots"].shape[0], values["hidden_states"].shape[0])
    else:
        return
    if not isinstance(top_k, int):
        raise Refusal(stage, "the number of experts per token is symbolic; it stays an operator call")
    if not 1 <= top_k <= MAX_UNROLLED_EXPERTS:
        raise Refusal(
            stage, f"{top_k} experts per token are too many to write out; it stays an operator call"
        )


def slots_per_token(slots: int | torch.SymInt, tokens: int | torch.SymInt) -> int | torch.SymInt:
    """K, a plain int wherever S = K*T is known symbolically; any K is right for no tokens."""
    for top_k in range(1, MAX_UNROLLED_EXPERTS + 1):
        if _compat.statically_known_true(slots == top_k * tokens):
            return top_k
    return slots // tokens


def gather_rows(args: Permute) -> Tensor:
    """`permute`."""
    top_k = slots_per_token(args.sorted_slots.shape[0], args.hidden_states.shape[0])
    return torch.ops.aten.index.Tensor(args.hidden_states, [args.sorted_slots // top_k])


def weighted_sum(args: Combine) -> Tensor:
    """`combine`."""
    expert_out, topk_weights, inverse, *_ = args
    dtype = torch.float64 if expert_out.dtype == torch.float64 else torch.float32
    total = torch.zeros((), dtype=dtype, device=expert_out.device)
    slots = zip(inverse.view(topk_weights.shape).unbind(1), topk_weights.unbind(1), strict=True)
    for row, weight in slots:  # one term per slot, in slot order: a reduction could reorder them
        values = expert_out.index_select(0, row.clamp(min=0)).to(dtype) * weight.to(dtype).unsqueeze(1)
        # `where`, not a multiplication by zero: a dropped slot must not bring in a NaN of the row read for it.
        total = torch.where((row >= 0).unsqueeze(1), total + values, total)
    return with_joined(total, args).to(expert_out.dtype)


_FORMULAS: dict[str, Callable[..., Tensor]] = {
    "permute": gather_rows,
    "gated_activation": gated_activation,
    "combine": weighted_sum,
}
