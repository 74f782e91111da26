"""How the parameters of a module of experts lie, which is what sharding it needs to know.

Letters: E experts, H hidden size, I intermediate size.
"""

from dataclasses import dataclass
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from layers.expert_parameters import WHOLE_ON_RANKS, plain_parameters
from layers.fused_moe import FusedMoE
from layers.huggingface.quantised import GLOBAL_SCALE, PARTS, blocks, has_scales, numbers_in_each
from layers.quantised import blocks_of
from layers.weights.scales import GLOBAL_SCALES, SCALES, ZERO_POINTS, Blocks
from layers.weights.shard import TensorShard
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
        unit: of what a rank's part of I has to be a multiple, so that it has whole blocks of scales, and whole bytes.
        num_idle: how many more than E the first weight has, of experts that return their input (LongCat-Flash).
    """

    num_experts: int
    top_k: int | None
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    parameters: dict[str, ParameterLayout]
    unit: int = 1
    num_idle: int = 0

    @property
    def is_quantised(self) -> bool:
        """Whether weights have 8 or 4 bits. Scales are among the parameters then."""
        return self.dtype.itemsize == 1

    @property
    def token_dtype(self) -> torch.dtype:
        """The widest that hidden states have: quantised weights do not say theirs."""
        return torch.float32 if self.is_quantised else self.dtype

    def expect_alike(self) -> None:
        """Raises ValueError where weights have not as many experts each: ranks would hold w13 of others than w2."""
        if self.num_idle:
            up, down, *_ = self.parameters
            raise ValueError(
                f"{up} has {self.num_experts + self.num_idle} experts, {down} has {self.num_experts}: expected as many "
                "for whole experts on ranks; ExpertTensorParallel shares these"
            )

    def expect_parts(self, shard: TensorShard) -> None:
        """Raises ValueError where experts cannot be cut into as many parts."""
        size = shard.local_size("intermediate_size", self.intermediate_size)
        if size % self.unit:
            raise ValueError(
                f"intermediate_size={self.intermediate_size} of quantised experts in {shard.size} parts: "
                f"expected a multiple of {self.unit} in each, for blocks that share a scale are not cut"
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
    unit = 1
    if module.quantisation is not None and module.w2_weight.dtype.itemsize == 1:
        kind, block = module.quantisation.kind, module.quantisation.block
        found = blocks_of(module, module.expert_weights(), kind, block)
        of_scales, unit = _of_scales(found, rows, module.w2_weight, numbers_in(module.w2_weight.dtype))
        layouts |= dict.fromkeys(GLOBAL_SCALES, ParameterLayout(None))
        layouts |= zip((*SCALES, *ZERO_POINTS), of_scales * 2)
    for name in plain_parameters(module):
        if name not in layouts and name not in WHOLE_ON_RANKS:
            raise ValueError(f"module has {name}: expected no scales of weights among ranks")
    present = {name: layout for name, layout in layouts.items() if getattr(module, name, None) is not None}
    sizes = config.num_physical_experts, config.top_k, config.hidden_size, config.intermediate_size
    return ExpertsLayout(*sizes, module.w2_weight.dtype, present, unit)


def _of_scales(
    of: Blocks, rows: ParameterLayout, w2: Tensor, per_byte: int
) -> tuple[tuple[ParameterLayout, ParameterLayout], int]:
    """Of scales beside w13, whose rows lie as its own do, and beside w2, and a unit of I; zero points lie alike.

    What is one scale for all of I, on either side, every rank has.
    """
    (gate_rows, _), (_, columns) = of
    size, whole = w2.shape[2] * per_byte, ParameterLayout(None)
    w13 = rows if gate_rows < size else whole
    down = ParameterLayout(2) if columns < size else whole
    cut = (each for each, layout in ((gate_rows, w13), (columns, down)) if layout is not whole)
    return (w13, down), lcm(per_byte, *cut)


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
    rows = ParameterLayout(2 if is_transposed else 1, has_blocks)
    layouts = {up: rows, "down_proj": ParameterLayout(1 if is_transposed else 2)}
    unit = 1
    if has_scales(module):
        of_scales, unit = _of_scales(blocks(module), rows, module.down_proj, numbers_in_each(module))
        layouts |= {
            f"{name}{part}": ParameterLayout(None) if part == GLOBAL_SCALE else layout
            for part in PARTS
            if f"down_proj{part}" in module._parameters
            for name, layout in zip(layouts.copy(), of_scales)
        }
    if has_bias:
        layouts |= {f"{up}_bias": ParameterLayout(1, has_blocks), "down_proj_bias": ParameterLayout(None)}
    down, dim = module.down_proj, 1 if is_transposed else 2
    size = down.shape[dim] * numbers_in_each(module)
    sizes = down.shape[0], None, down.shape[3 - dim], size
    num_idle = getattr(module, up).shape[0] - down.shape[0]
    return ExpertsLayout(*sizes, down.dtype, layouts, unit, num_idle)
