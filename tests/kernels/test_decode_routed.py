"""Decode from logits, where the first launch routes as well: the same bits as with a launch of its own for routing."""

import pytest
import torch

from moe_ops import records
from moe_ops.arguments import Router
from moe_ops.kernels import fused
from moe_ops.kernels.gpu import H200
from moe_ops.kernels.program import Program, describe
from moe_ops.routing import reference
from moe_ops.types import Activation, RoutingConfig
from tests.helpers import mixed
from tests.kernels import oracles
from tests.kernels.by_name import record
from tests.kernels.oracles import assert_close

HALVES = Activation()
ROUTINGS = {  # top_k, and what else
    "softmax": RoutingConfig(top_k=3),
    "as they are": RoutingConfig(top_k=3, renormalize=False, scale=2.5),
    "sigmoid": RoutingConfig(top_k=3, score_fn="sigmoid", renorm_eps=1e-20, scale=0.5),
    "later": RoutingConfig(top_k=3, order="topk_then_score"),
    "sqrtsoftplus": RoutingConfig(top_k=3, score_fn="sqrtsoftplus"),
    "one": RoutingConfig(top_k=1),
}
SIZES = {"T1": (1, 13, 48, 20), "T3": (3, 41, 37, 7), "T8": (8, 150, 19, 5)}  # T, E, H, I
KERNELS = ["routed_gemv_activation_kernel", "gemv_combine_kernel"]
OF_COLUMNS = ["routed_gemv_columns_kernel", "gemv_gate_kernel", "gemv_columns_kernel", "gemv_sum_kernel"]


def _tensors(size: str, dtype: torch.dtype = torch.float32, activation: Activation = HALVES) -> dict:
    tokens, experts, hidden, features = SIZES[size]
    rows = 2 * features if activation.is_gated else features
    tensors = {
        "hidden_states": torch.randn(tokens, hidden),
        "w13": torch.randn(experts, rows, hidden) / hidden**0.5,
        "w2": torch.randn(experts, hidden, features) / features**0.5,
        "w13_bias": torch.randn(experts, rows),
        "w2_bias": torch.randn(experts, hidden),
    }
    return {name: tensor.to(dtype) for name, tensor in tensors.items()} | {
        "router_logits": torch.randn(tokens, experts),
        "correction_bias": None,
        "expert_map": None,
    }


def _run(tensors: dict, routing: RoutingConfig, activation: Activation, device: str) -> torch.Tensor:
    placed = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
    (out,) = _program(placed, routing, activation).filled.run(placed)
    return out.cpu()


def _program(tensors: dict, routing: RoutingConfig, activation: Activation = HALVES) -> Program:
    """Made anew."""
    given = record("fused_moe", **tensors, routing=routing, activation=activation)
    described = records.transform(
        lambda leaf: describe(leaf) if isinstance(leaf, torch.Tensor) else leaf, given
    )
    return fused.fused_moe_program(described, H200)


def _check(
    tensors: dict,
    routing: RoutingConfig,
    device: str,
    activation: Activation = HALVES,
    kernels: list[str] = KERNELS,
) -> None:
    """Against the oracle of experts on the definition's routes, and to the bit against two launches."""
    assert _names(tensors, routing, activation) == kernels
    out = _run(tensors, routing, activation, device)
    given = {
        name: tensor for name, tensor in tensors.items() if name not in ("router_logits", "correction_bias")
    }
    router = Router(tensors["router_logits"], tensors["correction_bias"], routing.spec)
    given["topk_weights"], given["topk_ids"] = reference(router)
    assert_close(out, oracles.experts(**given, shared=None, activation=activation))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fused, "routes_inside", lambda router, up: False)
        assert torch.equal(out, _run(tensors, routing, activation, device))


def _names(tensors: dict, routing: RoutingConfig, activation: Activation = HALVES) -> list[str]:
    return [launch.kernel.__name__ for launch in _program(tensors, routing, activation).launches]


