"""transformers' tensor-parallel plan of a model with experts that are ours: what `from_pretrained` reads of a file.

A plan says by name what each rank loads of a parameter. Ours names the experts' parameters, by transformers' own rules,
and leaves their forward alone, where transformers would sum up outputs that we sum up.
"""

import re
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from transformers.distributed.tensor_parallel import (
    ParallelInterface,  # type: ignore[attr-defined]  # transformers 5.17 has it here alone
    TensorParallelLayer,
)

from layers._checks import expect_type
from layers.huggingface.finding import find
from layers.huggingface.recognise import Recogniser
from layers.parallel.layout import ExpertsLayout, of_transformers_experts
from layers.parallel.styles import ExpertParallel, ExpertTensorParallel

_ALONE = "moe_ops"


class _LeftAlone(TensorParallelLayer):
    """A rule that splits nothing and replaces no forward. By silence a plan leaves it to the model's own."""

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        return module


ParallelInterface.register(_ALONE, _LeftAlone())  # type: ignore[arg-type]  # declared for functions


def tp_plan(model: nn.Module, style: Any) -> dict[str, str]:
    """See `layers.huggingface.tp_plan`."""
    expect_type("model", model, nn.Module)
    expect_type("style", style, (ExpertParallel, ExpertTensorParallel))
    rest: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    plan = rest if style.dispatcher == "allreduce" else dict.fromkeys(rest, _ALONE)
    for name, experts in find(model, Recogniser()).experts.items():
        below = f"{_rule(name)}."
        plan = {rule: kind for rule, kind in plan.items() if not rule.startswith(below)}
        plan |= _experts_rules(name, experts, style)
    return plan


def expect_planned(model: nn.Module, name: str, experts: nn.Module, style: ParallelStyle) -> None:
    """Raises ValueError unless transformers has loaded these experts by the plan of `style`."""
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    for rule, kind in _experts_rules(name, experts, style).items():
        if (found := plan.get(rule, _ALONE)) != kind:
            raise ValueError(
                f"{rule} was loaded by the rule {found!r}: expected {kind!r}, of layers.huggingface.tp_plan(model, "
                f"{type(style).__name__}(...))"
            )


def _experts_rules(name: str, experts: nn.Module, style: ParallelStyle) -> dict[str, str]:
    layout = of_transformers_experts(experts)
    if isinstance(style, ExpertParallel):
        layout.expect_alike()
    kinds = {parameter: _kind(experts, parameter, layout, style) for parameter in layout.parameters}
    return {_rule(name): _ALONE} | {f"{_rule(name)}.{parameter}": kind for parameter, kind in kinds.items()}


def _kind(experts: nn.Module, parameter: str, layout: ExpertsLayout, style: ParallelStyle) -> str:
    """The rule that loads the part of a parameter which `style` computes with."""
    if isinstance(style, ExpertParallel):
        return "grouped_gemm"  # the first dimension
    each = layout.parameters[parameter]
    if each.dim is None:
        return _ALONE
    kind = (
        "rowwise" if each.dim == experts.get_parameter(parameter).dim() - 1 else "colwise"
    )  # of the last two
    return f"packed_{kind}" if each.has_blocks else kind


def _rule(name: str) -> str:
    """Layers are alike in a plan."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
