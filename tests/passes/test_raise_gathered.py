"""RaiseExperts on weights that are gathered or repeated in other ways than by `weight[ids]`."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed_but
from tests.passes.capture import computed, rewrite
from tests.passes.spellings import of_best
from tests.passes.stock import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, layer, swiglu
from tests.passes.test_before_autograd import check, float32
from tests.passes.test_raise_forms_in_training import trained

PIPELINE = (*RAISES, *FUSIONS)
SIZES = ((7, torch.float32, False), (1, torch.bfloat16, False), (9, torch.bfloat16, False))
OPEN = (9, torch.bfloat16, True)


def with_weights(gather, gate=swiglu):
    """A layer of `gather(weight, ids)`, [T, K, X, Y]."""

    def combine(x, weights, ids, w13, w2):
        hidden = gate(torch.einsum("th,tkih->tki", x, gather(w13, ids)))
        return (torch.einsum("tki,tkhi->tkh", hidden, gather(w2, ids)) * weights.unsqueeze(-1)).sum(1)

    return of_best(combine)


def embedded(weight, ids):
    return F.embedding(ids, weight.flatten(1)).view(*ids.shape, *weight.shape[1:])


def of_flat_ids(weight, ids):
    return F.embedding(ids.flatten(), weight.flatten(1)).view(*ids.shape, *weight.shape[1:])


def of_a_table(weight, ids):
    """An `nn.Embedding` of matrices, which nobody has as [E, X, Y]."""
    return F.embedding(ids, weight.flatten(1) * 1).unflatten(-1, weight.shape[1:])


def rows_of_flat(weight, ids):
    return weight.flatten(1)[ids].unflatten(-1, weight.shape[1:])


def along(weight, ids):
    found = torch.take_along_dim(weight, ids.flatten()[:, None, None], 0)
    return found.view(*ids.shape, *weight.shape[1:])


def in_another_shape(weight, ids):
    """[X, Y] as [Y, X], which is not its transpose."""
    return F.embedding(ids, weight.flatten(1)).view(*ids.shape, *weight.mT.shape[1:]).mT


def by_token(weight, ids):
    """Out of weights that are repeated for each token."""
    index = ids[:, :, None, None].expand(-1, -1, *weight.shape[1:])
    return weight.expand(len(ids), -1, -1, -1).gather(1, index)


def with_biases(x, weights, ids, w13, w2):
    hidden = torch.einsum("th,tkih->tki", x, embedded(w13, ids)) + F.embedding(ids, w13[:, :, 0])
    return (torch.einsum("tki,tkhi->tkh", swiglu(hidden), w2[ids]) * weights.unsqueeze(-1)).sum(1)


def all_experts(multiply):
    """A layer of products of every token with every expert: `multiply(rows [T, E or 1, A], weight [E, B, A])`."""

    def combine(x, weights, ids, w13, w2):
        dense = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, ids, weights)
        out = multiply(swiglu(multiply(x.unsqueeze(1), w13)), w2)
        return (out * dense.unsqueeze(-1)).sum(1)

    return of_best(combine)


FORMS = {
    "by embedding": with_weights(embedded),
    "by embedding, of flat ids": with_weights(of_flat_ids),
    "by embedding, of a table": with_weights(of_a_table),
    "rows of flat matrices": with_weights(rows_of_flat),
    "in another shape": with_weights(in_another_shape),
    "by take_along_dim": with_weights(along),
    "by gather, for each token": with_weights(by_token),
    "biases by embedding": of_best(with_biases),
    "repeated, rows first": all_experts(lambda rows, weight: (rows.unsqueeze(2) @ weight.mT).squeeze(2)),
    "repeated, weights first": all_experts(lambda rows, weight: (weight @ rows.unsqueeze(-1)).squeeze(-1)),
}


@pytest.mark.parametrize(("what", "sizes"), mixed_but(OPEN, FORMS, SIZES), ids=str)
def test_every_form_is_raised(what, sizes):
    inputs = layer(*sizes)
    result, out = computed(FORMS[what], *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert_matches_oracle(out, FORMS[what](*(each.double() for each in inputs)))


@pytest.mark.parametrize(
    "what", ["by embedding", "by take_along_dim", "by gather, for each token", "repeated, rows first"]
)
def test_gradients(what):
    assert not trained(FORMS[what]).refused


@pytest.mark.parametrize("dynamic", [False, True])
def test_by_batch_of_tokens(dynamic):
    """[B, S, E, 1, H]."""

    def run(x, router, w13, w2):
        weights, ids = F.linear(x, router).softmax(-1).topk(TOP_K)
        dense = torch.zeros(*x.shape[:2], EXPERTS, dtype=x.dtype).scatter(-1, ids, weights)
        out = swiglu(x[:, :, None, None] @ w13.mT) @ w2.mT
        return (out.squeeze(3) * dense.unsqueeze(-1)).sum(2)

    inputs = layer(8, torch.float32)
    inputs = inputs._replace(hidden_states=inputs.hidden_states.view(4, 2, HIDDEN))
    if dynamic:
        torch._dynamo.mark_dynamic(inputs.hidden_states, 0)
    result, out = computed(run, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out, run(*(each.double() for each in inputs)))


def along_other_rows(weight, ids):
    """The row of that number, of the expert that a choice's place is."""
    index = ids[:, :, None, None].expand(-1, -1, *weight.shape[1:])
    return weight.expand(len(ids), -1, -1, -1).gather(2, index)


