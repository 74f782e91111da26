"""The routed experts as one module: logits in, hidden states out.

Letters: T tokens, H hidden size, E experts, K experts per token, I intermediate size.

Traced by a compiler the forward is a straight line of stage ops that passes can fuse across; eager, it is one
fused op. The module holds weights and nothing else: no streams, no names, no per-layer state in the graph, so
that identical layers share one compiled graph.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from layers._checks import expect_features, expect_type
from layers.balancing import EplbState, ExpertBalancing, balancing_of_layer
from layers.config import MoEConfig, emitted
from layers.routed_experts import RoutedExpertsCapture
from layers.router import RouterOutput
from layers.weights.expert_loader import ParamsMapping, expert_params_mapping, load_expert_weight
from layers.weights.shard import WHOLE, TensorShard
from moe_ops import topk_routing
from moe_ops.activation import activation_spec
from moe_ops.arguments import ExpertWeights, FusedExperts, FusedMoe, GroupedLinear, Placement, Router
from moe_ops.fused_experts import run as run_experts, weigh_input
from moe_ops.fused_moe import run as run_moe


class FusedMoE(nn.Module):
    """Routes every token to K of E experts and adds up what they return.

    Args:
        config: sizes, routing and activation.
        expert_map: [E] integers for a layer that holds only some of the experts: the local index of every
            global expert (physical one, where experts have replicas), -1 for one that lives elsewhere and
            contributes nothing here. Placement is not a
            weight, so the buffer is not saved in the state dict. It keeps its values through every move and cast;
            a module that comes from the meta device gets back the map it was built with.
        shard: the part of every expert that this module holds; I below is then its share of
            `config.intermediate_size`, and outputs of all ranks add up to the layer's.
        device, dtype: of the parameters; `device="meta"` allocates nothing.

    Attributes:
        w13_weight: [E_local, 2I, H], gate rows first, or alternating when `config.activation.interleaved`
            ([E_local, I, H] for an ungated activation).
        w2_weight: [E_local, H, I].
        w13_bias, w2_bias: [E_local, 2I] and [E_local, H], or None.
        e_score_correction_bias: [E] float32 buffer or None. It stays float32 when the module is cast:
            rounded to bfloat16 it would pick other experts.
        routing_override: None, or a module (hidden_states [T, H], router_logits [T, E]) -> (topk_weights, topk_ids)
            that routes instead: `RoutedExpertsReplay`, `SimulatedRouting`, or any other.
        capture: None, or a `RoutedExpertsCapture`, which remembers the chosen experts.
        balancing: None, or the `ExpertBalancing` that `set_eplb_state` made.

    Raises:
        TypeError, ValueError: `config` is not a `MoEConfig`, `expert_map` does not describe `config.num_experts`
            experts, or `shard` does not divide `config.intermediate_size`.
    """

    w13_weight: Tensor
    w2_weight: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    e_score_correction_bias: Tensor | None
    expert_map: Tensor | None

    def __init__(
        self,
        config: MoEConfig,
        expert_map: Tensor | None = None,
        *,
        shard: TensorShard = WHOLE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        expect_type("config", config, MoEConfig)
        expect_type("shard", shard, TensorShard)
        self.config = config
        self.shard = shard
        self.routing_override: nn.Module | None = None
        self.capture: RoutedExpertsCapture | None = None
        self.balancing: ExpertBalancing | None = None
        self._routes_apart = config.router.weight_on == "input" or config.num_redundant_experts > 0
        self._placement = None if expert_map is None else _placement(expert_map, config.num_physical_experts)
        for name, shape in _parameter_shapes(config, self.num_local_experts, shard).items():
            parameter = (
                None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            )
            self.register_parameter(name, parameter)
        has_correction = config.router.has_correction_bias
        correction = (
            torch.empty(config.num_experts, device=device, dtype=torch.float32) if has_correction else None
        )
        self.register_buffer("e_score_correction_bias", correction)
        self.register_buffer("expert_map", self._placement_on(device), persistent=False)
        self.reset_parameters()

    @property
    def num_local_experts(self) -> int:
        """How many experts have their weights here: without an `expert_map` all, replicas included."""
        return self.config.num_physical_experts if self._placement is None else max(self._placement) + 1

    def reset_parameters(self) -> None:
        """Fills weights and biases uniformly in ±1/sqrt(fan_in) as `nn.Linear` does; no selection bias."""
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                fan_in = self.config.hidden_size if name.startswith("w13") else self.config.intermediate_size
                nn.init.uniform_(parameter, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
            if self.e_score_correction_bias is not None:
                self.e_score_correction_bias.zero_()

    def weight_loader(
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copies one tensor of a checkpoint into its place in `param`; `load_checkpoint` does this for whole files.

        Args:
            param: a parameter [E_local, ...] of this module: weight, bias, or a scale from `add_weight_scales`. It may
                be padded; what the checkpoint does not fill becomes zero. With the attribute `is_transposed` it holds
                matrices the other way round.
            loaded_weight: of one expert as the checkpoint has it, w1 and w3 [I, H], w2 [H, I], or of all experts with
                a dimension in front; over all tensor-parallel ranks, of which `shard` takes its part.
            weight_name: says what it is: "scale", "zero" or "offset" (kind by the parameter's `quant_method`),
                "input_scale", "weight_shape", "g_idx", "bias" or "weight" is part of the name.
            shard_id: "w1" gate, "w3" up, "w2" down.
            expert_id: global expert, physical one where experts are replicated.

        Returns:
            None; with `return_success` whether anything was copied: False for an expert of another rank and for a name
            that says none of these.

        Raises:
            TypeError, ValueError: unknown shard or scale kind, a shape that does not fit, or another kind of dtype.
        """
        success = load_expert_weight(self, param, loaded_weight, weight_name, shard_id, expert_id)
        return success if return_success else None

    @classmethod
    def make_expert_params_mapping(
        cls,
        ckpt_gate_proj_name: str,
        ckpt_down_proj_name: str,
        ckpt_up_proj_name: str,
        num_experts: int,
        num_redundant_experts: int = 0,
    ) -> ParamsMapping:
        """What to look for in a checkpoint with a tensor per expert, for `weight_loader`.

        Returns:
            (param_name, weight_name, expert_id, shard_id) for each matrix of each physical expert: in the name of a
            tensor of the checkpoint, `weight_name` is replaced by `param_name` to get that of the parameter. Redundant
            expert i holds a copy of expert i mod `num_experts`.

        Example:
            >>> FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", num_experts=8)[0]
            ('experts.w13_', 'experts.0.gate_proj.', 0, 'w1')
        """
        return expert_params_mapping(
            ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name, num_experts, num_redundant_experts
        )

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
        """Parameters of the experts that are here, [E_local, -1] each, without copies: what moves when an expert does.

        Raises:
            ValueError: a parameter is not contiguous.
        """
        parameters = dict(self.named_parameters(recurse=False))
        for name, parameter in parameters.items():
            if not parameter.is_contiguous():
                raise ValueError(f"{name} has strides {parameter.stride()}: expected a contiguous parameter")
        return [parameter.detach().view(self.num_local_experts, -1) for parameter in parameters.values()]

    def route(self, router_logits: Tensor, hidden_states: Tensor | None = None) -> RouterOutput:
        """Scores the logits [..., E] and picks the experts of each of the T tokens; see `RouterOutput`.

        `hidden_states` [T, H] is for a `routing_override` that looks at it.

        Raises:
            TypeError, ValueError: `router_logits` is not a floating point tensor [..., E].
        """
        expect_features("router_logits", router_logits, self.config.num_experts)
        logits = router_logits.reshape(-1, router_logits.shape[-1])  # [T, E]
        if self.routing_override is not None:
            return RouterOutput(logits, *self.routing_override(hidden_states, logits))
        return RouterOutput(logits, *topk_routing(logits, self.config.routing, self.e_score_correction_bias))

    def forward(
        self, hidden_states: Tensor, router_logits: Tensor | RouterOutput, shared: Tensor | None = None
    ) -> Tensor:
        """The weighted sum of the chosen experts, plus `shared`.

        Args:
            hidden_states: [..., H] in the weights' dtype.
            router_logits: [..., E] with the same leading dimensions, any floating dtype; or what `route` made of
                them, when the caller wants to see or to change it.
            shared: [..., H], added to the routed output before it is rounded.

        Returns:
            [..., H] in the dtype of `hidden_states`.

        Raises:
            ValueError, TypeError: shapes or dtypes do not fit; the message names argument, value, expectation.
        """
        expect_features("hidden_states", hidden_states, self.config.hidden_size)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])  # [T, H]
        addend = None if shared is None else self._rows_of(shared)
        if isinstance(router_logits, RouterOutput):
            output = self._run_routed(tokens, router_logits, addend)
        elif self._is_routed_apart():
            output = self._run_routed(tokens, self.route(router_logits, tokens), addend)
        else:
            output = self._run(tokens, router_logits, addend)
        return output.reshape(hidden_states.shape)

    def _is_routed_apart(self) -> bool:
        """Whether something looks at the chosen experts before they run, which the fused operator would hide."""
        if self._routes_apart or self.routing_override is not None:
            return True
        return self.capture is not None or self.balancing is not None

    def _rows_of(self, shared: Tensor) -> Tensor:
        expect_features("shared", shared, self.config.hidden_size)
        return shared.reshape(-1, shared.shape[-1])  # the operators compare it with the number of tokens

    def _experts(self) -> ExpertWeights:
        return ExpertWeights(
            GroupedLinear(self.w13_weight, self.w13_bias), GroupedLinear(self.w2_weight, self.w2_bias)
        )

    def _run(self, tokens: Tensor, router_logits: Tensor, shared: Tensor | None) -> Tensor:
        config = self.config
        expect_features("router_logits", router_logits, config.num_experts)
        logits = router_logits.reshape(-1, router_logits.shape[-1])  # [T, E]
        router = Router(logits, self.e_score_correction_bias, config.routing.spec)
        placement, spec = Placement(self.expert_map), activation_spec(config.activation)
        args = FusedMoe(tokens, router, self._experts(), placement, spec)
        return run_moe(args, shared, emitted(config.emit, config.save_for_backward))

    def _run_routed(self, tokens: Tensor, routed: RouterOutput, shared: Tensor | None) -> Tensor:
        config, weights, ids = self.config, routed.topk_weights, self._physical(routed.topk_ids)
        placement, spec = Placement(self.expert_map), activation_spec(config.activation)
        args = FusedExperts(tokens, self._experts(), weights, ids, placement, shared, spec)
        args = weigh_input(args) if config.router.weight_on == "input" else args
        return run_experts(args, emitted(config.emit, config.save_for_backward))

    def _physical(self, topk_ids: Tensor) -> Tensor:
        if self.capture is not None:
            self.capture(topk_ids)
        return topk_ids if self.balancing is None else self.balancing(topk_ids)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FusedMoE":
        # Every cast and move of a module comes through here, `to_empty` too, which leaves memory as it finds it.
        correction, expert_map = self.e_score_correction_bias, self.expert_map
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if correction is not None and moved is not None and moved.dtype != correction.dtype:
            self.e_score_correction_bias = correction.to(moved.device)
        if expert_map is not None and self.expert_map is not None:
            self._place(expert_map, self.expert_map.device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # Loaded with assign=True, a module leaves the meta device without a move, and buffers take any dtype.
        if self.e_score_correction_bias is not None:
            self.e_score_correction_bias = self.e_score_correction_bias.float()
        if self.expert_map is not None and self.expert_map.is_meta:
            self._place(self.expert_map, self.w13_weight.device)

    def _place(self, expert_map: Tensor, device: torch.device) -> None:
        leaves_meta = expert_map.is_meta and device.type != "meta"
        self.expert_map = self._placement_on(device) if leaves_meta else expert_map.to(device)

    def _placement_on(self, device: torch.device | str | None) -> Tensor | None:
        return (
            None
            if self._placement is None
            else torch.tensor(self._placement, dtype=torch.int32, device=device)
        )

    def extra_repr(self) -> str:
        config = self.config
        sizes = f"num_experts={config.num_experts}, hidden_size={config.hidden_size}"
        return f"{sizes}, intermediate_size={config.intermediate_size}, routing={config.routing.spec!r}"


def _parameter_shapes(
    config: MoEConfig, num_experts: int, shard: TensorShard
) -> dict[str, tuple[int, ...] | None]:
    H, I = config.hidden_size, shard.local_size("intermediate_size", config.intermediate_size)
    gate_up = config.gate_up_size(I)
    return {
        "w13_weight": (num_experts, gate_up, H),
        "w2_weight": (num_experts, H, I),
        "w13_bias": (num_experts, gate_up) if config.has_bias else None,
        "w2_bias": (num_experts, H) if config.has_bias else None,
    }


def _placement(expert_map: Any, num_experts: int) -> tuple[int, ...]:
    """The map as plain integers: it survives meta devices and `to_empty`, and sizes the weights."""
    if not isinstance(expert_map, Tensor) or expert_map.is_floating_point() or expert_map.dtype == torch.bool:
        raise TypeError(f"expert_map={expert_map!r}: expected an integer tensor")
    if expert_map.is_meta:
        raise ValueError("expert_map is on the meta device: expected its values, on any other device")
    if expert_map.shape != (num_experts,):
        raise ValueError(
            f"expert_map has shape {tuple(expert_map.shape)}: expected ({num_experts},) = [num_experts]"
        )
    placement = tuple(int(local) for local in expert_map.tolist())
    local = sorted(index for index in placement if index >= 0)
    if not local or local != list(range(len(local))) or min(placement) < -1:
        raise ValueError(f"expert_map={list(placement)}: expected each of 0..E_local-1 once and -1 elsewhere")
    return placement
