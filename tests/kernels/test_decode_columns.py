"""Decode with weights whose columns lie together: every size, option and dtype against the slot-by-slot oracle."""

import pytest
import torch

from moe_ops.kernels.decode_blocks import depth_of_part
from moe_ops.types import Activation
from tests.helpers import mixed
from tests.kernels import oracles
from tests.kernels.by_name import launch, program_of
from tests.kernels.oracles import assert_close
from tests.kernels.test_pairs import on, taken_apart

SIZES = {  # T, E, K, H, I, into how many parts the depths of w13 and w2 are cut for bfloat16
    "one route": (1, 3, 1, 80, 1025, 2, 5),
    "odd": (2, 37, 3, 37, 150, 1, 3),
    "one part": (1, 9, 3, 37, 30, 1, 1),
    "many routes": (1, 50, 40, 16, 24, 1, 1),
    "tokens": (8, 256, 2, 70, 130, 2, 3),
}
HALVES = Activation()
ACTIVATIONS = [HALVES, Activation("swiglu_oai", interleaved=True), Activation("relu2")]
BOTH = ("w13", "w2")
COLUMNS = {
    "w13": ["gemv_columns_kernel", "gemv_gate_kernel"],
    "w2": ["gemv_columns_kernel", "gemv_sum_kernel"],
}
ROWS = {"w13": ["gemv_activation_kernel"], "w2": ["gemv_combine_kernel"]}


def _tensors(size: str, dtype: torch.dtype, activation: Activation, optional: bool) -> dict:
    tokens, experts, top_k, hidden, features, *_ = SIZES[size]
    rows = 2 * features if activation.is_gated else features
    tensors = {
        "hidden_states": torch.randn(tokens, hidden),
        "w13": torch.randn(experts, rows, hidden) / hidden**0.5,
        "w2": torch.randn(experts, hidden, features) / features**0.5,
        "w13_bias": torch.randn(experts, rows) if optional else None,
        "w2_bias": torch.randn(experts, hidden) if optional else None,
        "shared": torch.randn(tokens, hidden) if optional else None,
        "shared_gate": torch.randn(tokens, 1) if optional else None,
        "residual": torch.randn(tokens, hidden) if optional else None,
    }
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).to(torch.int32)
    return {name: tensor if tensor is None else tensor.to(dtype) for name, tensor in tensors.items()} | {
        "topk_weights": torch.rand(tokens, top_k) + 0.1,
        "topk_ids": ids,
        "expert_map": None,
    }


def _columns_together(weight: torch.Tensor) -> torch.Tensor:
    return weight.transpose(1, 2).contiguous().transpose(1, 2)


def _names(tensors: dict, activation: Activation) -> list[str]:
    program = program_of("fused_experts", **tensors, activation=activation)
    return [launch.kernel.__name__ for launch in program.launches]


def _expected(transposed: tuple[str, ...]) -> list[str]:
    return [kernel for name in BOTH for kernel in (COLUMNS if name in transposed else ROWS)[name]]


def _run(
    tensors: dict, activation: Activation, device: str, transposed: tuple[str, ...] = BOTH
) -> torch.Tensor:
    placed = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
    placed |= {name: _columns_together(placed[name]) for name in transposed}
    assert _names(placed, activation) == _expected(transposed)
    out = launch("fused_experts", **placed, activation=activation)
    assert_close(out, oracles.experts(**tensors, activation=activation))
    again = launch("fused_experts", **placed, activation=activation)
    assert torch.equal(out.view(torch.int8), again.view(torch.int8))  # NaN too
    return out


@pytest.mark.parametrize("size", SIZES)
def test_every_size(size: str, device: str) -> None:
    _run(_tensors(size, torch.bfloat16, HALVES, True), HALVES, device)


@pytest.mark.parametrize(("activation", "optional"), mixed(ACTIVATIONS, (False, True)), ids=str)
def test_every_option(activation: Activation, optional: bool, device: str) -> None:
    _run(_tensors("odd", torch.bfloat16, activation, optional), activation, device)


@pytest.mark.parametrize(
    ("dtype", "size"), mixed((torch.float16, torch.float32, torch.float64), ("one route", "odd")), ids=str
)
def test_every_dtype(size: str, dtype: torch.dtype, device: str) -> None:
    _run(_tensors(size, dtype, HALVES, True), HALVES, device)


