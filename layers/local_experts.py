"""Experts for a `ModularKernel`, one class for each format: the weights of a `FusedMoE` and its stages, no more.

Letters: T tokens, H hidden size, E experts held here, S routed slots, M rows set aside for an expert.
"""

from collections.abc import Set
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layers._checks import expect_features, expect_multiplied, expect_type, present
from layers.config import MoEConfig, emitted
from layers.expert_options import in_chunks
from layers.fused_moe import FusedMoE
from layers.lora import ExpertLora, run_with_lora
from layers.modular_parts import (
    ActivationFormat,
    ExpertOutput,
    Prepared,
    TopKWeightAndReduce,
    TopKWeightAndReduceDelegate,
)
from layers.quantised import products, quantised_rows, run_quantised
from layers.router import RouterOutput
from layers.weigh_and_reduce import TopKWeightAndReduceContiguous, TopKWeightAndReduceNoOp
from moe_ops import (
    batched_gemm,
    build_dispatch,
    combine,
    gated_activation,
    gather_gemm_act,
    grouped_gemm,
    permute,
)
from moe_ops.activation import activation_spec
from moe_ops.arguments import FusedExperts, Placement
from moe_ops.errors import value_error
from moe_ops.fused_experts import emits_stages

# What a config may say here besides its defaults. Whatever else changes what experts compute is refused by name.
_SIZES = {"num_experts", "top_k", "hidden_size", "intermediate_size"}
_LAYER = _SIZES | {
    "routing",
    "activation",
    "has_bias",
    "emit",
    "save_for_backward",
    "router",
    "shared_experts",
    "experts",
    "num_redundant_experts",
}
_ROUTER = {
    "has_bias",
    "has_correction_bias",
    "gate_dtype",
    "weight_on",
    "has_expert_scale",
    "routing_function",
}


class LocalExperts(nn.Module):
    """What both formats share: the weights, and who they are.

    Args:
        layer: its weights, its routing, `balancing` and `capture` are used, its forward is not.

    Raises:
        TypeError: `layer` is not a `FusedMoE`.
        ValueError: its config has an option that these experts do not know, or a style has sharded it.
    """

    known_options = frozenset({"latent_size", "padded_size"})
    """Fields of `ExpertsConfig` that these experts know."""

    def __init__(self, layer: FusedMoE) -> None:
        super().__init__()
        expect_type("layer", layer, FusedMoE)
        _expect_known("config", layer.config, _LAYER)
        _expect_known("config.router", layer.config.router, _ROUTER)
        _expect_known("config.experts", layer.config.experts, self.known_options)
        if layer.parallel is not None:
            raise ValueError(
                "layer is sharded by a style, which exchanges tokens: expected an expert_map or a shard"
            )
        if layer.config.emit == "batch_invariant":
            raise ValueError("config.emit='batch_invariant': expected another in a ModularKernel")
        self.layer = layer
        self._activation = activation_spec(layer.config.activation)

    @property
    def config(self) -> MoEConfig:
        """That of the layer."""
        return self.layer.config

    @property
    def num_experts(self) -> int:
        """E."""
        return self.layer.num_local_experts

    @property
    def expert_map(self) -> Tensor | None:
        """That of the layer."""
        return self.layer.expert_map

    @property
    def apply_router_weight_on_input(self) -> bool:
        """Whether the config says so."""
        return self.config.router.weight_on == "input"

    def expect_tokens(self, hidden_states: Tensor) -> None:
        """Raises TypeError or ValueError unless these are tokens for the layer, before a `ModularKernel` sends any."""
        expect_features("hidden_states", hidden_states, self.config.expert_hidden_size)
        expect_multiplied(hidden_states, self.layer.w13_weight)

    def extra_tensors(self, num_tokens: int) -> tuple[Tensor, ...]:
        """The adapter of each token, if the layer has any."""
        lora = self.layer.lora
        return () if lora is None else (lora.ids_of_tokens(num_tokens),)

    def route(self, router_logits: Tensor, hidden_states: Tensor | None = None) -> RouterOutput:
        """See `FusedMoE.route`."""
        return self.layer.route(router_logits, hidden_states)

    def places_of(self, topk_ids: Tensor) -> Tensor:
        """See `FusedMoE.places_of`."""
        return self.layer.places_of(topk_ids)

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        self.layer.reset_parameters()

    def forward(self, prepared: Prepared) -> ExpertOutput:
        """What the experts return for tokens in their format; rows of no token may hold anything.

        Raises:
            TypeError, ValueError: `prepared` does not hold floating point tokens in this format.
        """
        x, padded = prepared.hidden_states, self.config.experts.padded_size
        expect_features("hidden_states", x, self.config.expert_hidden_size)
        if padded is None:
            return self._run(prepared)
        output = self._run(prepared._replace(hidden_states=F.pad(x, (0, padded - x.shape[-1]))))
        return output._replace(rows=output.rows[..., : x.shape[-1]])

    def _run(self, prepared: Prepared) -> ExpertOutput:
        raise NotImplementedError


