"""MultiplyFewTokens: the products of a layer that every token takes part in, for a few tokens on a GPU.

logits = mm(hidden_states, router_weight.T), routing(logits)
->
logits = dense_gemm(hidden_states, router_weight), routing(logits)

The same for the products between a layer's tokens and what is added to its sum: those of its shared experts. A library
splits such a product and adds up the parts in another launch; `dense_gemm` reads each row of the weight once, in one
launch. Its plan says for how many tokens and features that is faster; with a symbolic token count nothing is done.
"""

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from inductor_passes.base import PassLog, Refusal
from inductor_passes.graph_tools import arguments, erase_dead, find, replacement, rewrite_each
from inductor_passes.raising.views_of_rows import rows_shown
from inductor_passes.raising.written_out import multiplied
from moe_ops.arguments import DenseGemm

aten, prims = torch.ops.aten, torch.ops.prims
_ROUTERS = ("topk_routing", "routing_dispatch", "fused_moe", "fused_moe_formula")
_SUMS = ("fused_experts", "fused_experts_formula")
_PRODUCTS = (aten.mm.default, aten.mm.dtype, aten.addmm.default)
_CASTS = (prims.convert_element_type.default, aten.view.default, aten.reshape.default)


class MultiplyFewTokens:
    """Products of routers and shared experts become `dense_gemm` where its kernel is for so few tokens."""

    name = "multiply_few_tokens"
    requires: tuple[str, ...] = _ROUTERS + _SUMS
    inference_only = True

    def run(self, graph: Graph, log: PassLog) -> None:
        """Rewrites the products behind logits and shared outputs on CUDA."""
        with multiplied(graph):
            found = [*_router_products(graph), *_shared_products(graph)]
            rewrite_each(graph, dict.fromkeys(found), _rewrite, log, log.keep)


def _router_products(graph: Graph) -> Iterator[Node]:
    for router in find(graph, *_ROUTERS):
        yield from filter(_is_for_few, products_behind(arguments(router).router.router_logits))


def products_behind(value: Node) -> Iterator[Node]:
    """The products that `value` is made of, seen through views, casts and what works element by element."""
    seen: set[Node] = set()
    pending = [value]
    while pending:
        node = pending.pop()
        if node.target in _PRODUCTS:
            yield node
        elif node not in seen and (node.target in _CASTS or _is_pointwise(node)):
            seen.add(node)
            pending.extend(node.all_input_nodes)


def _shared_products(graph: Graph) -> Iterator[Node]:
    for layer in find(graph, *_SUMS):
        args, seen = arguments(layer), {}
        tokens = rows_shown(args.hidden_states)
        joined = (each for each in (args.shared, args.epilogue.shared_gate) if each is not None)
        between = (node for value in joined for node in _between(tokens, value, seen))
        yield from (node for node in between if _is_for_few(node))


def _between(tokens: Node, value: Node, seen: dict[Node, list[Node]]) -> list[Node]:
    """Every node on a way from `tokens` to `value` through products and what works element by element."""
    if value not in seen:
        seen[value] = []
        passes = value.target in _PRODUCTS or value.target in _CASTS or _is_pointwise(value)
        sources = value.all_input_nodes if passes else ()
        ways = [_between(tokens, each, seen) for each in sources if each is not tokens]
        if tokens in sources or any(ways):
            seen[value] = [*(node for way in ways for node in way), value]
    return seen[value]


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_for_few(node: Node) -> bool:
    """Whether the plan of `dense_gemm` takes this product, on a GPU and with sizes that are known."""
    if node.target not in _PRODUCTS or node.kwargs or node.meta["val"].device.type != "cuda":
        return False
    x, weight, bias, dtype = _operands(node)
    values = [each.meta["val"] for each in (x, weight, bias) if each is not None]
    is_known = all(isinstance(size, int) for value in values for size in (*value.shape, *value.stride()))
    if not is_known or (bias is not None and bias.meta["val"].dim() != 1):
        return False
    from moe_ops.kernels import plans

    return plans.is_taken(DenseGemm(values[0], values[1].t(), values[2] if bias else None, dtype))


def _operands(product: Node) -> tuple[Node, Node, Node | None, torch.dtype]:
    """Tokens, transposed weight, bias if there is one, and the dtype of what comes out."""
    *bias, x, weight = (each for each in product.args if isinstance(each, Node))
    return x, weight, bias[0] if bias else None, product.meta["val"].dtype


def _rewrite(graph: Graph, product: Node, log: PassLog) -> None:
    x, transposed, bias, dtype = _operands(product)
    with graph.inserting_before(product):
        weight = graph.call_function(aten.permute.default, (transposed, [1, 0]))
    weight.meta["val"] = transposed.meta["val"].t()
    try:
        few = replacement(graph, DenseGemm(x, weight, bias, dtype), product)  # type: ignore[arg-type]
    except Refusal:
        graph.erase_node(weight)
        raise
    log.lower("a kernel for few tokens", product)
    product.replace_all_uses_with(few)
    erase_dead(graph, [product])
