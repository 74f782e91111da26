"""Kernels: what is not finite in one row, or in one expert's weights, changes no bit of rows that do not read it."""

from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import RoutingConfig
from tests.containment import STRANGE
from tests.kernels.by_name import launch

T, E, K, H, I = 9, 6, 2, 16, 24
BAD = 4  # a token, and a row of what lies in expert order
ROUTING = RoutingConfig(K, "sigmoid")


def tensors(dtype: torch.dtype, tokens: int = T) -> dict[str, Tensor]:
    """Arguments of operators by name; one slot is dropped, and expert 5 is chosen by nobody."""
    ids = torch.rand(tokens, E - 1).argsort(1)[:, :K].int()
    ids[0, 1] = -1
    plan = moe_ops.build_dispatch(ids, E)
    sizes = {
        "hidden_states": (tokens, H), "router_logits": (tokens, E), "w13": (E, 2 * I, H), "w2": (E, H, I),
        "w13_bias": (E, 2 * I), "w2_bias": (E, H), "shared": (tokens, H), "rows": (tokens * K, H),
        "activated": (tokens * K, I), "gate_up": (tokens * K, 2 * I), "grad": (tokens, H),
    }  # fmt: skip
    made = {name: torch.randn(shape).to(dtype) for name, shape in sizes.items()}
    made |= {"router_logits": made["router_logits"].float(), "topk_weights": torch.rand(tokens, K)}
    return {**made, "topk_ids": ids, **plan._asdict()}


def rows_of(given: dict[str, Tensor], token: int) -> Tensor:
    """[S] whether a row in expert order is of this token."""
    return given["sorted_slots"] // K == token


def experts_of(given: dict[str, Tensor], token: int) -> Tensor:
    """[E] whether the token reaches an expert."""
    return torch.isin(torch.arange(E), given["topk_ids"][token])


# By operator: its arguments by name, what is spoilt and with what (rows, experts or tokens), and what of each output is
# compared. An argument called otherwise in the operator is (its name there, its name here).
LAYER = ["hidden_states", "w13", "w2", "topk_weights", "topk_ids", "w13_bias", "w2_bias", "shared"]
CASES: dict[str, tuple[str, list[Any], str, dict[str, Any], str]] = {
    "layer": ("fused_experts", LAYER, "hidden_states", {"activation": "silu"}, "token"),
    "invariant layer": ("batch_invariant_experts", LAYER, "hidden_states", {"activation": "silu"}, "token"),
    "shared": ("fused_experts", LAYER, "shared", {"activation": "silu"}, "token"),
    "routing": ("topk_routing", ["router_logits"], "router_logits", {"routing": ROUTING}, "token"),
    "gather": ("permute", ["hidden_states", "sorted_slots"], "hidden_states", {}, "row"),
    "gather back": ("permute_backward", [("grad", "rows"), "sorted_slots"], "rows", {"num_tokens": T}, "token"),
    "product": ("grouped_gemm", [("x", "rows"), ("weight", "w13"), "expert_offsets"], "rows", {}, "row"),
    "gate": ("gated_activation", ["gate_up"], "gate_up", {"activation": "silu"}, "row"),
    "gate back": (
        "gated_activation_backward", [("grad", "activated"), "gate_up"], "gate_up", {"activation": "silu"}, "row",
    ),
    "sum": ("combine", [("expert_out", "rows"), "topk_weights", "inverse", "shared"], "rows", {}, "token"),
    "sum back": (
        "combine_backward", ["grad", ("expert_out", "rows"), "topk_weights", "inverse"], "rows", {}, "row and slot",
    ),
    "first half": (
        "gather_gemm_act", ["hidden_states", "w13", "sorted_slots", "expert_offsets"], "hidden_states",
        {"activation": "silu"}, "row",
    ),
    "second half": (
        "gemm_combine", [("x", "activated"), "w2", "expert_offsets", "topk_weights", "inverse"],
        "activated", {}, "token",
    ),
    "weights back": (
        "grouped_gemm_weight_backward", [("grad", "gate_up"), ("x", "rows"), "expert_offsets"], "rows", {}, "expert",
    ),
}  # fmt: skip


def spoil(given: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensor `name` with NaN and infinity in what belongs to the token BAD."""
    of_token = given[name].shape[0] == T
    bad = torch.arange(T) == BAD if of_token else rows_of(given, BAD)
    changed = given[name].clone()
    changed[bad] = float("nan")
    changed[bad, ::2] = float("inf")
    return {**given, name: changed}


def kept(given: dict[str, Tensor], what: str) -> list[Tensor]:
    """Of each output, what has nothing to do with the token BAD."""
    tokens = torch.arange(T) != BAD
    by = {"token": tokens, "row": ~rows_of(given, BAD), "expert": ~experts_of(given, BAD), "slot": tokens}
    return [by[each] for each in what.split(" and ")]


def run(
    operator: str, arguments: list[Any], given: dict[str, Tensor], options: dict[str, Any], device: str
) -> Any:
    pairs = (each if isinstance(each, tuple) else (each, each) for each in arguments)
    out = launch(operator, **{there: given[here].to(device) for there, here in pairs}, **options)
    return [each.cpu() for each in (out if isinstance(out, tuple) else (out,))]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in CASES),
        ("product", torch.float32),
        ("weights back", torch.float32),
    ],
    ids=str,
)
def test_a_token(name: str, dtype: torch.dtype, device: str) -> None:
    operator, arguments, spoilt, options, what = CASES[name]
    given = tensors(dtype)
    clean, dirty = (run(operator, arguments, each, options, device) for each in (given, spoil(given, spoilt)))
    masks = kept(given, what)
    for before, after, mask in zip(
        clean, dirty, masks * len(clean) if len(masks) == 1 else masks, strict=True
    ):
        assert torch.equal(after[mask], before[mask])


@pytest.mark.parametrize("tokens", [1, 11])
@pytest.mark.parametrize("operator", ["fused_experts", "batch_invariant_experts"])
@pytest.mark.parametrize("layout", ["dense", "columns"])
def test_weights_of_one_expert(operator: str, tokens: int, layout: str, device: str) -> None:
    given = tensors(torch.bfloat16, tokens)
    if layout == "columns":
        given |= {name: given[name].mT.contiguous().mT for name in ("w13", "w2")}
    clean = run(operator, LAYER, given, {"activation": "silu"}, device)[0]
    expert = 5 if tokens == 1 else int(given["topk_ids"][-1, 0])
    for name, value in zip(("w13", "w2", "w13_bias", "w2_bias"), (*STRANGE, STRANGE[0]), strict=True):
        given[name][expert] = value
    out = run(operator, LAYER, given, {"activation": "silu"}, device)[0]
    untouched = (given["topk_ids"] != expert).all(1)
    assert untouched.any() and torch.equal(out[untouched], clean[untouched])
    assert not out[~untouched].isfinite().any()
