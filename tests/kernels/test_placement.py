"""Replicas and their load: exact, whatever the blocks, the dtypes and the strides."""

import pytest
import torch

from tests.kernels import oracles
from tests.kernels.by_name import launch

EXPERTS = torch.tensor([[0, 5, 9], [1, -1, -1], [7, 2, -1], [3, -6, 8], [4, -7, -1]], dtype=torch.int32)
COUNTS = torch.tensor([3, 1, 2, 9, 0], dtype=torch.int32)  # 9 of 3, and an expert that is nowhere
PHYSICAL = 10


def _ids(tokens: int, top_k: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(-2, 7, (tokens, top_k), dtype=dtype)


@pytest.mark.parametrize("tokens, top_k", [(1, 1), (7, 3), (33, 4), (513, 1), (700, 2)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", [None, 0, 12345678901, -3])
def test_replicas_and_load(
    tokens: int, top_k: int, dtype: torch.dtype, seed: int | None, device: str
) -> None:
    ids = _ids(tokens, top_k, dtype)
    tensors = ids.to(device), EXPERTS.to(device), COUNTS.to(device)
    scalar = None if seed is None else torch.tensor(seed, device=device)
    expected = oracles.replicas(ids, EXPERTS, COUNTS, seed)
    chosen = launch("map_replicas", *tensors, scalar)
    assert chosen.dtype == torch.int32 and chosen.tolist() == expected
    load = torch.arange(PHYSICAL, dtype=dtype, device=device)
    assert torch.equal(launch("map_and_record", *tensors, load, scalar), chosen)
    grown = (load.cpu() - torch.arange(PHYSICAL)).tolist()
    assert grown == oracles.load_of(expected, PHYSICAL)


@pytest.mark.parametrize("num_real", [-1, 0, 1, 300, 699, 5000])
@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("tokens", [700, 4100])  # slots are added one by one, and counted first
def test_padding_and_a_switch(num_real: int, recording: bool, tokens: int, device: str) -> None:
    ids = _ids(tokens, 2)
    load = torch.zeros(PHYSICAL, dtype=torch.int32, device=device)
    scalars = torch.tensor(num_real, device=device), torch.tensor(recording, device=device)
    tensors = (tensor.to(device) for tensor in (ids, EXPERTS, COUNTS))
    chosen = launch("map_and_record", *tensors, load, None, *scalars)
    expected = oracles.replicas(ids, EXPERTS, COUNTS, None)
    assert chosen.tolist() == expected
    assert load.tolist() == oracles.load_of(expected[: max(num_real, 0)] if recording else [], PHYSICAL)


def test_ids_beyond_32_bits_and_experts_beyond_the_load(device: str) -> None:
    ids = torch.tensor([[(1 << 32) + 1, 0], [-(1 << 40), 3], [3, 0], [0, 3]])
    load = torch.zeros(6, dtype=torch.int64, device=device)
    chosen = launch("map_and_record", ids.to(device), EXPERTS.to(device), COUNTS.to(device), load)
    expected = oracles.replicas(ids, EXPERTS, COUNTS, None)
    assert chosen.tolist() == expected
    assert max(max(row) for row in expected) > 5
    assert load.tolist() == oracles.load_of(expected, 6)


def test_strided_tensors(device: str) -> None:
    def spread(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(-1).repeat_interleave(3, -1).to(device)[..., 1]

    ids, load = _ids(40, 3).t().contiguous().t(), spread(torch.zeros(PHYSICAL, dtype=torch.int32))
    chosen = launch("map_and_record", ids.to(device), spread(EXPERTS), spread(COUNTS), load)
    expected = oracles.replicas(ids, EXPERTS, COUNTS, None)
    assert chosen.tolist() == expected
    assert load.tolist() == oracles.load_of(expected, PHYSICAL)
