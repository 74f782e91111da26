"""Argument errors whose text a user sees, also at the end of a compiler's traceback.

Dynamo ends its report of an error with the *source line* that raised it: of an f-string, the code of the f-string. So
the text is formatted in a function that Dynamo does not look into, and stands in for the source of the one line through
which every check and every operator of ours is reached.
"""

import linecache
from collections.abc import Callable
from typing import Any, NoReturn

import torch


def invoke(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`: the innermost line of ours in a traceback of Dynamo's, where the text of an error is shown."""
    return function(*args)


_LINE_OF_INVOKE = invoke.__code__.co_firstlineno + 2


def value_error(template: str, *values: Any) -> NoReturn:
    """Raises ValueError with `template.format(*values)`. Values are what a graph can hold: numbers, strings, lists."""
    invoke(_raise, "ValueError", template, *values)
    raise AssertionError("unreachable")


def type_error(template: str, *values: Any) -> NoReturn:
    """Raises TypeError with `template.format(*values)`; values of other types go through `describe`."""
    invoke(_raise, "TypeError", template, *values)
    raise AssertionError("unreachable")


def describe(value: Any) -> str:
    """`value` as Python would write it if it is a plain one, else its type; Dynamo traces it."""
    if value is None or isinstance(value, str | int | float):
        return f"{value!r}"
    return f"<{type(value).__name__}>"


@torch.compiler.allow_in_graph
def _raise(kind: str, template: str, *values: Any) -> NoReturn:
    error = {"ValueError": ValueError, "TypeError": TypeError}[kind](template.format(*map(_readable, values)))
    show(error)
    raise error


def _readable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return f"[{', '.join(str(_readable(each)) for each in value)}]"
    return f"{value} (now {value.node.hint})" if isinstance(value, torch.SymInt) else value


def show(error: Exception) -> None:
    """Makes `error` the text of the line in `invoke`, in tracebacks from now on until `forget`."""
    forget()
    lines = linecache.getlines(__file__)
    lines = [
        *lines[: _LINE_OF_INVOKE - 1],
        f"    {type(error).__name__}: {error}\n",
        *lines[_LINE_OF_INVOKE:],
    ]
    linecache.cache[__file__] = (0, None, lines, __file__)  # without a time stamp it is not read anew


def forget() -> None:
    """Gives the line in `invoke` its source back, before anything else can fail in it."""
    if _is_shown():
        del linecache.cache[__file__]


def _is_shown() -> bool:
    entry = linecache.cache.get(__file__)
    return entry is not None and len(entry) > 1 and entry[1] is None
