"""Named problems shared by the tests: small, odd and adversarial."""

from dataclasses import dataclass, field

import torch

from moe_ops import Activation, RoutingConfig


@dataclass(frozen=True)
class Case:
    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: Activation = field(default_factory=Activation)
    bias: bool = False
    hot: int | None = None

    @property
    def name(self):
        extra = ("-bias" if self.bias else "") + ("" if self.hot is None else "-hot")
        return f"T{self.tokens}-E{self.experts}-K{self.top_k}-{self.activation.spec}{extra}"


CASES = [
    Case(0, 4, 2, 8, 6),
    Case(1, 13, 3, 8, 6),
    Case(7, 13, 3, 9, 5, bias=True),
    Case(33, 8, 2, 16, 12, Activation("gelu")),
    Case(33, 13, 1, 8, 6, Activation("gelu_tanh")),
    Case(7, 4, 4, 8, 6, Activation("relu2"), bias=True),
    Case(33, 16, 4, 12, 10, Activation("swiglu_oai", interleaved=True), bias=True),
    Case(20, 8, 2, 8, 6, Activation("silu", limit=0.5), hot=3),
    Case(3, 8, 2, 8, 6, bias=True),
    Case(7, 5, 2, 8, 6, Activation("swiglustep", limit=0.5), bias=True),
    Case(7, 5, 2, 9, 5, Activation("situ", beta=1.5, linear_beta=2.0), bias=True),
    Case(33, 8, 2, 8, 6, Activation("gelu_no_mul")),
]

# Beside silu, gelu, gelu_tanh, relu2 and swiglu_oai with their defaults.
MORE_ACTIVATIONS = [
    Activation("swiglu_oai", beta=0.5),
    Activation("swiglustep", limit=0.6),
    Activation("swiglustep", interleaved=True),
    Activation("situ", beta=1.5),
    Activation("situ", beta=4.0, linear_beta=0.8, interleaved=True),
    Activation("silu_no_mul"),
    Activation("gelu_no_mul"),
    Activation("gelu_tanh_no_mul"),
]

ROUTINGS = [
    RoutingConfig(top_k=2),
    RoutingConfig(top_k=3, renormalize=False),
    RoutingConfig(top_k=3, renorm_eps=0.25),
    RoutingConfig(top_k=3, score_fn="sigmoid", scale=2.5),
    RoutingConfig(top_k=2, order="topk_then_score"),
    RoutingConfig(top_k=2, order="topk_then_score", renormalize=False),
    RoutingConfig(top_k=2, score_fn="sigmoid", order="topk_then_score", scale=0.5),
    RoutingConfig(top_k=3, score_fn="sqrtsoftplus", scale=1.5),
    RoutingConfig(top_k=2, score_fn="sqrtsoftplus", order="topk_then_score", renormalize=False),
    RoutingConfig(top_k=3, num_groups=4, topk_groups=2),
    RoutingConfig(
        top_k=4,
        score_fn="sigmoid",
        num_groups=4,
        topk_groups=2,
        group_score="top2_sum",
        renorm_eps=1e-20,
        scale=2.5,
    ),
    RoutingConfig(4, "sqrtsoftplus", num_groups=4, topk_groups=2, group_score="top2_sum", group_fill=0.0),
]


@dataclass
class Problem:
    hidden_states: torch.Tensor
    router_logits: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    routing: RoutingConfig
    activation: Activation

    def tensors(self):
        biases = [] if self.w13_bias is None else [self.w13_bias, self.w2_bias]
        return [self.hidden_states, self.router_logits, self.w13, self.w2, *biases]

    def args(self):
        return self.hidden_states, self.router_logits, self.w13, self.w2, self.routing, self.activation

    def biases(self):
        return {"w13_bias": self.w13_bias, "w2_bias": self.w2_bias}


def make(case: Case, dtype=torch.float64, requires_grad=False, device="cpu") -> Problem:
    rows = (2 if case.activation.is_gated else 1) * case.intermediate
    logits = torch.randn(case.tokens, case.experts)
    if case.hot is not None:
        logits[:, case.hot] += 20
    shapes = [(case.experts, rows, case.hidden), (case.experts, case.hidden, case.intermediate)]
    w13, w2 = (torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes)
    biases = (
        [torch.randn(case.experts, rows), torch.randn(case.experts, case.hidden)]
        if case.bias
        else [None, None]
    )
    tensors = [torch.randn(case.tokens, case.hidden), logits, w13, w2, *biases]
    placed = [t if t is None else t.to(device, dtype).requires_grad_(requires_grad) for t in tensors]
    return Problem(*placed, RoutingConfig(top_k=case.top_k), case.activation)
