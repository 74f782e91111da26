"""What stands between the two products of a layer, as a formula: elementwise over gate and up, whatever it is.

Views are taken along to what they show: each value of the result reads some element of gate_up, which must be its gate
or its up, and some elements of other tensors, which may depend on the expert and the column, not on the row.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from inductor_passes.base import Refusal
from inductor_passes.graph_tools import describe
from inductor_passes.raising.evaluation import WIDE, concrete, cut
from inductor_passes.raising.views_of_rows import indexed
from moe_ops._checks import compute_dtype
from moe_ops.formula import MAX_OPERANDS, OPERATIONS, Formula, Layout, OperandLayout, Step

aten, prims = torch.ops.aten, torch.ops.prims

Shape = tuple[int, ...]
View = Node | Shape
"""A node that shows a tensor otherwise, or a shape to which one is expanded."""


class Captured(NamedTuple):
    """A gate as a formula, and the tensors that it reads besides."""

    formula: Formula
    operands: tuple[Node, ...]


def capture(gate_up: Node, activated: Node, is_expert_of_rows: Callable[[Node], bool]) -> Captured:
    """The gate that makes `activated` [S, I] of `gate_up` [S, 2I or I].

    Raises:
        Refusal: something in between is not elementwise, reads other columns, or other rows; it names the node.
    """
    inlined = cut([activated], lambda node: node is gate_up or not _is_inlined(node)).nodes
    if len(inlined) > _MOST_NODES:
        raise Refusal(
            activated, f"the gate has {len(inlined)} nodes: more than {_MOST_NODES} are not inlined"
        )
    writer = _Writer(gate_up, activated, is_expert_of_rows)
    result = writer.value(activated, ())
    layout = writer.layout or ("ungated" if writer.columns == writer.shape[1] else "halves")
    return Captured(
        Formula(layout, tuple(writer.operands.values()), tuple(writer.steps), result),
        tuple(node for node, _ in writer.operands),
    )


_MOST_NODES = 64
_CASTS = (prims.convert_element_type.default, aten._to_copy.default, aten.clone.default)
_NUMBERS = (aten.full.default, aten.scalar_tensor.default)


def _is_inlined(node: Node) -> bool:
    return node.target in _CASTS or _shown(node) is not None or _is_elementwise(node)


def _is_elementwise(node: Node) -> bool:
    value = node.meta.get("val")
    is_value = isinstance(value, Tensor) and (value.dtype.is_floating_point or value.dtype == torch.bool)
    return is_value and _operation(node) is not None


class _Writer:
    """Writes the steps of a formula, each once."""

    def __init__(self, gate_up: Node, activated: Node, is_expert_of_rows: Callable[[Node], bool]) -> None:
        self.gate_up = gate_up
        self.shape, self.columns = _shape(activated), _shape(gate_up)[1]
        if self.columns not in (self.shape[1], 2 * self.shape[1]):
            raise Refusal(activated, f"the gate makes {self.shape[1]} columns of {self.columns}")
        self.dtype = compute_dtype(gate_up.meta["val"].dtype)
        self.is_expert_of_rows = is_expert_of_rows
        self.layout: Layout | None = None
        self.steps: list[Step] = []
        self.operands: dict[tuple[Node, OperandLayout], OperandLayout] = {}
        self._known: dict[tuple[Node, tuple[View, ...]], str] = {}

    def value(self, node: Node, views: tuple[View, ...]) -> str:
        """The name of what `node` gives, as seen through `views`, the last one first."""
        if (node, views) not in self._known:
            self._known[node, views] = self._write(node, views)
        return self._known[node, views]

    def _write(self, node: Node, views: tuple[View, ...]) -> str:
        if node is self.gate_up:
            return self._column(node, views)
        if (source := _shown(node)) is not None:
            return self.value(source, (*views, node))
        if node.target in _CASTS:
            return self._cast(node, views)
        if node.target in _NUMBERS:
            return _number(node.args[-1], node)
        if self._reads_rows_of(node) is not None:
            return self._operand(node, views)
        return self._steps(node, views) if _is_elementwise(node) else self._operand(node, views)

    def _column(self, node: Node, views: tuple[View, ...]) -> str:
        rows, features = self.shape
        shown = _through(views, (rows, self.columns), node)
        for layout, name, stride, offset in _COLUMNS:
            first = features if offset is None else offset
            gated = layout != "ungated"
            fits = self.columns == (2 * features if gated else features) and layout in (self.layout or layout)
            if fits and shown.storage_offset() == first and _has_strides(shown, (self.columns, stride)):
                self.layout = layout
                return name
        raise Refusal(
            _last(views, node), f"the gate reads columns of gate_up by {_told(views)}, not gate or up"
        )

    def _cast(self, node: Node, views: tuple[View, ...]) -> str:
        source: Any = node.args[0]
        before, after = source.meta["val"].dtype, node.meta["val"].dtype
        is_number = after in WIDE or after == before
        if not is_number or (after == torch.float64 and self.dtype != after):
            raise Refusal(node, f"{describe(node)} to {after} is no step of a formula in {self.dtype}")
        name = self.value(source, views)
        return name if before.is_floating_point or after == before else self._step("number", name)

    def _steps(self, node: Node, views: tuple[View, ...]) -> str:
        shape = _shape(node)

        def given(value: Any) -> str:
            if not isinstance(value, Node) or not isinstance(value.meta.get("val"), Tensor):
                return _number(value, node)
            return self.value(value, views if _shape(value) == shape else (*views, shape))

        return _operation(node)(self._step, given, node)  # type: ignore[misc]

    def _step(self, operation: str, *given: str) -> str:
        step = (operation, given)
        if step not in self.steps:
            self.steps.append(step)
        return f"t{self.steps.index(step)}"

    def _reads_rows_of(self, node: Node) -> Node | None:
        """The tensor [E, ...] of which `node` holds the row of each row's expert."""
        source = indexed(node) if node.op == "call_function" else None
        return source[0] if source is not None and self.is_expert_of_rows(source[1]) else None

    def _operand(self, node: Node, views: tuple[View, ...]) -> str:
        source = self._reads_rows_of(node)
        tensor, shape = (node if source is None else source), _shape(node)
        if _depends_on(tensor, self.gate_up):
            raise Refusal(node, f"{describe(node)} is not elementwise over gate and up")
        shown = _through(views, shape, node)
        per_row = 0 if source is None else shown.new_empty(shape).stride(0)
        if not _has_strides(shown, (per_row, shown.stride(1))):
            raise Refusal(node, f"{describe(node)} is another for each row, and not by its expert")
        layout = OperandLayout(
            per_row, int(shown.storage_offset()), shown.stride(1) if shown.shape[1] > 1 else 0
        )
        return self._pointer(tensor, layout)

    def _pointer(self, tensor: Node, layout: OperandLayout) -> str:
        value = tensor.meta["val"]
        usable = value.dtype.is_floating_point and value.device == self.gate_up.meta["val"].device
        if not usable or not value.is_contiguous():
            raise Refusal(tensor, f"the gate reads {describe(tensor)}, {value.dtype} on {value.device}")
        self.operands.setdefault((tensor, layout), layout)
        if len(self.operands) > MAX_OPERANDS:
            raise Refusal(tensor, f"the gate reads more than {MAX_OPERANDS} tensors besides gate and up")
        return f"a{list(self.operands).index((tensor, layout))}"


