"""Experts of a model that the ranks of a mesh share: what is asked of mesh and style, and how they are applied."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from layers._checks import expect_type
from layers.huggingface import plans
from layers.huggingface.finding import Found
from layers.parallel.styles import ExpertParallel, ExpertTensorParallel, shared_by

_DEFAULT = ExpertParallel("allreduce")


def expect_mesh(model: nn.Module, mesh: DeviceMesh | None, style: ParallelStyle | None) -> None:
    """Raises TypeError or ValueError unless these are a mesh and a style, and those of experts shared already."""
    if style is not None:
        expect_type("style", style, (ExpertParallel, ExpertTensorParallel))
    if mesh is None:
        if style is not None:
            raise ValueError(f"mesh=None with style={type(style).__name__}: expected a mesh of one dimension")
        return
    expect_type("mesh", mesh, DeviceMesh)
    if mesh.ndim != 1:
        raise ValueError(f"mesh has {mesh.ndim} dimensions: expected one, such as mesh['ep']")
    for name, module in model.named_modules():
        if hasattr(module, "moe_ops_parallel"):
            _expect_shared_by(name, module, mesh, style or _DEFAULT)


def _expect_shared_by(name: str, experts: Any, mesh: DeviceMesh, style: Any) -> None:
    """Experts are shared once: another mesh or style would change nothing."""
    for argument, given in shared_by(mesh, style).items():
        before = experts.moe_ops_shared_by[argument]
        if given != before:
            raise ValueError(f"{argument}={given}: expected {before}, by which {name} is shared")


def shard(model: nn.Module, found: Found, mesh: DeviceMesh, style: ParallelStyle | None) -> None:
    """Shares experts that are whole; what is shared already stays as it is.

    Raises ValueError, before any are shared, for a block that is patched as a whole: every rank would keep its experts.
    """
    if found.blocks:
        name = next(iter(found.blocks))
        kind = type(model.get_submodule(name)).__name__
        raise ValueError(
            f"{name} is a {kind}, patched as a whole: expected experts for ranks to share, or mesh=None"
        )
    style = style or _DEFAULT
    whole = {name: each for name, each in found.experts.items() if not hasattr(each, "moe_ops_parallel")}
    for name, module in whole.items():
        if any(isinstance(each, DTensor) for each in module.parameters(recurse=False)):
            plans.expect_planned(model, name, module, style)
    for module in whole.values():
        parallelize_module(module, mesh, style)
