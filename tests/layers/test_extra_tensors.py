"""Tensors carried along with tokens, on one device: they arrive in the rows of their tokens."""

import pytest
import torch

from layers import FusedMoE, LocalPrepareAndFinalize, ModularKernel, RouterOutput
from tests.helpers import assert_matches_oracle
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
from tests.layers.modular import EXPERT_MAP, FORMATS, E, H, K, batched, config, standard
from tests.layers.test_modular_kernel import oracle_of_routed

formats = pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)


def tokens(num_tokens: int) -> tuple[torch.Tensor, RouterOutput]:
    hidden, logits = torch.randn(num_tokens, H), torch.randn(num_tokens, E)
    weights, ids = logits.softmax(1).topk(K)
    return numbered(hidden, numbers(num_tokens)), RouterOutput(logits, weights, ids.to(torch.int32))


@formats
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_they_arrive_with_their_tokens(make, num_tokens):
    hidden, routed = tokens(num_tokens)
    kernel = make(FusedMoE(config(), EXPERT_MAP))
    prepared = kernel.start(hidden, routed, extra_tensors(numbers(num_tokens))).wait()
    assert_beside_their_tokens(prepared)


def test_tokens_that_find_their_expert_full_leave_nothing_behind():
    hidden, routed = tokens(9)
    assert_beside_their_tokens(
        batched(FusedMoE(config()), 1).start(hidden, routed, extra_tensors(numbers(9))).wait()
    )


@formats
def test_compiled(make):
    kernel = make(FusedMoE(config()))
    start = torch.compile(
        lambda *args: kernel.start(*args).wait(), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for num_tokens in (7, 3):
        assert_beside_their_tokens(start(*tokens(num_tokens), extra_tensors(numbers(num_tokens))))


def test_what_has_no_row_per_token_is_refused():
    kernel, (hidden, routed) = standard(FusedMoE(config())), tokens(5)
    ids = torch.zeros(5, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"extra_tensors\[1\] has shape \[4, 2\]: expected 5 rows, one per token"
    ):
        kernel(hidden, routed, None, (ids, torch.zeros(4, 2)))
    with pytest.raises(ValueError, match=r"extra_tensors\[0\] has shape \[\]: expected 5 rows"):
        kernel(hidden, routed, extra_tensors=[torch.tensor(1.0)])
    with pytest.raises(TypeError, match=r"extra_tensors\[0\]=.*: expected a torch.Tensor"):
        kernel(hidden, routed, extra_tensors=[[0] * 5])


def test_rows_quantised_before_or_after_the_exchange():
    layer, (hidden, routed) = FusedMoE(config()), tokens(9)
    before = ModularKernel(QuantisesFirst(LocalPrepareAndFinalize()), QuantisedExperts(layer))
    after = ModularKernel(LocalPrepareAndFinalize(), QuantisingExperts(layer))
    expected = oracle_of_routed(layer, dequantise(*quantise(hidden)), routed)
    assert_matches_oracle(before(hidden, routed), expected)
    assert torch.equal(before(hidden, routed), after(hidden, routed))
