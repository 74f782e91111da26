"""No host synchronisation in anything that runs under capture: read from the sources, for a graph cannot show it.

Under capture run an operator's CUDA implementation, its checks and its fake, all they call in their module, and every
host function of `moe_ops/kernels`.
"""

import ast
from pathlib import Path

import pytest

import moe_ops

ROOT = Path(moe_ops.__file__).parent
OPERATORS = sorted(path for path in ROOT.glob("*.py") if "_library.define(" in path.read_text())
KERNELS = sorted((ROOT / "kernels").glob("*.py"))
SYNCHRONISING = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "synchronize",
    "masked_select",
    "unique",
    "cuda",
}


def _functions(tree):
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def _registered(tree):
    """Names given as cuda=, check= and fake= to `_library.define`."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_library.define"
    ]
    keywords = [
        keyword for call in calls for keyword in call.keywords if keyword.arg in ("cuda", "check", "fake")
    ]
    return {ast.unparse(keyword.value) for keyword in keywords}


def _reached(functions, roots):
    reached, pending = set(), [name for name in roots if name in functions]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            calls = [node.func for node in ast.walk(functions[name]) if isinstance(node, ast.Call)]
            pending += [call.id for call in calls if isinstance(call, ast.Name) and call.id in functions]
    return reached


def _syncs(function):
    methods = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [
        f"{function.name}: {ast.unparse(m)}"
        for m in methods
        if isinstance(m, ast.Attribute) and m.attr in SYNCHRONISING
    ]


def test_there_is_something_to_read():
    assert len(OPERATORS) >= 6 and len(KERNELS) >= 6


@pytest.mark.parametrize("path", OPERATORS, ids=lambda path: path.name)
def test_operator_bodies(path):
    tree = ast.parse(path.read_text())
    functions = _functions(tree)
    reached = _reached(functions, _registered(tree))
    assert reached
    assert [found for name in sorted(reached) for found in _syncs(functions[name])] == []


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.name)
def test_kernel_modules(path):
    functions = _functions(ast.parse(path.read_text()))
    assert [found for function in functions.values() for found in _syncs(function)] == []


def test_the_lint_finds_what_it_looks_for():
    assert _syncs(ast.parse("def f(x):\n    return x.sum().item()").body[0]) == ["f: x.sum().item"]
