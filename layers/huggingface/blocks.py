"""Blocks outside transformers' experts interface that route or weigh in their own way, a kind each.

What a block computes is tried on a twin of small sizes, in float64, with its gradient, and compared with what its own
code computes: where the two differ it is left as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from layers._compat import has_global_hooks
from layers.config import Emit, SaveForBackward, emitted
from layers.huggingface import forwards, gates, trial
from layers.huggingface.outside import (
    TOKENS,
    are_close,
    other_batches,
    run,
    tokens_of_all_sizes,
    twin_of,
)
from layers.huggingface.settled import Settings, has_changed, is_watched, settings_of
from moe_ops import (
    RoutingConfig,
    build_dispatch,
    combine,
    gated_activation,
    grouped_gemm,
    permute,
    topk_routing,
)
from moe_ops.arguments import ExpertWeights, FusedExperts, GroupedLinear, PairedLinear, Placement
from moe_ops.fused_experts import run as run_experts


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """What `patch` settles for a block, as its attribute `moe_ops_block`."""

    kind: "type[BlockKind]"
    settings: Settings
    routing: RoutingConfig
    activation: str
    emit: Emit
    save_for_backward: SaveForBackward


class BlockKind:
    """A block that routes or weighs in its own way."""

    reads: tuple[str, ...]
    """Attributes that tell it, beside the router's."""
    inside: tuple[str, ...]
    """Modules inside that `forward` does not call."""
    forward: Callable[..., Any]
    """What runs in place of such blocks' own code: its `self` is the block, not the kind."""
    router_forward: Callable[..., Any] | None = None
    """That of their router, where it has to be another."""

    def own(self: Any, hidden_states: Tensor) -> Any:
        """What runs when something inside has changed: it calls every module."""
        return type(self).forward(self, hidden_states)

    @staticmethod
    def act(block: Any) -> Any:
        """What is applied to gate columns."""
        raise NotImplementedError

    @staticmethod
    def num_experts(block: Any) -> int:
        """E."""
        raise NotImplementedError

    @staticmethod
    def routing(block: Any) -> RoutingConfig:
        """How it routes."""
        raise NotImplementedError


class Llama4(BlockKind):
    """Weights are applied to what goes into an expert; its own code runs every expert on every token."""

    reads = ("experts.gate_up_proj", "experts.act_fn", "shared_expert", "top_k")
    inside = ("experts", "experts.act_fn")

    @staticmethod
    def act(block: Any) -> Any:
        return block.experts.act_fn

    @staticmethod
    def num_experts(block: Any) -> int:
        return block.experts.down_proj.shape[0]

    @staticmethod
    def routing(block: Any) -> RoutingConfig:
        return RoutingConfig(block.top_k, "sigmoid", "topk_then_score", renormalize=False)

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if not hasattr(self.router, "top_k"):  # PEFT's wrapper is there by now
            return type(self).forward(self, hidden_states)
        tokens = hidden_states.reshape(-1, self.hidden_dim)
        scores, router_logits = self.router(tokens)
        routing = self.moe_ops_block.routing
        if is_watched(self.router) or self.router.top_k != routing.top_k:
            weights, ids = scores.topk(
                self.router.top_k
            )  # what a hook left of them; zero where nobody was chosen
        else:
            weights, ids = topk_routing(router_logits, routing)
        rows = (tokens.unsqueeze(1) * weights.to(tokens.dtype).unsqueeze(2)).flatten(0, 1)  # [T * K, H]
        w13, w2 = self.experts.gate_up_proj.transpose(1, 2), self.experts.down_proj.transpose(1, 2)
        routed = _run_block(self, rows, w13, w2, torch.ones_like(weights).view(-1, 1), ids.view(-1, 1))
        shared = self.shared_expert(tokens)
        return shared + routed.view(*ids.shape, self.hidden_dim).sum(1), router_logits


class JetMoe(BlockKind):
    """One bias for the output of all; its own code brings the experts' loads to the host."""

    reads = ("input_linear.weight", "output_linear.weight", "activation", "bias", "router.layer")
    inside = ("input_linear", "output_linear", "activation")

    @staticmethod
    def act(block: Any) -> Any:
        return block.activation

    @staticmethod
    def num_experts(block: Any) -> int:
        return block.input_linear.weight.shape[0]

    @staticmethod
    def routing(block: Any) -> RoutingConfig:
        return RoutingConfig(block.router.top_k, order="topk_then_score", renormalize=False)

    def router_forward(self: Any, hidden_states: Tensor) -> Any:  # type: ignore[override]
        logits = self.layer(hidden_states).float()
        if self.top_k == self.moe_ops_routing.top_k:
            weights, ids = topk_routing(logits, self.moe_ops_routing)
        else:  # set since
            chosen, ids = logits.topk(self.top_k)
            weights = chosen.softmax(-1)
        return ids, None, weights, None, logits

    router_forward.__name__ = "forward"  # by which a copy in another process finds the router's own

    def forward(self: Any, layer_input: Tensor) -> Tensor:
        tokens = layer_input.reshape(-1, layer_input.shape[-1])
        ids, _, weights, _, _ = self.router(tokens)
        output = _run_block(self, tokens, self.input_linear.weight, self.output_linear.weight, weights, ids)
        return output.view(layer_input.shape) + self.bias

    def own(self: Any, layer_input: Tensor) -> Tensor:  # type: ignore[override]
        """Its own forward would need its router's own."""
        tokens = layer_input.reshape(-1, layer_input.shape[-1])
        ids, _, weights, _, _ = self.router(tokens)
        plan = build_dispatch(ids, self.input_linear.weight.shape[0])
        counts = plan.expert_offsets.diff().tolist()
        gate, up = self.input_linear(permute(tokens, plan.sorted_slots), counts).chunk(2, -1)
        rows = self.output_linear(self.activation(gate) * up, counts)
        return combine(rows, weights, plan.inverse).view(layer_input.shape) + self.bias


