"""RaiseExperts on loops over the choices of a token: what means the same is raised, what does something else stays."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.base import PassLog
from inductor_passes.graph_tools import arguments, find
from inductor_passes.pipeline import FUSIONS, RAISES, run_passes
from inductor_passes.raising import RaiseExperts
from inductor_passes.raising.views_of_rows import aten
from tests.helpers import assert_matches_oracle, mixed_but
from tests.passes import stock
from tests.passes.capture import computed, post_grad, rewrite
from tests.passes.stock import EXPERTS, HIDDEN, TOP_K, layer, oracle, softmax_router, swiglu

PIPELINE = (*RAISES, *FUSIONS)
SIZES = ((7, torch.bfloat16, False), (1, torch.float32, False), (5, torch.float32, False))
OPEN = (5, torch.float32, True)


def of_einsums(x, w13, w2, gate):
    return torch.einsum("ti,thi->th", gate(torch.einsum("th,tih->ti", x, w13)), w2)


def of_products(x, w13, w2, gate):
    """`bmm`, rows on the left."""
    return torch.bmm(gate(torch.bmm(x.unsqueeze(1), w13.mT)), w2.mT).squeeze(1)


def of_columns(x, w13, w2, gate):
    """Rows on the right, gate and up cut out of what was gathered."""
    gate_up = [(each @ x.unsqueeze(-1)).squeeze(-1) for each in w13.chunk(2, 1)]
    return (w2 @ gate(torch.cat(gate_up, -1)).unsqueeze(-1)).squeeze(-1)


def added(terms, x):
    total = torch.zeros_like(x)
    for term in terms:
        total = total + term
    return total


def in_turn(**parts):
    """A loop over choices, with some parts written differently."""
    part = {
        "choices": range(TOP_K),
        "router": softmax_router,
        "tokens": lambda x, k: x,
        "expert": of_einsums,
        "gate": lambda gate_up, k: swiglu(gate_up),
        "experts": lambda ids, k: (ids[:, k], ids[:, k]),
        "bias": lambda out, expert, k: out,
        "weight": lambda weights, ids, k: weights[:, k, None],
        "term": lambda out, weight: weight * out,
        "sum": added,
        **parts,
    }

    def run(x, router, w13, w2):
        weights, ids = part["router"](F.linear(x, router))
        weights, terms = weights.to(x.dtype), []
        for k in part["choices"]:
            first, second = part["experts"](ids, k)
            rows = part["tokens"](x, k)
            out = part["expert"](rows, w13[first], w2[second], lambda gate_up, k=k: part["gate"](gate_up, k))
            terms.append(part["term"](part["bias"](out, second, k), part["weight"](weights, ids, k)))
        return part["sum"](terms, x)

    return run


def apart(x, router, w13, w2):
    """Gate and up in tensors of their own, choices unbound, all summed at the end."""
    weights, ids = softmax_router(F.linear(x, router))
    w1, w3 = w13.chunk(2, 1)
    outs = []
    for e in ids.unbind(-1):
        hidden = F.silu(torch.einsum("th,tih->ti", x, w1[e])) * torch.einsum("th,tih->ti", x, w3[e])
        outs.append(torch.einsum("ti,thi->th", hidden, w2[e]))
    return (torch.stack(outs, 1) * weights.to(x.dtype).unsqueeze(-1)).sum(1)


def addcmul(terms, x):
    total = torch.zeros_like(x)
    for out, weight in terms:
        total = total.addcmul(out, weight)
    return total


LOOPS = {
    "einsums": in_turn(),
    "products": in_turn(expert=of_products),
    "backwards": in_turn(choices=range(TOP_K)[::-1]),
    "gate and up apart": apart,
    "added in float32": in_turn(
        term=lambda out, weight: out.float() * weight.float(),
        sum=lambda terms, x: sum(terms).to(x.dtype),
    ),
    "stacked": in_turn(sum=lambda terms, x: torch.stack(terms).sum(0)),
    "addcmul": in_turn(term=lambda out, weight: (out, weight), sum=addcmul),
    "weights selected by a mask": in_turn(
        weight=lambda weights, ids, k: (weights * (torch.arange(TOP_K) == k)).sum(-1, keepdim=True)
    ),
}


@pytest.mark.parametrize(("what", "sizes"), mixed_but(OPEN, LOOPS, SIZES), ids=str)
def test_loops_over_choices(what, sizes):
    inputs = layer(*sizes)
    result, out = computed(LOOPS[what], *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"] and not result.reasons
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out, oracle(inputs, stock.looped))


BIASES = torch.randn(EXPERTS, stock.HIDDEN)


def test_biases_and_a_gate_of_ones_own():
    function = in_turn(
        bias=lambda out, expert, k: out + BIASES.to(out.dtype)[expert],
        gate=lambda gate_up, k: gate_up[:, ::2].relu() * gate_up[:, 1::2],
    )
    inputs = layer(7, torch.float32)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe_formula"]
    torch.testing.assert_close(out, function(*inputs), rtol=1e-4, atol=1e-4)


def test_other_biases_of_gate_and_up_stay():
    def run(x, router, w13, w2, *biases):
        weights, ids = softmax_router(F.linear(x, router))
        total = torch.zeros_like(x)
        for k in range(TOP_K):
            gate_up = torch.einsum("th,tih->ti", x, w13[ids[:, k]]) + biases[int(k > 0)][ids[:, k]]
            total = total + weights[:, k, None] * torch.einsum("ti,thi->th", swiglu(gate_up), w2[ids[:, k]])
        return total

    inputs = layer(7, torch.float32)
    assert rewrite(run, *inputs, BIASES, BIASES, passes=PIPELINE).ops() == ["fused_moe"]
    (reason,) = rewrite(run, *inputs, BIASES, BIASES.flip(0), passes=PIPELINE).reasons
    assert "the choices of a token are treated differently" in reason


def test_choices_that_are_sorted_in_turn_stay():
    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        total = torch.zeros_like(x)
        for k in range(TOP_K):
            order, offsets = stock.sorted_slots(ids[:, k, None])
            out = torch._grouped_mm(swiglu(torch._grouped_mm(x[order], w13.mT, offsets)), w2.mT, offsets)
            total = total.index_add(0, order, out * weights[order, k, None].to(x.dtype))
        return total

    result = rewrite(run, *layer(7), passes=PIPELINE)
    reason = "rows come from aten.index.Tensor, not from tokens in expert order"
    assert not result.log.raised and result.reasons == [reason] * TOP_K


def test_one_choice_of_each_token():
    """Top-1, whose only choice is picked."""

    def run(x, router, w13, w2):
        weights, ids = F.linear(x, router).float().softmax(-1).topk(1)
        return weights.to(x.dtype) * of_einsums(x, w13[ids[:, 0]], w2[ids[:, 0]], swiglu)

    inputs = layer(7)
    result, out = computed(run, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"]
    torch.testing.assert_close(out, run(*inputs), rtol=0.03, atol=0.03)


def test_weights_in_float32_stay_so():
    """A softmax of the best logits, which are bfloat16: weights are not those of a softmax in bfloat16."""

    def best_first(logits):
        best, ids = logits.topk(TOP_K)
        return best.float().softmax(-1), ids

    graph = rewrite(in_turn(router=best_first), *layer(5), passes=(RaiseExperts(),)).graph
    (combine,) = find(graph, "combine")
    assert arguments(combine).topk_weights.meta["val"].dtype == torch.float32


def counted_from_logits(logits):
    """Python takes some below zero for those of the last experts."""
    return logits.float().softmax(-1)[:, :TOP_K], (logits[:, :TOP_K] * 3).long()


SUM = "is not the sum of what experts give"


def rotated(terms, x):
    """Every weight meets what another choice gives."""
    given, weights = zip(*terms, strict=True)
    columns = torch.cat(given, 1)
    columns = torch.cat([columns[:, HIDDEN:], columns[:, :HIDDEN]], 1)
    return (columns.view(len(x), TOP_K, HIDDEN) * torch.stack(weights, 1)).sum(1)


OTHER = {
    "choices change places": (
        {"term": lambda out, weight: (out, weight), "sum": rotated},
        "is not the sum of what experts give",
    ),
    "a choice is left out": ({"choices": range(TOP_K - 1)}, "is not the expert of each slot"),
    "a choice is taken twice": ({"choices": [0, 1, 1]}, "a choice of a token is taken twice"),
    "the second product has another choice's": (
        {"experts": lambda ids, k: (ids[:, k], ids[:, (k + 1) % TOP_K])},
        "gives rows to other experts than the ids of the layer",
    ),
    "experts of other tokens": (
        {"experts": lambda ids, k: (ids[:, k].flip(0), ids[:, k].flip(0))},
        "is not one choice of each token",
    ),
    "other tokens for one choice": ({"tokens": lambda x, k: x if k else x + 1}, "treated differently"),
    "another gate for one choice": (
        {"gate": lambda gate_up, k: swiglu(gate_up if k else -gate_up)},
        "treated differently",
    ),
    "biases of one choice": (
        {"bias": lambda out, expert, k: out if k else out + BIASES.to(out.dtype)[expert]},
        "treated differently",
    ),
    "a gate that tells tokens apart": (
        {"gate": lambda gate_up, k: swiglu(gate_up) * torch.arange(len(gate_up)).unsqueeze(1)},
        "tells rows apart by where they lie",
    ),
    "ids that may be out of range": (
        {"router": counted_from_logits},
        "expert ids of a choice may be out of range",
    ),
    "weights of another choice": ({"weight": lambda weights, ids, k: weights[:, k - 1, None]}, SUM),
    "weights of other tokens": ({"weight": lambda weights, ids, k: weights[:, k, None].flip(0)}, SUM),
    "weights are added": ({"term": torch.add}, SUM),
    "something else is added twice": ({"sum": lambda terms, x: terms[0] + x + terms[1] + x + terms[2]}, SUM),
    "the largest": ({"sum": lambda terms, x: torch.stack(terms).amax(0)}, SUM),
    "one is read by another": ({"sum": lambda terms, x: (sum(terms), terms[0])}, "output reads"),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_treats_choices_differently_stays(what):
    parts, reason = OTHER[what]
    result = rewrite(in_turn(**parts), *layer(5), passes=PIPELINE)
    assert all(each.kind != "experts" for each in result.log.raised)
    assert any(reason in each for each in result.reasons), result.reasons


def test_layers_of_the_same_choice_are_no_choices_of_one():
    """As many as a token has choices, with the same weights and ids."""

    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        return [stock.batched_experts(x + k, weights, ids, w13, w2) for k in range(TOP_K)]

    result = rewrite(run, *layer(5), passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts"] * TOP_K + ["topk_routing"]


def looped(gate, result):
    """As `in_turn()`, with a gate that sees ids, and what is read besides."""

    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        total, seen = torch.zeros_like(x), []
        for k in range(TOP_K):
            seen.append(torch.einsum("th,tih->ti", x, w13[ids[:, k]]))
            out = torch.einsum("ti,thi->th", gate(seen[-1], ids[:, k, None]), w2[ids[:, k]])
            total = total + weights[:, k, None].to(x.dtype) * out
        return result(total, seen)

    return run


def test_a_gate_with_a_mask_of_ids_stays():
    def gate(rows, ids):
        gate, up = rows.chunk(2, 1)
        return F.silu(gate).masked_fill(ids >= EXPERTS, 0.0) * up

    function = looped(gate, lambda total, seen: total)
    (reason, *_) = rewrite(function, *layer(5), passes=PIPELINE).reasons
    assert reason == "the gate of a choice reads ids or weights"


def test_a_product_that_something_else_reads_stays():
    function = looped(lambda rows, ids: swiglu(rows), lambda total, seen: (total, seen[1]))
    result = rewrite(function, *layer(5), passes=PIPELINE)
    assert all(each.kind != "experts" for each in result.log.raised)
    assert "is also read by" in result.reasons[0]


def test_what_nobody_reads_is_no_reader():
    """Decompositions leave such nodes."""
    with torch.no_grad():
        (module,) = post_grad(in_turn(), *layer(5))
    graph = module.graph
    term = next(node for node in reversed(graph.nodes) if node.target is aten.mul.Tensor)
    with graph.inserting_after(term):
        graph.call_function(aten.neg.default, (term,)).meta = dict(term.meta)
    log = PassLog()
    run_passes(graph, RAISES, log)
    assert [each.kind for each in log.raised] == ["experts", "topk_routing"]
