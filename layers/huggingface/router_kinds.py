"""Routers that compute more than a product and a `RoutingConfig`, each around the part that `topk_routing` does.

They are told by the attributes that they read, and tried like all others: what does not give what the module's own
code gives is not used.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layers.huggingface import linear_router, trial
from layers.huggingface.routers import Known, for_experts
from layers.router import linear_in
from moe_ops import RoutingConfig, routing_weights, topk_routing

_ROWS = 100


class RouterKind:
    """A way to route."""

    forward: Callable[..., Any]
    """The forward that such routers get: its `self` is the module, not the kind."""

    reads: tuple[str, ...]
    """Attributes that tell it."""
    is_for_training = True
    """Whether it does in training what it does in evaluation."""

    @staticmethod
    def routings(router: Any) -> Iterator[RoutingConfig]:
        """Options that such a router may have."""
        raise NotImplementedError

    @staticmethod
    def arguments(twin: Any, rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """What a forward takes beside the hidden states [T, H] of a trial."""
        return ()


def known(router: nn.Module) -> Known | None:
    """How this router is rebuilt, or None."""
    for kind in (_Scaled, _Hashed, _Joint, _Skipping, _SparseMixer):
        if all(hasattr(router, name) for name in kind.reads):
            return _known(router, kind)
    return None


def _known(router: nn.Module, kind: type[RouterKind]) -> Known | None:
    generator = torch.Generator().manual_seed(0)
    twin = trial.skeleton(router, trial.random_like(generator)).eval()
    hidden_size = next((each.shape[1] for each in twin.parameters() if each.dim() == 2), None)
    if hidden_size is None:  # quantised, its weights are no parameters
        return None
    tokens = torch.randn(_ROWS, hidden_size, generator=generator, dtype=torch.float64)
    tokens = tokens * torch.logspace(-2, 1, _ROWS, dtype=torch.float64)[:, None]
    tried = linear_router.attempt(twin, tokens, *kind.arguments(twin, _ROWS, generator))
    if tried is None:
        return None
    everywhere = torch.ones(_ROWS, dtype=torch.bool)
    for routing in kind.routings(router):
        found = Known(kind.forward, routing, None)
        if linear_router.agrees(found, tried, everywhere):
            is_alike = not kind.is_for_training or linear_router.trains_alike(tried, everywhere)
            return found if is_alike else None
    return None


class _Scaled(RouterKind):
    """Gemma 4: a norm in front, and a scale for each expert behind. What it returns for logits are probabilities."""

    reads = ("per_expert_scale", "scalar_root_size")

    @staticmethod
    def routings(router: Any) -> Iterator[RoutingConfig]:
        yield RoutingConfig(router.config.top_k_experts)

    def forward(self: Any, hidden_states: Tensor) -> Any:
        if self.config.top_k_experts != self.moe_ops_routing.top_k:  # set since
            return type(self).forward(self, hidden_states)
        scores = self.proj(self.norm(hidden_states) * self.scale * self.scalar_root_size)
        weights, ids = topk_routing(scores, self.moe_ops_routing)
        weights = weights * self.per_expert_scale[ids]
        return F.softmax(scores, dim=-1, dtype=torch.float32), weights, for_experts(self, ids)


class _Hashed(RouterKind):
    """DeepSeek-V4's first layers: a table says who is chosen, logits say how much each counts."""

    reads = ("tid2eid", "routed_scaling_factor")

    @staticmethod
    def routings(router: Any) -> Iterator[RoutingConfig]:
        scale = router.routed_scaling_factor
        for score_fn in ("softmax", "sigmoid", "sqrtsoftplus"):
            yield RoutingConfig(router.top_k, score_fn, renorm_eps=1e-20, scale=scale)

    @staticmethod
    def arguments(twin: Any, rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        num_tokens, top_k = twin.tid2eid.shape
        chosen = torch.rand(num_tokens, twin.num_experts, generator=generator).argsort(-1)
        twin.tid2eid = chosen[:, :top_k]
        return (torch.randint(0, num_tokens, (rows,), generator=generator),)

    def forward(self: Any, hidden_states: Tensor, input_ids: Tensor) -> Any:
        router_logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        ids = self.tid2eid[input_ids.reshape(-1)].int()
        return (
            router_logits,
            routing_weights(router_logits, ids, self.moe_ops_routing),
            for_experts(self, ids),
        )


class _Joint(RouterKind):
    """Inkling: the weights of routed and shared experts have one sum."""

    reads = ("n_shared_experts", "global_scale")

    @staticmethod
    def routings(router: Any) -> Iterator[RoutingConfig]:
        yield RoutingConfig(router.top_k, "sigmoid", renormalize=False)

    def forward(self: Any, hidden_states: Tensor) -> Any:
        logits = linear_in(torch.float32, hidden_states.reshape(-1, self.hidden_dim), self.weight)
        routed, shared = logits.split([self.num_experts, self.n_shared_experts], -1)
        _, ids = topk_routing(routed, self.moe_ops_routing, self.e_score_correction_bias)
        together = torch.cat([routed.gather(1, ids.long()), shared], 1)
        weights = F.logsigmoid(together).softmax(-1) * self.route_scale * self.global_scale.float()
        gammas = weights[:, self.top_k :].to(hidden_states.dtype)
        return routed, weights[:, : self.top_k], for_experts(self, ids), gammas


class _Skipping(RouterKind):
    """ZAYA: a network instead of a product, a state from layer to layer, and an expert that does nothing."""

    reads = ("router_mlp", "balancing_biases")

    @staticmethod
    def routings(router: Any) -> Iterator[RoutingConfig]:
        yield RoutingConfig(router.top_k, renormalize=False)

    @staticmethod
    def arguments(twin: Any, rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        size = twin.router_hidden_size
        # Logits decide, and often for the expert that does nothing.
        twin.balancing_biases.data.div_(100)
        twin.balancing_biases.data[-1] = 0.5
        return (torch.randn(2, rows // 2, size, generator=generator, dtype=torch.float64),)

    def forward(self: Any, hidden_states: Tensor, router_states: Tensor | None = None) -> Any:
        states = self.down_proj(hidden_states)
        if self.use_eda and router_states is not None:
            states = states + router_states * self.router_states_scale
        router_logits = self.router_mlp(states).flatten(0, 1)
        weights, ids = topk_routing(router_logits, self.moe_ops_routing, self.balancing_biases)
        is_skipped = ids == self.num_experts
        weights, ids = weights.masked_fill(is_skipped, 0), ids.masked_fill(is_skipped, 0)
        return router_logits, weights, for_experts(self, ids), states.clone()


class _SparseMixer(RouterKind):
    """Phi-MoE: each weight is a softmax over the logits near the one chosen. In training its own code samples."""

    reads = ("router_jitter_noise", "input_jitter_noise")
    is_for_training = False

    @staticmethod
    def routings(router: Any) -> Iterator[RoutingConfig]:
        yield RoutingConfig(router.top_k)

    def forward(self: Any, hidden_states: Tensor) -> Any:
        if self.training:
            return type(self).forward(self, hidden_states)
        router_logits = F.linear(hidden_states, self.weight)
        _, ids = topk_routing(router_logits, self.moe_ops_routing)
        best, second = router_logits.gather(-1, ids.long()).unsqueeze(-2).unbind(-1)
        without_best = router_logits.scatter(-1, ids[:, :1].long(), float("-inf"))
        limit = 2 * self.router_jitter_noise
        weights = [
            _softmax_near(router_logits, router_logits, best, limit),
            _softmax_near(router_logits, without_best, second, limit),
        ]
        return router_logits, torch.cat(weights, -1), for_experts(self, ids)


def _softmax_near(logits: Tensor, left: Tensor, chosen: Tensor, limit: float) -> Tensor:
    """[T, 1]: the softmax of the chosen among those left that are not further from it than `limit`, relatively."""
    is_far = (chosen - logits).detach() / torch.maximum(logits.abs(), chosen).detach() > limit
    return 1 / (left - chosen).masked_fill(is_far, float("-inf")).exp().sum(-1, keepdim=True)