class Dbrx(BlockKind):
    """Gate and up projections are two tensors, experts stacked along their rows: two products for one."""

    reads = ("experts.mlp.w1", "experts.mlp.v1", "experts.mlp.w2", "experts.num_experts", "top_k")
    inside = ("experts", "experts.mlp", "experts.mlp.activation_fn")

    @staticmethod
    def act(block: Any) -> Any:
        return block.experts.mlp.activation_fn

    @staticmethod
    def num_experts(block: Any) -> int:
        return block.experts.num_experts

    @staticmethod
    def routing(block: Any) -> RoutingConfig:
        return RoutingConfig(block.top_k, renormalize=block.moe_normalize_expert_weights is not None)

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        options: BlockOptions = self.moe_ops_block
        router_logits = self.router(hidden_states)
        weights, ids = topk_routing(router_logits, options.routing)
        tokens, num_experts = hidden_states.reshape(-1, hidden_states.shape[-1]), self.experts.num_experts
        mlp = self.experts.mlp
        w1, v1, w2 = (each.unflatten(0, (num_experts, -1)) for each in (mlp.w1, mlp.v1, mlp.w2))
        plan = build_dispatch(ids, num_experts)
        rows = permute(tokens, plan.sorted_slots)
        halves = [grouped_gemm(rows, weight, plan.expert_offsets) for weight in (w1, v1)]
        activated = gated_activation(torch.cat(halves, 1), options.activation)
        output = grouped_gemm(activated, w2.transpose(1, 2), plan.expert_offsets)
        return combine(output, weights, plan.inverse).view(hidden_states.shape)


def _run_block(block: Any, tokens: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The weighted sum over experts [E, 2I, H] and [E, H, I]."""
    options: BlockOptions = block.moe_ops_block
    experts = ExpertWeights(PairedLinear(w13, None), GroupedLinear(w2, None))
    args = FusedExperts(tokens, experts, weights, ids, Placement(None), None, options.activation)
    return run_experts(args, emitted(options.emit, options.save_for_backward))


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """How a block is rebuilt, and what it computes."""

    kind: type[BlockKind]
    routing: RoutingConfig
    activation: str


def known_block(block: Any) -> FoundBlock | None:
    """How this block is rebuilt, or None where no kind gives what its own code does."""
    for kind in (Llama4, JetMoe, Dbrx):
        if all(_has(block, name) for name in (*kind.reads, "router")):
            return _tried_block(block, kind)
    return None


def _has(module: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True


def _tried_block(block: Any, kind: type[BlockKind]) -> FoundBlock | None:
    activation = gates.of_function(kind.act(block))
    if activation is None:
        return None
    found = FoundBlock(kind, kind.routing(block), activation.spec)
    with trial.trial_mode():
        twin, generator = twin_of(block, kind.num_experts(block))
        sizes = (each.shape[1] for name, each in twin.named_parameters() if name.startswith("router"))
        if (hidden_size := next(sizes, None)) is None:  # quantised, its weight is no parameter
            return None
        tokens = tokens_of_all_sizes(generator, 10, 3, TOKENS // 3, hidden_size)
        inputs = list(product((False, True), (tokens, *other_batches(tokens))))
        own = [run(type(twin).forward, twin.train(mode), each) for mode, each in inputs]
        install(twin, found, "auto", "auto")
        ours = (run(kind.forward, twin.train(mode), each) for mode, each in inputs)
        return found if all(map(are_close, own, ours)) else None


def install(block: Any, found: FoundBlock, emit: Emit, save_for_backward: SaveForBackward) -> None:
    """Replaces the forward of this one block, and of its router."""
    settings = settings_of(block, *found.kind.inside)
    options = found.kind, settings, found.routing, found.activation
    block.moe_ops_block = BlockOptions(*options, emit, save_for_backward)
    forwards.replace(block, forward)
    if found.kind.router_forward is not None:
        block.router.moe_ops_routing = found.routing
        forwards.replace(block.router, found.kind.router_forward)


def forward(self: Any, hidden_states: Tensor) -> Any:
    """The forward of patched blocks."""
    how: BlockOptions = self.moe_ops_block
    is_own = has_global_hooks() or has_changed(self, how.settings)
    return (how.kind.own if is_own else how.kind.forward)(self, hidden_states)


def uninstall(block: Any) -> None:
    """Undoes `install`; other modules are left as they are."""
    if vars(block).pop("moe_ops_block", None) is None:
        return
    forwards.restore(block)
    if vars(block.router).pop("moe_ops_routing", None) is not None:
        forwards.restore(block.router)
