"""Tensors carried along through every exchange, of every dtype, and rows quantised before or after it."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from layers import ModularKernel, Prepared, RouterOutput, StandardExperts
from layers.carried import moved_as_bytes
from layers.parallel import AllGatherPrepareAndFinalize, AllReducePrepareAndFinalize
from tests.helpers import assert_matches_oracle, assert_same, usually
from tests.layers.carried import (
    QuantisedExperts,
    QuantisesFirst,
    QuantisingExperts,
    assert_beside_their_tokens,
    dequantise,
    extra_tensors,
    numbered,
    numbers,
    quantise,
)
from tests.layers.parallel.exchanges import (
    ALL,
    REPLICATED,
    E,
    H,
    K,
    all_gather,
    config,
    make_layer,
    tokens_of as any_tokens_of,
    variable,
)
from tests.layers.parallel.test_compiled import compiled_for_any_number
from tests.layers.parallel.test_exchanges import loss, oracle
from tests.layers.parallel.world import on_ranks

exchanges = pytest.mark.parametrize("name", ALL)
of_rows = pytest.mark.parametrize("name", [name for name in ALL if "batched" not in name])


def tokens_of(name, **options):
    """Of this rank: hidden states with numbers in front, how they are routed, and the numbers."""
    rank = dist.get_rank()
    hidden, routed = any_tokens_of(rank, name, **options)
    which = numbers(hidden.shape[0], 0 if name in REPLICATED else rank)
    return numbered(hidden, which), routed, which


@pytest.mark.parametrize("ids", [torch.arange(5)[None].int().t(), torch.tensor([[3]]).expand(1, 1).t()])
def test_a_column_whatever_its_stride_goes_as_bytes(ids):
    assert torch.equal(moved_as_bytes(lambda rows: lambda: rows, ids)(), ids)


@on_ranks(2, 4)
@exchanges
def test_they_arrive_with_their_tokens(name):
    hidden, routed, which = tokens_of(name, routing="padding")
    prepared = ALL[name](make_layer(config())).start(hidden, routed, extra_tensors(which)).wait()
    assert_beside_their_tokens(prepared)
    arrived = set(prepared.hidden_states.flatten(0, -2)[:, 0].int().tolist()) - {0}
    assert len({number // 100 for number in arrived}) == (
        1 if name in REPLICATED else dist.get_world_size() - 1
    )


@on_ranks(2)
@exchanges
def test_no_rank_has_a_token(name):
    routed = RouterOutput(torch.empty(0, E), torch.empty(0, K), torch.empty(0, K, dtype=torch.int32))
    prepared = (
        ALL[name](make_layer(config())).start(torch.empty(0, H), routed, extra_tensors(numbers(0))).wait()
    )
    assert_beside_their_tokens(prepared)


@on_ranks(4)
def test_behind_tokens_that_some_ranks_share():
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    exchange = AllReducePrepareAndFinalize(mesh["tp"], AllGatherPrepareAndFinalize(mesh["dp"]))
    kernel = ModularKernel(exchange, StandardExperts(make_layer(config())))
    rank = dist.get_rank() // 2
    (hidden, routed), which = any_tokens_of(rank, "padded", sizes="even"), numbers(6, rank)
    prepared = kernel.start(numbered(hidden, which), routed, extra_tensors(which)).wait()
    assert prepared.hidden_states.shape[0] == 12
    assert_beside_their_tokens(prepared)


@on_ranks(2)
@pytest.mark.parametrize("name", usually(ALL, ("padded", "variable")))
def test_one_graph_for_all_contents(name):
    kernel = ALL[name](make_layer(config()))

    def arrived(*args):
        prepared = kernel.start(*args).wait()
        return prepared.hidden_states, prepared.extra_tensors

    function, counter = compiled_for_any_number(arrived)
    for step, routing in enumerate(("random", "padding", "one_rank")):
        hidden, routed, which = tokens_of(name, routing=routing, sizes="even", step=step)
        keep = 6 - step
        routed = RouterOutput(*(each[:keep].clone() for each in routed))
        extras = extra_tensors(which[:keep])
        rows, extras = function(hidden[:keep].clone(), routed, extras)
        assert_beside_their_tokens(Prepared(rows, *routed[1:], extra_tensors=extras))
    assert counter.frame_count == 1


class ScaledExperts(StandardExperts):
    def forward(self, prepared):
        rows = prepared.hidden_states * prepared.extra_tensors[0].unsqueeze(1)
        return super().forward(prepared._replace(hidden_states=rows))


@on_ranks(2)
@of_rows
def test_gradients(name):
    layer = make_layer(config(), torch.float64)
    kernel = ALL[name](layer)
    hidden, routed, _ = tokens_of(name, dtype=torch.float64)
    scales = torch.linspace(0.5, 1.5, hidden.shape[0], dtype=torch.float64).requires_grad_()
    scaled = ModularKernel(kernel.prepare_finalize, ScaledExperts(kernel.experts.layer))
    loss(scaled(hidden, routed, None, (scales,))).backward()
    expected = scales.detach().clone().requires_grad_()
    loss(layer(hidden * expected.unsqueeze(1), routed)).backward()
    assert_same([scales.grad], [expected.grad])


class Sent(TorchDispatchMode):
    """Bytes per row that collectives of tokens are given."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name.startswith("_c10d_functional::all_") and "reduce" not in name:
            sent = args[0] if isinstance(args[0], list) else [args[0]]
            self.bytes += [each.shape[1:].numel() * each.element_size() for each in sent]
        return function(*args, **(kwargs or {}))


