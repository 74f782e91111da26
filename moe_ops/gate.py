"""Gates without a name: a function of the user's between the two products, and the `Formula` a pass makes of it.

A function gets float32 values (float64 for float64) and its result is rounded once, like the gates that have names.
Traced or eager it stands between the stages as the plain PyTorch that it is.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops import _checks, _library
from moe_ops.activation import split_gate_up
from moe_ops.arguments import ExpertWeights, Gate
from moe_ops.errors import describe, type_error, value_error
from moe_ops.formula import Formula

GateFunction = Callable[..., Tensor]


class Custom(NamedTuple):
    """A user's function of [S, I] gate and up, or of x, and of the rows of `per_expert`: [E] or [E, I] each."""

    function: GateFunction
    per_expert: tuple[Tensor, ...]


def custom(function: GateFunction, per_expert: Sequence[Tensor], experts: ExpertWeights) -> Custom:
    """A function for weights [E, 2I or I, H] and [E, H, I].

    Raises:
        ValueError: rows of w13 that are neither I nor 2I, a tensor per expert of another shape.
        TypeError: a tensor per expert that is none, or not floating.
    """
    (w13, *_), (w2, _) = experts
    _checks.expect_shape("w13", w13, ("E", "2I", "H"))
    _checks.expect_shape("w2", w2, (w13.shape[0], w13.shape[2], "I"))
    if experts.w13.columns not in (w2.shape[2], 2 * w2.shape[2]):
        value_error(
            "w13 has {} rows for the {} columns of w2: expected twice as many for activation(gate, up), or as many"
            " for activation(x)",
            experts.w13.columns,
            w2.shape[2],
        )
    for index, each in enumerate(per_expert):
        name = f"per_expert[{index}]"
        _checks.expect_floating(name, each)
        _checks.expect_shape(name, each, (w13.shape[0], w2.shape[2])[: max(each.dim(), 1)])
        _checks.expect_same_device(w13.device, "w13", **{name: each})
    return Custom(function, tuple(per_expert))


def apply_function(gate_up: Tensor, gate: Custom, features: int, expert_offsets: Tensor) -> Tensor:
    """[S, 2I or I] to [S, I]. Raises ValueError or TypeError for a function that gives anything else."""
    values = _in_compute_dtype(gate_up, expert_offsets)
    columns = values.chunk(2, dim=1) if gate_up.shape[1] != features else (values,)
    rows: tuple[Tensor, ...] = ()
    if gate.per_expert:
        expert = _expert_read(expert_offsets, gate_up.shape[0])
        rows = tuple(_of_rows(each, expert).to(values.dtype) for each in gate.per_expert)
    result = gate.function(*columns, *rows)
    if not isinstance(result, Tensor):
        type_error("activation returned {}: expected a torch.Tensor", describe(result))
    _checks.expect_shape("what activation returned", result, (gate_up.shape[0], features))
    return result.to(gate_up.dtype).contiguous()


def _in_compute_dtype(gate_up: Tensor, expert_offsets: Tensor) -> Tensor:
    """gate_up to compute a gate of. Rows of dropped slots are zeros, which have an infinite slope in some gates.

    No gradient comes from such a row, but nothing times infinity is no number: there they are another row's values.
    """
    values = gate_up.to(_checks.compute_dtype(gate_up.dtype))
    if not values.requires_grad:
        return values
    return torch.where(_is_kept(expert_offsets, values.shape[0]), values, values[:1].detach())


def _is_kept(expert_offsets: Tensor, num_rows: int) -> Tensor:
    """[S, 1] whether a row is an expert's, not of a dropped slot."""
    rows = torch.arange(num_rows, dtype=expert_offsets.dtype, device=expert_offsets.device)
    return (rows < expert_offsets[-1]).unsqueeze(1)


def _of_rows(tensor: Tensor, expert: Tensor) -> Tensor:
    rows = tensor.index_select(0, expert)
    return rows if rows.dim() == 2 else rows.unsqueeze(1)


def expert_of_rows(expert_offsets: Tensor, num_rows: int) -> Tensor:
    """[S] int64: the expert of each row of a plan, E for those behind the last one's.

    The first offset is 0, and is searched as well: Inductor of torch 2.11, which searches in a view on a GPU, such as
    the offsets behind the first, begins where its memory does.
    """
    rows = torch.arange(num_rows, dtype=expert_offsets.dtype, device=expert_offsets.device)
    return torch.searchsorted(expert_offsets, rows, right=True) - 1


def _expert_read(expert_offsets: Tensor, num_rows: int) -> Tensor:
    """The same; the last one for rows of dropped slots, which nothing reads."""
    return expert_of_rows(expert_offsets, num_rows).clamp(max=expert_offsets.shape[0] - 2)


def apply_formula(gate_up: Tensor, gate: Gate, expert_offsets: Tensor) -> Tensor:
    """The definition of a captured gate: [S, 2I or I] to [S, I], zeros for rows of dropped slots."""
    formula = Formula.from_spec(gate.formula)
    columns = split_gate_up(gate_up, formula) if formula.is_gated else (gate_up,)
    return apply_to_halves(columns, gate, expert_offsets)


def apply_to_halves(halves: Sequence[Tensor], gate: Gate, expert_offsets: Tensor) -> Tensor:
    """`apply_formula` of gate and up [S, I] as tensors of their own; of one tensor without a gate."""
    formula, (first, *_) = Formula.from_spec(gate.formula), halves
    columns = [_in_compute_dtype(half, expert_offsets) for half in halves]
    rows = []
    if gate.operands:
        expert = _expert_read(expert_offsets, first.shape[0])
        rows = formula.rows_of(gate.operands, expert, columns[0])
    result = formula(columns[0], columns[-1], rows).to(first.dtype)
    return result.where(_is_kept(expert_offsets, first.shape[0]), 0.0)


def check_gate(gate: Gate, num_experts: int, features: int, x: Tensor) -> Formula:
    """The formula, when its tensors are there and as large as it reads them; raises ValueError or TypeError else."""
    formula, operands = Formula.from_spec(gate.formula), gate.operands
    if len(operands) != len(formula.operands):
        value_error(
            "formula {!r} reads {} tensors: got {}", gate.formula, len(formula.operands), len(operands)
        )
    for index, (operand, layout) in enumerate(zip(operands, formula.operands, strict=True)):
        name = f"operand{index}"
        _checks.expect_floating(name, operand)
        _checks.expect_same_device(x.device, "hidden_states", **{name: operand})
        if not layout.fits(operand.shape, num_experts, features):
            value_error(
                "{} has shape {}: expected one that {!r} can read", name, list(operand.shape), gate.formula
            )
    return formula


def launch(args: Any) -> Tensor:
    """Runs the launches of an operator with a captured gate, whose kernels take dense tensors."""
    *operands, formula = args.gate
    dense = (None if each is None else each.contiguous() for each in operands)
    return _library.launch(args._replace(gate=Gate(*dense, formula=formula)))