_COLUMNS: tuple[tuple[Layout, str, int, int | None], ...] = (
    ("ungated", "gate", 1, 0),
    ("halves", "gate", 1, 0),
    ("halves", "up", 1, None),
    ("interleaved", "gate", 2, 0),
    ("interleaved", "up", 2, 1),
)
"""Layout, name, distance of two columns in gate_up, and where the first one is; None for the second half."""


# Views


def _shown(node: Node) -> Node | None:
    """What `node` is a view of; None for what computes."""
    source: Any = node.args[0] if node.op == "call_function" and node.args else None
    if node.target is operator.getitem:
        return source if _shown(source) is not None else None
    is_view = getattr(node.target, "is_view", False) or node.target in _COPYING_VIEWS
    return source if is_view and node.target is not aten.view.dtype else None


_COPYING_VIEWS = (aten._unsafe_view.default, aten.reshape.default)


def _through(views: Sequence[View], shape: Shape, node: Node) -> Tensor:
    """A dense tensor of this shape as it is seen through `views`: its strides tell what is read of it."""
    shown: Any = torch.empty(shape, device="meta")
    try:
        for view in reversed(views):
            shown = shown.expand(view) if isinstance(view, tuple) else _seen(view, shown)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise Refusal(node, f"{describe(node)} is shown in a way that is no view: {error}") from error
    return shown


