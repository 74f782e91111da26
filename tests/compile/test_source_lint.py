"""No host synchronisation in anything that runs under capture: read from the sources, for a graph cannot show it.

Under capture run an operator's CUDA implementation, its checks and its fake, all they call in their module, every
host function of `moe_ops/kernels` and every shared check. Two forms are looked for: methods that wait for the device,
and a tensor that is asked for its value (`int(t)`, `if t:`, `range(t)`, ...). What is a tensor follows from the
annotations of arguments and functions and from what is computed of them; sizes, dtypes and other metadata are not.
"""

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_type_hints

import pytest
from torch import Tensor

import moe_ops
from inductor_passes.source_lint import Reader, synchronisations
from moe_ops import arguments
from moe_ops.records import is_record

ROOT = Path(moe_ops.__file__).parent
OPERATORS = sorted(path for path in ROOT.glob("*.py") if "_library.define(" in path.read_text())
KERNELS = sorted((ROOT / "kernels").glob("*.py"))


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


def _hints(record):
    """What the fields of a record of arguments are, in order; none for anything else."""
    return get_type_hints(record) if is_record(record) else {}


@dataclass
class RecordReader(Reader):
    """Reads records of arguments as well, whose fields are annotated in `moe_ops.arguments`."""

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
            case ast.Attribute(value=value, attr=name) if self.record(value) is not None:
                return _hints(self.record(value)).get(name) in (Tensor, Tensor | None)
        return super().is_tensor(node)

    def num_known(self) -> int:
        return super().num_known() + len(self.records)

    def learn_from(self, node) -> None:
        match node:
            case ast.arg(arg=name, annotation=ast.Name(id=kind)) if is_record(getattr(arguments, kind, None)):
                self.records[name] = getattr(arguments, kind)
        super().learn_from(node)

    def assign(self, target, value) -> None:
        super().assign(target, value)
        if not self.is_tensor(value) and self.record(value) is not None:
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


def _syncs(function, scope):
    """What in a function waits for the device, as text."""
    reader = RecordReader({name: each.returns for name, (_, each) in scope.items()})
    return [f"{function.name}: {text}" for _, text in synchronisations(function, reader)]


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
        ("return offsets.sum().item()", "offsets.sum().item()"),
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
        "return count == 1 and offsets.strides[1] == bias.strides[1] == 1",
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
