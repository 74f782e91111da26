"""map_replicas and map_and_record as defined: chosen by the token alone, counted exactly, in place, compiled too."""

import pytest
import torch

import moe_ops
from tests.helpers import mixed
from tests.kernels import oracles

EXPERTS = torch.tensor([[0, 5, 9], [1, -1, -1], [7, 2, -1], [3, -6, 8], [4, -7, -1]], dtype=torch.int32)
COUNTS = torch.tensor([3, 1, 2, 9, 0], dtype=torch.int32)  # 9 of 3, and an expert that is nowhere
PHYSICAL = 10


def ids_of(tokens, dtype=torch.int32):
    return torch.randint(-2, 7, (tokens, 3), dtype=dtype)


def mapped(ids, load=None, **options):
    return moe_ops.map_replicas(ids, EXPERTS, COUNTS, load=load, **options)


@pytest.mark.parametrize(
    ("tokens", "seed", "compiled", "dtype"),
    mixed((0, 1, 7, 33), (None, 5, -(1 << 40) + 3), (False, True), (torch.int32, torch.int64), rounds=3),
    ids=str,
)
def test_replicas_and_load(tokens, seed, compiled, dtype):
    run = torch.compile(mapped, fullgraph=True, backend="aot_eager") if compiled else mapped
    ids, scalar = ids_of(tokens, dtype), None if seed is None else torch.tensor(seed)
    expected = oracles.replicas(ids, EXPERTS, COUNTS, seed)
    load = torch.arange(PHYSICAL, dtype=dtype)
    assert run(ids, seed=scalar).tolist() == expected
    chosen = run(ids, load, seed=scalar)
    assert chosen.tolist() == expected and chosen.dtype == torch.int32
    assert (load - torch.arange(PHYSICAL)).tolist() == oracles.load_of(expected, PHYSICAL)


@pytest.mark.parametrize("num_real", [-1, 0, 1, 30, 33, 5000])
@pytest.mark.parametrize("recording", [True, False])
def test_padding_and_a_switch(num_real, recording):
    ids, load = ids_of(33), torch.zeros(PHYSICAL, dtype=torch.int32)
    options = {"num_real_tokens": torch.tensor(num_real), "is_recording": torch.tensor(recording)}
    expected = oracles.replicas(ids, EXPERTS, COUNTS, None)
    assert mapped(ids, load, **options).tolist() == expected
    assert load.tolist() == oracles.load_of(expected[: max(num_real, 0)] if recording else [], PHYSICAL)


def test_ids_beyond_32_bits_and_experts_beyond_the_load():
    ids = torch.tensor([[(1 << 32) + 1, 0], [-(1 << 40), 3], [3, 0], [0, 3]])
    load = torch.zeros(6, dtype=torch.int32)
    expected = oracles.replicas(ids, EXPERTS, COUNTS, None)
    assert mapped(ids, load).tolist() == expected
    assert load.tolist() == oracles.load_of(expected, 6)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_replicas_take_equal_shares(seed, replicas):
    experts = torch.arange(2 * replicas, dtype=torch.int32).view(2, replicas)
    load = torch.zeros(2 * replicas, dtype=torch.int32)
    counts = torch.full((2,), replicas, dtype=torch.int32)
    ids = torch.tensor([[0, 1]]).expand(8192, 2)
    moe_ops.map_replicas(ids, experts, counts, seed=None if seed is None else torch.tensor(seed), load=load)
    assert load.sum() == 2 * 8192
    assert load.max() / load.double().mean() < 1.15


def test_another_seed_is_another_choice():
    ids = torch.zeros(64, 1, dtype=torch.int32)
    choices = {tuple(mapped(ids, seed=torch.tensor(seed)).flatten().tolist()) for seed in range(20)}
    assert len(choices) == 20


def test_compiled_code_counts_in_place_and_sees_a_new_placement():
    """One compile; the maps and the load are inputs, changed between its runs."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._inductor.compile(graph, inputs)

    experts, load, expected = EXPERTS.clone(), torch.zeros(PHYSICAL, dtype=torch.int32), [0] * PHYSICAL
    run = torch.compile(
        lambda ids: moe_ops.map_replicas(ids, experts, COUNTS, load=load) * 2, backend=backend, fullgraph=True
    )
    for _ in range(3):
        ids = ids_of(7)
        physical = oracles.replicas(ids, experts, COUNTS, None)
        assert run(ids).tolist() == [[2 * expert for expert in row] for row in physical]
        expected = [a + b for a, b in zip(expected, oracles.load_of(physical, PHYSICAL), strict=True)]
        assert load.tolist() == expected
        experts.copy_(experts.roll(1, 0))
    assert len(graphs) == 1


def test_load_is_neither_cloned_nor_copied_back_by_inductor():
    from torch._inductor.utils import run_and_get_code

    load = torch.zeros(PHYSICAL, dtype=torch.int32)
    run = torch.compile(mapped, fullgraph=True)
    _, (code,) = run_and_get_code(run, ids_of(7), load)
    assert "moe.map_and_record.default" in code
    assert "cpp_fused" not in code and "copy_" not in code and "clone" not in code


def test_autograd_notices_the_change():
    load = torch.zeros(PHYSICAL, dtype=torch.int32)
    weight = torch.ones(PHYSICAL, requires_grad=True)
    out = (weight * load).sum()
    mapped(ids_of(7), load)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("outside", [False, True])
def test_inference_mode(outside):
    with torch.inference_mode(not outside):
        load = torch.zeros(PHYSICAL, dtype=torch.int32)
    with torch.inference_mode():
        chosen = mapped(ids_of(7), load)
    assert load.tolist() == oracles.load_of(chosen.tolist(), PHYSICAL)


def test_vmap_over_ids_adds_up_and_over_anything_else_is_refused():
    ids, load = ids_of(14).view(2, 7, 3), torch.zeros(PHYSICAL, dtype=torch.int32)
    expected = [oracles.replicas(each, EXPERTS, COUNTS, None) for each in ids]
    assert torch.vmap(mapped)(ids).tolist() == expected
    assert torch.vmap(lambda each: mapped(each, load))(ids).tolist() == expected
    assert load.tolist() == oracles.load_of([*expected[0], *expected[1]], PHYSICAL)
    loads = torch.zeros(2, PHYSICAL, dtype=torch.int32)
    with pytest.raises(ValueError, match="vmap over load of moe"):
        torch.vmap(mapped)(ids, loads)


WRONG = {
    "without load": (
        lambda: mapped(ids_of(3), num_real_tokens=torch.tensor(2)),
        ValueError,
        "num_real_tokens with",
    ),
    "a flag without load": (
        lambda: mapped(ids_of(3), is_recording=torch.tensor(True)),
        ValueError,
        "is_recording without load",
    ),
    "no replica": (
        lambda: moe_ops.map_replicas(ids_of(3), EXPERTS[:, :0], COUNTS),
        ValueError,
        "at least one replica of an expert",
    ),
    "wide maps": (
        lambda: moe_ops.map_replicas(ids_of(3), EXPERTS.long(), COUNTS),
        TypeError,
        "logical_to_physical has dtype torch.int64: expected torch.int32",
    ),
    "a number": (lambda: mapped(ids_of(3), seed=5), TypeError, "seed=5: expected a torch.Tensor"),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
