"""Formulas: an elementwise gate as a value, captured from plain PyTorch, and its canonical text.

    halves | a0=expert*1+0+column*0 | t0=sigmoid(gate) | t1=mul(gate,t0) | t2=mul(t1,up) | t3=mul(t2,a0) | t3

The layout of gate and up columns, the tensors that are read besides, the steps in order, and which of them is the
result. Equal gates have equal texts, so identical layers share a graph and a kernel. Computed in float32 (float64 for
float64), as the built-in gates are. Leaf module, imports nothing of ours.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Layout = Literal["halves", "interleaved", "ungated"]
MAX_OPERANDS = 4
"""Tensors that a formula may read besides gate and up."""

Step = tuple[str, tuple[str, ...]]
"""An operation of `OPERATIONS` and what it takes: "gate", "up", "a0" for a tensor, "t0" for a step, or a number."""

OPERATIONS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "add": (2, torch.add),
    "sub": (2, torch.sub),
    "mul": (2, torch.mul),
    "div": (2, torch.div),
    "maximum": (2, torch.maximum),
    "minimum": (2, torch.minimum),
    "neg": (1, torch.neg),
    "abs": (1, torch.abs),
    "reciprocal": (1, torch.reciprocal),
    "sqrt": (1, torch.sqrt),
    "rsqrt": (1, torch.rsqrt),
    "exp": (1, torch.exp),
    "exp2": (1, torch.exp2),
    "expm1": (1, torch.expm1),
    "log": (1, torch.log),
    "log2": (1, torch.log2),
    "log1p": (1, torch.log1p),
    "sigmoid": (1, torch.sigmoid),
    "tanh": (1, torch.tanh),
    "erf": (1, torch.erf),
    "sin": (1, torch.sin),
    "cos": (1, torch.cos),
    "floor": (1, torch.floor),
    "ceil": (1, torch.ceil),
    "eq": (2, torch.eq),
    "ne": (2, torch.ne),
    "lt": (2, torch.lt),
    "le": (2, torch.le),
    "gt": (2, torch.gt),
    "ge": (2, torch.ge),
    "logical_and": (2, torch.logical_and),
    "logical_or": (2, torch.logical_or),
    "logical_not": (1, torch.logical_not),
    "where": (3, torch.where),
    "number": (1, torch.clone),
}
"""How many values each takes, and what it is in PyTorch. `number` makes 1 of true and 0 of false."""

_OPERAND = re.compile(r"a\d+=expert\*(\d+)\+(\d+)\+column\*(\d+)")
_STEP = re.compile(r"t\d+=(\w+)\((.*)\)")


class OperandLayout(NamedTuple):
    """Which element of a dense tensor goes with an expert and an output column: a sum of multiples of the two."""

    per_expert: int
    offset: int
    per_column: int

    def fits(self, shape: Sequence[int], num_experts: int, features: int) -> bool:
        """Whether a tensor is read within its bounds: [E, ...], each expert within its own, or one for all."""
        last = self.offset + self.per_column * max(features - 1, 0)
        if not self.per_expert:
            return last < prod(shape)
        return list(shape[:1]) == [num_experts] and prod(shape[1:]) == self.per_expert > last


@dataclass(frozen=True, slots=True)
class Formula:
    """A gate by its steps.

    Args:
        layout: where gate and up columns are: "halves" (gate first), "interleaved", or "ungated", all are `gate`.
        operands: how the tensors besides are read.
        steps: in order; each takes what came before it.
        result: the name of the value that the gate gives.

    Raises:
        ValueError: an unknown layout, operation or name, a wrong number of values, too many operands.
    """

    layout: Layout
    operands: tuple[OperandLayout, ...]
    steps: tuple[Step, ...]
    result: str

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise ValueError(f"formula layout {self.layout!r}: expected one of {get_args(Layout)}")
        if len(self.operands) > MAX_OPERANDS:
            raise ValueError(f"formula reads {len(self.operands)} tensors: expected at most {MAX_OPERANDS}")
        known = {"gate", "up"} if self.is_gated else {"gate"}
        known |= {f"a{index}" for index in range(len(self.operands))}
        for index, (operation, given) in enumerate(self.steps):
            wanted, _ = OPERATIONS.get(operation, (-1, None))
            if wanted != len(given) or not all(name in known or _is_number(name) for name in given):
                raise ValueError(
                    f"formula step {operation}({','.join(given)}): not an operation on known values"
                )
            known.add(f"t{index}")
        if self.result not in known:
            raise ValueError(f"formula result {self.result!r}: expected one of {sorted(known)}")

    @property
    def is_gated(self) -> bool:
        """Whether the input has gate and up columns (2I of them) rather than I."""
        return self.layout != "ungated"

    @property
    def name(self) -> str:
        """What messages call it."""
        return "a formula"

    @property
    def interleaved(self) -> bool:
        """Whether gate and up columns alternate."""
        return self.layout == "interleaved"

    @property
    def spec(self) -> str:
        """The canonical text."""
        operands = (f"a{i}=expert*{a}+{b}+column*{c}" for i, (a, b, c) in enumerate(self.operands))
        steps = (f"t{i}={operation}({','.join(given)})" for i, (operation, given) in enumerate(self.steps))
        return "|".join((self.layout, *operands, *steps, self.result))

    @staticmethod
    @lru_cache(maxsize=None)
    def from_spec(spec: str) -> "Formula":
        """The formula whose `spec` this is. Raises ValueError for anything else."""
        layout, *items, result = spec.split("|") if "|" in spec else (spec, "")
        operands, steps = [], []
        for item in items:
            if match := _OPERAND.fullmatch(item):
                operands.append(OperandLayout(*map(int, match.groups())))
            elif match := _STEP.fullmatch(item):
                steps.append((match[1], tuple(match[2].split(","))))
            else:
                raise ValueError(f"formula item {item!r}: expected a tensor or a step")
        return Formula(layout, tuple(operands), tuple(steps), result)  # type: ignore[arg-type]

    def __call__(self, gate: Tensor, up: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """The gate of [..., I] values in their own dtype; `operands` are what `rows_of` gives."""
        known = {"gate": gate, "up": up} | {f"a{index}": value for index, value in enumerate(operands)}
        for index, (operation, given) in enumerate(self.steps):
            values = [known[name] if name in known else gate.new_full((), float(name)) for name in given]
            result = OPERATIONS[operation][1](*values)
            known[f"t{index}"] = result.to(gate.dtype) if operation == "number" else result
        return known[self.result].expand(gate.shape)

    def rows_of(self, operands: Sequence[Tensor], expert: Tensor, like: Tensor) -> list[Tensor]:
        """What each of `operands` is for rows of these experts [S]: [S, I], or less that broadcasts."""
        return [
            _rows_of(operand, layout, expert, like)
            for operand, layout in zip(operands, self.operands, strict=True)
        ]


def _rows_of(operand: Tensor, layout: OperandLayout, expert: Tensor, like: Tensor) -> Tensor:
    per_expert, offset, per_column = layout
    rows = operand.reshape(-1, per_expert) if per_expert else operand.reshape(1, -1)
    last = offset + per_column * max(like.shape[-1] - 1, 0)
    rows = rows[:, offset : last + 1 : max(per_column, 1)].to(like.dtype)
    return rows.index_select(0, expert) if per_expert else rows


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
