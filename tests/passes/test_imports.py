"""The modules of the package import each other in one direction, inside functions too."""

import ast
import graphlib
from pathlib import Path

import inductor_passes

ROOT = Path(inductor_passes.__file__).parent


def _module(path):
    return ".".join(("inductor_passes", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    )


def _imports(path, modules):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        if isinstance(node, ast.ImportFrom) and (node.module or "") in modules:
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from named & modules or {node.module}


def test_no_module_imports_itself_around_a_circle():
    paths = {_module(path): path for path in ROOT.rglob("*.py")}
    graph = {name: set(_imports(path, paths.keys())) for name, path in paths.items()}
    assert graph["inductor_passes.report"] >= {"inductor_passes.html", "inductor_passes.text"}
    order = list(
        graphlib.TopologicalSorter(graph).static_order()
    )  # raises CycleError, which names the circle
    assert order.index("inductor_passes.html") < order.index("inductor_passes.report")
