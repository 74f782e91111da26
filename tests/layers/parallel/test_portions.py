"""Tokens exchanged in portions: batches that take turns, and chunks that all ranks have as many of."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import parallelize_module

from layers import ExpertsConfig
from layers.parallel import ExpertParallel, ExpertTensorParallel
from layers.parallel.portions import Portions
from tests.helpers import assert_matches_oracle, assert_same, usually
from tests.layers import oracle
from tests.layers.parallel.test_compiled import compiled_for_any_number
from tests.layers.parallel.test_overlap import Order
from tests.layers.parallel.test_styles import OPTIONS, H, loss, make_block, mesh_of_all
from tests.layers.parallel.world import on_ranks

STYLES = {
    "batches": ExpertParallel("allgather", batches=2),
    "batches_static": ExpertParallel("allgather", max_tokens=9, batches=2),
    "batches_alltoall": ExpertParallel("alltoall", max_tokens=9, batches=3),
    "batches_tensor": ExpertTensorParallel(batches=2),
    "chunks": ExpertParallel("allgather", chunk_tokens=4),
    "chunks_static": ExpertTensorParallel("allgather", max_tokens=11, chunk_tokens=4),
    "chunks_alltoall": ExpertParallel("alltoall", chunk_tokens=4, batches=2),
}
styles = pytest.mark.parametrize("style", STYLES)


def parallel(block, style):
    return parallelize_module(copy.deepcopy(block), mesh_of_all(), {"experts": STYLES[style]})


def tokens_of(rank, style, dtype=torch.float32, most=9):
    """Rank 1 has none, unless all have the same."""
    rank = 0 if style == "batches_tensor" else rank
    count = 0 if rank == 1 else max(most - rank, 0)
    generator = torch.Generator().manual_seed(10 * most + rank)
    return torch.randn(count, H, generator=generator, dtype=torch.float64).to(dtype)


@on_ranks(2, 4)
@styles
@pytest.mark.parametrize("name", ["plain", "deepseek_v3"])
def test_values(style, name):
    block = make_block(**OPTIONS[name])
    sharded = parallel(block, style)
    for most in (9, 8, 4, 3, 2, 1, 0):
        hidden = tokens_of(dist.get_rank(), style, most=most)
        assert_matches_oracle(sharded(hidden), oracle.block(block, hidden))


@on_ranks(2)
@styles
def test_a_shared_output_that_is_there_already(style):
    """Rows that fill up a rank's chunks have none of it."""
    block, hidden = make_block(**OPTIONS["deepseek_v3"]), tokens_of(dist.get_rank(), style)
    logits, shared = (
        torch.randn(len(hidden), 8, generator=torch.Generator().manual_seed(0)),
        torch.randn_like(hidden),
    )
    out = parallel(block, style).experts(hidden, logits, shared)
    assert_matches_oracle(out, oracle.experts(block.experts, hidden, logits) + shared.double())


@on_ranks(2)
@styles
def test_gradients(style):
    block = make_block(torch.float64, **OPTIONS["plain"])
    sharded, rank = parallel(block, style), dist.get_rank()
    hidden = tokens_of(rank, style, torch.float64).requires_grad_()
    loss(sharded(hidden)).backward()
    ranks = [0] if style == "batches_tensor" else range(dist.get_world_size())
    expected = [tokens_of(each, style, torch.float64).requires_grad_() for each in ranks]
    for each in expected:
        loss(block(each)).backward()
    assert_same([hidden.grad], [expected[rank if len(expected) > 1 else 0].grad])
    for name in ("w13_weight", "w2_weight", "w2_bias"):
        whole = sharded.experts.get_parameter(name).grad.full_tensor()
        assert_same([whole.reshape(-1)], [block.experts.get_parameter(name).grad.reshape(-1)])


