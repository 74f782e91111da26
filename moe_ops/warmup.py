"""warmup: everything lazy, before a first CUDA-graph capture.

A capture must not compile or load a kernel. Which kernels a layer runs depends on its sizes and the token count, so
the plans of `fused_moe` say which to load; nothing is run and no weight is allocated.
"""

from collections.abc import Iterable
from typing import Protocol

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
) -> None:
    """Compiles and loads the kernels that `fused_moe` launches for this layer at these token counts.

    Args:
        config: sizes and options of the layer, such as a `layers.MoEConfig`.
        sizes: token counts T that will be captured.
        device: the GPU; on a device without kernels of ours (the CPU) there is nothing to load.
        dtype: of hidden states and weights (standard layout). Router logits may be float32 or of this dtype.

    Raises:
        ValueError: a token count below 1.
        TypeError: dtype is not floating.

    Example:
        >>> moe_ops.warmup(config, sizes=[1, 8, 64], device="cpu")
    """
    if not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype}: expected a floating point dtype")
    target = torch.device(device)
    for tokens in sizes:
        if tokens < 1:
            raise ValueError(f"sizes has {tokens}: expected token counts of at least 1")
        if target.type == "cuda":
            for logits_dtype in {dtype, torch.float32}:
                _load(config, tokens, target, dtype, logits_dtype)


def _load(
    config: LayerSizes, tokens: int, device: torch.device, dtype: torch.dtype, logits_dtype: torch.dtype
) -> None:
    from moe_ops.kernels.fused import fused_moe_program
    from moe_ops.kernels.program import TensorSketch

    experts, hidden, features = config.num_experts, config.hidden_size, config.intermediate_size
    rows = 2 * features if config.activation.is_gated else features
    shapes = {
        "hidden_states": (tokens, hidden),
        "w13": (experts, rows, hidden),
        "w2": (experts, hidden, features),
    }
    if config.has_bias:
        shapes |= {"w13_bias": (experts, rows), "w2_bias": (experts, hidden)}
    tensors = {name: TensorSketch(shape, dtype, device) for name, shape in shapes.items()}
    tensors["router_logits"] = TensorSketch((tokens, experts), logits_dtype, device)
    absent = dict.fromkeys(("w13_bias", "w2_bias", "correction_bias", "expert_map"))
    program = fused_moe_program(**{**absent, **tensors}, routing=config.routing, activation=config.activation)
    program.load({name: tensor.dtype for name, tensor in tensors.items()}, device)
