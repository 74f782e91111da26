"""Replicas and their load: exact, whatever the blocks, the dtypes and the strides."""

import pytest
import torch

from moe_ops.kernels import placement
from moe_ops.types import RoutingConfig
from tests.kernels import oracles
from tests.kernels.by_name import launch, program_of
from tests.kernels.catalogue import meta

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


def test_many_experts_are_counted_in_parts(device: str) -> None:
    """300 physical experts in three histograms, of which the last has room for more."""
    experts = torch.stack([torch.arange(150) * 2, torch.randint(-1, 330, (150,))], 1).int()
    counts = torch.randint(1, 3, (150,), dtype=torch.int32)
    ids, load = torch.randint(-1, 151, (2100, 2)), torch.zeros(300, dtype=torch.int32, device=device)
    chosen = launch("map_and_record", ids.to(device), experts.to(device), counts.to(device), load)
    expected = oracles.replicas(ids, experts, counts, None)
    assert chosen.tolist() == expected
    assert load.tolist() == oracles.load_of(expected, 300)


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


ROUTINGS = [
    RoutingConfig(1, "sigmoid", renormalize=False),
    RoutingConfig(3, scale=2.5),
    RoutingConfig(2, "sigmoid", num_groups=2, topk_groups=1, group_score="top2_sum"),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.spec)
@pytest.mark.parametrize(
    "tokens, seed, num_real", [(1, None, None), (7, 5, 3), (33, -3, 5000), (33, None, -1)]
)
@pytest.mark.parametrize("recording", [None, True, False])
def test_a_router_maps_and_counts_what_it_chooses(
    routing: RoutingConfig,
    tokens: int,
    seed: int | None,
    num_real: int | None,
    recording: bool | None,
    device: str,
) -> None:
    """What the two operators do; 6 experts of which 5 have replicas, as with zero experts."""
    logits, bias = torch.randn(tokens, 6, device=device), torch.rand(6, device=device)
    values = {"seed": seed, "num_real_tokens": num_real, "is_recording": recording}
    given = {name: torch.tensor(value, device=device) for name, value in values.items() if value is not None}
    load = torch.arange(PHYSICAL, dtype=torch.int64, device=device)
    maps = EXPERTS.to(device), COUNTS.to(device)
    weights, ids, physical = launch("route_and_record", logits, *maps, load, bias, **given, routing=routing)
    alone = launch("topk_routing", logits, bias, routing)
    assert torch.equal(weights, alone[0]) and torch.equal(ids, alone[1])
    expected = oracles.replicas(ids.cpu(), EXPERTS, COUNTS, seed)
    assert physical.dtype == torch.int32 and physical.tolist() == expected
    counted = [] if recording is False else expected if num_real is None else expected[: max(num_real, 0)]
    assert (load.cpu() - torch.arange(PHYSICAL)).tolist() == oracles.load_of(counted, PHYSICAL)


@pytest.mark.parametrize(
    ("tokens", "experts", "groups", "launches"),
    [(512, 256, 1, 1), (513, 256, 1, 2), (513, 256, 8, 1), (4096, 512, 1, 1), (4096, 128, 1, 2)],
)
def test_which_router_counts(tokens: int, experts: int, groups: int, launches: int) -> None:
    """One that chooses slowly, or for few slots; else the atomics of all tokens would come at once."""
    maps = meta(experts, 2, dtype=torch.int32), meta(experts, dtype=torch.int32)
    load, routing = (
        meta(experts + 32, dtype=torch.int64),
        RoutingConfig(8, num_groups=groups, topk_groups=groups),
    )
    program = program_of("route_and_record", meta(tokens, experts), *maps, load, routing=routing)
    assert len(program.launches) == launches
    assert program.outputs == ("topk_weights", "topk_ids", "physical_ids")


def test_a_router_with_a_launch_behind_it_counts_the_same(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_FEW_SLOTS", 0)
    logits, load = torch.randn(37, 5, device=device), torch.zeros(PHYSICAL, dtype=torch.int32, device=device)
    maps, seed = (EXPERTS.to(device), COUNTS.to(device)), torch.tensor(11, device=device)
    weights, ids, physical = launch(
        "route_and_record", logits, *maps, load, seed=seed, routing=RoutingConfig(2)
    )
    alone = launch("topk_routing", logits, None, RoutingConfig(2))
    assert torch.equal(weights, alone[0]) and torch.equal(ids, alone[1])
    expected = oracles.replicas(ids.cpu(), EXPERTS, COUNTS, 11)
    assert physical.tolist() == expected
    assert load.tolist() == oracles.load_of(expected, PHYSICAL)


def test_a_router_counts_in_strided_tensors_and_leaves_out_what_is_beyond(device: str) -> None:
    def spread(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(-1).repeat_interleave(3, -1).to(device)[..., 1]

    logits, load = torch.randn(40, 5), spread(torch.zeros(6, dtype=torch.int32))
    given = spread(logits), spread(EXPERTS), COUNTS.to(device), load
    _, ids, physical = launch("route_and_record", *given, routing=RoutingConfig(3))
    expected = oracles.replicas(ids.cpu(), EXPERTS, COUNTS, None)
    assert physical.tolist() == expected and max(map(max, expected)) > 5
    assert load.tolist() == oracles.load_of(expected, 6)
