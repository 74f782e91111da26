"""warmup: everything lazy, before a first CUDA-graph capture.

A capture must not compile or load a kernel. Which kernels a layer runs depends on its sizes and the token count, so
the plans of the operators say which to load; nothing is run and no weight is allocated.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from moe_ops.types import Activation, RoutingConfig


class LayerSizes(Protocol):
    """What warmup reads of a layer's config; `layers.MoEConfig` is one."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    routing: RoutingConfig
    activation: Activation
    has_bias: bool


def warmup(
    config: LayerSizes,
    sizes: Iterable[int],
    *,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    expert_map: torch.Tensor | None = None,
) -> None:
    """Compiles and loads the kernels that a layer launches at these token counts.

    That is all that `topk_routing`, `fused_experts` and `fused_moe` launch: with a correction bias and without, with a
    shared output and without.

    Args:
        config: sizes and options of the layer, such as a `layers.MoEConfig`.
        sizes: token counts T that will be captured.
        device: the GPU; on a device without kernels of ours (the CPU) there is nothing to load.
        dtype: of hidden states and weights (standard layout). Router logits may be float32 or of this dtype.
        expert_map: [num_experts] int32, the layer's own, for one that has a part of the experts: as many as it names.

    Raises:
        ValueError: a token count below 1, or an expert_map that is not [num_experts] int32 or names no expert.
        TypeError: dtype is not floating.

    Example:
        >>> moe_ops.warmup(config, sizes=[1, 8, 64], device="cpu")
    """
    if not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype}: expected a floating point dtype")
    if expert_map is not None:
        _check_map(expert_map, config.num_experts)
    target = torch.device(device)
    for tokens in sizes:
        if tokens < 1:
            raise ValueError(f"sizes has {tokens}: expected token counts of at least 1")
        if target.type == "cuda":
            for logits_dtype in {dtype, torch.float32}:
                _load(config, _sketches(config, tokens, target, dtype, logits_dtype, expert_map))


def _check_map(expert_map: torch.Tensor, num_experts: int) -> None:
    if expert_map.shape != (num_experts,) or expert_map.dtype != torch.int32:
        found = f"expert_map has shape {list(expert_map.shape)} and dtype {expert_map.dtype}"
        raise ValueError(f"{found}: expected [{num_experts}] and torch.int32")
    if int(expert_map.max()) < 0:
        raise ValueError(
            f"expert_map has {int(expert_map.max())} as its largest entry: expected a local expert"
        )


def _sketches(
    config: LayerSizes,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    logits_dtype: torch.dtype,
    expert_map: torch.Tensor | None,
) -> dict[str, Any]:
    """Descriptions of every tensor that the operators take, None for those that the layer never has."""
    from moe_ops.kernels.common import compute_dtype
    from moe_ops.kernels.program import TensorSketch

    hidden, features = config.hidden_size, config.intermediate_size
    experts = config.num_experts if expert_map is None else int(expert_map.max()) + 1
    rows = 2 * features if config.activation.is_gated else features
    routed = (tokens, config.routing.top_k)
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype] | None] = {
        "hidden_states": ((tokens, hidden), dtype),
        "router_logits": ((tokens, config.num_experts), logits_dtype),
        "correction_bias": ((config.num_experts,), torch.float32),
        "topk_weights": (routed, compute_dtype(logits_dtype)),
        "topk_ids": (routed, torch.int32),
        "w13": ((experts, rows, hidden), dtype),
        "w2": ((experts, hidden, features), dtype),
        "w13_bias": ((experts, rows), dtype) if config.has_bias else None,
        "w2_bias": ((experts, hidden), dtype) if config.has_bias else None,
        "expert_map": None if expert_map is None else ((config.num_experts,), torch.int32),
        "shared": ((tokens, hidden), dtype),
    }
    return {
        name: None if kind is None else TensorSketch(kind[0], kind[1], device)
        for name, kind in tensors.items()
    }


def _load(config: LayerSizes, tensors: dict[str, Any]) -> None:
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    for program in _programs(config, tensors):
        program.load(dtypes, tensors["hidden_states"].device)


def _programs(config: LayerSizes, tensors: dict[str, Any]) -> Iterator[Any]:
    """Programs, made as the operators make them, that together launch all that the layer can."""
    from moe_ops.kernels.fused import fused_experts_program, fused_moe_program

    layer = {name: tensors[name] for name in _LAYER}
    for correction_bias in (None, tensors["correction_bias"]):
        given = {**layer, "router_logits": tensors["router_logits"], "correction_bias": correction_bias}
        yield fused_moe_program(**given, routing=config.routing, activation=config.activation)
    given = {**layer, **{name: tensors[name] for name in ("topk_weights", "topk_ids", "shared")}}
    yield fused_experts_program(**given, activation=config.activation)


_LAYER = ("hidden_states", "w13", "w2", "w13_bias", "w2_bias", "expert_map")
