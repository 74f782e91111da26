"""Inductor graph passes that fuse Mixture-of-Experts stages. Importing it changes nothing; `options` opts in.

torch.compile(model, options=inductor_passes.options())
torch.compile(model, backend="moe_inductor")
print(inductor_passes.explain(model, inputs))
"""

from inductor_passes.base import Fusion, MoEPass, Refused
from inductor_passes.explain import explain
from inductor_passes.hazards import Hazard
from inductor_passes.options import options
from inductor_passes.records import Break, LayerGraph, Unfused
from inductor_passes.report import Report

__all__ = [
    "Break",
    "Fusion",
    "Hazard",
    "LayerGraph",
    "MoEPass",
    "Refused",
    "Report",
    "Unfused",
    "explain",
    "options",
]