def by_other_ids(weight, ids):
    """Ids that a remainder makes another expert's."""
    index = ids.flatten()[:, None, None].expand(-1, *weight.shape[1:]).remainder(EXPERTS - 1)
    return weight.gather(0, index).view(*ids.shape, *weight.shape[1:])


def of_other_columns(weight, ids):
    index = (ids[:, :, None, None] + torch.arange(weight.shape[2]) % 2).clamp(max=EXPERTS - 1)
    return weight.expand(len(ids), -1, -1, -1).gather(1, index.expand(-1, -1, *weight.shape[1:]))


@of_best
def some_rows(x, weights, ids, w13, w2):
    """Of the first weights those of the gate alone."""
    index, rows = ids.flatten()[:, None, None], x.repeat_interleave(TOP_K, 0).unsqueeze(-1)
    hidden = F.relu(torch.bmm(w13.gather(0, index.expand(-1, INTERMEDIATE, HIDDEN)), rows))
    out = torch.bmm(w2.gather(0, index.expand(-1, HIDDEN, INTERMEDIATE)), hidden)
    return (out.view(-1, TOP_K, HIDDEN) * weights.unsqueeze(-1)).sum(1)


OTHER = {
    "along other rows": with_weights(along_other_rows),
    "by other ids": with_weights(by_other_ids),
    "of other columns": with_weights(of_other_columns),
    "some rows": some_rows,
}


@pytest.mark.parametrize("what", OTHER)
def test_what_gathers_something_else_stays(what):
    inputs = layer(7, torch.float32)
    result, out = computed(OTHER[what], *inputs, passes=PIPELINE)
    assert not result.log.raised and result.after == result.before
    assert_matches_oracle(out, OTHER[what](*(each.double() for each in inputs)))


def test_other_products_of_many_tokens_are_what_they_were():
    """Of no layer, with weights of each token's own, and of several rows."""

    def run(x, router, w13, w2):
        own = w13.expand(len(x), -1, -1, -1) * x[:, None, None]
        several = x.view(1, 1, -1, HIDDEN).expand(3, -1, -1, -1)
        return x[:, None, None] @ w13.mT, x[:, None, None] @ own.mT, several @ w13.mT

    result = rewrite(run, *layer(7, torch.float32), passes=PIPELINE)
    assert result.after == result.before


@pytest.mark.parametrize("how", [{"padding_idx": 0}, {"scale_grad_by_freq": True}])
def test_a_table_with_other_gradients_stays(how):
    def gather(weight, ids):
        return F.embedding(ids, weight.flatten(1), **how).view(*ids.shape, *weight.shape[1:])

    assert not check(with_weights(gather), float32(7)).raised


def test_matrices_that_are_cut_apart():
    """`INTERMEDIATE` is no argument of what gathers: gate and up are tables of their own."""

    def combine(x, weights, ids, w13, w2):
        gate, up = (embedded(each, ids) for each in w13.split(INTERMEDIATE, 1))
        hidden = F.silu(torch.einsum("th,tkih->tki", x, gate)) * torch.einsum("th,tkih->tki", x, up)
        return (torch.einsum("tki,tkhi->tkh", hidden, embedded(w2, ids)) * weights.unsqueeze(-1)).sum(1)

    inputs = layer(7, torch.float32)
    result, out = computed(of_best(combine), *inputs, passes=PIPELINE)
    assert len(result.log.raised) == 2
    assert_matches_oracle(out, of_best(combine)(*(each.double() for each in inputs)))
