"""`SymmetricPrepareAndFinalize` among processes: interpreted kernels on memory that the processes share."""

import copy
import pickle
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import triton
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from layers import (
    ExpertOutput,
    FusedMoE,
    ModularKernel,
    MoEConfig,
    RouterOutput,
    StandardExperts,
    quantise_experts,
)
from layers.parallel import ExpertParallel, SymmetricPrepareAndFinalize
from layers.weigh_and_reduce import TopKWeightAndReduceNoOp
from tests.helpers import RELATIVE_NORM, assert_matches_oracle, assert_same, relative_error
from tests.kernels.shared_memory import symmetric_memory_of_processes
from tests.layers.carried import assert_beside_their_tokens, extra_tensors, numbered, numbers
from tests.layers.parallel.exchanges import (
    MOST,
    ROUTINGS,
    E,
    H,
    K,
    config,
    held_by,
    make_layer,
    owners,
    part_of_experts,
    tokens_of,
)
from tests.layers.parallel.test_exchanges import differentiable, loss, oracle
from tests.layers.parallel.test_quantised_parts import FORMATS
from tests.layers.parallel.world import on_ranks

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
NAME = "symmetric"


def symmetric(layer) -> ModularKernel:
    ranks, dtype = owners(layer.config), layer.w13_weight.dtype
    sizes = {"max_tokens": MOST, "hidden_size": H, "top_k": K, "dtype": dtype}
    exchange = SymmetricPrepareAndFinalize(dist.group.WORLD, ranks, **sizes)
    return ModularKernel(exchange, StandardExperts(part_of_experts(layer, ranks)))


@on_ranks(2, 3)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_values(routing):
    layer, rank = make_layer(config()), dist.get_rank()
    with symmetric_memory_of_processes(), torch.no_grad():
        kernel = symmetric(layer)
        for step in range(3):
            hidden, routed = tokens_of(rank, NAME, routing, step=step)
            shared = torch.randn(hidden.shape)
            assert_matches_oracle(
                kernel(hidden, routed, shared), oracle(layer, hidden, routed) + shared.double()
            )


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["float8 blocks", "int4 with zero points"])
def test_quantised_experts(form, dtype):
    """Their weights do not say what tokens are: a style sets room aside for any."""
    layer, rank = quantised_layer(form), dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    with symmetric_memory_of_processes(), torch.no_grad():
        shared = parallelize_module(copy.deepcopy(layer), mesh, ExpertParallel("symmetric", max_tokens=9))
        for count in (9, 3 * rank):
            given = (torch.randn(count, size).to(dtype) for size in (layer.config.hidden_size, E))
            hidden, logits = given
            expected = layer(hidden, logits)
            actual = shared(hidden, logits)
            assert actual.dtype == dtype and actual.shape == expected.shape
            assert not count or relative_error(actual, expected) < RELATIVE_NORM[dtype]


def quantised_layer(form) -> FusedMoE:
    kind, stored, zero_points = FORMATS[form]
    torch.manual_seed(3)
    layer = FusedMoE(MoEConfig(E, K, 64, 32, has_bias=True))
    quantise_experts(layer, kind, (16, 32), dtype=stored, rows="exact", zero_points=zero_points)
    return layer


@on_ranks(2)
def test_gradients():
    layer, rank = make_layer(config(has_bias=True), torch.float64), dist.get_rank()
    expected = [differentiable(*tokens_of(each, NAME, dtype=torch.float64)) for each in range(2)]
    for each in expected:
        loss(layer(*each)).backward()
    with symmetric_memory_of_processes():
        kernel = symmetric(layer)
        hidden, routed = differentiable(*tokens_of(rank, NAME, dtype=torch.float64))
        loss(kernel(hidden, routed)).backward()
    own, part = expected[rank], kernel.experts.layer
    assert_same([hidden.grad, routed.topk_weights.grad], [own[0].grad, own[1].topk_weights.grad])
    for name, parameter in part.named_parameters():
        assert_same([parameter.grad], [layer.get_parameter(name).grad[held_by(part.expert_map)]])


