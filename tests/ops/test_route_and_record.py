"""route_and_record as defined: it routes as topk_routing does, and counts a slot once, however it is differentiated."""

import pytest
import torch

import moe_ops
from moe_ops import RoutingConfig
from moe_ops.arguments import LoadRecord, Replicas, Router
from moe_ops.route_and_record import route_and_record
from tests.kernels import oracles
from tests.ops.test_placement import COUNTS, EXPERTS, PHYSICAL

ROUTING = RoutingConfig(3, "sigmoid", scale=1.5)
MAPS = Replicas(EXPERTS, COUNTS)


def fresh(**switches):
    return LoadRecord(torch.zeros(PHYSICAL, dtype=torch.int32), **switches)


def run(logits, record, seed=None, bias=None):
    return route_and_record(Router(logits, bias, ROUTING.spec), MAPS, record, seed)


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize(
    "experts", [5, 7], ids="{} experts".format
)  # two that have no replicas, as zero experts
@pytest.mark.parametrize("how", ["eager", "aot_eager", "dynamic", "inductor"])
def test_it_is_both_operators(tokens, experts, how):
    if how != "eager":
        backend = "inductor" if how == "inductor" else "aot_eager"
        call = torch.compile(run, fullgraph=True, backend=backend, dynamic=how == "dynamic")
    else:
        call = run
    logits, bias, seed = torch.randn(tokens, experts), torch.rand(experts), torch.tensor(5)
    record = fresh(num_real_tokens=torch.tensor(20), is_recording=torch.tensor(True))
    for _ in range(2):
        weights, ids, physical = call(logits, record, seed, bias)
    expected_weights, expected_ids = moe_ops.topk_routing(logits, ROUTING, bias)
    torch.testing.assert_close(weights, expected_weights)
    assert torch.equal(ids, expected_ids) and physical.dtype == torch.int32
    expected = oracles.replicas(expected_ids, EXPERTS, COUNTS, 5)
    assert physical.tolist() == expected
    assert record.load.tolist() == [2 * load for load in oracles.load_of(expected[:20], PHYSICAL)]
    record.is_recording.fill_(False)
    call(logits, record, seed, bias)
    assert record.load.tolist() == [2 * load for load in oracles.load_of(expected[:20], PHYSICAL)]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_step_counts_once_and_has_the_routers_gradient(compiled):
    call = torch.compile(run, fullgraph=True) if compiled else run
    logits, record = torch.randn(7, 5, requires_grad=True), fresh()
    weights, ids, _ = call(logits, record)
    actual = torch.autograd.grad(weights.sin().sum(), logits)
    expected = torch.autograd.grad(moe_ops.topk_routing(logits, ROUTING)[0].sin().sum(), logits)
    torch.testing.assert_close(actual, expected)
    assert record.load.tolist() == oracles.load_of(oracles.replicas(ids, EXPERTS, COUNTS, None), PHYSICAL)


def test_a_tangent_counts_once():
    record = fresh()
    logits = torch.randn(7, 5)
    (_, ids), _ = torch.func.jvp(lambda x: run(x, record)[:2], (logits,), (torch.ones_like(logits),))
    assert record.load.tolist() == oracles.load_of(oracles.replicas(ids, EXPERTS, COUNTS, None), PHYSICAL)


def test_autograd_notices_the_change():
    record, weight = fresh(), torch.ones(PHYSICAL, requires_grad=True)
    out = (weight * record.load).sum()
    run(torch.randn(7, 5), record)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_vmap_adds_up_and_numbers_tokens_anew():
    logits, record = torch.randn(2, 7, 5), fresh()
    _, ids, physical = torch.vmap(lambda each: run(each, record))(logits)
    expected = [oracles.replicas(each, EXPERTS, COUNTS, None) for each in ids]
    assert physical.tolist() == expected
    assert record.load.tolist() == oracles.load_of([*expected[0], *expected[1]], PHYSICAL)
