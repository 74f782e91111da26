"""Layers that were not found: whoever wrote one is told why it stays.

Some compute more than what was chosen. They multiply tokens with every expert, or a number of tokens fixed for each,
and weigh by what a top-k chose. Nothing in their products says which expert a row belongs to, which is what raising
goes by.
"""

from collections.abc import Callable, Collection, Iterator

from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe, is_moe_op, outputs
from inductor_passes.raising.evaluation import cut
from inductor_passes.raising.from_the_left import is_of_expert
from inductor_passes.raising.indices import is_integral
from inductor_passes.raising.products import products
from inductor_passes.raising.stacks import Stack, selected
from inductor_passes.raising.views_of_rows import (
    args,
    aten,
    changes_dtype,
    indexed,
    is_one,
    is_reshape,
    is_shown,
    rank,
    size,
    unseen,
)

_CONVOLUTION = aten.convolution.default
_PRODUCTS = (_CONVOLUTION, aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
_CHOICES = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.argmax.default)

_REASONS = {
    "own": "every token is multiplied with every expert, whose weights are tensors of their own, and weighed by what "
    "was chosen: in one tensor [E, ...] they could be raised; layers.huggingface.patch(model, stack_experts=True) "
    "stacks experts in a list of modules",
    "stacked": "rows are multiplied with all experts at once, and weighed by what was chosen: raised is that where all "
    "experts read all tokens, and what a top-k chose of what they give is weighed and added up",
    "looped": "every token is multiplied with every weight[expert], and weighed by what was chosen: such a loop is "
    "raised where it reads weight[expert], or the same part of it, for every expert, with a gate between products "
    "that give rows [tokens, columns]",
    "fed": "what goes into a product with all experts is weighed by what was chosen: such a layer is raised where what "
    "they give is weighed, or where rows are those of what was chosen",
    "placed": "a product with what was chosen places tokens (a dispatch tensor) and may drop some over a capacity: "
    "raised is that where a product with a mask adds up what experts give, whose weights are [E, A, B]",
    "picked": "weights of experts are picked by a product with what was chosen (one_hot): raised is weight[ids]",
    "convolved": "every token is multiplied with every expert by a convolution in groups, and weighed by what was "
    "chosen: with matrices [E, A, B] it could be raised",
    "tokens": "what was chosen picks the tokens that are multiplied (expert choice, mixture of depths, groups of a "
    "fixed size): raised are layers that pick experts for tokens",
    "rows": "what was chosen picks rows of matrices [N, A], experts of one neuron each (PEER): raised are products "
    "with weight[ids] of a weight [E, A, B]",
    "gathered": "rows are multiplied with weight[ids], where weight is no [E, A, B], what was gathered of it is cast "
    "(autocast), a backward keeps what they give, or there are no rows, or no two such products with a gate between",
}
"""Why a layer stays, by how it reads its weights."""


def unrouted(graph: Graph, told: Collection[Node]) -> Iterator[Refusal]:
    """A refusal for each choice that only weighs what products of all experts give, and chooses none of `told`."""
    choices = [node for node in graph.nodes if node.target in _CHOICES and not _is_largest(node)]
    routers = {leaf for node in choices for leaf in cut([node], _is_product).leaves}
    seen: set[Node] = set()
    for choice in choices:
        if not _chooses(choice, told):
            before = {*cut([choice], lambda each: False).nodes, *told, *routers}
            found = next(_reasons(choice, before), None)
            if found is not None and found[0] not in seen:
                seen.add(found[0])
                yield Refusal(found[0], _REASONS[found[1]])


def _is_largest(choice: Node) -> bool:
    """Whether of a maximum only the number is read, as a softmax subtracts it, and not where it stands."""
    return choice.target is aten.max.dim and 1 not in outputs(choice)


