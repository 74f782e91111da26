"""Functions of counts that give what was computed with `Count`s: tuples, lists and records of expressions."""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from moe_ops.kernels.counts import Count


class Written(NamedTuple):
    """An expression of counts, as Python, of which no value is known."""

    text: str


def has_count(value: Any) -> bool:
    """Whether anything in a tuple, list or record is a `Count`, or `Written`."""
    return isinstance(value, Count | Written) or any(map(has_count, _parts(value)))


def function_of(names: Sequence[str], value: Any) -> Callable[..., Any]:
    """The function of counts of these names that gives `value` with their numbers in the place of `Count`s.

    Whatever has none in it is the same object in all results; an empty dict beside one is new in each.
    """
    constants: dict[str, Any] = {}
    return eval(f"lambda {','.join(names)}: {_text(value, constants)}", constants)


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, tuple | list):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return ()


def _text(value: Any, constants: dict[str, Any]) -> str:
    """Python for a value. `constants`: the names in it."""
    if isinstance(value, Count | Written):
        return value.text
    if not has_count(value):
        return _constant(value, constants)
    parts = [_empty(part) or _text(part, constants) for part in _parts(value)]
    if type(value) is list:
        return f"[{','.join(parts)}]"
    if type(value) is tuple:
        return f"({','.join(parts)},)"
    return f"{_constant(type(value), constants)}({','.join(parts)})"


def _empty(part: Any) -> str:
    return "{}" if part == {} else ""


def _constant(value: Any, constants: dict[str, Any]) -> str:
    if value is None or type(value) in (bool, int):
        return repr(value)
    name = f"c{len(constants)}"
    constants[name] = value
    return name
