"""Layers of tokens [B, S, H] that choose by a best of row, [B, S], or have experts between B and S."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from tests.helpers import assert_matches_oracle, relative_error
from tests.passes.capture import computed
from tests.passes.stock import EXPERTS, swiglu
from tests.passes.test_before_autograd import ALLOWED, Run, grads
from tests.passes.test_raise_unflattened import BATCH, PIPELINE, exact, layer, routed


def by_argmax(x, router, w13, w2):
    """Switch: ids [B, S], weights [B, S, 1]."""
    probs = F.linear(x, router).float().softmax(-1)
    ids, total = probs.argmax(-1), torch.zeros_like(x)
    weights = probs.gather(-1, ids.unsqueeze(-1))
    for expert in range(EXPERTS):
        out = F.linear(swiglu(F.linear(x, w13[expert])), w2[expert])
        total = total + out * (weights * (ids == expert).unsqueeze(-1)).to(x.dtype)
    return total


def gathered_by_max(x, router, w13, w2):
    """Weights and ids [B, S]."""
    weights, ids = F.linear(x, router).float().softmax(-1).max(-1)
    hidden = swiglu(torch.einsum("bsh,bsih->bsi", x, w13[ids]))
    return torch.einsum("bsi,bshi->bsh", hidden, w2[ids]) * weights.unsqueeze(-1).to(x.dtype)


BEST = {each.__name__: each for each in (by_argmax, gathered_by_max)}


@pytest.mark.parametrize(
    ("name", "sizes"), product(BEST, [(torch.float32, False), (torch.bfloat16, True)]), ids=str
)
def test_the_best_of_each_row_of_a_sequence(name, sizes):
    """Also of fewer tokens a sequence than there are experts: these are no choices."""
    inputs = layer(4, *sizes)
    result, out = computed(BEST[name], *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert_matches_oracle(out, BEST[name](*(each.double() for each in inputs)))


@pytest.mark.parametrize("name", BEST)
def test_gradients_of_the_best_of_each_row_of_a_sequence(name):
    inputs, run = layer(4, torch.float32), Run()
    exact_ones = grads(BEST[name], [each.double() for each in inputs])
    for ours, expected in zip(grads(run.compile(BEST[name]), inputs), exact_ones, strict=True):
        assert relative_error(ours, expected) <= ALLOWED
    assert run.raised == ["experts", "topk_routing"]


def between(turn):
    """Experts lie between sequences and their tokens, [B, E, S, I], of which the second product reads `turn`."""

    @routed
    def run(x, weights, ids, w13, w2):
        dense = torch.zeros(*x.shape[:2], EXPERTS).scatter(-1, ids, weights).to(x.dtype)
        hidden = turn(swiglu(torch.einsum("bsh,eih->besi", x, w13)))
        return torch.einsum("besh,bse->bsh", torch.einsum("besi,ehi->besh", hidden, w2), dense)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_between_sequences_and_tokens(dtype):
    inputs, function = layer(5, dtype), between(lambda hidden: hidden)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert_matches_oracle(out, exact(inputs))


@pytest.mark.parametrize("turn", [lambda hidden: hidden.transpose(0, 2), lambda hidden: hidden.flip(0)])
def test_experts_that_read_rows_of_other_sequences_stay(turn):
    """As many sequences as tokens in each."""
    inputs, function = layer(BATCH, torch.float32), between(turn)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert not result.log.raised and result.reasons
    assert_matches_oracle(out, function(*(each.double() for each in inputs)))


@pytest.mark.parametrize(("gate", "up"), product(("eti", "tei"), repeat=2))
def test_a_gate_of_products_that_lie_otherwise_stays(gate, up):
    """As many tokens as experts: a gate's row of a token and an expert meets that of an expert and a token."""

    def run(x, router, w1, w3, w2):
        weights, ids = (x @ router.T).softmax(-1).topk(2)
        dense = torch.zeros(EXPERTS, EXPERTS).scatter(1, ids, weights)
        hidden = F.silu(torch.einsum(f"th,eih->{gate}", x, w1)) * torch.einsum(f"th,eih->{up}", x, w3)
        return torch.einsum("teh,te->th", torch.einsum("tei,ehi->teh", hidden, w2), dense)

    sizes = (EXPERTS, 16), (EXPERTS, 16), (EXPERTS, 12, 16), (EXPERTS, 12, 16), (EXPERTS, 16, 12)
    inputs = [torch.randn(size) for size in sizes]
    result, out = computed(run, *inputs, passes=PIPELINE)
    assert bool(result.log.raised) == (gate == up == "tei")
    assert_matches_oracle(out, run(*inputs))