GATHERS = "all_gather_into_tensor_coalesced"
STARTS = (GATHERS, "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "all_reduce")


def exchanges(function):
    """What `function` starts, in order."""
    with Order() as order:
        function()
    return [name for name in order.names if name in STARTS]


@on_ranks(4)
@pytest.mark.parametrize(
    "style, asked, chunks",
    [
        ("chunks_static", 0, 3),  # of 11 tokens at most
        ("chunks", 1 + 3, 3),  # of 9, and sizes are asked for, of all and of each chunk
    ],
)
def test_ranks_without_tokens_exchange_as_often(style, asked, chunks):
    block, told = parallel(make_block(torch.float64), style), [None] * 4
    hidden = tokens_of(dist.get_rank(), style, torch.float64).requires_grad_()
    outputs = []
    forward = exchanges(lambda: outputs.append(block(hidden)))
    backward = exchanges(lambda: loss(outputs[0]).backward())
    dist.all_gather_object(told, (forward, backward))
    assert all(each == told[0] for each in told)
    assert forward.count(GATHERS) == forward.count("reduce_scatter_tensor") == chunks
    assert forward.count("all_gather_into_tensor") == asked
    assert backward.count("all_gather_into_tensor") == chunks


@on_ranks(2)
def test_one_batch_is_on_its_way_while_experts_run_the_other():
    block = parallel(make_block(**OPTIONS["deepseek_v3"]), "batches_static")
    with Order() as order, torch.no_grad():
        block(torch.randn(9, H))
    seen = {GATHERS: "there", "reduce_scatter_tensor": "back", "wait_tensor": "wait"}
    seen |= {"fused_experts": "experts", "gated_activation": "shared"}
    names = [seen[name] for name in order.names if name in seen]
    assert names == [
        *("there", "there"),
        "shared",
        *(*["wait"] * 3, "experts", "back"),
        *(*["wait"] * 3, "experts", "back"),
        *("wait", "wait"),
    ]


@on_ranks(2)
@pytest.mark.parametrize(
    "style",
    usually(["batches_static", "batches_tensor", "chunks_static"], ["batches_static", "chunks_static"]),
)
def test_one_graph_for_any_number(style):
    """Of batches with more than one row. What chunks hold is no symbol: Inductor cannot view one that it saw as 0."""
    block = make_block(**OPTIONS["plain"])
    function, counter = compiled_for_any_number(parallel(block, style))
    graphs = set()
    for most in (8, 7, 6, *([11, 4, 3] if style == "chunks_static" else [])):
        hidden = tokens_of(0, style, most=most)
        with torch.no_grad():
            assert_matches_oracle(function(hidden), oracle.block(block, hidden))
        graphs.add(counter.frame_count)
    assert len(graphs) == 1


@on_ranks(2)
def test_rows_that_fill_chunks_up_have_no_expert():
    sharded, asked = parallel(make_block(**OPTIONS["plain"]), "chunks_static"), []
    exchange = sharded.experts.parallel.exchange
    start = exchange.prepare_async

    def prepare_async(tokens, weights, ids, *others):
        asked.append((len(tokens), (ids >= 0).all(1).sum().item()))
        return start(tokens, weights, ids, *others)

    with mock.patch.object(exchange, "prepare_async", prepare_async):
        sharded(torch.randn(6, H))
    assert asked == [(4, 4), (4, 2), (3, 0)]


@on_ranks(2)
def test_chunks_of_unknown_number_are_not_compiled():
    function, _ = compiled_for_any_number(parallel(make_block(), "chunks"))
    with pytest.raises(
        Exception, match="max_tokens=None with chunk_tokens: expected a number in compiled code"
    ):
        function(torch.randn(6, H))


@on_ranks(2)
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_layers_whose_chunks_are_of_unknown_number_are_not_compiled(dispatcher):
    """How many tokens come here, ranks tell each other."""
    block = make_block(experts=ExpertsConfig(chunk_size=4))
    parallelize_module(block, mesh_of_all(), {"experts": ExpertParallel(dispatcher)})
    function, _ = compiled_for_any_number(block)
    with pytest.raises(
        Exception, match="chunk_size=4 of tokens whose number only the run can tell: expected"
    ):
        function(torch.randn(9, H))


@on_ranks(2)
def test_more_tokens_than_chunks_are_for():
    block = parallel(make_block(), "chunks_static")
    with pytest.raises(
        ValueError, match=r"hidden_states has 12 tokens on rank .: expected at most max_tokens=11"
    ):
        block(torch.randn(12, H))


@on_ranks(2)
def test_portions_that_differ():
    style = ExpertParallel("allreduce", batches=1 + dist.get_rank())
    with pytest.raises(
        ValueError, match=r"style.portions differs between ranks: .*batches=1.* on rank 0; .* on rank 1"
    ):
        parallelize_module(make_block(), mesh_of_all(), {"experts": style})


@pytest.mark.parametrize(
    "style, options, message",
    [
        (ExpertParallel, {"batches": 0}, "batches=0: expected at least 1"),
        (ExpertParallel, {"chunk_tokens": 0}, "chunk_tokens=0: expected at least 1"),
        (
            ExpertTensorParallel,
            {"chunk_tokens": 4},
            "chunk_tokens=4 with dispatcher='allreduce': expected None",
        ),
        (ExpertTensorParallel, {"max_tokens": 4}, "max_tokens=4 with dispatcher='allreduce': expected None"),
    ],
)
def test_refused(style, options, message):
    with pytest.raises(ValueError, match=message):
        style(**options)


def test_rows():
    def rows(portions, num_tokens):
        return [[(each.start, each.stop) for each in chunk] for chunk in portions.rows(num_tokens)]

    assert rows(Portions(batches=2), 9) == [[(0, 4), (4, 9)]]
    assert rows(Portions(batches=2), 1) == [[(0, 0), (0, 1)]]
    assert rows(Portions(chunk_tokens=4), 9) == [[(0, 4)], [(4, 8)], [(8, 9)]]
    assert rows(Portions(chunk_tokens=4), 0) == [[(0, 0)]]
    assert rows(Portions(chunk_tokens=4, batches=2), 7) == [[(0, 2), (2, 4)], [(4, 5), (5, 7)]]
    most = [
        Portions(max_tokens=9, batches=2),
        Portions(9, 2, chunk_tokens=4),
        Portions(9, 1, chunk_tokens=20),
    ]
    assert [each.of_one_exchange for each in most] == [5, 2, 9]
    assert Portions(chunk_tokens=4).of_one_exchange is None