def _reasons(choice: Node, before: Collection[Node]) -> Iterator[tuple[Node, str]]:
    """(product, reason): what a choice that raises nothing does, for sure first. Of no product `before`."""
    yield from ((each, "tokens") for each in _of_picked_tokens(choice) if each not in before)
    for meeting in _meetings(choice):
        yield from ((each, _kind(each) or "") for each in _weighed_by(meeting) if each not in before)
    yield from ((each, "fed") for each in _fed_by(choice, before))
    yield from ((each, "placed") for each in _placed_by(choice, before))
    yield from ((each, "picked") for each in _picked_by(choice, before))
    yield from ((each, "gathered") for each in _with_gathered(choice) if each not in before)
    yield from ((each, "rows") for each in _rows_of_tables(choice))


def alone(graph: Graph, in_layers: Collection[Node]) -> Iterator[Refusal]:
    """A refusal for the products with each weight, by expert, that go through no gate into another such product."""
    seen: set[Stack] = set()
    for product in products(graph):
        if product.node not in in_layers and product.weight not in seen:
            seen.add(product.weight)
            readers = ", ".join(describe(user) for user in product.node.users) or "nobody"
            yield Refusal(
                product.node, f"a product with experts that no gate leads to another: {readers} reads it"
            )


def _chooses(choice: Node, told: Collection[Node]) -> bool:
    """Whether what was chosen says which expert a row belongs to, in one of these products or operators of ours."""

    def leads_on(node: Node) -> bool:
        is_weight = node.target is aten.index.Tensor and rank(args(node)[0]) > 2
        is_index = is_integral(node) or not isinstance(node.meta.get("val"), Tensor)
        return is_index or is_weight or is_reshape(node)

    return any(node in told or is_moe_op(node) for node in _behind(choice, leads_on))


def _behind(start: Node, leads_on: Callable[[Node], bool]) -> Iterator[Node]:
    """Who reads `start`, and then who reads those that lead on."""
    pending, seen = [*start.users], set()
    while pending:
        node = pending.pop()
        if node not in seen and node.op == "call_function":
            seen.add(node)
            yield node
            if leads_on(node):
                pending.extend(node.users)


def _meetings(choice: Node) -> Iterator[tuple[Node, Node]]:
    """(operand, where): what is not made of the choice and meets what is, before any other product."""
    reached, pending = {choice}, [choice]
    while pending:
        for user in pending.pop().users:
            if user in reached or user.op == "output":
                continue
            reached.add(user)
            if user.target not in _PRODUCTS and not is_moe_op(user):
                pending.append(user)
    for node in reached:
        yield from ((each, node) for each in node.all_input_nodes if each not in reached)


def _weighed_by(meeting: tuple[Node, Node]) -> Iterator[Node]:
    """The products with weights behind an operand that is not added, if no other product is in between."""
    operand, user = meeting
    if user.target not in (aten.add.Tensor, aten.sub.Tensor):
        behind = cut([operand], _ends_here)
        yield from (leaf for leaf in behind.leaves if leaf.target in _PRODUCTS and _kind(leaf) is not None)


def _fed_by(choice: Node, before: Collection[Node]) -> Iterator[Node]:
    """The products with weights of several experts whose rows are multiplied with what is made of the choice."""
    for weight, product in _meetings(choice):
        if product.target in _PRODUCTS and product not in before and _kind(product) in ("stacked", "looped"):
            rows = (unseen(each) for each in product.all_input_nodes if each is not weight)
            if any(each.target is aten.mul.Tensor for each in rows):
                yield product


def _placed_by(choice: Node, before: Collection[Node]) -> Iterator[Node]:
    """The first products with weights of several experts behind one of tokens with what is made of the choice alone."""
    made, known = {choice}, {choice}
    for node in choice.graph.nodes:
        inputs = [each for each in node.all_input_nodes if each is choice or rank(each) >= 0]
        if node.op == "call_function" and known.issuperset(inputs):
            known.add(node)  # or made of nothing at all
            if not made.isdisjoint(inputs):
                made.add(node)
        elif node.target in _PRODUCTS and not made.isdisjoint(inputs) and _kind(node) in (None, "own"):
            yield from (each for each in _next_products(node) if each not in before)


