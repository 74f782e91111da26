"""The routed experts as one module: logits in, hidden states out.

Letters: T tokens, H hidden size, E experts, K experts per token, I intermediate size.

Traced by a compiler the forward is a straight line of stage ops that passes can fuse across; eager, it is one
fused op. The module holds weights and nothing else: no streams, no names, no per-layer state in the graph, so
that identical layers share one compiled graph.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layers._checks import expect_features
from layers.attached import expect_attached
from layers.balancing import EplbState, ExpertBalancing, balancing_of_layer
from layers.config import ExpertsConfig, MoEConfig, RoutingEmit, emitted
from layers.expert_options import expect_none, expect_overlap, in_chunks, run_with_norm, scaled, zero_experts
from layers.expert_parameters import WHOLE_ON_RANKS, ExpertParameters, expect_movable, plain_parameters
from layers.lora import ExpertLora, run_with_lora
from layers.own_routing import route_by_function, route_by_override
from layers.quantised import products, run_quantised
from layers.routed_experts import RoutedExpertsCapture
from layers.router import RouterOutput
from layers.weights.shard import WHOLE, TensorShard
from moe_ops import RoutingConfig, topk_routing
from moe_ops._library import autocast
from moe_ops.activation import activation_spec
from moe_ops.arguments import (
    ExpertWeights,
    FusedExperts,
    FusedMoe,
    GroupedLinear,
    PairedLinear,
    Placement,
    Router,
    SharedExpert,
)
from moe_ops.combine import check_shared, combine
from moe_ops.fused_experts import expect_routed, run as run_experts, weigh_input
from moe_ops.fused_moe import run as run_moe
from moe_ops.shared import run as run_with_shared


class FusedMoE(ExpertParameters):
    """Routes every token to K of E experts and adds up what they return.

    Args:
        config: sizes, routing and activation.
        expert_map: [E] integers for a layer that holds only some of the experts: the local index of every
            global expert (physical one, where experts have replicas), -1 for one that lives elsewhere and contributes
            nothing here. Placement is not a weight, so the buffer is not saved in the state dict. It keeps its values
            through every move and cast; a module that comes from the meta device gets back the map it was built with.
        shard: the part of every expert that this module holds; I below is then its share of
            `config.intermediate_size`, and outputs of all ranks add up to the layer's.
        device, dtype: of the parameters; `device="meta"` allocates nothing.

    Attributes:
        w13_weight: [E_local, 2I, H], gate rows first, or alternating when `config.activation.interleaved`
            ([E_local, I, H] for an ungated activation).
        w2_weight: [E_local, H, I]. H here is `config.experts.padded_size` or `latent_size` where there is one.
        w13_bias, w2_bias: [E_local, 2I] and [E_local, H], or None.
        expert_scale: [E] or None, post_norm_weight: [H] or None; ones after `reset_parameters`.
        e_score_correction_bias: [E] float32 buffer or None. It stays float32 when the module is cast:
            rounded to bfloat16 it would pick other experts.
        routing_override: None, or a module (hidden_states [T, H], router_logits [T, E]) -> (topk_weights, topk_ids)
            that routes instead: `RoutedExpertsReplay`, `HashRouting`, `SimulatedRouting`, or any other. Its weights
            are final, but for the scale of an output that is scaled and `expert_scale`.
        capture: None, or a `RoutedExpertsCapture`, which remembers the chosen experts.
        balancing: None, or the `ExpertBalancing` that `set_eplb_state` made.
        lora: None, or the `ExpertLora` whose adapters tokens may have; it runs between the stages, also where
            `config.emit` is "fused".
        quantisation: None, or how `quantise_experts` or `add_weight_scales` left the weights.
        parallel: None, or the `RankExperts` that a style of `layers.parallel` made; parameters are then DTensors.

    Raises:
        TypeError, ValueError: `config` is not a `MoEConfig`, `expert_map` does not describe `config.num_experts`
            experts, or `shard` does not divide `config.intermediate_size` or would cut what a norm needs whole.
    """

    def __init__(
        self,
        config: MoEConfig,
        expert_map: Tensor | None = None,
        *,
        shard: TensorShard = WHOLE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, expert_map, shard=shard, device=device, dtype=dtype)
        self.routing_override: nn.Module | None = None
        self.capture: RoutedExpertsCapture | None = None
        self.balancing: ExpertBalancing | None = None
        self.lora: ExpertLora | None = None
        self._routing = _routing(config)
        self._routes_first = _routes_first(config)
        self._routing_emit: RoutingEmit = "batch_invariant" if config.emit == "batch_invariant" else "auto"
        self._scale = config.routing.scale if config.router.scale_on == "output" else 1.0
        self._post_norm_eps = config.experts.post_norm_eps  # Dynamo reads no shared float in two checkpoints

    def __setattr__(self, name: str, value: Any) -> None:
        expect_attached(self, name, value)
        super().__setattr__(name, value)

    def set_eplb_state(
        self,
        moe_layer_idx: int,
        expert_load_view: Tensor,
        logical_to_physical_map: Tensor,
        logical_replica_count: Tensor,
        **options: Tensor | None,
    ) -> None:
        """From now on chooses replicas by these maps and records their load: row `moe_layer_idx` of each tensor.

        The layer keeps views: a new placement, written into the tensors, counts from the next forward on, in compiled
        code and captured graphs too. See `EplbState` for the tensors and `ExpertBalancing` for the options
        `num_real_tokens`, `is_recording` and `seed`, which layers may share.

        Raises:
            TypeError, ValueError: a tensor has other dtypes or sizes than this layer's, or the row does not exist.
        """
        state = EplbState(expert_load_view, logical_to_physical_map, logical_replica_count)
        sizes = self.config.num_experts, self.config.num_physical_experts
        self.balancing = balancing_of_layer(sizes, moe_layer_idx, state, **options)

    def get_expert_weights(self) -> list[Tensor]:
        """Tensors of the experts that are here, [E_local, -1] each, without copies: what moves when an expert does.

        Weights, biases, scales, then those of `lora`. Of a layer that `ExpertParallel` sharded, the local parts.

        Raises:
            TypeError, ValueError: a parameter is not contiguous, parametrised or pruned, or a DTensor of nobody's here.
        """
        parameters: dict[str, Tensor] = {**plain_parameters(self)}
        for name in WHOLE_ON_RANKS:
            parameters.pop(name, None)
        if self.lora is not None:
            parameters |= {f"lora.{name}": each for name, each in self.lora.named_parameters()}
        for name, parameter in parameters.items():
            if self.parallel is not None:
                parameters[name] = parameter = self.parallel.stored_part(parameter)
            expect_movable(name, parameter)
        return [parameter.detach().view(self.num_local_experts, -1) for parameter in parameters.values()]

    def route(self, router_logits: Tensor, hidden_states: Tensor | None = None) -> RouterOutput:
        """Scores the logits [..., E] and picks the experts of each of the T tokens; see `RouterOutput`.

        Args:
            hidden_states: [..., H], what a `routing_function` or a `routing_override` sees of the tokens; else they
                play no part.

        Raises:
            TypeError, ValueError: `router_logits` is not a floating point tensor [..., E], or there is a
                `routing_function` and no `hidden_states`.
        """
        logits = _rows("router_logits", router_logits, self.config.router_size)  # [T, E]
        function = self.config.router.routing_function
        if self.routing_override is not None:
            weights, ids = route_by_override(self.routing_override, self.config, logits, hidden_states)
        elif function is not None:
            weights, ids = route_by_function(function, self.config, logits, hidden_states)
        else:
            bias, emit = self.e_score_correction_bias, self._routing_emit
            weights, ids = topk_routing(logits, self._routing, bias, emit=emit)
        return self._scaled(RouterOutput(logits, weights, ids))

    def _scaled(self, routed: RouterOutput) -> RouterOutput:
        if self.expert_scale is None:
            return routed
        return routed._replace(topk_weights=scaled(routed.topk_weights, routed.topk_ids, self.expert_scale))

    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor | RouterOutput,
        shared: Tensor | SharedExpert | Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """The weighted sum of the chosen experts, plus `shared`.

        Args:
            hidden_states: [..., H] in the weights' dtype.
            router_logits: [..., E] with the same leading dimensions, any floating dtype; or what `route` made of
                them, when the caller wants to see or to change it.
            shared: [..., H], added to the routed output before it is rounded; or a shared expert that is to run beside
                these, from `SharedExperts.operand`; or, of a layer sharded over ranks, a function without arguments
                that computes [T, H] while tokens are on their way.

        Returns:
            [..., H] in the dtype of `hidden_states`.

        Raises:
            ValueError, TypeError: shapes or dtypes do not fit; the message names argument, value, expectation.
        """
        config, hidden_size = self.config, self.config.expert_hidden_size
        if config.emit == "batch_invariant":
            expect_none(self, "balancing", "lora", "parallel")
        if is_beside := isinstance(shared, SharedExpert):
            expect_overlap(self)
        tokens = _rows("hidden_states", hidden_states, hidden_size)  # [T, H]
        is_later = self.parallel is not None and callable(shared)
        addend: Any = shared
        if shared is not None and not is_beside and not is_later:
            addend = _rows("shared", addend, hidden_size)
        # Ranks exchange all tokens at once, as often as each other; what they get is then run in chunks.
        chunk_size = config.experts.chunk_size if self.parallel is None else None
        if isinstance(router_logits, RouterOutput):
            routed, ids = router_logits, self.places_of(router_logits.topk_ids)
        else:
            logits = _rows("router_logits", router_logits, config.router_size)
            if not self._is_routed_apart() and not isinstance(addend, SharedExpert):
                return in_chunks(self._run, chunk_size, tokens, logits, addend).reshape(hidden_states.shape)
            routed, ids = self._route_and_place(logits, tokens)
        adapter_ids = None if self.lora is None else self.lora.ids_of_tokens(tokens.shape[0])
        output = in_chunks(self._run_routed, chunk_size, tokens, routed, ids, addend, adapter_ids)
        return output.reshape(hidden_states.shape)

    def _is_routed_apart(self) -> bool:
        """Whether something looks at the chosen experts before they run, which the fused operator would hide."""
        if self._routes_first or self.routing_override is not None or self.quantisation is not None:
            return True
        return any(each is not None for each in (self.capture, self.balancing, self.lora, self.parallel))

    def _route_and_place(self, logits: Tensor, tokens: Tensor) -> tuple[RouterOutput, Tensor]:
        """How tokens are routed, and where the chosen experts are: in one operator, where routing is ours."""
        is_ours = self.routing_override is None and self.config.router.routing_function is None
        if self.balancing is None or not is_ours:
            routed = self.route(logits, tokens)
            return routed, self.places_of(routed.topk_ids)
        router = Router(logits, self.e_score_correction_bias, self._routing.spec)
        weights, topk_ids, ids = self.balancing.route(router)
        self._captured(topk_ids)
        return self._scaled(RouterOutput(logits, weights, topk_ids)), ids

    def places_of(self, topk_ids: Tensor) -> Tensor:
        """Physical experts for logical ones [T, K], by `balancing`; `capture` and its load are told of them."""
        self._captured(topk_ids)
        return topk_ids if self.balancing is None else self.balancing(topk_ids)

    def _captured(self, topk_ids: Tensor) -> None:
        if self.capture is not None:
            self.capture(topk_ids)

    def expert_weights(self) -> ExpertWeights:
        """Weights and biases of the experts."""
        return ExpertWeights(
            PairedLinear(self.w13_weight, self.w13_bias), GroupedLinear(self.w2_weight, self.w2_bias)
        )

    def _run(self, tokens: Tensor, router_logits: Tensor, shared: Tensor | None) -> Tensor:
        config = self.config
        router = Router(router_logits, self.e_score_correction_bias, config.routing.spec)
        placement, spec = Placement(self.expert_map), activation_spec(config.activation)
        args = FusedMoe(tokens, router, self.expert_weights(), placement, spec)
        return run_moe(args, shared, emitted(config.emit, config.save_for_backward))

    def _run_routed(
        self,
        tokens: Tensor,
        routed: RouterOutput,
        ids: Tensor,
        shared: Tensor | SharedExpert | Callable[[], Tensor] | None,
        adapter_ids: Tensor | None = None,
    ) -> Tensor:
        config, weights = self.config, routed.topk_weights
        placement, spec = Placement(self.expert_map), activation_spec(config.activation)
        beside, shared = (None, shared) if isinstance(shared, Tensor) else (shared, None)
        args = FusedExperts(tokens, self.expert_weights(), weights, ids, placement, shared, spec)
        args = weigh_input(args) if config.router.weight_on == "input" else args
        if isinstance(beside, SharedExpert):
            output = run_with_shared(args, beside)
        elif self.parallel is not None:
            extras = () if adapter_ids is None else (adapter_ids,)
            output = self.parallel.run(args, self.num_local_experts, self._run_received, beside, extras)
        else:
            output = self._run_here(args, adapter_ids)
        if config.experts.num_zero_experts and (self.parallel is not None or self.is_first_part):
            added = output + zero_experts(tokens, routed, config.num_experts)
            output = added.to(output.dtype)  # autocast's, whatever tokens are in
        return output

    def _run_received(self, args: FusedExperts, adapter_ids: Tensor | None = None) -> Tensor:
        """What this rank has to do for tokens of all."""

        def run(tokens: Tensor, weights: Tensor, ids: Tensor, adapters: Tensor | None) -> Tensor:
            each = args._replace(hidden_states=tokens, topk_weights=weights, topk_ids=ids)
            return self._run_here(each, adapters)

        routed = args.hidden_states, args.topk_weights, args.topk_ids
        return in_chunks(run, self.config.experts.chunk_size, *routed, adapter_ids)

    def _run_here(self, args: FusedExperts, adapter_ids: Tensor | None) -> Tensor:
        if self.config.experts.padded_size is None and self._scale == 1.0:
            return self._run_experts(args, adapter_ids)
        return self._run_before_shared(args, adapter_ids)

    def _run_before_shared(self, args: FusedExperts, adapter_ids: Tensor | None) -> Tensor:
        """With what comes between the routed sum and the shared output."""
        (x, shared), padded = autocast((args.hidden_states, args.shared)), self.config.experts.padded_size
        check_shared(shared, x.shape[0], x.shape[1], "hidden_states", x)
        widened = x if padded is None else F.pad(x, (0, padded - x.shape[1]))
        output = self._run_experts(args._replace(hidden_states=widened, shared=None), adapter_ids)
        output = output[:, : x.shape[1]] * self._scale
        return output if shared is None else output + shared

    def _run_experts(self, args: FusedExperts, adapter_ids: Tensor | None = None) -> Tensor:
        config = self.config
        if self.lora is not None and adapter_ids is not None:
            return self._run_adapted(args, self.lora, adapter_ids)
        if self.quantisation is not None:
            return run_quantised(self, args)
        if self.post_norm_weight is not None and self._post_norm_eps is not None:
            return run_with_norm(args, self.post_norm_weight, self._post_norm_eps)
        return run_experts(args, emitted(config.emit, config.save_for_backward))

    def _run_adapted(self, args: FusedExperts, lora: ExpertLora, adapter_ids: Tensor) -> Tensor:
        expect_routed(args)
        rows, plan = run_with_lora(args, lora, adapter_ids, products(self, args.experts))
        eps = self._post_norm_eps
        if self.post_norm_weight is not None and eps is not None:
            rows = F.rms_norm(rows, self.post_norm_weight.shape, self.post_norm_weight, eps)
        rows, shared = autocast((rows, args.shared))  # as the products did
        return combine(rows, args.topk_weights, plan.inverse, shared)


def _routing(config: MoEConfig) -> RoutingConfig:
    """How logits become weights, without what is multiplied elsewhere."""
    return replace(config.routing, scale=1.0) if config.router.scale_on == "output" else config.routing


def _routes_first(config: MoEConfig) -> bool:
    """Whether routing is a step of its own, because `fused_moe` has no place for what comes after it."""
    router, options = config.router, config.experts
    return (
        config.num_redundant_experts > 0
        or router.weight_on == "input"
        or router.scale_on == "output"
        or router.has_expert_scale
        or router.routing_function is not None
        or options != ExpertsConfig(latent_size=options.latent_size, chunk_size=options.chunk_size)
    )


def _rows(name: str, tensor: Tensor, features: int) -> Tensor:
    """`tensor` [..., features] as [T, features]."""
    expect_features(name, tensor, features)
    return tensor.reshape(-1, tensor.shape[-1])
