"""MultiplyHalves: float32 logits of half-precision tokens and router weights, without float32 copies of both.

logits = mm(hidden_states.float(), router_weight.float().T)
->
logits = mm(hidden_states, router_weight.T, out_dtype=float32)

A product of two halves is exact in float32, and both sum in float32: only the casts go, of which that of the weight is
as large as the product. On CUDA, where a tensor core multiplies halves and float32 has none.
"""

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from inductor_passes.base import PassLog
from inductor_passes.graph_tools import arguments, fake_call, find, inherit_meta
from inductor_passes.lowerings.few_tokens import products_behind
from inductor_passes.raising.written_out import multiplied

aten, prims = torch.ops.aten, torch.ops.prims
_VIEWS = (aten.view.default, aten.permute.default, aten.reshape.default)


class MultiplyHalves:
    """A router's float32 product of casts becomes a product of what is cast."""

    name = "multiply_halves"
    requires: tuple[str, ...] = ("topk_routing", "routing_dispatch", "fused_moe", "fused_moe_formula")
    inference_only = True

    def run(self, graph: Graph, log: PassLog) -> None:
        """Rewrites the product behind the logits of every router."""
        with multiplied(graph):
            for router in find(graph, *self.requires):
                for product in dict.fromkeys(products_behind(arguments(router).router.router_logits)):
                    if _is_float32_on_a_gpu(product):
                        _rewrite(graph, product, log)


def _is_float32_on_a_gpu(product: Node) -> bool:
    value = product.meta["val"]
    is_float = value.dtype == torch.float32 and value.device.type == "cuda"
    return is_float and product.target is aten.mm.default


def _rewrite(graph: Graph, product: Node, log: PassLog) -> None:
    casts = [_cast(factor) for factor in product.args]  # type: ignore[arg-type]
    dtypes = {None if cast is None else cast.args[0].meta["val"].dtype for cast in casts}  # type: ignore[union-attr]
    if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float16}:
        return
    with graph.inserting_before(product):
        args = (*(_uncast(graph, factor) for factor in product.args), torch.float32)  # type: ignore[arg-type]
        narrow = graph.call_function(aten.mm.dtype, args)
    inherit_meta(narrow, product)
    narrow.meta["val"] = _value(narrow)
    product.replace_all_uses_with(narrow)
    graph.erase_node(product)
    log.lower("a product of halves", narrow)


def _cast(factor: Node) -> Node | None:
    """The cast that `factor` shows."""
    while factor.target in _VIEWS:
        factor = factor.args[0]  # type: ignore[assignment]
    return factor if factor.target is prims.convert_element_type.default else None


def _uncast(graph: Graph, factor: Node) -> Node:
    """`factor` before its cast, in the same view."""
    if factor.target is prims.convert_element_type.default:
        return factor.args[0]  # type: ignore[return-value]
    source = _uncast(graph, factor.args[0])  # type: ignore[arg-type]
    view = graph.node_copy(factor, lambda each: source if each is factor.args[0] else each)
    view.meta["val"] = _value(view)
    return view


def _value(node: Node) -> Any:
    return fake_call(node.target, map_arg(node.args, lambda each: each.meta["val"]))  # type: ignore[arg-type]
