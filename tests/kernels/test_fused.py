"""The fused programs, decode and grouped, against the slot-by-slot oracle."""

import contextlib

import pytest
import torch

from moe_ops import routing as routing_definition
from moe_ops.arguments import (
    ExpertWeights,
    FusedExperts,
    GroupedLinear,
    PairedLinear,
    Placement,
    Router,
    SharedExpert,
)
from moe_ops.kernels import decode_blocks, fused, plans
from moe_ops.kernels.gpu import H200
from moe_ops.kernels.program import BoundByName
from moe_ops.types import Activation, RoutingConfig
from moe_ops.values import SharedAlone
from tests.helpers import mixed, usually
from tests.kernels import oracles
from tests.kernels.by_name import launch, program_of
from tests.kernels.oracles import assert_close

SIZES = {
    "T1": (1, 13, 3, 48, 40),
    "T7": (7, 13, 4, 48, 40),
    "turns": (3, 41, 3, 72, 20),
    "T33": (33, 13, 4, 72, 24),
    "hot": (24, 2, 2, 64, 136),
}
ACTIVATIONS = [
    Activation("silu"),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("relu2"),
    Activation("swiglu_oai", interleaved=True),
    Activation("silu", limit=0.5, interleaved=True),
    Activation("swiglustep", limit=0.5),
    Activation("situ", beta=1.5, linear_beta=2.0, interleaved=True),
    Activation("silu_no_mul"),
]


def _experts(
    size: str, dtype: torch.dtype, activation: Activation, transposed: bool = False, biased: bool = False
):
    tokens, num_experts, top_k, hidden, features = SIZES[size]
    rows = 2 * features if activation.is_gated else features
    tensors = {
        "hidden_states": torch.randn(tokens, hidden),
        "w13": torch.randn(num_experts, rows, hidden) / hidden**0.5,
        "w2": torch.randn(num_experts, hidden, features) / features**0.5,
        "topk_weights": torch.rand(tokens, top_k),
        "topk_ids": torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(tokens)]).to(torch.int32),
        "w13_bias": torch.randn(num_experts, rows) if biased else None,
        "w2_bias": torch.randn(num_experts, hidden) if biased else None,
        "expert_map": None,
        "shared": torch.randn(tokens, hidden) if biased else None,
        "shared_gate": torch.randn(tokens, 1) if biased else None,
        "residual": torch.randn(tokens, hidden) if biased else None,
    }
    for name in {*tensors} - {"topk_weights", "topk_ids"}:
        tensors[name] = None if tensors[name] is None else tensors[name].to(dtype)
    if transposed:
        for name in ("w13", "w2"):
            tensors[name] = tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    return tensors


def _check(tensors, activation: Activation, device: str) -> torch.Tensor:
    moved = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
    out = launch("fused_experts", **moved, activation=activation)
    assert_close(out, oracles.experts(**tensors, activation=activation))
    return out


@pytest.mark.parametrize(
    ("size", "dtype"), mixed(SIZES, (torch.bfloat16, torch.float32, torch.float64), rounds=2), ids=str
)
def test_fused_experts(dtype: torch.dtype, size: str, device: str) -> None:
    _check(_experts(size, dtype, Activation()), Activation(), device)


@pytest.mark.parametrize(
    ("activation", "size", "transposed"), mixed(ACTIVATIONS, ("T1", "T33"), (False, True), rounds=2), ids=str
)
def test_activations_biases_and_layouts(
    size: str, activation: Activation, transposed: bool, device: str
) -> None:
    _check(_experts(size, torch.bfloat16, activation, transposed, biased=True), activation, device)


