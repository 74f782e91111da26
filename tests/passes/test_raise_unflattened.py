"""Layers of tokens [B, S, H] whose router gives ids [B, S, K]: raised as those of [T, H] are, B and S known or not."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed
from tests.passes import stock
from tests.passes.capture import computed, rewrite
from tests.passes.stock import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, oracle, softmax_router, swiglu

PIPELINE = (*RAISES, *FUSIONS)
BATCH = 3


def layer(tokens, dtype=torch.bfloat16, dynamic=False):
    """As `stock.layer`, of `BATCH` times as many tokens."""
    made = stock.layer(BATCH * tokens, dtype)
    made = made._replace(hidden_states=made.hidden_states.view(BATCH, tokens, HIDDEN))
    for dim in range(2 * dynamic):
        torch._dynamo.mark_dynamic(made.hidden_states, dim)
    return made


def exact(inputs, style=stock.grouped):
    flat = inputs._replace(hidden_states=inputs.hidden_states.flatten(0, 1))
    return oracle(flat, style).view(inputs.hidden_states.shape)


def routed(experts):
    """A layer of `experts(hidden_states, weights, ids, w13, w2)`."""

    def run(x, router, w13, w2):
        return experts(x, *softmax_router(F.linear(x, router)), w13, w2).to(x.dtype)

    run.__name__ = experts.__name__
    return run


@routed
def sorted_once(x, weights, ids, w13, w2):
    flat = x.reshape(-1, HIDDEN)
    return stock.grouped_experts(flat, weights.view(-1, TOP_K), ids, w13, w2).view(x.shape)


@routed
def einsums(x, weights, ids, w13, w2):
    hidden = swiglu(torch.einsum("bsh,bskih->bski", x, w13[ids]))
    return (torch.einsum("bski,bskhi->bskh", hidden, w2[ids]) * weights.unsqueeze(-1)).sum(2)


@routed
def multiplied(x, weights, ids, w13, w2):
    hidden = swiglu((w13[ids] @ x[:, :, None, :, None]).squeeze(-1))
    out = (w2[ids] @ hidden.unsqueeze(-1)).squeeze(-1)
    return torch.einsum("bskh,bsk->bsh", out, weights.to(x.dtype))


@routed
def a_gate_of_ones_own(x, weights, ids, w13, w2):
    """ReGLU, its columns named as the last of four dimensions."""
    gate, up = torch.einsum("bsh,bskih->bski", x, w13[ids]).chunk(2, dim=3)
    out = torch.einsum("bski,bskhi->bskh", F.relu(gate) * up, w2[ids])
    return (out * weights.unsqueeze(-1)).sum(2)


@routed
def looped(x, weights, ids, w13, w2):
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        weight = (weights * (ids == expert)).sum(-1, keepdim=True).to(x.dtype)
        total = total + F.linear(swiglu(F.linear(x, w13[expert])), w2[expert]) * weight
    return total


@routed
def scattered(x, weights, ids, w13, w2):
    total, dense = torch.zeros_like(x), torch.zeros(*x.shape[:2], EXPERTS)
    dense = dense.scatter(-1, ids, weights).to(x.dtype)
    for expert in range(EXPERTS):
        gate, up = x @ w13[expert, :INTERMEDIATE].T, x @ w13[expert, INTERMEDIATE:].T
        total += ((F.silu(gate) * up) @ w2[expert].T) * dense[..., expert, None]
    return total


FORMS = {each.__name__: each for each in (sorted_once, einsums, multiplied, looped, scattered)}
SIZES = ((11, torch.bfloat16, True), (7, torch.float32, False), (1, torch.bfloat16, False))


@pytest.mark.parametrize(("name", "sizes"), mixed(FORMS, SIZES), ids=str)
def test_every_form_is_raised(name, sizes):
    if name == "sorted_once" and sizes[1] is torch.float32:
        pytest.skip("_grouped_mm takes bfloat16")
    inputs = layer(*sizes)
    result, out = computed(FORMS[name], *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert_matches_oracle(out, exact(inputs))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_gate_of_ones_own(dynamic):
    inputs = layer(5, dynamic=dynamic)
    result, out = computed(a_gate_of_ones_own, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe_formula"]
    torch.testing.assert_close(out, a_gate_of_ones_own(*inputs), rtol=0.03, atol=0.03)


def summed_by_batch(x, router, w13, w2):
    """Tokens are flat until what experts give is added up: transformers 4.5x evaluated Qwen3-VL and gpt-oss so."""
    flat = x.reshape(-1, HIDDEN)
    logits = F.linear(flat, router)
    weights, ids = softmax_router(logits)
    dense = torch.zeros_like(logits).scatter(1, ids, weights.to(logits.dtype))
    rows = flat.repeat(EXPERTS, 1).view(EXPERTS, -1, HIDDEN)
    out = torch.bmm(swiglu(torch.bmm(rows, w13.mT)), w2.mT).view(EXPERTS, x.shape[0], -1, HIDDEN)
    return (out * dense.T.view(EXPERTS, x.shape[0], -1, 1)).sum(0)


@pytest.mark.parametrize("dims", [(), (0,), (1,), (0, 1)])
def test_a_sum_that_shows_flat_tokens_by_batch(dims):
    inputs = layer(5, torch.float32)
    for dim in dims:
        torch._dynamo.mark_dynamic(inputs.hidden_states, dim)
    result, out = computed(summed_by_batch, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert_matches_oracle(out, exact(inputs))


@routed
def weights_of_other_tokens(x, weights, ids, w13, w2):
    hidden = swiglu(torch.einsum("bsh,bskih->bski", x, w13[ids]))
    out = torch.einsum("bski,bskhi->bskh", hidden, w2[ids])
    return (out * weights.transpose(0, 1).unsqueeze(-1)).sum(2)


def test_weights_of_other_tokens_are_weights():
    """They are those of no router: the experts are raised alone."""
    inputs = layer(3)
    result, out = computed(weights_of_other_tokens, *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts"]
    torch.testing.assert_close(out, weights_of_other_tokens(*inputs), rtol=0.03, atol=0.03)


@routed
def rows_of_other_tokens(x, weights, ids, w13, w2):
    hidden = swiglu(torch.einsum("sbh,bskih->bski", x, w13[ids]))
    return (torch.einsum("bski,bskhi->bskh", hidden, w2[ids]) * weights.unsqueeze(-1)).sum(2)


def test_rows_of_other_tokens_are_tokens():
    """B and S are exchanged, for the experts alone: what these read has as many rows."""
    inputs = layer(BATCH, torch.float32)
    result, out = computed(rows_of_other_tokens, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"]
    torch.testing.assert_close(out, rows_of_other_tokens(*inputs), rtol=1e-4, atol=1e-5)


@routed
def ids_of_other_tokens(x, weights, ids, w13, w2):
    return stock.grouped_experts(
        x.reshape(-1, HIDDEN), weights.view(-1, TOP_K), ids.transpose(0, 1), w13, w2
    ).view(x.shape)


@routed
def a_sum_over_tokens(x, weights, ids, w13, w2):
    hidden = swiglu(torch.einsum("bsh,bskih->bski", x, w13[ids]))
    return (torch.einsum("bski,bskhi->bskh", hidden, w2[ids]) * weights.unsqueeze(-1)).sum(1)


@routed
def columns_of_other_tokens(x, weights, ids, w13, w2):
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        weight = (weights * (ids == expert)).sum(-1).T[..., None].to(x.dtype)
        total = total + F.linear(swiglu(F.linear(x, w13[expert])), w2[expert]) * weight
    return total


@routed
def columns_of_the_first_batch(x, weights, ids, w13, w2):
    total = torch.zeros_like(x)
    for expert in range(EXPERTS):
        weight = (weights * (ids == expert)).sum(-1, keepdim=True).to(x.dtype)
        total = total + F.linear(swiglu(F.linear(x, w13[expert])), w2[expert]) * weight[:1]
    return total


OTHER = {
    ids_of_other_tokens: "not from tokens in expert order",
    a_sum_over_tokens: "reads what experts give, not a weighted sum",
    columns_of_other_tokens: "is not the sum of what experts give",
    columns_of_the_first_batch: "is not the sum of what experts give",
}


@pytest.mark.parametrize("function", OTHER, ids=lambda function: function.__name__)
def test_what_mixes_tokens_up_stays(function):
    """B, S and K are all 3: sizes tell nothing."""
    result = rewrite(function, *layer(3), passes=PIPELINE)
    assert not result.log.raised and not result.ops()
    assert any(OTHER[function] in reason for reason in result.reasons)


@pytest.mark.parametrize("dynamic", [False, True])
def test_sequences_as_long_as_there_are_experts(dynamic):
    """What is summed up for each of so many tokens, [B, E, 1], is no groups of experts."""

    def function(x, router, w13, w2):
        weights, ids = F.linear(x, router).sigmoid().topk(TOP_K)
        weights, hidden = (
            weights / weights.sum(-1, keepdim=True),
            torch.einsum("bsh,bskih->bski", x, w13[ids]),
        )
        out = torch.einsum("bski,bskhi->bskh", swiglu(hidden), w2[ids])
        return (out * weights.unsqueeze(-1)).sum(2)

    inputs = layer(EXPERTS, torch.float32, dynamic)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"]
    torch.testing.assert_close(out, function(*inputs))


def seen_flat(experts, by_time=False):
    """A layer of `experts(tokens [T, H], weights [T, K], ids [T, K], w13, w2)`."""

    def run(x, router, w13, w2):
        shown = x.transpose(0, 1) if by_time else x
        flat = shown.reshape(-1, HIDDEN)
        out = experts(flat, *softmax_router(F.linear(flat, router)), w13, w2).to(x.dtype).view(shown.shape)
        return out.transpose(0, 1) if by_time else out

    return run


def all_at_once(x, weights, ids, w13, w2):
    out = torch.bmm(swiglu(torch.bmm(x.unsqueeze(0).expand(EXPERTS, -1, -1), w13.mT)), w2.mT)
    chosen = torch.zeros(x.shape[0], EXPERTS, dtype=x.dtype).scatter(1, ids, weights.to(x.dtype))
    return torch.einsum("eth,te->th", out, chosen)


def in_turn(x, weights, ids, w13, w2):
    total = torch.zeros_like(x)
    for k in range(TOP_K):
        hidden = swiglu(torch.bmm(w13[ids[:, k]], x.unsqueeze(-1)).squeeze(-1))
        out = torch.bmm(w2[ids[:, k]], hidden.unsqueeze(-1)).squeeze(-1)
        total = total + weights[:, k, None].to(x.dtype) * out
    return total


@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.parametrize(
    ("experts", "sizes"),
    mixed((all_at_once, in_turn), SIZES),
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_tokens_that_are_seen_flat(experts, sizes, by_time):
    """Behind views their rows are those of [B, S, H], or of [S, B, H]."""
    inputs = layer(*sizes)
    result, out = computed(seen_flat(experts, by_time), *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert_matches_oracle(out, exact(inputs))


def one_in_a_batch(x, router, w13, w2):
    """Tokens [T, 1, H], each multiplied with all weights of its experts at once."""
    weights, ids = softmax_router(F.linear(x[:, 0], router))
    stacked = w13[ids].reshape(-1, TOP_K * 2 * INTERMEDIATE, HIDDEN).transpose(1, 2)
    activated = swiglu(torch.bmm(x, stacked).view(-1, TOP_K, 2 * INTERMEDIATE))
    out = torch.einsum("tei,tehi->teh", activated, w2[ids])
    return torch.einsum("teh,te->th", out, weights.to(x.dtype))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_one_token_in_a_batch(sizes):
    tokens, dtype, dynamic = sizes
    inputs = stock.layer(tokens, dtype)
    batches = inputs._replace(hidden_states=inputs.hidden_states.unsqueeze(1))
    if dynamic:
        torch._dynamo.mark_dynamic(batches.hidden_states, 0)
    result, out = computed(one_in_a_batch, *batches, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert_matches_oracle(out, oracle(inputs, stock.grouped))
