"""The backend's name is found without importing anything of ours, and private torch names stay in one file."""

import ast
import tomllib
from pathlib import Path

import inductor_passes
from tests.forked import run_python

ROOT = Path(inductor_passes.__file__).parents[1]
PRIVATE = (
    "torch._inductor",
    "torch._dynamo",
    "torch._functorch",
    "torch._higher_order_ops",
    "torch._subclasses",
)

PROBE = """
import sys, torch
assert "inductor_passes" not in sys.modules
compiled = torch.compile(lambda x: x + 1, backend="moe_inductor", mode="reduce-overhead")
assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
assert "inductor_passes.backend" in sys.modules
"""


def test_the_name_needs_no_import(tmp_path):
    """Run against metadata written from pyproject.toml, so that it needs no installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, target),) = project["entry-points"]["torch_dynamo_backends"].items()
    info = tmp_path / "moe_backend_probe-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moe-backend-probe\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{name} = {target}\n")
    paths = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
    done = run_python(paths + PROBE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


def test_importing_the_passes_changes_no_compile():
    probe = (
        "import torch, torch._inductor.config as c, torch._inductor.lowering as l\n"
        "import moe_ops\n"
        "before = len(l.lowerings), c.post_grad_custom_pre_pass\n"
        "import inductor_passes\n"
        "inductor_passes.options()\n"
        "assert (len(l.lowerings), c.post_grad_custom_pre_pass) == before\n"
    )
    done = run_python(probe, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_private_torch_names_are_in_compat_only():
    for path in sorted((ROOT / "inductor_passes").rglob("*.py")):
        if path.name.startswith("_compat"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            assert not any(name.startswith(PRIVATE) for name in names), (
                f"{path.name}:{getattr(node, 'lineno', 0)}"
            )
