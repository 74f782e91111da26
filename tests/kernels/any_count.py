"""Arguments of every operator that has launch plans, described, for any number of tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moe_ops import arguments as of, invariant_arguments as invariant, scaled_arguments as scaled
from moe_ops.arguments import (
    Epilogue,
    ExpertWeights,
    PairedLinear,
    Placement,
    Replicas,
    Router,
    SharedExpert,
)
from moe_ops.formula import Formula
from moe_ops.kernels.program import TensorMeta
from moe_ops.types import Activation, RoutingConfig
from moe_ops.values import Gate, LoadRecord, ScaledLinear, SharedAlone

INT = torch.int32


@dataclass(frozen=True)
class Layer:
    """Sizes and layouts. joins: whether there are biases, an expert map, a correction bias, shared outputs and more."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    dtype: torch.dtype = torch.bfloat16
    transposed: bool = False
    joins: bool = False
    apart: bool = False

    def of(self, *shape: int, dtype: torch.dtype | None = None) -> TensorMeta:
        strides = tuple(torch.empty(shape, device="meta").stride())
        return TensorMeta(shape, strides, dtype or self.dtype, True)

    def linear(self, rows: int, depth: int) -> PairedLinear:
        weight = self.of(self.num_experts, rows, depth)
        if self.transposed:
            weight = weight._replace(strides=(rows * depth, 1, rows))
        return PairedLinear(weight, self.of(self.num_experts, rows) if self.joins else None)

    def gate_up(self) -> PairedLinear:
        """The first product, of two weights where they are apart."""
        if not self.apart:
            return self.linear(2 * self.inner, self.hidden)
        half = self.linear(self.inner, self.hidden)
        return half._replace(up=half.weight, up_bias=half.bias)


LAYERS = {
    "Qwen3-30B-A3B": Layer(128, 8, 2048, 768),
    "Mixtral-8x7B": Layer(8, 2, 4096, 14336, joins=True),
    "in columns": Layer(16, 4, 512, 256, transposed=True, joins=True),
    "apart": Layer(16, 4, 512, 256, joins=True, apart=True),
    "odd": Layer(13, 3, 30, 15, dtype=torch.float32),
}
ACTIVATION = Activation("silu").spec
_FORMULA = Formula("halves", (), (("mul", ("gate", "up")),), "t0")


def arguments(layer: Layer, tokens: int) -> Iterator[Any]:
    """One or more for every record."""
    yield from _routing(layer, tokens)
    yield from _placing(layer, tokens)
    yield from _rows(layer, tokens)
    yield from _products(layer, tokens)
    yield from _fused(layer, tokens)


def _router(layer: Layer, tokens: int) -> Router:
    logits = layer.of(tokens, layer.num_experts, dtype=torch.float32)
    bias = layer.of(layer.num_experts, dtype=torch.float32) if layer.joins else None
    return Router(logits, bias, RoutingConfig(layer.top_k).spec)


def _chosen(layer: Layer, tokens: int) -> tuple[TensorMeta, TensorMeta]:
    shape = tokens, layer.top_k
    return layer.of(*shape, dtype=torch.float32), layer.of(*shape, dtype=INT)


def _placement(layer: Layer) -> Placement:
    return Placement(layer.of(layer.num_experts, dtype=INT) if layer.joins else None)


def _routing(layer: Layer, tokens: int) -> Iterator[Any]:
    router, (weights, ids) = _router(layer, tokens), _chosen(layer, tokens)
    yield of.TopkRouting(router)
    yield invariant.BatchInvariantRouting(router)
    yield of.TopkRoutingBackward(weights, router.router_logits, weights, ids, router.routing)
    yield of.RoutingDispatch(router, _placement(layer), layer.num_experts)
    yield of.BuildDispatch(ids, _placement(layer), layer.num_experts)
    for most in (512, 4096):
        yield of.PlanExchange(ids, layer.of(layer.num_experts, dtype=INT), 4, most)


