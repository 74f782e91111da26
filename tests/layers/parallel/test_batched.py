"""Tokens of all ranks in the rows of their experts. Values, gradients and graphs: with those of other exchanges."""

import pytest
import torch
import torch.distributed as dist

from layers.parallel import BatchedExchange
from tests.helpers import assert_matches_oracle
from tests.layers.parallel.exchanges import MOST, E, H, batched, config, make_layer, padded, tokens_of
from tests.layers.parallel.test_exchanges import oracle
from tests.layers.parallel.world import on_ranks


@on_ranks(2, 4)
def test_every_token_lies_in_a_row_of_its_expert():
    kernel, ranks = batched(padded(make_layer(config())), MOST), range(dist.get_world_size())
    hidden, routed = tokens_of(dist.get_rank(), "padded")
    prepared = kernel.start(hidden, routed).wait()
    here = E // len(ranks)
    assert prepared.hidden_states.shape == (here, MOST, H)
    everyones = [tokens_of(rank, "padded") for rank in ranks]
    for expert, (rows, count) in enumerate(
        zip(prepared.hidden_states, prepared.counts.tolist(), strict=True)
    ):
        is_asked = (dist.get_rank() * here) + expert
        wanted = [each[(them.topk_ids == is_asked).any(1)] for each, them in everyones]
        assert torch.equal(rows[:count], torch.cat(wanted)) and not rows[count:].any()


@on_ranks(2)
def test_slots_that_find_their_expert_full_are_dropped():
    layer = make_layer(config())
    hidden, routed = tokens_of(0, "padded", "random")  # the same on both
    ids = torch.tensor([[0, 4, -1]], dtype=torch.int32).repeat(hidden.shape[0], 1)
    routed = routed._replace(topk_ids=ids)
    kept = torch.tensor([0, 1]) if dist.get_rank() == 0 else torch.tensor([], dtype=torch.int64)
    output = batched(padded(layer), max_tokens=2)(hidden, routed)
    expected = oracle(layer, hidden, routed)
    assert_matches_oracle(output[kept], expected[kept])
    others = [token for token in range(hidden.shape[0]) if token not in kept]
    assert not output[others].any()


@on_ranks(2)
def test_what_it_says_of_itself():
    exchange = padded(make_layer(config()), max_tokens=5).prepare_finalize
    around = BatchedExchange(exchange)
    for name in ("num_dispatchers", "max_num_tokens_per_rank", "output_is_reduced"):
        assert getattr(around, name) == getattr(exchange, name)
    assert (around.num_dispatchers, around.max_num_tokens_per_rank) == (2, 5)
    with pytest.raises(ValueError, match="max_tokens=0: expected at least 1"):
        BatchedExchange(exchange, max_tokens=0)
    with pytest.raises(TypeError, match=r"exchange=.*: expected"):
        BatchedExchange(around)
