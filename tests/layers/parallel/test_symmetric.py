"""The exchange over symmetric memory where there is none: one rank, refusals, and traces of many ranks.

What it computes among ranks is in tests/kernels/test_symmetric_ranks.py and, on GPUs, in test_symmetric_gpu.py.
"""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from layers import ModularKernel, StandardExperts
from layers.parallel import AllGatherPrepareAndFinalize, ExpertParallel, SymmetricPrepareAndFinalize
from layers.parallel._compat import symmetric_memory
from layers.parallel.symmetric import _fault, _peers
from moe_ops.exchange_plan import plan_exchange
from moe_ops.peers import ExchangeLayout, Peers, fields_of, new_turns, peers_named
from moe_ops.pull_sums import pull_sums
from moe_ops.push_rows import push_rows
from tests.helpers import assert_matches_oracle, assert_same
from tests.layers.carried import assert_beside_their_tokens, extra_tensors, numbered, numbers
from tests.layers.parallel.exchanges import (
    MOST,
    E,
    H,
    K,
    config,
    make_layer,
    owners,
    part_of_experts,
    tokens_of,
)
from tests.layers.parallel.test_exchanges import differentiable, loss, oracle
from tests.layers.parallel.world import on_ranks

SIZES = {"max_tokens": MOST, "hidden_size": H, "top_k": K}
ALONE = "symmetric"


def kernel_of(layer) -> ModularKernel:
    ranks = owners(layer.config)
    exchange = SymmetricPrepareAndFinalize(dist.group.WORLD, ranks, **SIZES, dtype=layer.w13_weight.dtype)
    return ModularKernel(exchange, StandardExperts(part_of_experts(layer, ranks)))


@on_ranks(1)
def test_one_rank_needs_no_memory_of_others():
    layer = make_layer(config(), torch.float64)
    kernel = kernel_of(layer)
    assert kernel.prepare_finalize.peers is None
    hidden, routed = differentiable(*tokens_of(0, ALONE, "padding", torch.float64))
    shared = torch.randn_like(hidden)
    out = kernel(hidden, routed, shared)
    assert_matches_oracle(out, oracle(layer, hidden, routed) + shared)
    loss(out).backward()
    own = differentiable(hidden.detach(), routed._replace(topk_weights=routed.topk_weights.detach()))
    loss(layer(*own)).backward()
    assert_same([hidden.grad, routed.topk_weights.grad], [own[0].grad, own[1].topk_weights.grad])


@on_ranks(1)
def test_extra_tensors_of_one_rank():
    hidden, routed = tokens_of(0, ALONE)
    which = numbers(hidden.shape[0], 0)
    prepared = (
        kernel_of(make_layer(config())).start(numbered(hidden, which), routed, extra_tensors(which)).wait()
    )
    assert_beside_their_tokens(prepared)
    assert prepared.hidden_states.shape[0] == MOST
    assert (prepared.topk_ids[hidden.shape[0] :] == -1).all()


@on_ranks(2)
def test_ranks_of_a_cpu_are_told_what_to_take():
    message = r"dispatcher='symmetric': rank 0 computes on a CPU; expected GPUs of one host, or 'allgather'"
    with pytest.raises(ValueError, match=message):
        kernel_of(make_layer(config()))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    with pytest.raises(ValueError, match=message):
        parallelize_module(make_layer(config()), mesh["ep"], ExpertParallel("symmetric", max_tokens=MOST))
    chosen = parallelize_module(make_layer(config()), mesh["ep"], ExpertParallel(max_tokens=MOST))
    assert isinstance(chosen.parallel.exchange, AllGatherPrepareAndFinalize)


@on_ranks(2)
@pytest.mark.parametrize("holders", [(0,), (0, 1)])
def test_buffers_of_another_exchange_are_those_of_all_ranks_or_of_none(holders):
    """What one rank let go may be on another still, where it is not collected yet."""
    group, layout = dist.group.WORLD, ExchangeLayout(2, MOST, 16, 16)
    name = f"{group.group_name} {MOST} 16 16"
    made = Peers(name, dist.get_rank(), layout, torch.zeros(2).long(), new_turns(60.0, "cpu"))
    if dist.get_rank() not in holders:
        del made
    if len(holders) == 2:
        assert _peers(group, layout, 60.0) is made
    else:
        with pytest.raises(ValueError, match="rank 0 computes on a CPU"):  # would make new ones
            _peers(group, layout, 60.0)


@on_ranks(2)
def test_sizes_that_differ():
    sizes = {**SIZES, "top_k": K + dist.get_rank()}
    with pytest.raises(ValueError, match=r"top_k differs between ranks: 3 on rank 0; 4 on rank 1; expected"):
        SymmetricPrepareAndFinalize(dist.group.WORLD, owners(config()), **sizes)


def test_max_tokens_is_needed():
    with pytest.raises(ValueError, match=r"max_tokens=None with dispatcher='symmetric': expected a number"):
        ExpertParallel("symmetric")


