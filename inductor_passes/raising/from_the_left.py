"""Products with an expert's weight on the left, seen as products of rows by the passes that raise layers.

    (weight[expert] @ hidden_states.T).T

What is not raised is turned again.
"""

from contextlib import AbstractContextManager

from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.graph_tools import write_out
from inductor_passes.raising.instead import instead
from inductor_passes.raising.stacks import of_expert
from inductor_passes.raising.views_of_rows import args, aten, only_user, rank


def products_of_rows(graph: Graph) -> AbstractContextManager[None]:
    """What turns such a product is one of rows, until the end."""
    turns = graph.find_nodes(op="call_function", target=aten.permute.default)
    return instead(graph, {node: _of_rows(graph, node) for node in turns if _is_from_the_left(node)})


def is_of_expert(factor: Node) -> bool:
    """Whether a matrix is one of a tensor [E, A, B]."""
    return of_expert(factor, lambda stack, _: rank(stack) == 3) is not None


def _is_from_the_left(node: Node) -> bool:
    product, dims = args(node)
    is_turned = product.target is aten.mm.default and list(dims) == [1, 0]
    return is_turned and only_user(product) is node and is_of_expert(args(product)[0])


def _of_rows(graph: Graph, node: Node) -> Node:
    def multiply(weight: Tensor, columns: Tensor) -> Tensor:
        return columns.T @ weight.T

    with graph.inserting_before(node.next):
        (product,) = write_out(graph, multiply, args(args(node)[0]), node)
    return product
