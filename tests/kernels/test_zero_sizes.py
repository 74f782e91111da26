"""Tensors without elements: no empty launch, no descriptor over nothing, and the values the definitions give."""

import itertools

import pytest
import torch

from moe_ops.kernels.program import Descriptor, Filled
from moe_ops.types import Activation, RoutingConfig
from tests.kernels import oracles
from tests.kernels.by_name import launch, launches_of

EXPERTS, TOP_K, ACT = 16, 2, Activation()
SIZES = list(itertools.product((0, 1, 40), (0, 24), (0, 16)))


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Filled]:
    """What ran."""
    ran, run = [], Filled.run
    monkeypatch.setattr(Filled, "run", lambda self, tensors: ran.append(self) or run(self, tensors))
    return ran


def _expect_nothing_empty(programs: list[Filled]) -> None:
    launches = [launch for program in programs for launch in launches_of(program)]
    descriptors = [a for launch in launches for a in launch.args.values() if isinstance(a, Descriptor)]
    assert programs and all(all(launch.grid) for launch in launches)
    assert all(all(descriptor.shape) for descriptor in descriptors)


def _layer(tokens: int, hidden: int, inner: int, dtype: torch.dtype, transposed: bool) -> dict:
    weights = {
        "w13": torch.randn(EXPERTS, 2 * inner, hidden, dtype=dtype),
        "w2": torch.randn(EXPERTS, hidden, inner, dtype=dtype),
    }
    if transposed:
        weights = {name: w.transpose(1, 2).contiguous().transpose(1, 2) for name, w in weights.items()}
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)] or [torch.zeros(TOP_K)])
    return weights | {
        "hidden_states": torch.randn(tokens, hidden, dtype=dtype),
        "topk_weights": torch.rand(tokens, TOP_K),
        "topk_ids": ids[:tokens].to(torch.int32),
        "w13_bias": torch.randn(EXPERTS, 2 * inner, dtype=dtype),
        "w2_bias": torch.randn(EXPERTS, hidden, dtype=dtype),
        "expert_map": None,
        "shared": torch.randn(tokens, hidden, dtype=dtype),
    }


@pytest.mark.parametrize("transposed", [False, True], ids=["standard", "transposed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens, hidden, inner", SIZES)
def test_layers(tokens, hidden, inner, dtype, transposed, programs, device: str) -> None:
    """Without inner features the biases and the shared expert are what is left."""
    tensors = _layer(tokens, hidden, inner, dtype, transposed)
    placed = {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
    out = launch("fused_experts", **placed, activation=ACT)
    oracles.assert_close(out, oracles.experts(**tensors, activation=ACT))
    _expect_nothing_empty(programs)


@pytest.mark.parametrize("tokens, columns", [(0, 0), (0, 24), (8, 0)])
def test_stages(tokens: int, columns: int, programs: list[Filled], device: str) -> None:
    """No element goes in, so none comes out: only the shapes are left to be wrong."""
    slots, config = tokens * TOP_K, RoutingConfig(top_k=TOP_K)
    rows, hidden = torch.randn(slots, columns).to(device), torch.randn(tokens, columns).to(device)
    index, weights = torch.arange(slots, dtype=torch.int32).to(device), torch.rand(tokens, TOP_K).to(device)
    offsets = torch.zeros(3, dtype=torch.int32).to(device)
    offsets[1:] = slots
    logits, ids = torch.randn(tokens, 4).to(device), torch.zeros(tokens, TOP_K, dtype=torch.int32).to(device)
    assert launch("permute", hidden, index).shape == (slots, columns)
    assert launch("permute_backward", rows, index, tokens).shape == (tokens, columns)
    assert launch("combine", rows, weights, index, hidden).shape == (tokens, columns)
    to_rows, to_weights = launch("combine_backward", hidden, rows, weights, index)
    assert to_rows.shape == rows.shape and (to_weights == 0).all()
    assert launch("gated_activation", rows, ACT).shape == (slots, columns // 2)
    grad = rows[:, : columns // 2]
    assert launch("gated_activation_backward", grad, rows, ACT).shape == rows.shape
    weighted = launch("weighted_activation_backward", grad, rows, weights.flatten(), ACT)
    assert [each.shape for each in weighted] == [rows.shape, grad.shape, (slots,)]
    assert (weighted[2] == 0).all()
    assert launch("topk_routing", logits, None, config)[0].shape == (tokens, TOP_K)
    assert launch("topk_routing_backward", weights, logits, weights, ids, config).shape == logits.shape
    out = launch("grouped_gemm", rows, torch.randn(2, 8, columns).to(device), offsets, None)
    assert out.shape == (slots, 8) and (out == 0).all()
    assert launch("grouped_gemm", rows, torch.randn(2, 0, columns).to(device), offsets, None).shape == (
        slots,
        0,
    )
    to_weight = launch("grouped_gemm_weight_backward", rows, rows[:, :0], offsets)
    assert to_weight.shape == (2, columns, 0)
    to_weight = launch("grouped_gemm_weight_backward", torch.ones(slots, 8).to(device), rows, offsets)
    assert to_weight.shape == (2, 8, columns) and (to_weight == 0).all()
    _expect_nothing_empty(programs)