def _placing(layer: Layer, tokens: int) -> Iterator[Any]:
    experts, (_, ids) = layer.num_experts, _chosen(layer, tokens)
    replicas = Replicas(layer.of(experts, 3, dtype=INT), layer.of(experts, dtype=INT))
    record = LoadRecord(layer.of(2 * experts, dtype=INT), layer.of(dtype=INT) if layer.joins else None)
    yield of.MapReplicas(ids, replicas)
    yield of.MapAndRecord(of.MapReplicas(ids, replicas), record)
    yield of.RouteAndRecord(_router(layer, tokens), replicas, record)


def _rows(layer: Layer, tokens: int) -> Iterator[Any]:
    hidden, slots, (weights, _) = layer.of(tokens, layer.hidden), tokens * layer.top_k, _chosen(layer, tokens)
    by_slot, index = layer.of(slots, layer.hidden), layer.of(slots, dtype=INT)
    yield of.Permute(hidden, index)
    yield of.PermuteBackward(by_slot, index, tokens)
    yield of.Combine(by_slot, weights, index, *_joined(layer, tokens))
    yield of.CombineBackward(hidden, by_slot, weights, index)
    gate_up, activated = layer.of(slots, 2 * layer.inner), layer.of(slots, layer.inner)
    backward = of.GatedActivationBackward(activated, gate_up, ACTIVATION)
    yield of.GatedActivation(gate_up, ACTIVATION)
    yield backward
    yield of.WeightedActivationBackward(backward, layer.of(slots, dtype=torch.float32))


def _joined(layer: Layer, tokens: int) -> tuple[TensorMeta | None, Epilogue]:
    if not layer.joins:
        return None, Epilogue()
    hidden = layer.of(tokens, layer.hidden)
    return hidden, Epilogue(layer.of(tokens, 1), hidden)


def _products(layer: Layer, tokens: int) -> Iterator[Any]:
    slots, offsets = tokens * layer.top_k, layer.of(layer.num_experts + 1, dtype=INT)
    x, product = layer.of(slots, layer.hidden), layer.of(slots, 2 * layer.inner)
    linear = layer.gate_up()
    yield of.GroupedGemm(x, linear, offsets)
    yield invariant.BatchInvariantGemm(x, linear, offsets)
    yield of.GroupedGemmWeightBackward(product, x, offsets)
    yield from _scaled(layer, tokens, offsets)
    padded = layer.of(layer.num_experts, tokens, layer.hidden)
    yield of.BatchedGemm(padded, linear.halves[0], layer.of(layer.num_experts, dtype=INT))
    hidden, bias = layer.of(tokens, layer.hidden), layer.of(64) if layer.joins else None
    yield of.DenseGemm(hidden, layer.of(64, layer.hidden), bias, torch.float32)
    shared = layer.of(2 * layer.inner, layer.hidden), layer.of(layer.hidden, layer.inner)
    expert = SharedExpert(*shared, layer.of(tokens, 1) if layer.joins else None, ACTIVATION)
    yield SharedAlone(hidden, expert)
    if not layer.transposed:
        experts = ExpertWeights(linear, layer.linear(layer.hidden, layer.inner).halves[0])
        chosen, placement = _chosen(layer, tokens), _placement(layer)
        yield of.FusedExpertsWithShared(hidden, experts, *chosen, placement, expert, ACTIVATION)


