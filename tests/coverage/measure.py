"""What `patch` does to one model, and how close the result is to what it was."""

import copy
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inductor_passes import _compat
from inductor_passes.base import PassLog
from inductor_passes.pipeline import FUSIONS, run_passes
from layers import huggingface
from layers.huggingface.stacked import StackedExperts
from tests.coverage.cases import CASES, outputs, stock_model

FUSED = ("fused_moe", "fused_experts", "fused_moe_formula", "fused_experts_formula")


@dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        family: folder in transformers' models.
        experts, routers: how many `patch` changed.
        compiled: the operators of ours in the compiled model, such as "2 fused_moe".
        eager, compiled_error: largest difference of an output from stock's, over the largest output.
        gradient: as `eager`, the worst of all parameters that have one.
        effect: how much an output changes without experts, over the largest output.
        left: reasons for what was left alone.
        options: of `patch`, beside the defaults.
    """

    name: str
    family: str
    experts: int
    routers: int
    compiled: str
    eager: float
    compiled_error: float
    gradient: float
    effect: float
    left: str
    options: str = ""

    @property
    def is_fused(self) -> bool:
        """Whether each layer is one operator, with nothing but its router beside it."""
        kinds = {each.split()[1] for each in self.compiled.split(", ") if each}
        return bool(kinds & {*FUSED}) and kinds <= {*FUSED, "topk_routing"}


def measure(name: str) -> Row:
    """Patches the model, runs it eagerly, compiled as far as our passes go, and backward."""
    stock = stock_model(name)
    ours = copy.deepcopy(stock)
    report = huggingface.patch(ours, stack_experts=name in STACKED)
    with torch.no_grad():
        expected, eager = outputs(stock, name)[0], outputs(ours, name)[0]
        effect = _relative(outputs(_without_experts(stock), name)[0], expected)
    compiled, kinds = _compiled(ours, name)
    return Row(
        name,
        CASES[name].folder,
        len(report.experts),
        len(report.routers),
        ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())),
        _relative(eager, expected),
        _relative(compiled, expected),
        _worst_gradient(stock, ours, name),
        effect,
        "; ".join(sorted({why for _, why in report.left})),
        "stack_experts=True" if name in STACKED else "",
    )


STACKED = ("dbrx", "switch_transformers")
"""Families whose experts lie in separate tensors."""


def _relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def _without_experts(model: nn.Module) -> nn.Module:
    bare = copy.deepcopy(model)
    for name, parameter in bare.named_parameters():
        if re.search(r"experts?\b.*(down_proj|\.w2|\.wo|fc2)|output_linear|up_embed", name):
            parameter.data.zero_()
    return bare


def _compiled(model: nn.Module, name: str) -> tuple[Tensor, Counter[str]]:
    """What the graphs compute that our passes make of the model, and their operators. No code is generated."""
    kinds: Counter[str] = Counter()

    def rewrite(graph_module: Any, _: Any) -> None:
        run_passes(graph_module.graph, FUSIONS, PassLog())
        graph_module.recompile()
        targets = [str(node.target).split(".") for node in graph_module.graph.nodes]
        kinds.update(target[1] for target in targets if target[0] == "moe")

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=_compat.post_grad_backend(rewrite))
    with torch.no_grad():
        result = outputs(compiled, name)[0]
    torch._dynamo.reset()
    return result, kinds


def _worst_gradient(stock: nn.Module, ours: nn.Module, name: str) -> float:
    for model in (stock, ours):
        output = outputs(model, name)[0]
        generator = torch.Generator().manual_seed(5)
        (output * torch.randn(output.shape, generator=generator)).sum().backward()
    theirs, found = _gradients(stock), _gradients(ours)
    top = max(float(grad.abs().max()) for grad in theirs.values())
    # What is next to nothing beside the largest is what is left of sums that cancel: stock's own implementations
    # differ by as much there.
    counted = {key: grad for key, grad in theirs.items() if float(grad.abs().max()) > 1e-4 * top}
    return max(_relative(found[key], grad) for key, grad in counted.items())


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """By the names that parameters had before any were stacked."""
    found = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
    for path, module in model.named_modules():
        for part in module.moe_ops_parts if isinstance(module, StackedExperts) else ():
            grad = part.of(found[f"{path}.{part.parameter}"])
            found[f"{path}.{part.name}"] = grad.flatten(0, 1) if grad.dim() == 3 else grad
    return found
