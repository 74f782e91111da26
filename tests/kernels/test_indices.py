"""Indices that no plan of ours holds: what is out of range is dropped, and no kernel leaves its tensors.

Interpreted, every access is checked (tests/kernels/memory.py); on a GPU the values show what was read.
"""

import pytest
import torch
import triton

from moe_ops.kernels import combine
from moe_ops.types import Activation, RoutingConfig
from tests.kernels import memory, oracles
from tests.kernels.by_name import launch
from tests.kernels.oracles import assert_close

LARGEST, SMALLEST = (1 << 31) - 1, -(1 << 31)
STRANGE = [-1, -2, -8, 12, 13, 96, 1 << 30, LARGEST, SMALLEST]
"""None of them is one of 12 slots or rows."""


def _index(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def _with_strange(size: int = 12, every: int = 3) -> list[int]:
    """A permutation in which some entries are strange ones instead."""
    order = torch.randperm(size).tolist()
    return [STRANGE[row // every] if row % every == 0 else slot for row, slot in enumerate(order)]


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the check is of interpreted kernels")
def test_the_check_sees_a_kernel_leave_its_tensors() -> None:
    flags, rows = torch.zeros(8, dtype=torch.int32), {"flags_ptr": 0, "num_rows": 8, "BLOCK": 16}
    with memory.checked():
        combine._clear_kernel[(1,)](**(rows | {"flags_ptr": flags}))
        with pytest.raises(Exception, match="writes 1 elements outside its tensors"):
            combine._clear_kernel[(1,)](**(rows | {"flags_ptr": flags[:7]}))
        with pytest.raises(Exception, match="writes 7 elements"):
            combine._clear_kernel[(1,)](**(rows | {"flags_ptr": flags[:1]}))


def test_permute_drops_strange_slots(device: str) -> None:
    hidden, slots = torch.randn(4, 5), _with_strange()
    out = launch("permute", hidden.to(device), _index(slots, device)).cpu()
    for row, slot in zip(out, slots, strict=True):
        assert torch.equal(row, hidden[slot // 3] if 0 <= slot < 12 else torch.zeros(5))


@pytest.mark.parametrize("garbage", [0, 5, 12, SMALLEST])
def test_permute_gradient_drops_strange_slots(
    garbage: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of a slot that nobody names is whatever memory held, another slot's row perhaps."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(garbage))
    grad, slots = torch.randn(12, 5), _with_strange()
    expected = torch.zeros(4, 5, dtype=torch.float64)
    for row, slot in zip(grad, slots, strict=True):
        if 0 <= slot < 12:
            expected[slot // 3] += row.double()
    assert_close(launch("permute_backward", grad.to(device), _index(slots, device), 4), expected)


def test_slots_without_tokens(device: str) -> None:
    slots = _index([0, 1, 2], device)
    assert torch.equal(launch("permute", torch.empty(0, 5, device=device), slots).cpu(), torch.zeros(3, 5))
    weights = torch.randn(2, 32, 8).bfloat16().to(device), slots, _index([0, 2, 3], device)
    empty = torch.empty(0, 8, device=device, dtype=torch.bfloat16)
    assert (launch("gather_gemm_act", empty, *weights, activation=Activation()) == 0).all()


def _combined(rows: torch.Tensor, weights: torch.Tensor, inverse: list[int]) -> torch.Tensor:
    out = torch.zeros(4, rows.shape[1], dtype=torch.float64)
    for slot, row in enumerate(inverse):
        if 0 <= row < 12:
            out[slot // 3] += weights[slot // 3, slot % 3].double() * rows[row].double()
    return out


def test_combine_drops_strange_rows(device: str) -> None:
    rows, weights, inverse = torch.randn(12, 5), torch.rand(4, 3), _with_strange()
    weights[[slot // 3 for slot in range(0, 12, 3)], [slot % 3 for slot in range(0, 12, 3)]] = float("nan")
    args = rows.to(device), weights.to(device), _index(inverse, device)
    assert_close(launch("combine", *args, None), _combined(rows, weights, inverse))
    assert (launch("combine", *args[:2], _index([LARGEST, SMALLEST, 12] * 4, device), None) == 0).all()


def test_combine_gradient_writes_no_strange_rows(device: str) -> None:
    rows, weights, grad, inverse = torch.randn(12, 5), torch.rand(4, 3), torch.randn(4, 5), _with_strange()
    expected_rows, expected_weights = torch.zeros(12, 5), torch.zeros(4, 3)
    for slot, row in enumerate(inverse):
        if 0 <= row < 12:
            expected_rows[row] = weights[slot // 3, slot % 3] * grad[slot // 3]
            expected_weights[slot // 3, slot % 3] = grad[slot // 3] @ rows[row]
    args = (t.to(device) for t in (grad, rows, weights, torch.tensor(inverse, dtype=torch.int32)))
    grad_rows, grad_weights = launch("combine_backward", *args)
    assert_close(grad_rows, expected_rows)
    assert_close(grad_weights, expected_weights)


@pytest.mark.parametrize("depth", [32, 31], ids=["tma", "generic"])
@pytest.mark.parametrize("act", [Activation(), Activation("relu2")], ids=lambda act: act.spec)
def test_gathering_gemm_takes_strange_slots_for_rows_of_zeros(
    act: Activation, depth: int, device: str
) -> None:
    hidden, weight = torch.randn(4, depth).bfloat16(), torch.randn(2, 32, depth).bfloat16()
    bias, slots, offsets = torch.randn(2, 32).bfloat16(), _with_strange(), [0, 5, 11]
    rows = torch.stack([hidden[slot // 3] if 0 <= slot < 12 else torch.zeros(depth) for slot in slots])
    expected = oracles.activate(oracles.grouped_gemm(rows, weight, offsets, bias), act)
    expected[11:] = 0
    args = hidden.to(device), weight.to(device), _index(slots, device), _index(offsets, device)
    assert_close(launch("gather_gemm_act", *args, bias.to(device), activation=act), expected, torch.bfloat16)


def test_offsets_that_overlap_make_no_more_tiles_than_there_is_room_for(device: str) -> None:
    x, weight = torch.randn(40, 32).bfloat16().to(device), torch.randn(5, 32, 32).bfloat16().to(device)
    launch("grouped_gemm", x, weight, _index([0, 40, 0, 40, 0, 40], device), None)


OFFSETS = ([0, 1 << 30, -5, 7], [1 << 20, 0, 1 << 20, 0], [LARGEST, SMALLEST, LARGEST, 12], [0, 12, 0, 12])


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("depth", [32, 31], ids=["tma", "generic"])
def test_strange_offsets_touch_nothing_else(offsets: list[int], depth: int, device: str) -> None:
    x, weight = torch.randn(12, depth).bfloat16().to(device), torch.randn(3, 32, depth).bfloat16().to(device)
    there = _index(offsets, device)
    launch("grouped_gemm", x, weight, there, None)
    launch("grouped_gemm_weight_backward", x, x, there)
    launch("gather_gemm_act", x[:4], weight, _index(_with_strange(), device), there, activation=Activation())
    w2, weights = torch.randn(3, 16, depth).bfloat16().to(device), torch.rand(4, 3).to(device)
    launch("gemm_combine", x, w2, there, weights, _index(_with_strange(), device))


def test_routing_gradient_drops_strange_ids(device: str) -> None:
    logits, grad = torch.randn(4, 12, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    ids, config = _with_strange(), RoutingConfig(top_k=3, score_fn="sigmoid", renormalize=False)
    expected = torch.zeros(4, 12, dtype=torch.float64)
    for slot, expert in enumerate(ids):
        if 0 <= expert < 12:
            score = logits[slot // 3, expert].sigmoid()
            expected[slot // 3, expert] += grad[slot // 3, slot % 3] * score * (1 - score)
    weights = torch.ones(4, 3, dtype=torch.float64)  # none says that its slot is constant
    args = grad.to(device), logits.to(device), weights.to(device), _index(ids, device).view(4, 3)
    assert_close(launch("topk_routing_backward", *args, config), expected)


@pytest.mark.parametrize("tokens", [4, 400])
def test_dispatch_trusts_neither_ids_nor_map(tokens: int, device: str) -> None:
    ids = torch.tensor(STRANGE)[torch.randint(0, len(STRANGE), (tokens, 3))].to(torch.int32)
    ids[::2] = torch.randint(0, 7, (3,), dtype=torch.int32)
    ids[-1] = torch.tensor([1, 3, 5])
    expert_map = torch.tensor([0, -1, LARGEST, SMALLEST, 3, 1, 2], dtype=torch.int32)
    for mapped, experts in ((None, 7), (expert_map, 3)):
        actual = launch(
            "build_dispatch", ids.to(device), None if mapped is None else mapped.to(device), experts
        )
        expected = oracles.dispatch(oracles.local_experts(ids, mapped, experts), experts)
        assert tuple(tensor.tolist() for tensor in actual) == expected
