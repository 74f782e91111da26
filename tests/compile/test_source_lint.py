"""No host synchronisation in anything that runs under capture: read from the sources, for a graph cannot show it.

Under capture run an operator's CUDA implementation, its checks and its fake, all they call in their module, every
host function of `moe_ops/kernels` and every shared check. Two forms are looked for: methods that wait for the device,
and a tensor that is asked for its value (`int(t)`, `if t:`, `range(t)`, ...). What is a tensor follows from the
annotations of arguments and functions and from what is computed of them; sizes, dtypes and other metadata are not.
"""

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_type_hints

import pytest
from torch import Tensor

import moe_ops
from moe_ops import arguments
from moe_ops.records import is_record

ROOT = Path(moe_ops.__file__).parent
OPERATORS = sorted(path for path in ROOT.glob("*.py") if "_library.define(" in path.read_text())
KERNELS = sorted((ROOT / "kernels").glob("*.py"))
WAITING = {"item", "tolist", "cpu", "numpy", "nonzero", "synchronize", "masked_select", "unique", "cuda"}
# Builtins that read a value off the device when they are given a tensor.
READING = {
    "int", "float", "bool", "complex", "range", "min", "max", "any", "all", "round", "str", "repr", "print",
}  # fmt: skip
METADATA = {
    "shape", "dtype", "device", "ndim", "layout", "is_cuda", "itemsize", "nbytes", "names", "requires_grad", "size",
    "stride", "dim", "numel", "storage_offset", "data_ptr", "element_size", "is_contiguous", "get_device",
    "is_inference", "is_floating_point", "is_complex", "untyped_storage", "type", "nelement",
}  # fmt: skip
CREATING = {"empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "rand", "randn", "randint"}


def _functions(tree):
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _scope(path, source=None):
    """Functions by the name they have in a module: its own, and those it imports from a module beside it."""
    tree = ast.parse(source if source is not None else path.read_text())
    scope = {name: (path, function) for name, function in _functions(tree).items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moe_ops."):
            beside = ROOT / f"{node.module.removeprefix('moe_ops.').replace('.', '/')}.py"
            theirs = _functions(ast.parse(beside.read_text())) if beside.exists() else {}
            names = {alias.asname or alias.name: alias.name for alias in node.names if alias.name in theirs}
            scope |= {local: (beside, theirs[name]) for local, name in names.items()}
    return scope


def _registered(source):
    """Names given as cuda=, check= and fake= to `_library.define`."""
    nodes = ast.walk(ast.parse(source))
    calls = [
        each for each in nodes if isinstance(each, ast.Call) and ast.unparse(each.func) == "_library.define"
    ]
    keywords = [keyword for call in calls for keyword in call.keywords]
    return {ast.unparse(each.value) for each in keywords if each.arg in ("cuda", "check", "fake")}


def _captured(path, source=None):
    """Every function an operator's module runs under capture, with the scope it runs in."""
    scope = _scope(path, source)
    registered = _registered(source if source is not None else path.read_text())
    assert registered, f"{path.name} registers nothing"
    assert registered <= scope.keys(), (
        f"{path.name}: the lint follows names only, not {registered - scope.keys()}"
    )
    reached, pending = {}, [(scope, name) for name in registered]
    while pending:
        where, name = pending.pop()
        home, function = where[name]
        if (home, function.name) not in reached:
            inside = scope if home == path else _scope(home)
            reached[home, function.name] = function, inside
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            pending += [
                (inside, call.id) for call in calls if isinstance(call, ast.Name) and call.id in inside
            ]
    return list(reached.values())


def _is_kernel(function):
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _means_tensor(annotation):
    """Whether an annotation is a tensor's: `Tensor`, `torch.Tensor`, with `| None`, or a tuple of nothing else."""
    text = ast.unparse(annotation).strip("'\"") if annotation is not None else ""
    inner = text.removeprefix("tuple[").removesuffix("]")
    parts = {part.strip().removeprefix("torch.") for part in re.split(r"[|,]", inner)}
    return parts - {"None", "..."} == {"Tensor"}


def _hints(record):
    """What the fields of a record of arguments are, in order; none for anything else."""
    return get_type_hints(record) if is_record(record) else {}


@dataclass
class Reader:
    """Which expressions of one function are tensors, as far as annotations and records of arguments tell."""

    scope: dict[str, tuple[Path, ast.FunctionDef]] = field(default_factory=dict)
    tensors: set[str] = field(default_factory=set)
    records: dict[str, type] = field(default_factory=dict)

    def record(self, node) -> type | None:
        """The record that an expression is, if it is one."""
        match node:
            case ast.Name(id=name):
                return self.records.get(name)
            case ast.Attribute(value=value, attr=name):
                hint = _hints(self.record(value)).get(name)
                return hint if is_record(hint) else None
            case ast.Call(func=ast.Attribute(value=value, attr="_replace")):
                return self.record(value)
            case ast.Call(func=ast.Name(id=name)):
                return getattr(arguments, name, None)
        return None

    def is_tensor(self, node) -> bool:
        match node:
            case ast.Name(id=name):
                return name in self.tensors
            case ast.Attribute(value=value, attr=name):
                of_record = _hints(self.record(value)).get(name) in (Tensor, Tensor | None)
                return of_record or (name not in METADATA and self.is_tensor(value))
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

    def _gives_tensor(self, call) -> bool:
        match call.func:
            case ast.Name(id=name) if name in self.scope:
                return _means_tensor(self.scope[name][1].returns)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                given = (*call.args, *(keyword.value for keyword in call.keywords))
                of_tensors = any(map(self.is_tensor, given)) and name not in METADATA
                return name.removesuffix("_like") in CREATING or of_tensors
            case ast.Attribute():
                return self.is_tensor(call.func)
        return False

    def learn(self, function) -> None:
        """Adds the function's tensor arguments and, until there is no more, what it computes of tensors."""
        known = -1
        while known < len(self.tensors) + len(self.records):
            known = len(self.tensors) + len(self.records)
            self._learn_once(function)

    def _learn_once(self, function) -> None:
        for node in ast.walk(function):
            match node:
                case ast.arg(arg=name, annotation=annotation) if _means_tensor(annotation):
                    self.tensors.add(name)
                case ast.arg(arg=name, annotation=ast.Name(id=kind)) if is_record(
                    getattr(arguments, kind, None)
                ):
                    self.records[name] = getattr(arguments, kind)
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                    for target, value in zip(targets, values, strict=True):
                        self._assign(target, value)
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        self._assign(target, value)
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation) if _means_tensor(
                    annotation
                ):
                    self.tensors.add(name)
                case ast.NamedExpr(target=ast.Name(id=name), value=value) if self.is_tensor(value):
                    self.tensors.add(name)

    def _assign(self, target, value) -> None:
        if self.is_tensor(value):
            self.tensors |= {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
        elif self.record(value) is not None:
            self._unpack(target, self.record(value))

    def _unpack(self, target, hint) -> None:
        match target:
            case ast.Name(id=name) if is_record(hint):
                self.records[name] = hint
            case ast.Name(id=name) if hint in (Tensor, Tensor | None):
                self.tensors.add(name)
            case ast.Tuple(elts=parts):
                for part, inner in zip(parts, _hints(hint).values(), strict=False):
                    self._unpack(part, inner)

    def reads(self, node) -> list:
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


def _syncs(function, scope):
    """What in a function waits for the device, as text."""
    reader = Reader(scope)
    reader.learn(function)
    found = []
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITING:
            found.append(ast.unparse(node.func))
        if reader.reads(node):
            found.append(
                ast.unparse(node.test if isinstance(node, ast.If | ast.While | ast.Assert) else node)
            )
    return [f"{function.name}: {text}" for text in found]


def test_there_is_something_to_read():
    assert len(OPERATORS) >= 6 and len(KERNELS) >= 6


@pytest.mark.parametrize("path", OPERATORS, ids=lambda path: path.name)
def test_operators_under_capture(path):
    assert [found for function, scope in _captured(path) for found in _syncs(function, scope)] == []


@pytest.mark.parametrize("path", OPERATORS, ids=lambda path: path.name)
def test_arguments_under_capture_are_annotated(path):
    """The annotations are what the lint goes by."""
    for function, _ in _captured(path):
        given = function.args
        bare = [each.arg for each in (*given.args, *given.kwonlyargs) if each.annotation is None]
        assert not bare, f"{path.name}: {function.name} leaves {bare} without annotation"


@pytest.mark.parametrize("path", [*KERNELS, ROOT / "_checks.py"], ids=lambda path: path.name)
def test_host_code_of_kernels_and_shared_checks(path):
    scope = _scope(path)
    hosts = [function for home, function in scope.values() if home == path and not _is_kernel(function)]
    assert [found for function in hosts for found in _syncs(function, scope)] == []


def _planted(body, signature="offsets: Tensor, bias: Tensor | None, count: int", helpers=""):
    tree = ast.parse(f"{helpers}\ndef f({signature}):\n    {body}")
    scope = {name: (ROOT, function) for name, function in _functions(tree).items()}
    return [found.removeprefix("f: ") for found in _syncs(scope["f"][1], scope)]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return offsets.sum().item()", "offsets.sum().item"),
        ("return int(offsets[-1])", "int(offsets[-1])"),
        ("total = offsets.sum() + 1\n    return float(total)", "float(total)"),
        ("last, *_ = offsets.unbind()\n    return bool(last)", "bool(last)"),
        ("if offsets.max() > count: return 1", "offsets.max() > count"),
        ("while offsets.any(): pass", "offsets.any()"),
        ("assert bias is None or bias.sum()", "bias is None or bias.sum()"),
        ("return not torch.equal_to(offsets, bias)", "not torch.equal_to(offsets, bias)"),
        ("return [0 for i in range(count) if offsets[i]]", None),
        ("return range(offsets[0])", "range(offsets[0])"),
        ("return max(offsets[0], count)", "max(offsets[0], count)"),
        ("raise ValueError(f'{offsets} is wrong')", None),
        ("return int(torch.zeros(count).sum())", "int(torch.zeros(count).sum())"),
        ("x: Tensor = count.made()\n    return int(x)", "int(x)"),
        ("return int(last(offsets))", "int(last(offsets))"),
        ("first, second = both(offsets)\n    return int(second)", "int(second)"),
        ("c = b * 2\n    b = a\n    a = offsets[0]\n    return int(c)", "int(c)"),
        ("def inner(x: Tensor): return int(x)\n    return inner", "int(x)"),
    ],
)
def test_the_lint_finds_what_is_planted(body, found):
    seen = _planted(
        body, helpers="def last(x) -> Tensor: ...\ndef both(x) -> tuple[Tensor, torch.Tensor]: ..."
    )
    assert len(seen) >= 1 and (found is None or found in seen)


