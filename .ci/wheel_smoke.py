"""Run by `.ci/wheel-smoke` inside a clean environment: is the installed wheel whole?"""

import importlib.metadata
import sys
from pathlib import Path

import torch

import inductor_passes
import layers
import moe_ops

DISTRIBUTION = "moe-inductor"
PACKAGES = {"moe_ops": moe_ops, "inductor_passes": inductor_passes, "layers": layers}


def check_owner() -> None:
    owners = importlib.metadata.packages_distributions()
    for name, package in PACKAGES.items():
        assert owners[name] == [DISTRIBUTION], f"{name} belongs to {owners[name]}"
        folder = Path(package.__file__).parent
        assert folder.is_relative_to(sys.prefix), (
            f"{name} was imported from {folder}, not from this environment"
        )
        assert (folder / "py.typed").exists(), f"{name} has no py.typed"


def check_entry_point() -> None:
    names = torch.compiler.list_backends(exclude_tags=())
    assert "moe_inductor" in names, f"backend moe_inductor is not among {names}"


def check_ops() -> None:
    hidden_states = torch.randn(5, 8, requires_grad=True)
    sorted_slots = torch.tensor([0, 2, 4, 6, 8, 1, 3, 5, 7, 9], dtype=torch.int32)
    torch.library.opcheck(torch.ops.moe.permute, (hidden_states, sorted_slots))
    w13, w2 = torch.randn(4, 12, 8), torch.randn(4, 8, 6)
    call = (hidden_states.detach(), torch.randn(5, 4), w13, w2, moe_ops.RoutingConfig(top_k=2))
    compiled = torch.compile(moe_ops.fused_moe, backend="moe_inductor", fullgraph=True)
    torch.testing.assert_close(compiled(*call), moe_ops.fused_moe(*call))


if __name__ == "__main__":
    check_owner()
    check_entry_point()
    check_ops()
    print(
        f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)} on torch {torch.__version__}: wheel is whole"
    )