class StandardExperts(LocalExperts):
    """Experts that put tokens [T, H] in order themselves and return rows [S, H].

    A compiler sees the stages of the plain layer. Eager, the first product gathers its rows and gates its output.
    Where the layer has a `chunk_size` they run so many tokens at a time and return sums [T, H], so that no tensor has
    rows of more.

    Example:
        >>> kernel = ModularKernel(LocalPrepareAndFinalize(), StandardExperts(FusedMoE(config)))
    """

    activation_formats = (ActivationFormat.Standard, ActivationFormat.Standard)
    weigh_and_reduce: TopKWeightAndReduce = TopKWeightAndReduceContiguous()
    known_options = LocalExperts.known_options | {"chunk_size"}

    def __init__(self, layer: FusedMoE) -> None:
        super().__init__(layer)
        if layer.config.experts.chunk_size is not None:
            self.weigh_and_reduce = TopKWeightAndReduceNoOp()

    def _run(self, prepared: Prepared) -> ExpertOutput:
        size = self.config.experts.chunk_size
        if size is None:
            return self._rows(prepared)
        return ExpertOutput(in_chunks(self._sums, size, *prepared[:3], *prepared.extra_tensors))

    def _sums(self, tokens: Tensor, weights: Tensor, ids: Tensor, *extras: Tensor) -> Tensor:
        output = self._rows(Prepared(tokens, weights, ids, extra_tensors=extras))
        return combine(output.rows, weights, present("inverse", output.inverse))

    def _rows(self, prepared: Prepared) -> ExpertOutput:
        layer, config, x = self.layer, self.config, prepared.hidden_states
        if layer.lora is not None:
            return self._adapted(layer.lora, prepared)
        if layer.quantisation is not None:
            rows, plan = quantised_rows(layer, self._args(prepared))
            return ExpertOutput(rows, plan.inverse)
        plan = build_dispatch(prepared.topk_ids, self.num_experts, self.expert_map)
        if emits_stages(emitted(config.emit, config.save_for_backward)):
            rows = permute(x, plan.sorted_slots)
            gate_up = grouped_gemm(rows, layer.w13_weight, plan.expert_offsets, layer.w13_bias)
            activated = gated_activation(gate_up, self._activation)
        else:
            activated = gather_gemm_act(x, layer.w13_weight, plan, self._activation, layer.w13_bias)
        rows = grouped_gemm(activated, layer.w2_weight, plan.expert_offsets, layer.w2_bias)
        return ExpertOutput(rows, plan.inverse)

    def _adapted(self, lora: ExpertLora, prepared: Prepared) -> ExpertOutput:
        args = self._args(prepared)
        rows, plan = run_with_lora(args, lora, prepared.extra_tensors[-1], products(self.layer, args.experts))
        return ExpertOutput(rows, plan.inverse)

    def _args(self, prepared: Prepared) -> FusedExperts:
        routed = prepared.topk_weights, prepared.topk_ids, Placement(self.expert_map)
        return FusedExperts(
            prepared.hidden_states, self.layer.expert_weights(), *routed, None, self._activation
        )


class BatchedExperts(LocalExperts):
    """Experts that find their tokens in [E, M, H] and leave the sum of rows [E, M, H] to the `PrepareAndFinalize`.

    Example:
        >>> kernel = ModularKernel(BatchedPrepareAndFinalize(max_tokens=64), BatchedExperts(FusedMoE(config)))
    """

    activation_formats = (ActivationFormat.BatchedExperts, ActivationFormat.BatchedExperts)
    weigh_and_reduce = TopKWeightAndReduceDelegate()

    def _run(self, prepared: Prepared) -> ExpertOutput:
        layer, x, counts = self.layer, prepared.hidden_states, present("counts", prepared.counts)
        if layer.quantisation is not None:
            return self._quantised(prepared, counts)
        gate_up = batched_gemm(x, layer.w13_weight, counts, layer.w13_bias)
        if layer.lora is not None:
            return self._adapted(layer.lora, prepared, counts, gate_up)
        activated = gated_activation(gate_up.flatten(0, 1), self._activation).unflatten(0, x.shape[:2])
        return ExpertOutput(batched_gemm(activated, layer.w2_weight, counts, layer.w2_bias), prepared.inverse)

    def _quantised(self, prepared: Prepared, counts: Tensor) -> ExpertOutput:
        """Every row is a token of one expert, that of its place."""
        layer, x = self.layer, prepared.hidden_states
        if layer.lora is not None:
            value_error("lora with quantised experts in batches: expected None, or StandardExperts")
        ids = _experts_of_rows(x, counts, -1).unsqueeze(1)
        weights = torch.ones(ids.shape, device=x.device)
        experts, placement = layer.expert_weights(), Placement(None)
        args = FusedExperts(x.flatten(0, 1), experts, weights, ids, placement, None, self._activation)
        return ExpertOutput(run_quantised(layer, args).unflatten(0, x.shape[:2]), prepared.inverse)

    def _adapted(self, lora: ExpertLora, prepared: Prepared, counts: Tensor, gate_up: Tensor) -> ExpertOutput:
        layer, x = self.layer, prepared.hidden_states
        lora.expect_experts(counts.shape[0])
        experts = _experts_of_rows(x, counts, counts.shape[0])
        adapted = lora.rows_of(experts, prepared.extra_tensors[-1].flatten())
        w13, w2 = lora.linears()
        changed = gate_up.flatten(0, 1) + adapted.change(x.flatten(0, 1), w13)
        activated = gated_activation(changed, self._activation)
        change = adapted.change(activated, w2).unflatten(0, x.shape[:2])
        rows = batched_gemm(activated.unflatten(0, x.shape[:2]), layer.w2_weight, counts, layer.w2_bias)
        return ExpertOutput(rows + change, prepared.inverse)


def _experts_of_rows(x: Tensor, counts: Tensor, nobody: int) -> Tensor:
    """[E * M], of rows [E, M, H]; `nobody` for those of no token."""
    experts, row = (torch.arange(size, device=x.device) for size in x.shape[:2])
    return torch.where(row < counts.unsqueeze(1), experts.unsqueeze(1), nobody).flatten()


def _expect_known(name: str, config: Any, known: Set[str]) -> None:
    for option in fields(config):
        value = getattr(config, option.name)
        if option.name not in known and value != option.default:
            raise ValueError(
                f"{name}.{option.name}={value!r}: expected {option.default!r} in a ModularKernel"
            )