def _scaled(layer: Layer, tokens: int, offsets: TensorMeta) -> Iterator[Any]:
    features, depth = 2 * layer.inner, layer.hidden
    block = (128, 128) if layer.joins else (1, depth)
    blocks = -(-features // block[0]), -(-depth // block[1])
    weight = layer.gate_up().weight._replace(shape=(layer.num_experts, features, depth), dtype=torch.int8)
    scale, bias = (
        layer.of(layer.num_experts, *blocks, dtype=torch.float32),
        layer.linear(features, depth).bias,
    )
    linear, hidden = ScaledLinear(weight, scale, bias, *block), layer.of(tokens, depth)
    yield scaled.QuantiseRows(hidden, block[1], torch.int8)
    yield scaled.dequantising(linear, layer.dtype)
    yield scaled.ScaledGroupedGemm(
        hidden, None, linear, offsets, layer.of(tokens * layer.top_k, dtype=INT), layer.dtype
    )
    pairs = weight._replace(shape=(layer.num_experts, features, depth // 2), dtype=torch.uint8)
    exponents = layer.of(layer.num_experts, features, -(-depth // 32), dtype=torch.uint8)
    in_pairs = ScaledLinear(pairs, exponents, bias, 1, 32)
    small = layer.of(layer.num_experts, features, -(-depth // 16), dtype=torch.float8_e4m3fn)
    outer = layer.of(layer.num_experts, 2, dtype=torch.float32)
    nvfp4 = ScaledLinear(pairs, small, bias, 1, 16, None, outer)
    yield scaled.ScaledGroupedGemm(hidden, None, in_pairs, offsets, None, layer.dtype)
    yield scaled.ScaledGroupedGemm(hidden, None, nvfp4, offsets, None, layer.dtype)
    rows, row_scale = hidden._replace(dtype=torch.int8), layer.of(tokens, blocks[1], dtype=torch.float32)
    yield scaled.ScaledGroupedGemm(rows, row_scale, linear, offsets, None, layer.dtype)
    narrow = weight._replace(
        shape=(layer.num_experts, depth, layer.inner), strides=(depth * layer.inner, layer.inner, 1)
    )
    down = ScaledLinear(
        narrow, layer.of(layer.num_experts, depth, 1, dtype=torch.float32), None, 1, layer.inner
    )
    shared, epilogue = _joined(layer, tokens)
    joined = _placement(layer), shared, ACTIVATION, epilogue
    yield scaled.ScaledFusedExperts(hidden, linear, down, *_chosen(layer, tokens), *joined)
    yield scaled.ScaledFusedExperts(hidden, linear, down, *_chosen(layer, tokens), *joined, "exact")
    pairs = narrow._replace(shape=(layer.num_experts, depth, layer.inner // 2), dtype=torch.uint8)
    pairs = pairs._replace(strides=(depth * layer.inner // 2, layer.inner // 2, 1))
    exponents = layer.of(layer.num_experts, depth, -(-layer.inner // 32), dtype=torch.uint8)
    down_in_pairs = ScaledLinear(pairs, exponents, None, 1, 32)
    yield scaled.ScaledFusedExperts(
        hidden, in_pairs, down_in_pairs, *_chosen(layer, tokens), *joined, "exact"
    )


def _fused(layer: Layer, tokens: int) -> Iterator[Any]:
    hidden, (weights, ids) = layer.of(tokens, layer.hidden), _chosen(layer, tokens)
    w13, w2 = layer.gate_up(), layer.linear(layer.hidden, layer.inner).halves[0]
    slots = layer.of(tokens * layer.top_k, dtype=INT)
    offsets, gate = layer.of(layer.num_experts + 1, dtype=INT), Gate(None, None, None, None, _FORMULA.spec)
    joined, experts, placement = _joined(layer, tokens), ExpertWeights(w13, w2), _placement(layer)
    gate_up, activated = (layer.of(slots.shape[0], width * layer.inner) for width in (2, 1))
    yield of.GatherGemm(hidden, w13, slots, offsets)
    yield of.GatherGemmAct(hidden, w13, slots, offsets, ACTIVATION)
    yield of.GatherGemmFormula(hidden, w13, slots, offsets, gate)
    yield of.GemmCombine(activated, w2, offsets, weights, slots, *joined)
    shared, epilogue = joined
    yield of.ActGemmCombine(gate_up, w2, offsets, weights, slots, slots, shared, ACTIVATION, epilogue)
    routed = hidden, experts, weights, ids, placement, shared
    yield of.FusedExperts(*routed, ACTIVATION, epilogue)
    yield of.FusedExpertsFormula(*routed, gate, epilogue)
    yield invariant.BatchInvariantExperts(*routed, ACTIVATION, epilogue)
    router = _router(layer, tokens)
    yield of.FusedMoe(hidden, router, experts, placement, ACTIVATION)
    yield of.FusedMoeFormula(hidden, router, experts, placement, gate)
