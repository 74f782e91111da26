"""The counting sort: stable, exact, blind to ids it must not trust."""

import pytest
import torch

from tests.helpers import mixed
from tests.kernels import oracles
from tests.kernels.by_name import launch


def _check(topk_ids: torch.Tensor, expert_map: torch.Tensor | None, num_experts: int, device: str) -> None:
    mapped = None if expert_map is None else expert_map.to(device)
    actual = launch("build_dispatch", topk_ids.to(device), mapped, num_experts)
    expected = oracles.dispatch(oracles.local_experts(topk_ids, expert_map, num_experts), num_experts)
    for name, tensor, values in zip(
        ("sorted_slots", "inverse", "expert_offsets"), actual, expected, strict=True
    ):
        assert tensor.dtype == torch.int32
        assert tensor.cpu().tolist() == values, name


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    mixed(
        [(1, 1), (1, 8), (7, 3), (33, 4), (128, 4), (171, 3), (700, 2), (4100, 2)], (torch.int32, torch.int64)
    ),
    ids=str,
)
def test_matches_a_stable_sort(sizes: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    tokens, top_k = sizes
    _check(torch.randint(0, 13, (tokens, top_k), dtype=dtype), None, 13, device)


@pytest.mark.parametrize("tokens", [9, 300, 2800])
def test_drops_ids_out_of_range(tokens: int, device: str) -> None:
    topk_ids = torch.randint(-3, 17, (tokens, 3), dtype=torch.int64)
    topk_ids[0, 0] = (1 << 32) + 1  # in range once narrowed
    topk_ids[-1, -1] = -(1 << 40)
    _check(topk_ids, None, 13, device)


@pytest.mark.parametrize("tokens", [9, 300, 2800])
def test_maps_global_to_local_experts(tokens: int, device: str) -> None:
    # 5, 99 and -4 are no local expert
    expert_map = torch.tensor([-1, 2, 0, 5, -1, 1, 99, -4], dtype=torch.int32)
    _check(torch.randint(-2, 10, (tokens, 3), dtype=torch.int32), expert_map, 3, device)


def test_takes_a_strided_map(device: str) -> None:
    expert_map = torch.tensor([2, 7, 0, 7, -1, 7, 1, 7], dtype=torch.int32)[::2]
    _check(torch.randint(0, 4, (9, 3), dtype=torch.int32), expert_map, 3, device)


@pytest.mark.parametrize("tokens", [40, 300, 4100])
@pytest.mark.parametrize("expert", [0, 12, -1])
def test_one_hot_expert(tokens: int, expert: int, device: str) -> None:
    _check(torch.full((tokens, 2), expert, dtype=torch.int32), None, 13, device)


def test_strided_ids_and_many_experts(device: str) -> None:
    _check(torch.randint(0, 1024, (4, 50), dtype=torch.int32).t(), None, 1024, device)


@pytest.mark.gpu
def test_a_million_slots(device: str) -> None:
    if device == "cpu":
        pytest.skip("too slow for the interpreter")
    topk_ids = torch.randint(-1, 256, (1 << 17, 8), dtype=torch.int32, device=device)
    sorted_slots, inverse, offsets = launch("build_dispatch", topk_ids, None, 256)
    keys = torch.where(topk_ids < 0, 256, topk_ids).flatten()
    assert torch.equal(sorted_slots.long(), torch.sort(keys, stable=True).indices)
    assert torch.equal(offsets[1:].long(), torch.bincount(keys, minlength=257)[:256].cumsum(0))
    kept = inverse >= 0
    assert torch.equal(kept, topk_ids.flatten() >= 0)
    assert torch.equal(sorted_slots[inverse[kept].long()].long(), kept.nonzero().squeeze(1))
