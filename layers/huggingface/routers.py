"""Routers of transformers' models, on `moe_ops.topk_routing`.

A router is known by its code: families whose router runs the same bytecode as one of the reference classes
below route alike, whatever they are called, and a class that a newer transformers changed is left alone
rather than guessed. All of them return (router_logits[T, E], weights[T, K], ids[T, K]), in that order.
"""

from functools import cache
from inspect import unwrap
from types import CodeType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ops import RoutingConfig, topk_routing

RouterOutput = tuple[Tensor, Tensor, Tensor]


class RouterKind(Protocol):
    """How one kind of router is rebuilt on our operators; `self` is the transformers module, not the kind."""

    @staticmethod
    def routing(router: Any) -> RoutingConfig:
        """The router's options, read off its attributes once."""
        ...

    def forward(self: Any, hidden_states: Tensor) -> RouterOutput:
        """The forward the router gets."""
        ...


def known_kind(router: nn.Module) -> type[RouterKind] | None:
    """How to replace this router, or None when its code is not one we know."""
    return _kinds().get(_code(type(router)))


def install(router: Any, kind: type[RouterKind]) -> None:
    """Replaces the forward of this one module; its weights, hooks and class stay.

    A bound method, because Dynamo then gives identical layers one graph. Unpickled, it resolves to the class's
    own forward: a pickled model comes back with stock routers, to be patched again.
    """
    router.moe_ops_routing = kind.routing(router)
    router.forward = MethodType(kind.forward, router)


def is_installed(router: nn.Module) -> bool:
    """Whether the forward of this module is ours."""
    return _own_forward(router) in {kind.forward for kind in _kinds().values()}


def is_replaced(router: nn.Module) -> bool:
    """Whether somebody (a hook of accelerate, say) gave this module a forward that its class does not have."""
    return _own_forward(router) not in (None, type(router).forward)


def _own_forward(router: nn.Module) -> object:
    forward = vars(router).get("forward")
    return getattr(forward, "__func__", forward)


class _Softmax:
    """Softmax over all experts, then the best K (Mixtral, Qwen, OLMoE)."""

    @staticmethod
    def routing(router: Any) -> RoutingConfig:
        return RoutingConfig(top_k=router.top_k, renormalize=getattr(router, "norm_topk_prob", True))

    def forward(self: Any, hidden_states: Tensor) -> RouterOutput:
        router_logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)  # [T, E]
        weights, ids = topk_routing(router_logits, self.moe_ops_routing)
        return router_logits, weights, ids


class _TopkSoftmax:
    """The best K logits, then softmax over those; the gate has a bias (gpt-oss)."""

    @staticmethod
    def routing(router: Any) -> RoutingConfig:
        # A softmax over the chosen logits sums to one already.
        return RoutingConfig(top_k=router.top_k, order="topk_then_score", renormalize=False)

    def forward(self: Any, hidden_states: Tensor) -> RouterOutput:
        router_logits = F.linear(hidden_states, self.weight, self.bias)  # [T, E]
        weights, ids = topk_routing(router_logits, self.moe_ops_routing)
        return router_logits, weights, ids


class _GroupedSigmoid:
    """Sigmoid scores plus a selection bias, group-limited, on float32 logits (DeepSeek-V3, GLM-4)."""

    @staticmethod
    def routing(router: Any) -> RoutingConfig:
        return RoutingConfig(
            top_k=router.top_k,
            score_fn="sigmoid",
            renormalize=router.norm_topk_prob,
            renorm_eps=1e-20 if router.norm_topk_prob else 0.0,
            num_groups=router.num_group,
            topk_groups=router.topk_group,
            group_score="top2_sum" if router.num_group > 1 else "max",
            scale=router.routed_scaling_factor,
        )

    def forward(self: Any, hidden_states: Tensor) -> RouterOutput:
        tokens = hidden_states.reshape(-1, self.hidden_dim).to(torch.float32)
        router_logits = F.linear(tokens, self.weight.to(torch.float32))  # [T, E]
        weights, ids = topk_routing(router_logits, self.moe_ops_routing, self.e_score_correction_bias)
        return router_logits, weights, ids


@cache
def _kinds() -> dict[tuple[object, ...], type[RouterKind]]:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

    return {
        _code(MixtralTopKRouter): _Softmax,
        _code(Qwen2MoeTopKRouter): _Softmax,
        _code(GptOssTopKRouter): _TopkSoftmax,
        _code(DeepseekV3TopkRouter): _GroupedSigmoid,
    }


def _code(router_class: type[nn.Module]) -> tuple[object, ...]:
    code: CodeType = unwrap(router_class.forward).__code__
    return code.co_code, code.co_names, code.co_consts
