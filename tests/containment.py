"""What is not finite stays where it is: the same layer clean and spoilt, and which rows must not differ in a bit.

Group sizes are kept alike, since bits may depend on them: where logits are spoilt, clean ones choose the same experts.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import moe_ops
from moe_ops import RoutingConfig

STRANGE = (float("nan"), float("inf"), float("-inf"))


@dataclass(frozen=True)
class Layer:
    """T tokens, their logits and the experts; ids follow from the logits."""

    hidden_states: Tensor
    router_logits: Tensor
    w13: Tensor
    w2: Tensor
    w13_bias: Tensor
    w2_bias: Tensor
    shared: Tensor
    routing: RoutingConfig

    def tensors(self) -> dict[str, Tensor]:
        """By name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def ids(self) -> Tensor:
        """[T, K]: the chosen experts."""
        return moe_ops.topk_routing(self.router_logits, self.routing)[1].long()

    def run(self, emit: str) -> dict[str, Tensor]:
        """The output, and the gradient of every tensor."""
        tensors = {name: tensor.detach().requires_grad_() for name, tensor in self.tensors().items()}
        out = moe_ops.fused_moe(**tensors, routing=self.routing, emit=emit)
        grad = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
        found = torch.autograd.grad(out, list(tensors.values()), grad)
        return {"output": out.detach(), **dict(zip(tensors, found, strict=True))}


def made(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, score_fn: str = "softmax"
) -> Layer:
    """A layer of (tokens, experts, top_k, hidden, intermediate)."""
    tokens, experts, top_k, hidden, inner = sizes
    shapes = (
        (tokens, hidden), (tokens, experts), (experts, 2 * inner, hidden), (experts, hidden, inner),
        (experts, 2 * inner), (experts, hidden), (tokens, hidden),
    )  # fmt: skip
    x, logits, *rest = (torch.randn(shape).to(device) for shape in shapes)
    routing = RoutingConfig(top_k, score_fn)  # type: ignore[arg-type]
    return Layer(x.to(dtype), logits, *(each.to(dtype) for each in rest), routing)


PER_TOKEN = ("output", "hidden_states", "router_logits", "shared")
PER_EXPERT = ("w13", "w2", "w13_bias", "w2_bias")


def spoilt_tokens(layer: Layer, value: float) -> tuple[Layer, Tensor, Tensor]:
    """Up to nine tokens hold `value` somewhere; the tokens and experts that it must not reach."""
    tokens = len(layer.hidden_states)
    is_bad = torch.arange(tokens, device=layer.hidden_states.device) % max(5, tokens // 8) == 2
    x = layer.hidden_states.clone()
    x[is_bad, x.shape[1] // 3] = value
    return replace(layer, hidden_states=x), ~is_bad, _untouched_experts(layer, is_bad)


def spoilt_logits(layer: Layer, value: float) -> tuple[Layer, Layer, Tensor, Tensor]:
    """The same for logits, and the clean layer, whose tokens choose the experts that the spoilt ones are given."""
    is_bad = torch.arange(len(layer.router_logits), device=layer.router_logits.device) % 5 == 2
    logits = layer.router_logits.clone()
    logits[is_bad] = value
    spoilt = replace(layer, router_logits=logits)
    clean = layer.router_logits.clone()
    wanted = torch.linspace(3, 1, layer.routing.top_k, device=logits.device).expand(int(is_bad.sum()), -1)
    clean[is_bad] = torch.zeros_like(clean[is_bad]).scatter(1, spoilt.ids()[is_bad], wanted)
    alike = replace(layer, router_logits=clean)
    return alike, spoilt, ~is_bad, _untouched_experts(alike, is_bad)


def spoilt_expert(layer: Layer, value: float) -> tuple[Layer, Tensor, Tensor]:
    """The weights of the expert of the first token hold `value`."""
    expert = int(layer.ids()[0, 0])
    changed = {}
    for name in PER_EXPERT:
        changed[name] = getattr(layer, name).clone()
        changed[name][expert].view(-1)[1::3] = value
    experts = torch.arange(len(layer.w13), device=layer.w13.device)
    return replace(layer, **changed), (layer.ids() != expert).all(1), experts != expert


def _untouched_experts(layer: Layer, is_bad: Tensor) -> Tensor:
    reached = layer.ids()[is_bad].unique()
    return ~torch.isin(torch.arange(len(layer.w13), device=reached.device), reached)


def assert_contained(
    clean: dict[str, Tensor], spoilt: dict[str, Tensor], tokens: Tensor, experts: Tensor
) -> None:
    """Equal bits of all rows of `tokens` and all experts of `experts`; what is spoilt shows somewhere else."""
    assert tokens.any() and not tokens.all() and experts.any() and not experts.all()
    for name, value in spoilt.items():
        rows = tokens if name in PER_TOKEN else experts
        assert torch.equal(value[rows], clean[name][rows]), f"{name}: a row changed that should not"
        assert value[rows].isfinite().all(), name