@pytest.mark.parametrize(("name", "size"), mixed(ROUTINGS, SIZES))
def test_every_score_at_every_size(name: str, size: str, device: str) -> None:
    _check(_tensors(size), ROUTINGS[name], device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_a_correction(dtype: torch.dtype, device: str) -> None:
    tensors = _tensors("T3", dtype)
    tensors["router_logits"] = tensors["router_logits"].to(dtype)
    tensors["correction_bias"] = torch.randn(41) * 3
    _check(tensors, RoutingConfig(top_k=4, score_fn="sigmoid"), device)


def test_ties_and_scores_that_are_not_finite(device: str) -> None:
    tensors = _tensors("T3")
    logits = tensors["router_logits"] = torch.zeros(3, 41)
    logits[1, ::2] = -float("inf")
    logits[2, 5:] = float("nan")
    _check(tensors, RoutingConfig(top_k=6, score_fn="sigmoid"), device)
    logits[2, 1:] = -float("inf")  # fewer usable experts than slots
    _check(tensors, RoutingConfig(top_k=6, order="topk_then_score"), device)


def test_experts_that_live_elsewhere_and_logits_apart(device: str) -> None:
    tensors = _tensors("T3")
    expert_map = torch.full((41,), -1, dtype=torch.int32)
    expert_map[torch.arange(0, 41, 3)] = torch.arange(14, dtype=torch.int32)
    expert_map[1], expert_map[2] = 14, 1 << 30  # no such local experts
    for name in ("w13", "w2", "w13_bias", "w2_bias"):
        tensors[name] = tensors[name][:14].clone()
    tensors |= {"expert_map": expert_map, "router_logits": torch.randn(41, 6).T[::2]}
    _check(tensors, RoutingConfig(top_k=6), device)


@pytest.mark.parametrize(
    "activation", [Activation("swiglu_oai", interleaved=True), Activation("relu2")], ids=str
)
def test_activations(activation: Activation, device: str) -> None:
    tensors = _tensors("T3", torch.bfloat16, activation)
    _check(tensors, ROUTINGS["softmax"], device, activation)


@pytest.mark.parametrize(
    ("size", "dtype", "activation"),
    mixed(SIZES, (torch.bfloat16, torch.float32), (HALVES, Activation("swiglu_oai", interleaved=True))),
    ids=str,
)
def test_columns_that_lie_together(
    size: str, dtype: torch.dtype, activation: Activation, device: str
) -> None:
    tensors = _tensors(size, dtype, activation)
    tensors["expert_map"] = torch.arange(SIZES[size][1], dtype=torch.int32).flip(0)
    tensors["expert_map"][::5] = -1
    tensors |= {name: tensors[name].mT.contiguous().mT for name in ("w13", "w2")}
    tensors["hidden_states"] = tensors["hidden_states"].repeat_interleave(2, 1)[:, ::2]
    _check(tensors, ROUTINGS["as they are"], device, activation, OF_COLUMNS)


def test_a_program_to_each_token_writes_the_routes() -> None:
    tensors = _tensors("T8")
    up, down = _program(tensors, ROUTINGS["softmax"]).launches
    assert up.grid[0] % 24 == 8 and up.args["BLOCK_E"] == 256
    written = {up.args[name].name for name in ("weights_ptr", "ids_ptr", "out_ptr")}
    assert written == {down.args[name].name for name in ("weights_ptr", "ids_ptr", "x_ptr")}


@pytest.mark.parametrize(
    ("tokens", "experts", "routing"),
    [
        (2, 32, RoutingConfig(top_k=2, num_groups=4)),  # groups take a token's programs too long
        (2, 600, RoutingConfig(top_k=2)),  # and so do as many experts
        (9, 40, RoutingConfig(top_k=2)),  # more tokens are sorted by expert
        (4, 8, RoutingConfig(top_k=4)),  # and so are slots that share experts
    ],
)  # fmt: skip
def test_others_route_in_a_launch_of_their_own(tokens: int, experts: int, routing: RoutingConfig) -> None:
    _expect_apart(tokens, experts, routing, 16)


def test_programs_of_several_warps_do_not_route() -> None:
    _expect_apart(1, 13, ROUTINGS["softmax"], 4096)


def _expect_apart(tokens: int, experts: int, routing: RoutingConfig, hidden: int) -> None:
    shapes = {"hidden_states": (tokens, hidden), "w13": (experts, 16, hidden), "w2": (experts, hidden, 8)}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    tensors["router_logits"] = torch.empty(tokens, experts, device="meta")
    names = _names(tensors, routing)
    assert names[0] == "_topk_routing_kernel" and "routed_gemv_activation_kernel" not in names
