"""Host synchronisation in Python source, where no graph shows it: the body of a user's operator.

Two forms are looked for: methods that wait for the device (`.item()`, `.cpu()`, ...), and a tensor that is asked for
its value (`int(t)`, `if t:`, `range(t)`, ...). What is a tensor follows from the annotations of arguments and functions
and from what is computed of them; sizes, dtypes and other metadata are not.
"""

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WAITING = frozenset(
    {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize", "masked_select", "unique", "cuda"}
)
# Builtins that read a value off the device when they are given a tensor.
READING = frozenset(
    {"int", "float", "bool", "complex", "range", "min", "max", "any", "all", "round", "str", "repr", "print"}
)
METADATA = frozenset(
    {
        *("shape", "size", "ndim", "dim", "numel", "nelement", "names"),
        *("stride", "strides", "layout", "is_contiguous", "storage_offset", "untyped_storage", "data_ptr"),
        *("dtype", "type", "itemsize", "element_size", "nbytes", "is_floating_point", "is_complex"),
        *("device", "get_device", "is_cuda", "is_nested", "is_quantized", "is_inference", "requires_grad"),
    }
)
CREATING = frozenset(
    {"empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "rand", "randn", "randint"}
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def waits(function: Callable[..., Any]) -> tuple[str, ...]:
    """Where `function`, or a function of its module that it calls, waits for the device: "file.py:12: x.item()".

    Nothing for a function without source.
    """
    reached: dict[str, Callable[..., Any]] = {}
    pending = [function]
    while pending:
        each = pending.pop()
        if each.__qualname__ not in reached:
            reached[each.__qualname__] = each
            pending += _helpers(each).values()
    return tuple(told for each in reached.values() for told in _waits_itself(each))


def _helpers(function: Callable[..., Any]) -> dict[str, types.FunctionType]:
    """Functions of the same module that it names."""
    code, scope = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    named = {name: scope.get(name) for name in code.co_names} if code is not None else {}
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, types.FunctionType) and value.__module__ == function.__module__
    }


def _waits_itself(function: Callable[..., Any]) -> Iterator[str]:
    tree = _parsed(function)
    if tree is None:
        return
    returns = {name: parsed.returns for name, each in _helpers(function).items() if (parsed := _parsed(each))}
    file = Path(inspect.getsourcefile(function) or "?").name
    for line, text in synchronisations(tree, Reader(returns)):
        yield f"{file}:{line}: {text}"


def _parsed(function: Callable[..., Any]) -> Function | None:
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return None
    ast.increment_lineno(tree, first - 1)
    return next((node for node in ast.walk(tree) if isinstance(node, Function)), None)


def synchronisations(function: Function, reader: "Reader") -> list[tuple[int, str]]:
    """Line and source of what in a function waits for the device, the outermost of each line."""
    reader.learn(function)
    found: dict[int, str] = {}
    for node in ast.walk(function):
        asked = node.test if isinstance(node, ast.If | ast.While | ast.Assert) else node
        if _calls_waiting(node) or reader.reads(node):
            found.setdefault(getattr(asked, "lineno", function.lineno), ast.unparse(asked))
    return sorted(found.items())


def _calls_waiting(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITING


def means_tensor(annotation: ast.expr | None) -> bool:
    """Whether an annotation is a tensor's: `Tensor`, `torch.Tensor`, with `| None`, or a tuple of nothing else."""
    text = ast.unparse(annotation).strip("'\"") if annotation is not None else ""
    inner = re.sub(r"^(Optional|tuple|list)\[|\]$", "", text)
    parts = {part.strip().removeprefix("torch.") for part in re.split(r"[|,]", inner)}
    return parts - {"None", "..."} == {"Tensor"}


@dataclass
class Reader:
    """Which expressions of one function are tensors, as far as annotations tell."""

    returns: Mapping[str, ast.expr | None] = field(default_factory=dict)
    """What functions that it may call return, by name."""
    tensors: set[str] = field(default_factory=set)

    def is_tensor(self, node: ast.expr) -> bool:
        """Whether the value of an expression is a tensor, or several."""
        match node:
            case ast.Name(id=name):
                return name in self.tensors
            case ast.Attribute(value=value, attr=name):
                return name not in METADATA and self.is_tensor(value)
            case ast.Subscript(value=value) | ast.UnaryOp(op=ast.USub() | ast.Invert(), operand=value):
                return self.is_tensor(value)
            case ast.BinOp(left=left, right=right):
                return self.is_tensor(left) or self.is_tensor(right)
            case ast.IfExp(body=body, orelse=other):
                return self.is_tensor(body) or self.is_tensor(other)
            case ast.Compare(left=left, ops=ops, comparators=others):
                by_identity = all(isinstance(op, ast.Is | ast.IsNot) for op in ops)
                return not by_identity and any(map(self.is_tensor, (left, *others)))
            case ast.Call():
                return self._gives_tensor(node)
        return False

    def _gives_tensor(self, call: ast.Call) -> bool:
        match call.func:
            case ast.Name(id=name):
                return means_tensor(self.returns.get(name))
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                given = (*call.args, *(keyword.value for keyword in call.keywords))
                of_tensors = any(map(self.is_tensor, given)) and name not in METADATA
                return name.removesuffix("_like") in CREATING or of_tensors
            case ast.Attribute():
                return self.is_tensor(call.func)
        return False

    def learn(self, function: Function) -> None:
        """Adds the function's tensor arguments and, until there is no more, what it computes of tensors."""
        known = -1
        while known < self.num_known():
            known = self.num_known()
            for node in ast.walk(function):
                self.learn_from(node)

    def num_known(self) -> int:
        """How much has been learned."""
        return len(self.tensors)

    def learn_from(self, node: ast.AST) -> None:
        """Adds what one node says."""
        match node:
            case ast.arg(arg=name, annotation=annotation) if means_tensor(annotation):
                self.tensors.add(name)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                for target, value in zip(targets, values, strict=False):
                    self.assign(target, value)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self.assign(target, value)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if means_tensor(annotation):
                self.tensors.add(name)
            case ast.NamedExpr(target=ast.Name(id=name), value=value) if self.is_tensor(value):
                self.tensors.add(name)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """Adds the names that are set to a tensor."""
        if self.is_tensor(value):
            self.tensors |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}

    def reads(self, node: ast.AST) -> list[ast.expr]:
        """The tensors whose values `node` itself asks for."""
        match node:
            case ast.Call(func=ast.Name(id=name), args=args) if name in READING:
                asked = args
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.Assert(test=test):
                asked = [test]
            case ast.comprehension(ifs=asked) | ast.BoolOp(values=asked):
                pass
            case ast.UnaryOp(op=ast.Not(), operand=value) | ast.FormattedValue(value=value):
                asked = [value]
            case _:
                asked = []
        return [each for each in asked if self.is_tensor(each)]
