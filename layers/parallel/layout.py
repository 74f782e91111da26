"""How the parameters of a module of experts lie, which is what sharding it needs to know.

Letters: E experts, H hidden size, I intermediate size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layers.fused_moe import FusedMoE
from moe_ops.pairs import numbers_in

_WHY_NO_ADAPTERS = "module has lora: expected None, adapters are made for what a rank holds, afterwards"


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """Of one parameter [E, ...].

    Args:
        dim: the dimension of size I or 2I, None if it has none.
        has_blocks: whether it is gate rows, then up rows, of which each half is to be sharded.
    """

    dim: int | None
    has_blocks: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsLayout:
    """Of a module.

    Args:
        num_experts: E, physical ones.
        top_k: K, or None where the module does not know it.
        hidden_size: H.
        intermediate_size: I.
        dtype: of the weights.
        parameters: by name, those [E, ...].
    """

    num_experts: int
    top_k: int | None
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    parameters: dict[str, ParameterLayout]

    @property
    def is_quantised(self) -> bool:
        """Whether weights have 8 bits. Scales are among the parameters then, and go with whole experts only."""
        return self.dtype.itemsize == 1

    def expect_parts(self) -> None:
        """Raises ValueError where an expert cannot be cut: a scale may be of rows on both sides."""
        if self.is_quantised:
            raise ValueError(
                f"weights have dtype {self.dtype}: expected ExpertParallel, which keeps experts whole"
            )


def experts_layout(module: nn.Module) -> ExpertsLayout:
    """Of a `FusedMoE`, or of experts that `layers.huggingface.patch` runs on our operators.

    Raises:
        TypeError: the module is neither.
        ValueError: it holds a part of its experts already, or has an option that needs all of them on one device.
    """
    if isinstance(module, FusedMoE):
        return _of_fused_moe(module)
    if hasattr(module, "moe_ops_options"):
        return of_transformers_experts(module)
    raise TypeError(
        f"module={type(module).__name__}: expected FusedMoE, such as 'experts' of a MoEBlock, or experts of a "
        "patched model"
    )


def _of_fused_moe(module: FusedMoE) -> ExpertsLayout:
    config = module.config
    if module.lora is not None:
        raise ValueError(_WHY_NO_ADAPTERS)
    if module.expert_map is not None or module.shard.size > 1 or module.parallel is not None:
        raise ValueError("module holds a part of its experts: expected all of them, to be sharded once")
    if config.experts.post_norm_eps is not None:
        raise ValueError(f"experts.post_norm_eps={config.experts.post_norm_eps}: expected None among ranks")
    if config.shared_experts is not None and config.shared_experts.overlap:
        raise ValueError("shared_experts.overlap=True: expected False among ranks")
    if config.emit == "batch_invariant":
        raise ValueError("config.emit='batch_invariant': expected another among ranks")
    activation: Any = config.activation
    rows = ParameterLayout(1, activation.is_gated and not activation.interleaved)
    layouts = {
        "w13_weight": rows,
        "w2_weight": ParameterLayout(2),
        "w13_bias": rows,
        "w2_bias": ParameterLayout(None),
    }
    if module.quantisation is not None and module.w2_weight.dtype.itemsize == 1:
        layouts |= dict.fromkeys(module.quantisation.parameters, ParameterLayout(None))
    for name, _ in module.named_parameters(recurse=False):
        if name not in layouts and name != "expert_scale":
            raise ValueError(f"module has {name}: expected no scales of weights among ranks")
    present = {name: layout for name, layout in layouts.items() if getattr(module, name) is not None}
    sizes = config.num_physical_experts, config.top_k, config.hidden_size, config.intermediate_size
    return ExpertsLayout(*sizes, module.w2_weight.dtype, present)


def of_transformers_experts(module: Any) -> ExpertsLayout:
    """Of experts that transformers dispatches. Raises as `experts_layout` does."""
    if getattr(module, "moe_ops_parallel", None) is not None:
        raise ValueError("module holds a part of its experts: expected all of them, to be sharded once")
    if getattr(module, "moe_ops_lora", None) is not None:
        raise ValueError(_WHY_NO_ADAPTERS)
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"{type(module).__name__} has a norm behind its experts: expected none among ranks")
    return transformers_layout(module)


def transformers_layout(module: Any) -> ExpertsLayout:
    """Of experts that transformers dispatches, whether they are here or on ranks."""
    has_gate, is_transposed = getattr(module, "has_gate", True), getattr(module, "is_transposed", False)
    up, has_bias = "gate_up_proj" if has_gate else "up_proj", getattr(module, "has_bias", False)
    has_blocks = has_gate and getattr(module, "is_concatenated", True)
    layouts = {
        up: ParameterLayout(2 if is_transposed else 1, has_blocks),
        "down_proj": ParameterLayout(1 if is_transposed else 2),
    }
    if module.down_proj.dtype.itemsize == 1:
        has_zeros = "down_proj_zero_point" in module._parameters
        beside = ("_scale_inv", "_zero_point") if has_zeros else ("_scale_inv",)
        layouts |= {f"{name}{each}": ParameterLayout(None) for each in beside for name in layouts}
    if has_bias:
        layouts |= {f"{up}_bias": ParameterLayout(1, has_blocks), "down_proj_bias": ParameterLayout(None)}
    down, dim = module.down_proj, 1 if is_transposed else 2
    intermediate_size = down.shape[dim] * numbers_in(down.dtype)
    return ExpertsLayout(down.shape[0], None, down.shape[3 - dim], intermediate_size, down.dtype, layouts)
