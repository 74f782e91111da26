"""Run by `.ci/wheel-smoke` inside a clean environment: is the installed wheel whole?

    wheel_smoke.py SOURCE

SOURCE is the tree that the wheel was built from.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import torch

DISTRIBUTION = "moe-inductor"
PACKAGES = ("moe_ops", "inductor_passes", "layers")


def check_owner() -> None:
    owners = importlib.metadata.packages_distributions()
    for name in PACKAGES:
        assert owners[name] == [DISTRIBUTION], f"{name} belongs to {owners[name]}"
        folder = _folder(name)
        assert folder.is_relative_to(sys.prefix), (
            f"{name} was imported from {folder}, not from this environment"
        )


def check_files(source: Path) -> None:
    for name in PACKAGES:
        ours = _files(source / name)
        theirs = _files(_folder(name))
        differing = sorted(path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path))
        assert not differing, f"{name} was built from other files than there are: {differing}"


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"no package {package}"
    return Path(spec.origin).parent


def _files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def check_entry_point() -> None:
    names = torch.compiler.list_backends(exclude_tags=())
    assert "moe_inductor" in names, f"backend moe_inductor is not among {names}"


def check_values() -> None:
    import moe_ops
    from moe_ops.reference import reference_experts, reference_routing

    shapes = (5, 8), (5, 4), (4, 12, 8), (4, 8, 6)
    hidden_states, logits, w13, w2 = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    routing = moe_ops.RoutingConfig(top_k=2)
    weights, ids = reference_routing(logits, routing)
    expected = reference_experts(hidden_states, w13, w2, weights, ids, moe_ops.Activation())
    call = hidden_states, logits, w13, w2, routing
    torch.testing.assert_close(moe_ops.fused_moe(*call), expected)
    compiled = torch.compile(moe_ops.fused_moe, backend="moe_inductor", fullgraph=True)
    torch.testing.assert_close(compiled(*call), expected)


if __name__ == "__main__":
    check_owner()
    check_files(Path(sys.argv[1]))
    check_entry_point()
    check_values()
    print(
        f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)} on torch {torch.__version__}: wheel is whole"
    )
