"""transformers' experts function, on our operators.

transformers calls `fn(experts_module, hidden_states[T, H], top_k_index[T, K], top_k_weights[T, K])` for every
class decorated with `use_experts_implementation`. The module says how its weights lie (`is_transposed`,
`is_concatenated`, `has_bias`, `has_gate`); we take them as views. An id equal to the local expert count is
transformers' sentinel for "not here", and our operators drop ids out of range anyway.

The function is traced by Dynamo, so it only compares and looks up: no option is built or formatted in it. `patch`
settles `ExpertsOptions` on the module beforehand; a module that was only registered for has none.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import activations
from transformers.integrations import moe
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface, _default_apply_gate

from layers.config import Emit, SaveForBackward, emitted
from layers.huggingface import gates, quantised
from layers.huggingface.settled import Settings, has_changed, is_watched, settings_of
from layers.lora import ExpertLora, run_with_lora
from moe_ops import Activation, build_dispatch, combine, grouped_gemm, permute
from moe_ops.arguments import ExpertWeights, FusedExperts, GroupedLinear, PairedLinear, Placement
from moe_ops.errors import describe, type_error, value_error
from moe_ops.fused_experts import run as run_experts

NAME = "moe_ops"

_GATED = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
}
_UNGATED = {kind: f"{name}_no_mul" for kind, name in _GATED.items()} | {
    activations.ReLUSquaredActivation: "relu2"
}
_SWIGLU_OAI = Activation("swiglu_oai", interleaved=True)


@dataclass(frozen=True, slots=True)
class ExpertsOptions:
    """What `patch` settles for one experts module, as its attribute `moe_ops_options`.

    Attributes:
        activation: spec of what the experts compute between their products; None if only the module itself can.
        emit, save_for_backward: see `layers.MoEConfig`.
        settings: of the module; once they have changed, only the module itself can compute the activation.
    """

    activation: str | None
    emit: Emit
    save_for_backward: SaveForBackward
    settings: Settings


def is_dispatched(module: nn.Module) -> bool:
    """Whether transformers' `use_experts_implementation` decorates the module's class."""
    return hasattr(type(module), "_apply_gate") and isinstance(getattr(module, "has_gate", None), bool)


def dispatches(module: nn.Module) -> bool:
    """Whether the class's forward is what that decorator made, and not one that a subclass put around it."""
    return getattr(type(module).forward, "__globals__", None) is vars(moe)


def register() -> None:
    """Adds the implementation to transformers' registries, for every model of the process."""
    for interface in (ExpertsInterface, FP8ExpertsInterface):
        interface.register(NAME, experts_forward)


def forward(self: Any, *args: Any, **named: Any) -> Tensor:
    """The forward of patched experts: without transformers' interface, as long as the config names this function."""
    if implementation(self.config) == NAME:
        return experts_forward(self, *args, **named)
    for attribute, what in _OURS_ALONE:
        if _rare(self, attribute) is not None:
            names = implementation(self.config), NAME
            value_error("experts_implementation={!r}: expected {!r}, for experts {}", *names, what)
    return type(self).forward(self, *args, **named)


# Stock code would pass over the ones, and multiply with the others as they are stored.
_OURS_ALONE = ("moe_ops_lora", "with adapters"), ("moe_ops_format", "that are quantised")