@on_ranks(2)
@of_rows
def test_rows_quantised_before_or_after_the_exchange(name):
    layer = make_layer(config())
    kernel = ALL[name](layer)
    exchange, part = kernel.prepare_finalize, kernel.experts.layer
    hidden, routed, which = tokens_of(name, sizes="even")
    outputs, sent = [], []
    for each, experts in ((QuantisesFirst(exchange), QuantisedExperts), (exchange, QuantisingExperts)):
        with Sent() as seen, torch.no_grad():
            prepared = ModularKernel(each, experts(part)).start(hidden, routed, (which,)).wait()
        assert torch.equal(prepared.extra_tensors[-1] != 0, prepared.hidden_states.ne(0).any(1))
        sent.append(sum(seen.bytes))
        outputs.append(ModularKernel(each, experts(part))(hidden, routed, None, (which,)))
        assert_matches_oracle(outputs[-1], oracle(layer, dequantise(*quantise(hidden)), routed))
    assert torch.equal(*outputs)
    assert sent[1] - sent[0] == (0 if name in REPLICATED else H * 4 - (H + 4))


@on_ranks(2)
@pytest.mark.parametrize("make", [all_gather, variable])
@pytest.mark.parametrize(("what", "more"), [("extra", 1), ("ids", 4 * K), ("weights", 4 * K)])
def test_other_tensors_on_the_first_rank_are_refused(what, more, make):
    hidden, routed, which = tokens_of("variable", sizes="even")
    extras = (which,)
    if dist.get_rank() == 0:
        wide = {
            "ids": {"topk_ids": routed.topk_ids.long()},
            "weights": {"topk_weights": routed.topk_weights.double()},
        }
        routed, extras = (
            routed._replace(**wide.get(what, {})),
            (*extras, *([which.bool()] * (what == "extra"))),
        )
    with pytest.raises(ValueError) as caught:
        make(make_layer(config()))(hidden, routed, None, extras)
    usual = 4 * H + 8 * K + 8
    assert str(caught.value) == (
        f"bytes of a token, its weights, ids and extra_tensors differs between ranks: {usual + more} on rank 0; "
        f"{usual} on rank 1; expected the same on all"
    )
    dist.barrier()  # nothing is left on its way
