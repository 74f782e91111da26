"""warmup: everything lazy, before a first CUDA-graph capture.

A capture must not compile or load a kernel. Which kernels a layer runs depends on its sizes and the token count, so
the plans of the operators say which to load; nothing is run and no weight is allocated.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from moe_ops import records
from moe_ops._checks import as_device
from moe_ops.arguments import (
    ExpertWeights,
    FusedExperts,
    FusedMoe,
    PairedLinear,
    Placement,
    Router,
    TopkRouting,
)
from moe_ops.invariant_arguments import BatchInvariantExperts, BatchInvariantRouting
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

    That is all that `topk_routing`, `fused_experts` and `fused_moe` launch, with a correction bias and without, with a
    shared output and without; batch-invariant ones where `config.emit` says so. Where a layer launches more (an
    overlapped shared expert, the mapping to replicas, the parts of a `ModularKernel`) run one forward before a capture.

    Args:
        config: sizes and options of the layer, such as a `layers.MoEConfig`.
        sizes: token counts T that will be captured.
        device: the GPU; on a device without kernels of ours (the CPU) there is nothing to load.
        dtype: of hidden states and weights (standard layout). Router logits may be float32 or of this dtype.
        expert_map: [num_experts] int32, the layer's own, for one that has a part of the experts: as many as it names.

    Raises:
        ValueError: a token count below 1, an expert_map that is not [num_experts] int32 or names no expert, or a device
            that torch does not know or that is not there.
        TypeError: config is no such config, dtype is not floating, a token count no int, or expert_map no tensor.

    Example:
        >>> moe_ops.warmup(config, sizes=[1, 8, 64], device="cpu")
    """
    if not isinstance(getattr(config, "routing", None), RoutingConfig):
        raise TypeError(f"config={config!r}: expected the config of a layer, such as layers.MoEConfig")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype!r}: expected a floating point dtype")
    if expert_map is not None:
        _check_map(expert_map, config.num_experts)
    if not isinstance(sizes, Iterable):
        raise TypeError(f"sizes={sizes!r}: expected several token counts")
    target = as_device("device", device)
    loader = _loader(target)
    for tokens in sizes:
        if not isinstance(tokens, int) or isinstance(tokens, bool):
            raise TypeError(f"sizes has {tokens!r}: expected ints, token counts")
        if tokens < 1:
            raise ValueError(f"sizes has {tokens}: expected token counts of at least 1")
        if loader is not None:
            for logits_dtype in {dtype, torch.float32}:
                for arguments in _launched(config, _Sketch(tokens, target, dtype, logits_dtype), expert_map):
                    loader.load(*_program(arguments))


def _check_map(expert_map: torch.Tensor, num_experts: int) -> None:
    if not isinstance(expert_map, torch.Tensor):
        raise TypeError(f"expert_map is a {type(expert_map).__name__}: expected a tensor")
    if expert_map.shape != (num_experts,) or expert_map.dtype != torch.int32:
        found = f"expert_map has shape {list(expert_map.shape)} and dtype {expert_map.dtype}"
        raise ValueError(f"{found}: expected [{num_experts}] and torch.int32")
    if int(expert_map.max()) < 0:
        raise ValueError(
            f"expert_map has {int(expert_map.max())} as its largest entry: expected a local expert"
        )


class _Sketch(NamedTuple):
    """Descriptions of a layer's tensors."""

    tokens: int
    device: torch.device
    dtype: torch.dtype
    logits_dtype: torch.dtype

    def of(self, *shape: int, dtype: torch.dtype | None = None) -> Any:
        from moe_ops.kernels.program import TensorSketch

        return TensorSketch(shape, dtype or self.dtype, self.device)

    def product(self, config: LayerSizes, *shape: int) -> Any:
        return PairedLinear(self.of(*shape), self.of(*shape[:2]) if config.has_bias else None)


def _launched(config: LayerSizes, sketch: _Sketch, expert_map: torch.Tensor | None) -> Iterator[Any]:
    """Arguments of operators that together launch all that the layer can."""
    from moe_ops.kernels.common import compute_dtype

    hidden, features = config.hidden_size, config.intermediate_size
    local = config.num_experts if expert_map is None else int(expert_map.max()) + 1
    rows = 2 * features if config.activation.is_gated else features
    experts = ExpertWeights(
        sketch.product(config, local, rows, hidden), sketch.product(config, local, hidden, features)
    )
    placement = Placement(None if expert_map is None else sketch.of(config.num_experts, dtype=torch.int32))
    x, activation = sketch.of(sketch.tokens, hidden), config.activation.spec
    logits = sketch.of(sketch.tokens, config.num_experts, dtype=sketch.logits_dtype)
    biases = (None, sketch.of(config.num_experts, dtype=torch.float32))
    routers = [Router(logits, bias, config.routing.spec) for bias in biases]
    routed = sketch.tokens, config.routing.top_k
    weights = sketch.of(*routed, dtype=compute_dtype(sketch.logits_dtype))
    args = FusedExperts(x, experts, weights, sketch.of(*routed, dtype=torch.int32), placement, x, activation)
    if getattr(config, "emit", "auto") == "batch_invariant":
        yield from (BatchInvariantRouting(router) for router in routers)
        yield from (BatchInvariantExperts(*args._replace(shared=shared)) for shared in (None, x))
    else:
        yield from (FusedMoe(x, router, experts, placement, activation) for router in routers)
        yield from (TopkRouting(router) for router in routers)
        yield from (args._replace(shared=shared) for shared in (None, x))


def _loader(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    from moe_ops.kernels.loading import Loader

    return Loader(device)


def _program(arguments: Any) -> tuple[Any, dict[str, torch.dtype]]:
    from moe_ops.kernels import plans

    dtypes = {name: leaf.dtype for name, leaf in records.named(arguments).items() if hasattr(leaf, "dtype")}
    return plans.program(arguments), dtypes