@on_ranks(1)
def test_refused():
    for name in ("max_tokens", "hidden_size", "top_k", "extra_bytes"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            SymmetricPrepareAndFinalize(dist.group.WORLD, owners(config()), **{**SIZES, name: 0})
    with pytest.raises(TypeError, match="dtype"):
        SymmetricPrepareAndFinalize(dist.group.WORLD, owners(config()), **SIZES, dtype="bfloat16")
    for timeout, error in ((float("inf"), ValueError), (0, ValueError), (True, TypeError), ("1", TypeError)):
        with pytest.raises(error, match=f"timeout={timeout!r}"):
            SymmetricPrepareAndFinalize(dist.group.WORLD, owners(config()), **SIZES, timeout=timeout)
    kernel = kernel_of(make_layer(config()))
    hidden, routed = tokens_of(0, ALONE, sizes="most")
    more = (torch.cat([each, each[:1]]) for each in (hidden, routed.topk_weights, routed.topk_ids))
    message = rf"hidden_states has {MOST + 1} tokens on rank 0: expected at most max_tokens={MOST}"
    with pytest.raises(ValueError, match=message):
        kernel.prepare_finalize.prepare(*more, E, None)


def test_places_that_do_not_reach_each_other():
    assert _fault([("a", "0", 0), ("a", None, -1)]) == "rank 1 computes on a CPU"
    assert _fault([("a", "0", 0), ("b", "1", 0)]) == "the ranks are on 2 hosts"
    assert _fault([("a", "0", 0), ("a", "0", 0)]) == "2 ranks share 1 GPUs"


def test_no_barrier_waits_for_ever(monkeypatch):
    class Handle:
        buffer_ptrs = (16, 32)
        waits: ClassVar[list] = []

        def barrier(self, channel, timeout_ms=0):
            self.waits.append(timeout_ms)

    module = torch.distributed._symmetric_memory
    monkeypatch.setattr(module, "empty", lambda size, dtype, device: torch.full((size,), 7, dtype=dtype))
    monkeypatch.setattr(module, "rendezvous", lambda buffer, name: Handle())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    memory = symmetric_memory(48, SimpleNamespace(group_name="ranks"), torch.device("cpu"), 2.5)
    assert Handle.waits == [2500]
    assert memory.addresses.tolist() == [16, 32] and not memory.buffer.any()


def test_layout():
    layout = ExchangeLayout(num_ranks=2, max_tokens=3, row_bytes=64, sum_bytes=32)
    assert (layout.signals_at, layout.rows_at) == (32, 32 + 12 * 8)
    assert (layout.sums_at, layout.num_bytes) == (128 + 12 * 64, 128 + 12 * 64 + 12 * 32)
    assert fields_of(26, 12, 12, 5) == (32, 48, 64, 80)


def test_peers_are_known_as_long_as_they_live():
    addresses, turns = torch.zeros(1, dtype=torch.int64), new_turns(60.0, "cpu")
    peers = Peers("of a test", 0, ExchangeLayout(1, 1, 16, 16), addresses, turns)
    assert peers_named("of a test") is peers
    del peers
    with pytest.raises(ValueError, match="peers=of a test: expected the name of an exchange of this process"):
        peers_named("of a test")


@pytest.mark.parametrize("num_ranks", [2, 64])
def test_shapes_among_many_ranks(num_ranks):
    with FakeTensorMode():
        ids, experts = torch.zeros(5, K, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
        plan = plan_exchange(ids, experts, num_ranks, 7)
        assert [each.shape for each in plan] == [(5, num_ranks), (num_ranks, 7), (num_ranks,)]
        hidden, weights = torch.zeros(5, H, dtype=torch.bfloat16), torch.zeros(5, K)
        extra = torch.zeros(5, 16, dtype=torch.uint8)
        rows, row_weights, row_ids, row_extra, received = push_rows(hidden, weights, ids, extra, plan, "")
        assert rows.shape == (num_ranks * 7, H) and rows.dtype == torch.bfloat16
        assert row_weights.shape == row_ids.shape == (num_ranks * 7, K) and row_ids.dtype == torch.int32
        assert row_extra.shape == (num_ranks * 7, 16) and received.shape == (num_ranks,)
        assert pull_sums(rows, plan, received, None, "").shape == (5, H)


def test_several_ranks_of_one_cpu_are_refused():
    ids, experts = torch.zeros(5, K, dtype=torch.int32), torch.zeros(E, dtype=torch.int32)
    plan = plan_exchange(ids, experts, 2, 7)
    with pytest.raises(ValueError, match="tokens has 2 rows, of as many ranks, on a CPU: expected one"):
        push_rows(torch.zeros(5, H), None, None, None, plan, "")
    with pytest.raises(ValueError, match="on a CPU: expected one"):
        pull_sums(torch.zeros(14, H), plan, plan.sent, None, "")
    with pytest.raises(ValueError, match="topk_ids has 5 tokens: expected at most max_tokens=4"):
        plan_exchange(ids, experts, 2, 4)
    with pytest.raises(ValueError, match="num_ranks=0: expected at least 1"):
        plan_exchange(ids, experts, 0, 7)