@pytest.mark.parametrize("activation", [Activation("silu"), Activation("swiglu_oai", interleaved=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_generic_path_with_biases(dtype: torch.dtype, activation: Activation, device: str) -> None:
    _check(_experts("T33", dtype, activation, transposed=True, biased=True), activation, device)


@pytest.mark.parametrize("size", ["T1", "T7", "T33"])
def test_dropped_slots_contribute_nothing(size: str, device: str) -> None:
    tensors = _experts(size, torch.bfloat16, Activation())
    tensors["topk_ids"] = tensors["topk_ids"].long()
    tensors["topk_ids"][0, 0] = -1
    tensors["topk_ids"][-1, 1] = (1 << 32) + 2
    tensors["topk_weights"][0, 0] = float("nan")
    _check(tensors, Activation(), device)
    tensors["topk_ids"].fill_(13)
    out = _check(tensors, Activation(), device)
    assert (out == 0).all()


@pytest.mark.parametrize("interleaved", usually([False, True], [False]))
def test_decode_reads_long_rows_in_a_loop(
    interleaved: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_blocks, "_ONE_SHOT_BYTES", 0)
    monkeypatch.setattr(decode_blocks, "_LOOP_BYTES", 0)
    monkeypatch.setitem(SIZES, "long", (1, 3, 2, 136, 72))  # no other test caches a plan for these
    activation = Activation(interleaved=interleaved)
    _check(_experts("long", torch.bfloat16, activation, biased=True), activation, device)


@pytest.mark.parametrize("size", ["T1", "T33"])
def test_expert_map(size: str, device: str) -> None:
    tensors = _experts(size, torch.float32, Activation())
    expert_map = torch.full((13,), -1, dtype=torch.int32)
    expert_map[[2, 5, 7, 11]] = torch.tensor([1, 0, 3, 2], dtype=torch.int32)
    expert_map[3] = 50  # no such local expert
    tensors |= {"expert_map": expert_map, "w13": tensors["w13"][:4].clone(), "w2": tensors["w2"][:4].clone()}
    _check(tensors, Activation(), device)


@pytest.mark.parametrize("size", ["T1", "T7", "T33"])
def test_a_nan_token_changes_no_other_token(size: str, device: str) -> None:
    tensors = {
        k: None if v is None else v.to(device)
        for k, v in _experts(size, torch.bfloat16, Activation()).items()
    }
    clean = launch("fused_experts", **tensors, activation=Activation())
    tensors["hidden_states"][-1] = float("nan")
    out = launch("fused_experts", **tensors, activation=Activation())
    assert out[-1].isnan().all()
    assert torch.equal(out[:-1], clean[:-1])


@pytest.mark.parametrize(("size", "dtype"), mixed(SIZES, (torch.bfloat16, torch.float64)), ids=str)
def test_fused_moe_routes_and_computes(dtype: torch.dtype, size: str, device: str) -> None:
    tensors = _experts(size, dtype, Activation())
    tokens, num_experts, top_k = SIZES[size][:3]
    routing = RoutingConfig(top_k=top_k, score_fn="sigmoid", scale=1.5)
    logits = torch.randn(
        tokens, num_experts, dtype=torch.float64 if dtype == torch.float64 else torch.float32
    )
    bias = torch.rand(num_experts)
    weights, ids = routing_definition.reference(Router(logits, bias, routing.spec))
    expected = oracles.experts(
        **(tensors | {"topk_weights": weights, "topk_ids": ids}), activation=Activation()
    )
    args = [t.to(device) for t in (tensors["hidden_states"], logits, tensors["w13"], tensors["w2"])]
    out = launch("fused_moe", *args, bias.to(device), routing=routing, activation=Activation())
    assert_close(out, expected)
    assert torch.equal(
        out, launch("fused_moe", *args, bias.to(device), routing=routing, activation=Activation())
    )


@pytest.mark.parametrize("size", ["T7", "T33"])
def test_partial_fusions_compose_to_the_whole(size: str, device: str) -> None:
    tensors = _experts(size, torch.bfloat16, Activation(), biased=True)
    tokens, num_experts, top_k = SIZES[size][:3]
    routing = RoutingConfig(top_k=top_k)
    logits = torch.randn(tokens, num_experts).to(device)
    weights, ids, sorted_slots, inverse, offsets = launch(
        "routing_dispatch", logits, None, None, num_experts, routing
    )
    for actual, expected in zip(
        (sorted_slots, inverse, offsets), launch("build_dispatch", ids, None, num_experts), strict=True
    ):
        assert torch.equal(actual, expected)
    moved = {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}
    beside = [moved[name] for name in ("shared", "shared_gate", "residual")]
    hidden = launch(
        "gather_gemm_act",
        moved["hidden_states"],
        moved["w13"],
        sorted_slots,
        offsets,
        moved["w13_bias"],
        activation=Activation(),
    )
    out = launch("gemm_combine", hidden, moved["w2"], offsets, weights, inverse, moved["w2_bias"], *beside)
    routed = {"topk_weights": weights.cpu(), "topk_ids": ids.cpu()}
    expected = oracles.experts(**(tensors | routed), activation=Activation())
    assert_close(out, expected)
    up = moved["hidden_states"], moved["w13"], sorted_slots, offsets, moved["w13_bias"]
    plan, biases = (sorted_slots, inverse), (moved["w2_bias"], *beside)
    gate_up = launch("gather_gemm", *up)
    out = launch(
        "act_gemm_combine", gate_up, moved["w2"], offsets, weights, *plan, *biases, activation=Activation()
    )
    assert_close(out, expected)


def test_decode_path_counts_the_experts_of_the_map() -> None:
    """Eight local experts are few for 32 slots, but the slots of a token spread over all 128."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    routed = meta(4, 8, dtype=torch.float32), meta(4, 8, dtype=torch.int32)
    tensors = meta(4, 64), meta(8, 64, 64), meta(8, 64, 32), *routed
    for expert_map, first in (
        (None, "_rank_kernel"),
        (meta(128, dtype=torch.int32), "gemv_activation_kernel"),
    ):
        program = program_of("fused_experts", *tensors, expert_map=expert_map, activation=Activation())
        assert program.launches[0].kernel.__name__ == first


@pytest.mark.parametrize("sorts_first", [False, True])
def test_rows_by_tma(sorts_first: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 128 rows take rows in order by TMA: those of the second product, and sorted ones of the first."""
    monkeypatch.setattr(fused, "sorts_rows_first", lambda gemm: sorts_first)
    monkeypatch.setitem(
        SIZES, "many", (150 + sorts_first, 2, 2, 64, 136)
    )  # no other test caches a plan for these
    tensors = _experts("many", torch.bfloat16, Activation(), biased=True)
    tensors["topk_ids"][::7, 0] = -1
    moved = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
    program = program_of("fused_experts", **moved, activation=Activation())
    by_tma = [step.args["x_desc"] is not None for step in program.launches if "x_desc" in step.args]
    assert by_tma == [sorts_first, True]
    _check(tensors, Activation(), device)


def test_gather_gemm_act_zeroes_rows_of_dropped_slots(device: str) -> None:
    tensors = _experts("T33", torch.bfloat16, Activation(), biased=True)
    tensors["topk_ids"][::2] = -1
    slots, _, offsets = launch("build_dispatch", tensors["topk_ids"].to(device), None, 13)
    args = tensors["hidden_states"].to(device), tensors["w13"].to(device), slots, offsets
    out = launch("gather_gemm_act", *args, tensors["w13_bias"].to(device), activation=Activation())
    kept = int(offsets[-1])
    assert 0 < kept < out.shape[0]
    assert (out[kept:] == 0).all() and out[:kept].isfinite().all()
    out = launch("gather_gemm", *args, tensors["w13_bias"].to(device))
    assert (out[kept:] == 0).all() and out[:kept].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_both_streams_wait_for_each_other(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second starts after what the first has done, and is waited for before the first launch that reads its output.

    Where nothing overlaps that output is computed first. A token's takes launches of ours.
    """
    events: list[str] = []

    class Stream:
        cuda_stream = 0

        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            events.append(f"{self.name} waits for {other.name}")

        def __enter__(self) -> None:
            events.append(f"on {self.name}")

        def __exit__(self, *_: object) -> None:
            events.append(f"off {self.name}")

    def shared(_: SharedAlone) -> torch.Tensor:
        events.append("shared")
        return torch.empty(tokens, 64, dtype=torch.bfloat16)

    def launched(bound: BoundByName, first: int = 0, last: int | None = None) -> None:
        events.extend("reads" if step.reads("shared") else "launch" for step in bound.steps[first:last])

    kept = lambda _, stream: events.append(f"kept for {stream.name}")  # noqa: E731
    first, second = Stream("first"), Stream("second")
    monkeypatch.setattr(torch.Tensor, "record_stream", kept)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: first)
    monkeypatch.setattr(plans, "_second_stream", lambda device, stream: second)
    monkeypatch.setattr(plans, "gpu_of", lambda _: H200)
    monkeypatch.setattr(BoundByName, "launch", launched)
    w13 = PairedLinear(torch.empty(64, 96, 64).bfloat16())
    w2 = GroupedLinear(torch.empty(64, 64, 48).bfloat16())
    x, weights = torch.empty(tokens, 64).bfloat16(), torch.empty(tokens, 4)
    ids = torch.empty(tokens, 4, dtype=torch.int32)
    args = FusedExperts(x, ExpertWeights(w13, w2), weights, ids, Placement(), None, "silu")
    alone = SharedAlone(x, SharedExpert(torch.empty(96, 64).bfloat16(), w2.weight[0], None, "silu"))
    plans.launch_with_shared(args, alone, shared)
    told = " | ".join(events)
    if tokens < 16:
        alone = "launch | launch" if tokens == 1 else "shared"
        beside = f"second waits for first | on second | {alone} | off second | kept for first"
        assert told == f"{beside} | launch | first waits for second | reads"
    else:
        assert told.startswith("shared | launch") and told.endswith("launch | reads") and "waits" not in told