def _picked_by(choice: Node, before: Collection[Node]) -> Iterator[Node]:
    """The products of weights of several experts with zeros and ones that are made of the choice."""
    for weight, product in _meetings(choice):
        if product.target in _PRODUCTS and product not in before and _kind(product) in ("stacked", "looped"):
            others = (unseen(each) for each in product.all_input_nodes if each is not weight)
            if any(changes_dtype(each) and is_integral(args(each)[0]) for each in others):
                yield product


def _with_gathered(choice: Node) -> Iterator[Node]:
    """The products with what is gathered of weights, though biases are gathered beside them."""
    for _, product in _meetings(choice):
        if product.target in _PRODUCTS and _kind(product) == "gathered":
            yield product


def _picked(choice: Node) -> Iterator[Node]:
    """What is read of floating tensors at what was chosen, or at what follows from it."""
    for node in _behind(choice, is_integral):
        is_read = indexed(node) is not None or node.target is aten.gather.default
        if is_read and not is_integral(node):
            yield node


def _of_picked_tokens(choice: Node) -> Iterator[Node]:
    """The products of what is picked with weights, of which none is picked."""
    for picked in _picked(choice):
        for user in _behind(picked, lambda node: is_shown(node) or changes_dtype(node)):
            if user.target in _PRODUCTS and _kind(user) in ("own", "stacked", "looped"):
                yield user


def _rows_of_tables(choice: Node) -> Iterator[Node]:
    """The second of what is picked of two matrices that are inputs of the graph and have as many rows."""
    tables: dict[object, Node] = {}
    for picked in _picked(choice):
        table = args(picked)[0]
        if table.op != "call_function" and rank(table) == 2 and isinstance(size(table, 0), int):
            other = tables.setdefault(size(table, 0), table)
            if other is not table:
                yield picked


def _next_products(node: Node) -> Iterator[Node]:
    """Those with weights of several experts behind `node`, with no other product in between."""
    for user in _behind(node, lambda user: not _is_product(user)):
        if _is_product(user) and _kind(user) in ("stacked", "looped"):
            yield user


def _is_product(node: Node) -> bool:
    return node.target in _PRODUCTS


def _ends_here(node: Node) -> bool:
    is_index = is_integral(node) and not changes_dtype(node)
    return node.target in _PRODUCTS or is_moe_op(node) or is_index


def _kind(product: Node) -> str | None:
    """How a product reads a weight; None where it multiplies with none. A matrix on the left may be the tokens."""
    if product.target is _CONVOLUTION:
        return "convolved" if args(product)[-1] > 1 else None
    kinds = [_kind_of(each) for each in args(product)[-2:]]
    if kinds[1] is None and rank(product) == 2 and is_of_expert(args(product)[-2]):
        return "looped"
    return kinds[1] or (kinds[0] if rank(product) == 3 and kinds[0] != "own" else None)


def _shown(node: Node) -> Node | None:
    """What `node` shows, or is one of."""
    chosen = selected(node)
    return args(node)[0] if is_shown(node) else chosen and chosen[0]


def _kind_of(operand: Node) -> str | None:
    source = operand
    while (shown := _shown(source)) is not None:
        source = shown
    gathered = args(source)[0] if source.op == "call_function" and changes_dtype(source) else source
    while gathered.op == "call_function" and is_reshape(gathered):
        gathered = args(gathered)[0]
    if gathered.target is aten.index.Tensor and rank(args(gathered)[0]) > 2:
        return "gathered"
    if source.op == "call_function":
        return None
    if rank(source) == 2:
        return "own"
    if rank(source) < 3:
        return None
    return "looped" if rank(operand) == 2 or is_one(size(operand, 0)) else "stacked"