def implementation(config: Any) -> str | None:
    """What runs the experts. Configs have a `__getattribute__`: two microseconds, or a hundred steps of Dynamo."""
    if torch.compiler.is_compiling():  # Dynamo does not know how to go past it
        return config.__dict__["_experts_implementation_internal"]
    return object.__getattribute__(config, "_experts_implementation_internal")


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of the chosen experts' outputs.

    Args:
        self: a transformers experts module.
        hidden_states: [T, H].
        top_k_index: [T, K] integers; those outside [0, E_local) contribute nothing.
        top_k_weights: [T, K], any floating dtype.

    Returns:
        [T, H] in the dtype of `hidden_states`, as transformers' own implementations, in autocast too.
    """
    output = _output(self, hidden_states, top_k_index, top_k_weights)
    return output if output.dtype == hidden_states.dtype else output.to(hidden_states.dtype)


def _output(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """In autocast in its dtype."""
    options, parallel = getattr(self, "moe_ops_options", None), _rare(self, "moe_ops_parallel")
    activation = known_activation(self) if options is None else _settled_before(self, options)
    placement = Placement(_rare(self, "moe_ops_expert_map"))
    balancing = _rare(self, "moe_ops_balancing")
    ids = top_k_index if balancing is None else balancing(top_k_index)
    tensors = hidden_states, weights(self, parallel), top_k_weights, ids
    args = FusedExperts(*tensors, placement, None, activation or "")
    lora: ExpertLora | None = _rare(self, "moe_ops_lora")
    adapter_ids = () if lora is None else (lora.ids_of_tokens(hidden_states.shape[0]),)
    if parallel is None:
        return _run(self, options, args, *adapter_ids)

    def run_received(received: FusedExperts, *carried: Tensor) -> Tensor:
        return _run(self, options, received, *carried)

    return parallel.run(args, args.experts.w2.weight.shape[0], run_received, extra_tensors=adapter_ids)


def settle(
    experts: Any, emit: Emit, save_for_backward: SaveForBackward, activation: str | None
) -> ExpertsOptions:
    """The options of an experts module as it is now."""
    inside = ("act_fn",) if hasattr(experts, "act_fn") else ()
    return ExpertsOptions(activation, emit, save_for_backward, settings_of(experts, *inside))


def _settled_before(experts: Any, options: ExpertsOptions) -> str | None:
    return None if has_changed(experts, options.settings) else options.activation


def are_plain(experts: Any) -> bool:
    """Whether experts run on our operators as `patch` found them, and all there is to run are their weights."""
    if implementation(experts.config) != NAME or has_changed(experts, experts.moe_ops_options.settings):
        return False
    return all(_rare(experts, name) is None for name in _RARE)


_RARE = ("moe_ops_parallel", "moe_ops_expert_map", "moe_ops_balancing", "moe_ops_lora", "moe_ops_format")


def _rare(module: nn.Module, name: str) -> Any:
    """An attribute, or None. To be told by `nn.Module` that there is none takes a microsecond, in a guard too."""
    return module.__dict__.get(name, module._modules.get(name, module._buffers.get(name)))


def _run(
    experts: Any, options: ExpertsOptions | None, args: FusedExperts, adapter_ids: Tensor | None = None
) -> Tensor:
    if adapter_ids is not None:
        if not args.activation:
            value_error(
                "act_fn has changed since patch, or has hooks: expected none where experts have adapters"
            )
        lora = experts.moe_ops_lora
        rows, plan = run_with_lora(args, lora, adapter_ids, quantised.products(experts, args, lora))
        return combine(rows, args.topk_weights, plan.inverse)
    is_quantised = quantised.has_scales(experts)
    if args.activation and not is_quantised:
        emit = "auto" if options is None else emitted(options.emit, options.save_for_backward)
        return run_experts(args, emit)
    stages = quantised.run if is_quantised else _run_stages
    if options is not None and options.save_for_backward == "inputs" and torch.is_grad_enabled():
        return checkpoint(stages, experts, args, use_reentrant=False)
    return stages(experts, args)


def settled_activation(experts: Any) -> str | None:
    """The spec of the experts' activation, or None when only the module itself can compute it.

    For use outside any trace: it tries what the module's own code computes, where `known_activation` only looks.
    """
    if getattr(experts, "has_post_expert_norm", False):
        return None
    found = gates.recognised(experts)
    return None if found is None else found.spec


def known_activation(experts: Any) -> str | None:
    """The spec of the experts' activation, or None when it has to be built or only the module can compute it."""
    if is_watched(getattr(experts, "act_fn", None)):
        return None
    if getattr(experts, "has_post_expert_norm", False):
        return None
    if not getattr(experts, "has_gate", True):
        return _UNGATED.get(type(experts.act_fn))
    if type(experts)._apply_gate is _default_apply_gate:
        # act_fn(first half) * second half, whatever is_concatenated says
        return _GATED.get(type(experts.act_fn))
    if not _has_gpt_oss_gate(experts):
        return None
    is_default = experts.alpha == _SWIGLU_OAI.alpha and experts.limit == _SWIGLU_OAI.limit
    return _SWIGLU_OAI.spec if is_default else None


def _has_gpt_oss_gate(experts: Any) -> bool:
    if getattr(experts, "is_concatenated", True):
        return False
    # Imported here, where its only interleaved family is at hand: on top it would come in the midst of
    # transformers' own imports.
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return type(experts)._apply_gate is GptOssExperts._apply_gate


def weights(experts: Any, parallel: Any = None) -> ExpertWeights:
    """w13 [E, 2I, H], w2 [E, H, I] and their biases, as views in whatever strides the checkpoint has.

    With `parallel`, a `RankExperts`, the parts that are here.
    """
    has_bias, is_transposed = getattr(experts, "has_bias", False), getattr(experts, "is_transposed", False)
    up = "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"
    w13, w2 = getattr(experts, up), experts.down_proj
    biases = (getattr(experts, up + "_bias"), experts.down_proj_bias) if has_bias else (None, None)
    if parallel is not None:
        _expect_shared(up, w13)
        _expect_shared("down_proj", w2)
        w13, w2 = parallel.local_part(w13, 3, 2 if is_transposed else 1), parallel.local_part(w2, 3)
        biases = parallel.local_part(biases[0], 2), parallel.local_part(biases[1], 2)
    if w13.shape[0] > w2.shape[0]:  # experts that only return their input have rows too (LongCat-Flash)
        w13 = w13[: w2.shape[0]]
    if is_transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    return ExpertWeights(PairedLinear(w13, biases[0]), GroupedLinear(w2, biases[1]))


def _expect_shared(name: str, parameter: Any) -> None:
    """A rank would take a whole parameter for its part: `load_state_dict(assign=True)` sets what it is given."""
    if not isinstance(parameter, DTensor):
        type_error("{}={}: expected a DTensor, for ranks share it", name, describe(parameter))


def _run_stages(experts: Any, args: FusedExperts) -> Tensor:
    """Our stages around the module's own activation and post-expert norm.

    Weights come as arguments: run again in backward, a module may have others by then (PEFT adds its adapters to
    them for the time of a forward).
    """
    w13, w2 = args.experts
    plan = build_dispatch(args.topk_ids, w13.weight.shape[0], args.placement.expert_map)
    rows = permute(args.hidden_states, plan.sorted_slots)  # [S, H]
    gate_up = grouped_gemm(rows, w13.weight, plan.expert_offsets, w13.bias)  # [S, 2I]
    activated = gates.gate_of(experts)(gate_up)  # [S, I]
    expert_out = grouped_gemm(activated, w2.weight, plan.expert_offsets, w2.bias)  # [S, H]
    if getattr(experts, "has_post_expert_norm", False):
        expert_out = experts.post_expert_norm(expert_out)
    return combine(expert_out, args.topk_weights, plan.inverse)
