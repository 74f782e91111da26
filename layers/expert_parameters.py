"""What the routed experts of a layer hold: weights, their place among the ranks, and how checkpoints get into them."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layers._checks import expect_floating_dtype, expect_type
from layers.config import MoEConfig
from layers.placement import local_experts
from layers.weights import other_formats
from layers.weights.expert_loader import (
    ParamsMapping,
    expert_params_mapping,
    is_distributed,
    load_expert_weight,
)
from layers.weights.scales import GLOBAL_SCALES, INPUT_SCALES, SCALES, WEIGHTS, ZERO_POINTS, Quantisation
from layers.weights.shard import WHOLE, TensorShard
from moe_ops.mxfp4 import ONE
from moe_ops.pairs import PAIRS
from moe_ops.scaled import STORED

if TYPE_CHECKING:
    from layers.parallel.rank_experts import RankExperts


WHOLE_ON_RANKS = ("expert_scale", *INPUT_SCALES, "post_norm_weight")
"""Parameters of logical experts, or of all: no part of them moves with an expert."""


class ExpertParameters(nn.Module):
    """Parameters and buffers of `FusedMoE`, which documents them."""

    w13_weight: Tensor
    w2_weight: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    expert_scale: Tensor | None
    post_norm_weight: Tensor | None
    e_score_correction_bias: Tensor | None
    expert_map: Tensor | None
    parallel: "RankExperts | None" = None

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
        expect_floating_dtype("dtype", dtype)
        if shard.size > 1 and config.experts.post_norm_eps is not None:
            raise ValueError(
                f"experts.post_norm_eps={config.experts.post_norm_eps}: expected None in a shard"
            )
        self.config = config
        self.shard = shard
        self.quantisation: Quantisation | None = None
        self._placement = (
            None if expert_map is None else local_experts(expert_map, config.num_physical_experts)
        )
        for name, shape in _parameter_shapes(config, self.num_local_experts, shard).items():
            parameter = (
                None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            )
            self.register_parameter(name, parameter)
        has_correction = config.router.has_correction_bias
        correction = (
            torch.empty(config.router_size, device=device, dtype=torch.float32) if has_correction else None
        )
        self.register_buffer("e_score_correction_bias", correction)
        self.register_buffer("expert_map", self._placement_on(device), persistent=False)
        self.reset_parameters()

    @property
    def num_local_experts(self) -> int:
        """How many experts have their weights here: without an `expert_map` all, replicas included."""
        return self.config.num_physical_experts if self._placement is None else max(self._placement) + 1

    @property
    def is_first_part(self) -> bool:
        """Whether this part of a layer holds the first expert and, of its shards, the first.

        Outputs of parts are summed, so what each would add alike, such as the tokens of zero experts, is added by one.
        """
        has_first_expert = self._placement is None or self._placement[0] >= 0
        return has_first_expert and self.shard.rank == 0

    def hold(self, expert_map: Tensor | None) -> None:
        """From now on the parameters are those of the experts that `expert_map` [E] says are here; None for all."""
        count = self.config.num_physical_experts
        self._placement = None if expert_map is None else local_experts(expert_map, count)
        self.expert_map = self._placement_on(self.w13_weight.device)

    def held_experts(self) -> list[int]:
        """The physical experts whose weights are here, in their order."""
        if self._placement is None:
            return list(range(self.config.num_physical_experts))
        return sorted(
            (e for e, local in enumerate(self._placement) if local >= 0), key=self._placement.__getitem__
        )

    def reset_parameters(self) -> None:
        """Fills weights and biases uniformly in ±1/sqrt(fan_in) like `nn.Linear`. Scales are 1, selection biases 0.

        Of experts that ranks share, every rank has to call it. On CPUs each draws its part from its own generator.
        """
        config = self.config
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if name == "post_norm_weight" or name.endswith(("_scale", "_scale_2")):
                    parameter.fill_(ONE if parameter.dtype == PAIRS else 1)
                    continue
                if parameter.dtype.itemsize == 1:
                    raise ValueError(
                        f"{name} has dtype {parameter.dtype}: expected weights that are not quantised"
                    )
                fan_in = config.expert_hidden_size if name.startswith("w13") else config.intermediate_size
                nn.init.uniform_(parameter, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
            if self.parallel is not None and self.shard.size > 1 and self.w2_bias is not None:
                self.parallel.make_alike(self.w2_bias)
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
            param: a parameter [E_local, ...] of this module: weight, bias, scale or zero point. It may be padded; what
                the checkpoint does not fill becomes zero. With the attribute `is_transposed` it holds matrices the
                other way round. Of a layer that a style of `layers.parallel` has sharded it is a DTensor, and what is
                here of it is loaded.
            loaded_weight: of one expert as the checkpoint has it, w1 and w3 [I, H], w2 [H, I], or weights, biases and
                scales of rows and columns of all experts, with a dimension in front; over all tensor-parallel ranks,
                of which `shard` takes its part.
            weight_name: says what it is: "scale", "zero" or "offset" (kind by the parameter's `quant_method`),
                "input_scale", "weight_shape", "g_idx", "bias" or "weight" is part of the name.
            shard_id: "w1" gate, "w3" up, "w2" down.
            expert_id: global expert; a place, where experts have replicas or have moved (`ExpertBalancing.held`). Of a
                tensor of all experts each finds its place.

        Returns:
            None; with `return_success` whether anything was copied: False for an expert of another rank and for a name
            that says none of these.

        Raises:
            TypeError, ValueError: unknown shard or scale kind, a shard of another parameter, a shape that does not fit,
                another kind of dtype, a tensor on the meta device, a parameter that is computed of others, or a DTensor
                that something else has made.
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExpertParameters":
        # Every cast and move of a module comes through here, `to_empty` too, which leaves memory as it finds it.
        correction, expert_map = self.e_score_correction_bias, self.expert_map
        stored = [] if self.quantisation is None else self._stored(self.quantisation)

        def uncast(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            if applied.dtype == tensor.dtype or not any(tensor is each for each in stored):
                return applied
            # Cast, they would not be what their scales are for, nor the scales what they were.
            return tensor.detach().to(applied.device)

        super()._apply(uncast, recurse)
        moved = self.e_score_correction_bias
        if correction is not None and moved is not None and moved.dtype != correction.dtype:
            self.e_score_correction_bias = correction.to(moved.device)
        if expert_map is not None and self.expert_map is not None:
            self._place(expert_map, self.expert_map.device)
        return self

    def _stored(self, quantisation: Quantisation) -> list[Tensor]:
        """Quantised weights, what they have beside them, and scales of rows."""
        weights = [weight for name in WEIGHTS if (weight := getattr(self, name)).dtype in STORED]
        return [*weights, *(getattr(self, name) for name in quantisation.all_parameters)]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        beside = *SCALES, *ZERO_POINTS, *GLOBAL_SCALES, *INPUT_SCALES
        error_msgs.extend(other_formats.told(self, beside, state_dict, prefix, local_metadata))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
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
        activation: Any = config.activation
        shown = {
            "num_experts": config.num_experts,
            "num_local_experts": self.num_local_experts,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "shard": f"{self.shard.rank}/{self.shard.size}",
            "routing": repr(config.routing.spec),
            "activation": repr(activation.spec),
        }
        usual = {"num_local_experts": config.num_experts, "shard": "0/1"}
        return ", ".join(f"{name}={value}" for name, value in shown.items() if value != usual.get(name))


def plain_parameters(module: ExpertParameters) -> dict[str, nn.Parameter]:
    """Its own, by name. Raises ValueError where a weight is computed of others, which would not be among them."""
    beside = () if module.quantisation is None else module.quantisation.parameters
    for name in (*WEIGHTS, "w13_bias", "w2_bias", *beside):
        if name not in module._parameters:
            raise ValueError(f"{name} is parametrised or pruned: expected a plain parameter")
    return dict(module.named_parameters(recurse=False))


def expect_movable(name: str, parameter: Tensor) -> None:
    """Raises TypeError or ValueError unless rows of a parameter can be written where they lie."""
    if is_distributed(parameter):
        raise TypeError(f"{name} is a DTensor: expected a plain parameter, experts move before fully_shard")
    if not parameter.is_contiguous():
        raise ValueError(f"{name} has strides {parameter.stride()}: expected a contiguous parameter")


def weight_shapes(
    config: MoEConfig, num_experts: int, shard: TensorShard = WHOLE
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Of w13 and w2, of so many experts or of a shard of each."""
    H = config.experts.padded_size or config.expert_hidden_size
    I = shard.local_size("intermediate_size", config.intermediate_size)
    return (num_experts, config.gate_up_size(I), H), (num_experts, H, I)


def _parameter_shapes(
    config: MoEConfig, num_experts: int, shard: TensorShard
) -> dict[str, tuple[int, ...] | None]:
    w13, w2 = weight_shapes(config, num_experts, shard)
    return {
        "w13_weight": w13,
        "w2_weight": w2,
        "w13_bias": w13[:2] if config.has_bias else None,
        "w2_bias": w2[:2] if config.has_bias else None,
        "expert_scale": (config.router_size,) if config.router.has_expert_scale else None,
        "post_norm_weight": w2[1:2] if config.experts.post_norm_eps is not None else None,
    }