def _seen(view: Node, shown: Any) -> Any:
    rest = map_arg(view.args[1:], lambda each: concrete(each.meta["val"]))
    if view.target in _COPYING_VIEWS:
        return shown.view(*rest)
    return view.target(shown, *rest, **view.kwargs)  # type: ignore[operator]


def _has_strides(shown: Tensor, strides: Sequence[int]) -> bool:
    """Whether these are the strides of [S, I], where a dimension is longer than 1."""
    pairs = zip(shown.shape, shown.stride(), strides, strict=True)
    return all(size == 1 or ours == theirs for size, ours, theirs in pairs)


def _shape(node: Node) -> Shape:
    sizes = tuple(map(concrete, node.meta["val"].shape))
    if None in sizes:
        raise Refusal(node, f"{describe(node)} has a size that depends on data")
    return sizes  # type: ignore[return-value]


def _last(views: Sequence[View], node: Node) -> Node:
    return next((each for each in reversed(views) if isinstance(each, Node)), node)


def _told(views: Sequence[View]) -> str:
    return " and ".join(describe(each) for each in reversed(views) if isinstance(each, Node)) or "itself"


def _depends_on(node: Node, source: Node) -> bool:
    seen, pending = set(), [node]
    while pending:
        each = pending.pop()
        if each is source:
            return True
        if each not in seen:
            seen.add(each)
            pending.extend(each.all_input_nodes)
    return False


# Operations

_Write = Callable[..., str]
"""Writes a node's steps: (step, given, node), given being the name of an argument."""

_SAME_AS = {
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_not": "logical_not",
    "clamp_min": "maximum",
    "clamp_max": "minimum",
}


def _operation(node: Node) -> _Write | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = _name(node)
    if node.kwargs and (name not in ("add", "sub") or node.kwargs.keys() != {"alpha"}):
        return None
    known = name in OPERATIONS and OPERATIONS[name][0] == len(node.args)
    return _SPECIAL.get(name, _plain if known else None)


def _name(node: Node) -> str:
    name: str = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    return _SAME_AS.get(name, name)


def _plain(step: Callable[..., str], given: Callable[[Any], str], node: Node) -> str:
    return step(_name(node), *map(given, node.args))


def _sum(step: Callable[..., str], given: Callable[[Any], str], node: Node) -> str:
    left, right = map(given, node.args)
    alpha = node.kwargs.get("alpha", 1)
    return step(_name(node), left, right if alpha == 1 else step("mul", right, _number(alpha, node)))


def _relu(step: Callable[..., str], given: Callable[[Any], str], node: Node) -> str:
    return step("maximum", given(node.args[0]), "0.0")


def _pow(step: Callable[..., str], given: Callable[[Any], str], node: Node) -> str:
    base, exponent = cast(tuple[Any, Any], node.args)
    name = given(base)
    if exponent in _ROOTS:
        return step(_ROOTS[exponent], name)
    if exponent not in (1, 2, 3, 4, 5, 6, 7, 8):
        raise Refusal(node, f"{describe(node)} to {describe(exponent)} is no step of a formula")
    power = name
    for _ in range(int(exponent) - 1):
        power = step("mul", power, name)
    return power


_ROOTS: dict[Any, str] = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
_SPECIAL: dict[str, _Write] = {"add": _sum, "sub": _sum, "relu": _relu, "pow": _pow}


def _number(value: Any, node: Node) -> str:
    if isinstance(value, Node) or not isinstance(value, int | float):
        raise Refusal(node, f"{describe(node)} reads {describe(value)}, no number that is known")
    return repr(float(value))
