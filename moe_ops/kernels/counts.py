"""Numbers that a plan is made for many of: what is computed with them is written down, and what is decided by them.

Most numbers of a plan are expressions of how many rows there are, and between a few thresholds nothing else changes.
`Count` stands for the number of rows while a plan is made, and both become known.
"""

import operator
from collections.abc import Callable
from typing import Any


class CountError(TypeError):
    """What only a plain number can be asked for: there is no template of such a plan."""


class Count:
    """A number of rows, or an expression of such, with the value that it has where the plan is made.

    Arithmetic with plain numbers gives expressions. Whatever needs the value itself decides something: a comparison, an
    index. `decided` has what was, as conditions under which the plan is the same for other numbers.

    Not an int, of which code in C would read the value without a word: there is no way to it that is not written down.
    """

    __slots__ = ("_value", "decided", "text")
    decided: dict[str, None]
    text: str

    def __init__(self, text: str, value: int, decided: dict[str, None]) -> None:
        self.text, self._value, self.decided = text, value, decided

    @property
    def is_whole(self) -> bool:
        """Whether it is an int, as it then is for any counts."""
        return type(self._value) is int

    def known(self) -> int:
        """The value; the plan is for this one alone then."""
        self.decided[f"{self.text}=={self._value}"] = None
        return self._value

    def bit_length(self) -> "Count":
        """As int's."""
        return self._joined(f"({self.text}).bit_length()", self._value.bit_length())

    def __hash__(self) -> int:
        # A cache would keep what was computed with it, and give that to plans made of the plain number it equals.
        raise CountError("a count is no key")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CountError("a count is not copied: what is decided by a copy would be lost")

    def __neg__(self) -> "Count":
        return self._joined(f"(-{self.text})", -self._value)

    def __bool__(self) -> bool:
        return self._whether(f"({self.text}!=0)", self._value != 0)

    def _joined(self, text: str, value: int) -> "Count":
        return Count(text, value, self.decided)

    def _whether(self, condition: str, holds: bool) -> bool:
        self.decided[condition if holds else f"not {condition}"] = None
        return holds


def _binary(operation: Callable[[Any, Any], Any], join: str, sign: str, is_swapped: bool = False) -> Any:
    """The method of an operation on two numbers; `join`, a method, makes what comes of it."""

    def method(self: Count, other: Any) -> Any:
        if not sign or (not isinstance(other, Count) and type(other) not in (int, float)):
            return operation(other, self.known()) if is_swapped else operation(self.known(), other)
        theirs = (other.text, other._value) if isinstance(other, Count) else (f"({other})", other)
        ours = self.text, self._value
        (left, left_value), (right, right_value) = (theirs, ours) if is_swapped else (ours, theirs)
        return getattr(self, join)(f"({left}{sign}{right})", operation(left_value, right_value))

    return method


def _reading(name: str) -> Any:
    def method(self: Count, *others: Any) -> Any:
        return getattr(self.known(), name)(*others)

    return method


_ARITHMETIC = {
    "add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "lshift": "<<", "rshift": ">>",
    "truediv": "/", "pow": "", "and_": "", "or_": "", "xor": "",
}  # fmt: skip
"""Those without a sign read the value."""
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
for _name, _sign in _ARITHMETIC.items():
    _operation, _dunder = getattr(operator, _name), _name.strip("_")
    setattr(Count, f"__{_dunder}__", _binary(_operation, "_joined", _sign))
    setattr(Count, f"__r{_dunder}__", _binary(_operation, "_joined", _sign, is_swapped=True))
for _name, _sign in _COMPARISONS.items():
    setattr(Count, f"__{_name}__", _binary(getattr(operator, _name), "_whether", _sign))
_OF_OBJECTS = ("__new__", "__init__", "__getattribute__", "__doc__", "__sizeof__", "__getnewargs__")
for _name, _value in vars(int).items():  # whatever else a number can be asked for
    if callable(_value) and _name not in (*vars(Count), *_OF_OBJECTS):
        setattr(Count, _name, _reading(_name))