@pytest.mark.parametrize(
    "body",
    [
        "return int(count), float(count), bool(count)",
        "return int(offsets.shape[0]) + int(offsets.numel()) + max(offsets.dim(), count)",
        "return int(offsets.dtype.itemsize * offsets.stride(0)) if bias is None else range(len(offsets.shape))",
        "if bias is not None and offsets.device.type == 'cuda': raise ValueError(f'{offsets.shape} {count}')",
        "if offsets.numel() == 0 or not offsets.is_cuda: return offsets",
        "return torch.finfo(offsets.dtype).max if torch.is_floating_point(offsets) else int(size(offsets))",
    ],
)
def test_numbers_and_metadata_are_left_alone(body):
    assert _planted(body, helpers="def size(x) -> int: ...") == []


@pytest.mark.parametrize(
    ("path", "head", "read"),
    [
        ("permute.py", "def _cuda(args: Permute) -> Tensor:\n", "int(args.sorted_slots.max())"),
        (
            "fused_experts.py",
            "def _cuda(args: FusedExperts) -> Tensor:\n",
            "bool(args.experts.w13.weight[0, 0, 0])",
        ),
        (
            "dispatch.py",
            "def check_placement(placement: Placement, num_experts",
            "bool(placement.expert_map.min() < 0)",
        ),
    ],
)
def test_a_read_planted_in_a_real_operator_is_found(path, head, read):
    source = (ROOT / path).read_text()
    assert source.count(head) == 1
    start = source.index("\n", source.index(":\n", source.index(head))) + 1
    planted = f"{source[:start]}    planted = {read}\n{source[start:]}"
    found = [each for function, scope in _captured(ROOT / path, planted) for each in _syncs(function, scope)]
    assert len(found) == 1 and found[0].endswith(read)
