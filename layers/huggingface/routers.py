"""Routers of transformers' models, on `moe_ops.topk_routing`.

A router is known by its code: families whose router runs the same bytecode as one of the reference classes
below route alike, whatever they are called, and a class that a newer transformers changed is left alone
rather than guessed. All of them return (router_logits[T, E], weights[T, K], ids[T, K]), in that order.

Logits that a family computes in float32 are float32 inside `torch.autocast` too, where its own code gets the
autocast dtype after all: rounded logits pick other experts than the model was trained to pick.
"""

from functools import cache
from inspect import unwrap
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layers.huggingface import forwards
from layers.huggingface.experts import NAME
from layers.router import linear_in
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


def install(router: Any, kind: type[RouterKind], routing: RoutingConfig, config: Any) -> None:
    """Replaces the forward of this one module. `config` is that of the experts behind it."""
    router.moe_ops_routing = routing
    router.moe_ops_config = config
    forwards.replace(router, kind.forward)


def uninstall(router: nn.Module) -> None:
    """Undoes `install`, also on a module that was copied or pickled since; others are left as they are."""
    if "moe_ops_routing" not in vars(router):
        return
    forwards.restore(router)
    del router.moe_ops_routing, router.moe_ops_config


def is_installed(router: nn.Module) -> bool:
    """Whether the forward of this module is ours."""
    return forwards.current(router) in {kind.forward for kind in _kinds().values()}


def _output(router: Any, router_logits: Tensor, weights: Tensor, ids: Tensor) -> RouterOutput:
    """Our experts take the ids as they are; transformers' own count on int64, as its routers return them."""
    is_ours = router.moe_ops_config._experts_implementation == NAME
    return router_logits, weights, ids if is_ours else ids.long()


class _Softmax:
    """Softmax over all experts, then the best K (Mixtral, Qwen, OLMoE)."""

    @staticmethod
    def routing(router: Any) -> RoutingConfig:
        return RoutingConfig(top_k=router.top_k, renormalize=getattr(router, "norm_topk_prob", True))

    def forward(self: Any, hidden_states: Tensor) -> RouterOutput:
        router_logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)  # [T, E]
        return _output(self, router_logits, *topk_routing(router_logits, self.moe_ops_routing))


class _TopkSoftmax:
    """The best K logits, then softmax over those; the gate has a bias (gpt-oss)."""

    @staticmethod
    def routing(router: Any) -> RoutingConfig:
        # A softmax over the chosen logits sums to one already.
        return RoutingConfig(top_k=router.top_k, order="topk_then_score", renormalize=False)

    def forward(self: Any, hidden_states: Tensor) -> RouterOutput:
        router_logits = F.linear(hidden_states, self.weight, self.bias)  # [T, E]
        return _output(self, router_logits, *topk_routing(router_logits, self.moe_ops_routing))


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
        tokens = hidden_states.reshape(-1, self.hidden_dim)
        router_logits = linear_in(torch.float32, tokens, self.weight)  # [T, E]
        chosen = topk_routing(router_logits, self.moe_ops_routing, self.e_score_correction_bias)
        return _output(self, router_logits, *chosen)


@cache
def _kinds() -> dict[tuple[object, ...] | None, type[RouterKind]]:
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


def _code(router_class: type[nn.Module]) -> tuple[object, ...] | None:
    code: CodeType | None = getattr(
        unwrap(router_class.forward), "__code__", None
    )  # a scripted forward has none
    return None if code is None else (code.co_code, code.co_names, code.co_consts)
