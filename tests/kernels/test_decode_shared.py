"""A shared expert in the launches of its layer: as one more expert that every token chose, against float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ops import records
from moe_ops.arguments import (
    Epilogue,
    ExpertWeights,
    FusedExperts,
    FusedExpertsWithShared,
    GroupedLinear,
    PairedLinear,
    Placement,
    Router,
    SharedExpert,
)
from moe_ops.kernels import fused, plans
from moe_ops.kernels.decode_blocks import down_config
from moe_ops.kernels.gpu import H200
from moe_ops.kernels.program import describe
from moe_ops.routing import reference
from moe_ops.types import Activation, RoutingConfig
from tests.helpers import mixed
from tests.kernels import oracles
from tests.kernels.oracles import assert_close

K = 3
SIZES = {  # T, E, H, I, J
    "T1": (1, 13, 48, 20, 37), "T2": (2, 41, 37, 7, 64), "T3": (3, 60, 24, 16, 16), "T4": (4, 90, 72, 48, 11)
}  # fmt: skip
FORMS = ("one weight", "halves", "strided")
ROUTING = RoutingConfig(top_k=K, score_fn="sigmoid", scale=0.5)
SILU = Activation()


def _rows(rows: int, depth: int) -> torch.Tensor:
    return torch.randn(rows, depth) / depth**0.5


def _shared(size: str, form: str, activation: Activation, dtype: torch.dtype) -> SharedExpert:
    """On the CPU, with its weights in one of the forms that they may have."""
    _, _, hidden, _, features = SIZES[size]
    rows = 2 * features if activation.is_gated else features
    w13, w2 = _rows(rows, hidden + 5).to(dtype), _rows(hidden, features + 3).to(dtype)
    w13, w2 = (w13[:, 3:-2], w2[:, 1:-2]) if form == "strided" else (w13[:, :-5].clone(), w2[:, :-3].clone())
    if form != "halves":
        return SharedExpert(w13, w2, None, activation.spec)
    gate, up = (each.clone() for each in w13.chunk(2))
    return SharedExpert(gate, w2, None, activation.spec, up)


def _experts(size: str, activation: Activation, dtype: torch.dtype) -> FusedExperts:
    tokens, experts, hidden, features, _ = SIZES[size]
    rows = 2 * features if activation.is_gated else features
    w13 = _rows(experts * rows, hidden).view(experts, rows, hidden).to(dtype)
    w2 = _rows(experts * hidden, features).view(experts, hidden, features).to(dtype)
    weights, ids = torch.rand(tokens, K), torch.randint(-1, experts, (tokens, K), dtype=torch.int32)
    both = ExpertWeights(PairedLinear(w13, torch.randn(experts, rows).to(dtype)), GroupedLinear(w2))
    x = torch.randn(hidden, tokens).to(dtype).T
    return FusedExperts(x, both, weights, ids, Placement(), None, activation.spec)


def _alone(x: torch.Tensor, shared: SharedExpert) -> torch.Tensor:
    """What the shared expert gives, in float64."""
    w13 = shared.shared_w13 if shared.shared_up is None else torch.cat((shared.shared_w13, shared.shared_up))
    weight = torch.ones(len(x), 1) if shared.shared_weights is None else shared.shared_weights
    one = w13.unsqueeze(0), shared.shared_w2.unsqueeze(0), weight, torch.zeros(len(x), 1, dtype=torch.int32)
    return oracles.experts(x, *one, None, None, None, None, Activation.from_spec(shared.shared_activation))


def _both(args: FusedExperts, shared: SharedExpert) -> torch.Tensor:
    (w13, bias, *_), (w2, _) = args.experts
    given = args.hidden_states, w13, w2, args.topk_weights, args.topk_ids
    routed = oracles.experts(*given, bias, None, None, None, Activation.from_spec(args.activation))
    return routed + _alone(args.hidden_states, shared)


def _on(device: str, value: Any) -> Any:
    return records.map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


def _described(value: Any) -> Any:
    return records.map_leaves(lambda leaf: describe(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


@pytest.mark.parametrize(
    ("size", "form", "dtype"),
    mixed(SIZES, FORMS, (torch.bfloat16, torch.float32)),
    ids=str,
)
def test_from_ids(size: str, form: str, dtype: torch.dtype, device: str, poisoned_empty: None) -> None:
    args, shared = _experts(size, SILU, dtype), _shared(size, form, SILU, dtype)
    for weights in (None, torch.rand(1, args.hidden_states.shape[0]).T):
        shared = shared._replace(shared_weights=weights)
        given = FusedExpertsWithShared(*args[:5], shared, args.activation)
        assert fused.has_shared_inside(_described(given), H200)
        assert len(plans.program(given, H200).launches) == 2
        assert_close(plans.launch(_on(device, given)), _both(args, shared))


@pytest.mark.parametrize(
    "activation", [Activation("relu2"), Activation("swiglu_oai", interleaved=True)], ids=str
)
def test_activations(activation: Activation, device: str) -> None:
    args = _experts("T2", activation, torch.float64)
    shared = _shared("T2", "strided", activation, torch.float64)
    given = FusedExpertsWithShared(*args[:5], shared, args.activation)
    assert_close(plans.launch(_on(device, given)), _both(args, shared))


@pytest.mark.parametrize("groups", [1, 2], ids=["routing inside", "routing apart"])
@pytest.mark.parametrize("size", ["T1", "T4"])
def test_with_its_router_gate_and_residual(size: str, groups: int, device: str, poisoned_empty: None) -> None:
    args, shared = _experts(size, SILU, torch.float32), _shared(size, "halves", SILU, torch.float32)
    (tokens, hidden), experts = args.hidden_states.shape, args.experts.w13.weight.shape[0]
    routing = ROUTING if groups == 1 else replace(ROUTING, num_groups=experts, topk_groups=K + 1)
    router = Router(torch.randn(tokens, experts), None, routing.spec)
    gate, residual = torch.randn(tokens, 1), torch.randn(tokens, hidden)
    weights, ids = reference(router)
    args = args._replace(
        topk_weights=weights, topk_ids=ids, shared=residual, epilogue=Epilogue(gate, residual)
    )
    together = plans.decode_together(args, router, shared)
    assert together is not None and together.joins and together.routes == (groups == 1)
    tensors = {**records.named(args), **records.named(router), **shared._asdict()}
    if together.routes:
        del tensors["topk_weights"], tensors["topk_ids"]
    placed = {name: each.to(device) for name, each in tensors.items() if isinstance(each, torch.Tensor)}
    (out,) = together.program.filled.run(dict.fromkeys(tensors) | placed)
    routed = _both(args, shared) - _alone(args.hidden_states, shared)
    alone = gate.double().sigmoid() * _alone(args.hidden_states, shared)
    assert_close(out, routed + alone + residual)


def test_columns_of_a_program_fit_its_registers() -> None:
    """DeepSeek-V3: two columns of eight routes take them all, so beside a shared expert it is one."""
    w2 = describe(
        torch.empty(8, 7168, 2048, device="meta", dtype=torch.bfloat16).as_strided(
            (8, 7168, 2048), (7168 * 2048, 2048, 1)
        )
    )
    assert [down_config(w2, 8, H200, beside).block_n for beside in (0, 2048)] == [2, 1]


def test_for_which_it_is() -> None:
    """As many tokens as read a shared expert's weights again from the cache, one activation, and weights in rows."""
    experts, shared = _experts("T4", SILU, torch.float32), _shared("T4", "halves", SILU, torch.float32)

    def takes(tokens: int = 2, wide: bool = False, activation: str = "silu", **weights: torch.Tensor) -> bool:
        slots = torch.rand(tokens, K)
        args = experts._replace(
            hidden_states=torch.empty(tokens, 72),
            topk_weights=slots,
            topk_ids=slots.int(),
            activation=activation,
        )
        features = 49 if wide else 48
        halves = dict.fromkeys(("shared_w13", "shared_up"), torch.empty(features, 72))
        given = shared._replace(**{**halves, "shared_w2": torch.empty(72, features), **weights})
        return fused.takes_shared(_described(args), _described(given))

    assert takes() and takes(4) and not takes(5)
    assert takes(2, wide=True) and not takes(3, wide=True)
    assert not takes(shared_up=torch.empty(48, 80)[:, :72]) and not takes(shared_up=torch.empty(47, 72))
    assert not takes(activation="gelu") and not takes(shared_w2=torch.empty(48, 72).T)
    assert not takes(shared_w13=torch.empty(72, 48).T)
    columns = experts.experts._replace(w2=GroupedLinear(experts.experts.w2.weight.mT.contiguous().mT))
    assert not fused.takes_shared(_described(experts._replace(experts=columns)), _described(shared))
    assert takes(shared_w2=torch.empty(72, 8192)) and not takes(shared_w2=torch.empty(72, 8193))
    few = experts._replace(topk_ids=torch.zeros(4, 40, dtype=torch.int32))  # most slots share experts
    assert not fused.takes_shared(_described(few), _described(shared))
