"""PackageProducts: what AOTInductor packs on a CPU calls no operator of ours, so that it loads without this library.

grouped_gemm(x, weight, expert_offsets, bias)
->
_grouped_mm(x, weight.T, expert_offsets[1:]) + bias of each row's expert, zeros behind the last expert's rows

Elsewhere `grouped_gemm` stays, since it chooses between products when it runs. What a package still calls when the
passes are done is logged: its operators are written in Python, and `import moe_ops` registers them.
"""

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes import _compat
from inductor_passes.base import LOGGER, PassLog, Refusal
from inductor_passes.graph_tools import (
    arguments,
    expect_same_value,
    fake_call,
    find,
    inherit_meta,
    rewrite_each,
    write_out,
)
from moe_ops.arguments import GroupedGemm

_BYTES = 16  # strides are a multiple of


class PackageProducts:
    """grouped_gemm becomes torch's product where a package is compiled."""

    name = "package_products"
    requires: tuple[str, ...] = ()
    inference_only = False

    def run(self, graph: Graph, log: PassLog) -> None:
        """Rewrites every product of a package on a CPU, and says which operators the package calls."""
        if not _compat.is_packaging():
            return
        products = [node for node in find(graph, "grouped_gemm") if node.meta["val"].device.type == "cpu"]
        rewrite_each(graph, products, _rewrite, log, log.keep)
        if called := _called(graph):
            LOGGER.warning("the package calls %s: import moe_ops before it is loaded", ", ".join(called))


def _called(graph: Graph) -> list[str]:
    """Names of our operators that a graph calls, of those that change an argument too, as load is recorded."""
    called = (_compat.called_op(node) for node in graph.nodes if node.op == "call_function")
    operators = (each for each in called if isinstance(each, torch._ops.OpOverload))
    return sorted({each.name().partition(".")[0] for each in operators if each.namespace == "moe"})


def _rewrite(graph: Graph, product: Node, log: PassLog) -> None:
    args: GroupedGemm = arguments(product)
    weight, bias, *_ = args.weight  # no pair: these are two products by now
    _expect_taken(product, args.x.meta["val"], weight.meta["val"])  # type: ignore[attr-defined,union-attr]
    nodes = [args.expert_offsets] if bias is None else [args.expert_offsets, bias]
    with graph.inserting_before(product):
        plain = multiply(graph, (args.x, weight, args.expert_offsets), product)  # type: ignore[arg-type]
        result = write_out(graph, finish, [plain, *nodes], product)[0]  # type: ignore[list-item]
    expect_same_value(result, product)
    log.lower("ATen", product)
    product.replace_all_uses_with(result)
    graph.erase_node(product)


def _expect_taken(product: Node, x: Tensor, weight: Tensor) -> None:
    if not _compat.packages_grouped_mm():
        raise Refusal(product, "before torch 2.12 no package can call a grouped product of torch's")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise Refusal(product, f"torch has no grouped product of {x.dtype}")
    steps = [step for step in (*weight.stride()[1:], x.shape[1]) if step != 1]
    lanes = _BYTES // x.element_size()
    if not all(_compat.statically_known_true(step % lanes == 0) for step in steps):
        raise Refusal(product, f"rows of {list(weight.shape)} are no multiple of {_BYTES} bytes apart")


def multiply(graph: Graph, given: tuple[Node, Node, Node], like: Node) -> Node:
    """Inserts torch's product of rows [S, A] and weights [E, B, A], with offsets [E + 1] of each expert's rows.

    [S, B]; rows behind the last expert's hold anything.
    """
    x, weight, _ = given
    operands = write_out(graph, _operands, given[1:], like)
    product = graph.call_function(_compat.grouped_mm(), (x, *operands))
    inherit_meta(product, like)
    product.meta["val"] = fake_call(_result, [each.meta["val"] for each in (x, weight)])
    return product


def _operands(weight: Tensor, expert_offsets: Tensor) -> tuple[Tensor, Tensor]:
    # Side by side in memory: torch 2.14 asks for it, and before that kernels of CUDA's took it for granted.
    return weight.transpose(1, 2), expert_offsets.contiguous().narrow(0, 1, weight.shape[0])


def _result(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


def finish(rows: Tensor, expert_offsets: Tensor, *biases: Tensor) -> Tensor:
    """`rows` [S, B] with the bias [E, B] of their experts, if any; zeros where a row is no expert's."""
    index = torch.arange(rows.shape[0], device=rows.device)
    for bias in biases:
        expert = torch.searchsorted(expert_offsets, index, right=True) - 1
        rows = rows + bias.index_select(0, expert.clamp(max=bias.shape[0] - 1))
    return rows.masked_fill((index >= expert_offsets.select(0, -1)).unsqueeze(1), 0.0)