@on_ranks(2)
def test_extra_tensors_and_their_gradients():
    rank = dist.get_rank()
    hidden, routed = tokens_of(rank, NAME, routing="padding")
    which = numbers(hidden.shape[0], rank)
    scales = which.double().clone().requires_grad_()
    with symmetric_memory_of_processes():
        start = symmetric(make_layer(config())).start
        prepared = start(numbered(hidden, which), routed, extra_tensors(which)).wait()
        assert_beside_their_tokens(prepared)
        sent = start(numbered(hidden, which), routed, (scales,)).wait().extra_tensors[0]
        assert torch.equal(sent.float(), prepared.hidden_states[:, 0])
        sent.sum().backward()
    ranks = (routed.topk_ids // (E // 2)).masked_fill((routed.topk_ids < 0) | (routed.topk_ids >= E), -1)
    copies = sum((ranks == each).any(1).double() for each in range(2))
    assert torch.equal(scales.grad, copies)


@on_ranks(2)
def test_no_rank_has_a_token():
    routed = RouterOutput(torch.empty(0, E), torch.empty(0, K), torch.empty(0, K, dtype=torch.int32))
    with symmetric_memory_of_processes():
        assert symmetric(make_layer(config()))(torch.empty(0, H), routed).shape == (0, H)


@on_ranks(2)
def test_a_poisoned_token_changes_no_other_one():
    hidden, routed = tokens_of(dist.get_rank(), NAME, sizes="even")
    with symmetric_memory_of_processes():
        kernel = symmetric(make_layer(config()))
        clean, poisoned = kernel(hidden, routed), hidden.clone()
        poisoned[0], poisoned[1] = float("nan"), float("inf")
        out = kernel(poisoned, routed)
    assert not out[:2].isfinite().any()
    assert torch.equal(out[2:], clean[2:])


@on_ranks(2)
def test_copies_and_pickles_exchange_as_well():
    hidden, routed = tokens_of(dist.get_rank(), NAME)
    with symmetric_memory_of_processes():
        kernel = symmetric(make_layer(config()))
        for twin in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
            assert torch.equal(twin(hidden, routed), kernel(hidden, routed))
            assert twin.prepare_finalize.peers is kernel.prepare_finalize.peers


@on_ranks(2)
def test_both_ways_wait_for_every_rank():
    """For one that brings nothing, too: it may still read what the exchange before the last has left here."""
    rank = dist.get_rank()
    hidden, routed = tokens_of(rank, NAME, sizes="even")
    stay = (routed.topk_ids % (E // 2) + rank * (E // 2)).to(torch.int32)
    with symmetric_memory_of_processes(), torch.no_grad():
        exchange = symmetric(make_layer(config())).prepare_finalize
        for late in range(2):
            prepared = _in_time(late, lambda: exchange.prepare(hidden, routed.topk_weights, stay, E, None))
            assert int(prepared.way_back.received[1 - rank]) == 0
            given = ExpertOutput(prepared.hidden_states), prepared, TopKWeightAndReduceNoOp(), None
            assert torch.equal(_in_time(late, partial(exchange.finalize, *given)), hidden)


def _in_time(late: int, call):
    """What a call returns that one rank makes later than the others. Asserts that none is done before."""
    dist.barrier()
    if dist.get_rank() == late:
        time.sleep(0.5)
    started, result, ended = time.monotonic(), call(), time.monotonic()
    times = [None] * dist.get_world_size()
    dist.all_gather_object(times, (started, ended))
    assert min(end for _, end in times) >= times[late][0]
    return result


@on_ranks(2)
def test_one_graph_for_every_routing():
    layer, rank, graphs = make_layer(config()), dist.get_rank(), []
    with symmetric_memory_of_processes(), torch.no_grad():
        kernel = symmetric(layer)
        compiled = torch.compile(
            kernel, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph
        )
        for step, routing in enumerate(ROUTINGS):
            hidden, routed = tokens_of(rank, NAME, routing, sizes="even", step=step)
            assert_matches_oracle(compiled(hidden, routed), oracle(layer, hidden, routed))
    assert len(graphs) == 1


@on_ranks(2)
def test_what_does_not_fit_is_refused():
    layer, rank = make_layer(config()), dist.get_rank()
    hidden, routed = tokens_of(0, NAME, sizes="most")
    with symmetric_memory_of_processes():
        kernel = symmetric(layer)
        message = rf"hidden_states has {MOST + 1} tokens on rank {rank}: expected at most max_tokens={MOST}"
        more = (torch.cat([each, each[:1]]) for each in (hidden, routed.topk_weights, routed.topk_ids))
        with pytest.raises(ValueError, match=message):
            kernel.prepare_finalize.prepare(*more, E, None)
        wide = hidden.repeat(1, 9), routed.topk_weights, routed.topk_ids, E, None
        with pytest.raises(
            ValueError, match=r"hidden_states has \d+ bytes a token .*expected at most \d+, for which"
        ):
            kernel.prepare_finalize.prepare(*wide)
