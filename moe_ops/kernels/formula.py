"""Formulas as device functions: Triton source made from the steps, in the place of the kernels' named gates.

A kernel that applies a gate calls `captured` for one that has no name. Here that function is generated for a formula,
and the kernel is built again around it, from its own source. Both come from text alone: equal formulas, equal kernels.
"""

import dis
import hashlib
import linecache
from collections.abc import Mapping
from functools import lru_cache
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from moe_ops.formula import MAX_OPERANDS, Formula
from moe_ops.kernels.common import tanh_of
from moe_ops.kernels.program import Ref, is_dense
from moe_ops.types import Activation

POINTERS = tuple(f"operand{index}_ptr" for index in range(MAX_OPERANDS))

_TRITON: dict[str, str] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "reciprocal": "1.0 / {0}",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "exp": "tl.exp({0})",
    "exp2": "tl.exp2({0})",
    "expm1": "expm1({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "log1p": "log1p({0})",
    "sigmoid": "tl.sigmoid({0})",
    "tanh": "tanh_of({0})",
    "erf": "tl.erf({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_not": "{0} == 0",
    "where": "tl.where({0}, {1}, {2})",
    "number": "{0}.to(gate.dtype)",
}


@triton.jit
def log1p(value):
    """log(1 + value); the quotient makes up for what `1 + value` loses of a small one."""
    sum = 1.0 + value
    lost = sum - 1.0
    return tl.where((lost == 0.0) | (sum == float("inf")), value, tl.log(sum) * (value / lost))


@triton.jit
def expm1(value):
    """exp(value) - 1, in the same way."""
    power = tl.exp(value)
    difference = power - 1.0
    inexact = (difference == 0.0) | (difference == -1.0) | (power == float("inf"))
    exact = tl.where(difference == 0.0, value, difference)
    return tl.where(inexact, exact, difference * (value / tl.log(power)))


def source(formula: Formula) -> str:
    """The device function of a formula."""
    lines = [
        "@triton.jit",
        f"def captured(gate, up, expert, columns, inside, {', '.join(POINTERS)}):",
    ]
    for index, (per_expert, offset, per_column) in enumerate(formula.operands):
        address = f"operand{index}_ptr + tl.cast(expert, tl.int64) * {per_expert} + ({offset} + columns * {per_column})"
        lines.append(f"    a{index} = tl.load({address}, mask=inside, other=0.0).to(gate.dtype)")
        lines.append(f"    a{index} = tl.broadcast_to(a{index}, gate.shape)")
    for index, (operation, given) in enumerate(formula.steps):
        values = (name if name[0] in "guat" else _number(name) for name in given)
        lines.append(f"    t{index} = {_TRITON[operation].format(*values)}")
    lines.append(f"    return {formula.result}")
    return "\n".join(lines) + "\n"


def _number(text: str) -> str:
    # As a block: a bare number would be rounded to float32, also beside float64.
    value = float(text)
    written = repr(value) if value - value == 0.0 else f'float("{value}")'
    return f"tl.full(gate.shape, {written}, gate.dtype)"


def gate_of(args: Any) -> Activation | Formula:
    """What the arguments of an operator on experts say of their gate. Raises ValueError for operands with gaps."""
    if hasattr(args, "activation"):
        return Activation.from_spec(args.activation)
    for index, operand in enumerate(args.gate.operands):
        if not is_dense(operand):
            raise ValueError(f"operand{index} has strides {operand.strides}: expected a contiguous tensor")
    return Formula.from_spec(args.gate.formula)


def with_formula(kernel: Any, gate: Any) -> Any:
    """`kernel`, around the device function of `gate` where that is a formula."""
    return _around(kernel, gate) if isinstance(gate, Formula) else kernel


@lru_cache(maxsize=None)
def _around(kernel: Any, formula: Formula) -> Any:
    return _rebuilt(kernel, {"captured": _device_function(source(formula))})


@lru_cache(maxsize=None)
def _device_function(text: str) -> Any:
    filename = f"<gate {hashlib.sha256(text.encode()).hexdigest()}>"
    linecache.cache[filename] = (
        len(text),
        None,
        text.splitlines(keepends=True),
        filename,
    )  # Triton reads it there
    names: dict[str, Any] = {"triton": triton, "tl": tl, "tanh_of": tanh_of, "log1p": log1p, "expm1": expm1}
    names["__name__"] = __name__
    exec(compile(text, filename, "exec"), names)
    return names["captured"]


def _rebuilt(function: Any, instead: Mapping[str, Any]) -> Any:
    """A device function whose calls, and those of what it calls, go to the functions in `instead` of that name."""
    plain = function.fn
    called = {name: plain.__globals__[name] for name in _globals(plain) if name in plain.__globals__}
    functions = {name: value for name, value in called.items() if isinstance(value, type(function))}
    again = {name: instead.get(name) or _rebuilt(value, instead) for name, value in functions.items()}
    if again == functions:
        return function
    copy = FunctionType(plain.__code__, {**plain.__globals__, **again}, plain.__name__, plain.__defaults__)
    copy.__annotations__, copy.__module__ = plain.__annotations__, plain.__module__
    copy.__qualname__ = plain.__qualname__
    return triton.jit(copy, do_not_specialize=_not_specialized(function))


def _globals(function: FunctionType) -> set[str]:
    return {each.argval for each in dis.get_instructions(function) if each.opname == "LOAD_GLOBAL"}


def _not_specialized(function: Any) -> Any:
    """What a kernel was decorated with; the interpreter keeps it elsewhere."""
    kept = getattr(function, "kwargs", {}).get("do_not_specialize")
    return getattr(function, "do_not_specialize", kept)


def operand_args(gate: Any) -> dict[str, Any]:
    """The pointers of a kernel that applies `gate`."""
    count = len(gate.operands) if isinstance(gate, Formula) else 0
    return {name: Ref(f"operand{index}") if index < count else None for index, name in enumerate(POINTERS)}
