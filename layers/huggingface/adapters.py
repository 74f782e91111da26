"""Adapters for the experts of a patched model, those of all layers at once."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from layers._checks import expect_type
from layers.adapted_experts import AdaptedExperts
from layers.huggingface import quantised
from layers.lora import ExpertLora
from layers.parallel.layout import transformers_layout
from layers.weights.shard import WHOLE, TensorShard


def add_adapters(
    model: nn.Module, num_adapters: int, rank: int, adapter_ids: Tensor, gate_up_rank: int | None
) -> dict[str, ExpertLora]:
    """See `layers.huggingface.add_adapters`."""
    expect_type("model", model, nn.Module)
    experts: dict[str, Any] = {n: m for n, m in model.named_modules() if hasattr(m, "moe_ops_options")}
    for name, module in model.named_modules():
        if hasattr(module, "moe_ops_block"):
            raise ValueError(
                f"{name} is a {type(module).__name__}, patched as a whole: adapters are for experts"
            )
    if not experts:
        raise ValueError("model has no patched experts: expected some, by layers.huggingface.patch")
    for name, module in experts.items():
        if module.moe_ops_options.activation is None:
            raise ValueError(f"{name} computes its activation itself: expected one of moe_ops.Activation")
    sizes = num_adapters, rank, adapter_ids
    with torch.inference_mode(False):  # they are to be trained
        adapters = {
            name: ExpertLora(
                _adapted(module), *sizes, gate_up_rank=gate_up_rank, dtype=_dtype_of(model, module)
            )
            for name, module in experts.items()
        }
    for name, lora in adapters.items():
        experts[name].moe_ops_lora = lora
    return adapters


def _dtype_of(model: Any, module: Any) -> torch.dtype | None:
    """That of the model's first parameter beside quantised weights, which is that of its embedding."""
    return getattr(model, "dtype", None) if quantised.has_scales(module) else None


def _adapted(module: Any) -> AdaptedExperts:
    layout, down = transformers_layout(module), module.down_proj
    up, *_ = layout.parameters.values()
    num_experts, size = layout.num_experts, layout.intermediate_size
    hidden_size = down.shape[1] if layout.parameters["down_proj"].dim == 2 else down.shape[2]
    rows = size * (2 if "gate_up_proj" in layout.parameters else 1)
    shapes = (num_experts, rows, hidden_size), (num_experts, hidden_size, size)
    expert_map = getattr(module, "moe_ops_expert_map", None)
    places = range(num_experts) if expert_map is None else expert_map.tolist()
    held = [expert for expert, local in enumerate(places) if local >= 0]
    parallel = getattr(module, "moe_ops_parallel", None)
    balancing = partial(getattr, module, "moe_ops_balancing", None)
    return AdaptedExperts(shapes, held, up.has_blocks, down, balancing, _shard(down, parallel), parallel)


def _shard(down: Any, parallel: Any) -> TensorShard:
    if parallel is None or down.placements == (Shard(0),):
        return WHOLE
    return TensorShard(parallel.group.rank, parallel.group.size)