@pytest.mark.parametrize("name", BOTH)
def test_one_of_the_weights(name: str, device: str) -> None:
    _run(_tensors("odd", torch.bfloat16, HALVES, True), HALVES, device, (name,))


def test_gate_and_up_in_two_tensors(device: str) -> None:
    tensors = _tensors("odd", torch.bfloat16, HALVES, True)
    apart = on(device, taken_apart(tensors, "columns"))
    assert _names(apart, HALVES) == _expected(BOTH)
    expected = oracles.experts(**tensors, activation=HALVES)
    assert_close(launch("fused_experts", **apart, activation=HALVES), expected)


def test_neither_stride_is_one(device: str) -> None:
    tensors = _tensors("odd", torch.float32, HALVES, True)
    placed = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
    placed |= {name: placed[name].repeat_interleave(2, dim=2)[:, :, ::2] for name in BOTH}
    assert _names(placed, HALVES) == _expected(BOTH)
    assert_close(
        launch("fused_experts", **placed, activation=HALVES), oracles.experts(**tensors, activation=HALVES)
    )


@pytest.mark.parametrize("size", ["odd", "many routes"])
def test_dropped_slots_contribute_nothing(size: str, device: str) -> None:
    """Nor do their weights, which are NaN; what their partial products hold is never read."""
    tensors, experts = _tensors(size, torch.bfloat16, HALVES, True), SIZES[size][1]
    tensors["topk_ids"] = tensors["topk_ids"].long()
    for k, strange in enumerate((-1, experts, (1 << 32) + 2)):
        tensors["topk_ids"][0, k], tensors["topk_weights"][0, k] = strange, float("nan")
    _run(tensors, HALVES, device)
    tensors["topk_ids"].fill_(-1)
    tensors |= {"shared_gate": None, "residual": None}
    assert torch.equal(_run(tensors, HALVES, device).cpu(), tensors["shared"])


@pytest.mark.parametrize("size", ["odd", "many routes"])
def test_expert_map(size: str, device: str) -> None:
    """Every other expert lives elsewhere; one is mapped to an expert that is not here."""
    tensors, experts = _tensors(size, torch.bfloat16, HALVES, True), SIZES[size][1]
    local = torch.arange(experts, dtype=torch.int32).flip(0) // 2
    expert_map = torch.where(torch.arange(experts) % 2 == 0, local, -1).to(torch.int32)
    expert_map[tensors["topk_ids"][0, 0]] = 50
    here = {name: tensors[name][: experts // 2 + 1] for name in ("w13", "w2", "w13_bias", "w2_bias")}
    _run(tensors | here | {"expert_map": expert_map}, HALVES, device)


def test_a_nan_token_changes_no_other_token(device: str) -> None:
    tensors = _tensors("odd", torch.bfloat16, HALVES, True)
    clean = _run(tensors, HALVES, device)
    tensors["hidden_states"][0] = float("nan")
    out = _run(tensors, HALVES, device)
    assert out[0].isnan().all() and torch.equal(out[1], clean[1])


@pytest.mark.parametrize("size", SIZES)
def test_the_depth_is_cut_where_there_are_few_programs(size: str) -> None:
    tensors = _tensors(size, torch.bfloat16, HALVES, False)
    tensors |= {name: _columns_together(tensors[name]) for name in BOTH}
    launches = program_of("fused_experts", **tensors, activation=HALVES).launches
    assert (launches[1].args["PARTS"], launches[-1].args["PARTS"]) == SIZES[size][-2:]
    for multiply, add in ((launches[0], launches[1]), (launches[2], launches[3])):
        parts, depth = add.args["PARTS"], multiply.args["DEPTH"]
        assert (parts - 1) * multiply.args["PART"] < depth <= parts * multiply.args["PART"]


@pytest.mark.parametrize(
    ("depth", "programs", "part"),
    [
        (0, 0, 128),
        (30, 1, 128),
        (2048, 192, 128),  # Qwen3-30B-A3B, one token
        (2048, 768, 192),  # and four
        (2880, 360, 192),  # gpt-oss: 23 parts would do, 16 are the most
        (14336, 1, 896),
        (14336, 8191, 7168),
        (14336, 8192, 14336),
        (14337, 1 << 20, 14368),
    ],
)
def test_depth_of_part(depth: int, programs: int, part: int) -> None:
    assert depth_of_part(depth, programs, 32) == part
