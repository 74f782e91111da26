"""Inductor graph passes that fuse Mixture-of-Experts stages. Importing it changes nothing; `options` opts in.

torch.compile(model, options=inductor_passes.options())
torch.compile(model, backend="moe_inductor")
print(inductor_passes.explain(model, inputs))

From a shell: python -m inductor_passes explain --model PATH
"""

from inductor_passes.base import Fusion, MoEPass, Refused
from inductor_passes.explain import explain
from inductor_passes.guards import trust_library
from inductor_passes.hazards import Hazard
from inductor_passes.options import options
from inductor_passes.records import Break, Cost, Entry, Exchange, LayerGraph, Unfused
from inductor_passes.report import Report
from inductor_passes.stories import Story, Verdict

__all__ = [
    "Break",
    "Cost",
    "Entry",
    "Exchange",
    "Fusion",
    "Hazard",
    "LayerGraph",
    "MoEPass",
    "Refused",
    "Report",
    "Story",
    "Unfused",
    "Verdict",
    "explain",
    "options",
    "trust_library",
]
