"""Functions of counts that give what was computed with `Count`s: tuples, lists and records of expressions."""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from moe_ops.kernels.counts import Count

_SHORT = len("(t0*(8))")  # what is no longer is written out each time


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
    writer = _Writer()
    return eval(f"lambda {','.join(names)}: {writer.text(value)}", writer.constants)


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, tuple | list):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return ()


class _Writer:
    """Writes Python that computes what it has computed before only once, as it is run from left to right."""

    def __init__(self) -> None:
        self.constants: dict[str, Any] = {}
        self._known: dict[str, str] = {}

    def text(self, value: Any) -> str:
        if isinstance(value, Count | Written):
            return self._expression(value.text)
        if not has_count(value):
            return self._constant(value)
        parts = [_empty(part) or self.text(part) for part in _parts(value)]
        if type(value) is list:
            return f"[{','.join(parts)}]"
        if type(value) is tuple:
            return f"({','.join(parts)},)"
        kind = self._constant(type(value))
        if isinstance(value, tuple):  # past the constructor, which takes twice as long
            return f"{self._constant(tuple.__new__)}({kind},({','.join(parts)},))"
        return f"{kind}({','.join(parts)})"

    def _expression(self, text: str) -> str:
        written = text
        # Each is in brackets, so whole where it is found; the longest first, as it has shorter ones in it.
        for known in sorted(self._known, key=len, reverse=True):
            written = written.replace(known, self._known[known])
        if len(text) <= _SHORT or text in self._known or text[0] != "(" or text[-1] != ")":
            return written
        name = self._known[text] = f"v{len(self._known)}"
        return f"({name}:={written})"

    def _constant(self, value: Any) -> str:
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name


def _empty(part: Any) -> str:
    return "{}" if part == {} else ""
