"""Who imports what: private torch APIs in one file, and packages that import without Triton, a GPU or each other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_python

ROOT = Path(__file__).parents[2]
PACKAGES = ("moe_ops", "layers", "inductor_passes")
PRIVATE = (
    "torch._inductor",
    "torch._dynamo",
    "torch._functorch",
    "torch._higher_order_ops",
    "torch._subclasses",
)
ALLOWED = [
    ROOT / "inductor_passes" / name for name in ("_compat.py", "_compat_kernels.py", "_compat_options.py")
]


def _is_private(name: str) -> bool:
    return any(name == module or name.startswith(module + ".") for module in PRIVATE)


def _private_uses(tree: ast.AST) -> list[str]:
    """Imports of private torch modules and attribute chains such as `torch._inductor.config`."""
    uses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            uses += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            uses += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            uses.append(ast.unparse(node))
    return [use for use in uses if _is_private(use)]


def test_the_search_sees_every_form() -> None:
    for code in (
        "import torch._inductor.config",
        "from torch import _dynamo",
        "torch._functorch.config.x = 1",
    ):
        assert _private_uses(ast.parse(code)), code
    assert not _private_uses(ast.parse("import torch\ntorch.compiler.reset()"))


@pytest.mark.parametrize("package", [*PACKAGES, "benchmarks"])
def test_private_torch_apis_live_in_compat_only(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        if path not in ALLOWED:
            assert not _private_uses(ast.parse(path.read_text())), (
                f"{path.relative_to(ROOT)} uses private torch APIs"
            )


def _run(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr


def test_imports_and_cpu_work_without_a_triton_package() -> None:
    _run(
        """
import sys
sys.modules["triton"] = None  # `import triton` raises ImportError
import torch, moe_ops, layers, layers.huggingface, inductor_passes, inductor_passes.backend
assert not torch.cuda.is_initialized()
out = moe_ops.fused_moe(torch.randn(3, 8), torch.randn(3, 4), torch.randn(4, 12, 8), torch.randn(4, 8, 6),
                        moe_ops.RoutingConfig(top_k=2))
assert out.shape == (3, 8) and out.isfinite().all()
"""
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_one_package_imports_only_those_below_it(package: str) -> None:
    below = {"moe_ops": set(), "layers": {"moe_ops"}, "inductor_passes": {"moe_ops"}}[package]
    forbidden = sorted(set(PACKAGES) - below - {package}) + ["transformers"]
    done = run_python(f"import sys, {package}; assert not set({forbidden}) & set(sys.modules)", cwd=ROOT)
    assert done.returncode == 0, done.stderr
