"""RaiseExperts on loops that cut gate and up out of an expert's matrix, add biases, or run under autocast."""

import pytest
import torch
from torch.nn import functional as F

from tests.helpers import assert_matches_oracle, mixed
from tests.passes import stock
from tests.passes.capture import computed, rewrite
from tests.passes.stock import EXPERTS, layer, oracle, softmax_router, swiglu
from tests.passes.test_raise_loops import PIPELINE, looped_with, weigh


def cut_with(
    parts_of=lambda w13, expert: w13[expert].chunk(2), biases=lambda expert, *b: [each[expert] for each in b]
):
    """A loop over experts of `silu(x @ gate.T + b1) * (x @ up.T + b3)`, each cut out of one tensor."""

    def run(x, router, w13, w2, b13, b2):
        weights, ids = softmax_router(F.linear(x, router))
        total = torch.zeros_like(x)
        for expert in range(EXPERTS):
            (w1, w3), (b1, b2_) = parts_of(w13, expert), biases(expert, b13, b2)
            b1, b3 = b1.chunk(2)
            hidden = F.silu(F.linear(x, w1, b1)) * (x @ w3.T + b3)
            out = F.linear(hidden, w2[expert], b2_)
            total = total + out * weigh(weights, ids, expert).to(x.dtype)
        return total

    return run


def biased(tokens, dtype=torch.bfloat16, dynamic=False):
    inputs = layer(tokens, dtype, dynamic)
    return (
        *inputs,
        *(torch.randn(EXPERTS, size).to(dtype) for size in (2 * stock.INTERMEDIATE, stock.HIDDEN)),
    )


def exactly(x, router, w13, w2, b13, b2):
    """The layer in float64, token by token."""
    x, router, w13, w2, b13, b2 = (each.double() for each in (x, router, w13, w2, b13, b2))
    weights, ids = (x @ router.T).softmax(-1).topk(stock.TOP_K)
    weights = weights / weights.sum(-1, keepdim=True)
    hidden = swiglu(torch.einsum("th,tkih->tki", x, w13[ids]) + b13[ids])
    return ((torch.einsum("tki,tkhi->tkh", hidden, w2[ids]) + b2[ids]) * weights.unsqueeze(-1)).sum(1)


CUTS = {
    "chunk": lambda w13, expert: w13[expert].chunk(2),
    "slices": lambda w13, expert: (w13[expert, : stock.INTERMEDIATE], w13[expert, stock.INTERMEDIATE :]),
    "split": lambda w13, expert: w13[expert].split([stock.INTERMEDIATE, stock.INTERMEDIATE], 0),
    "unbound": lambda w13, expert: w13.unbind()[expert].chunk(2),
    "turned": lambda w13, expert: [half.T for half in w13.mT[expert].chunk(2, dim=1)],
}


@pytest.mark.parametrize(
    ("cut", "sizes"),
    mixed(CUTS, ((7, torch.bfloat16, True), (33, torch.float32, False), (1, torch.bfloat16, False))),
)
def test_parts_of_each_matrix_and_biases(cut, sizes):
    inputs = biased(*sizes)
    result, out = computed(cut_with(CUTS[cut]), *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert result.ops() == ["fused_moe"] and not result.reasons
    assert_matches_oracle(out, exactly(*inputs))


def other(expert):
    return {4: 5, 5: 4}.get(expert, expert)


NOT_CUT = {
    "gate and up of one expert change places": (
        {"parts_of": lambda w13, expert: w13[expert].chunk(2)[:: -1 if expert == 4 else 1]},
        "reads something else than the others",
    ),
    "parts of one expert overlap": (
        {
            "parts_of": lambda w13, expert: (
                w13[expert, :32],
                w13[expert, 16:48] if expert == 4 else w13[expert, 32:],
            )
        },
        "every weight[expert]",
    ),
    "two experts have each other's biases": (
        {"biases": lambda expert, b13, b2: (b13[expert], b2[other(expert)])},
        "is no bias of expert 4 out of one tensor",
    ),
    "the bias of one expert is of another tensor": (
        {"biases": lambda expert, b13, b2: (b13[expert], (b2 if expert != 4 else b13[:, ::1])[expert])},
        "biases out of different tensors",
    ),
    "a bias is one for all": (
        {"biases": lambda expert, b13, b2: (b13[expert], b2[0])},
        "is no bias of expert 1",
    ),
    "a bias is computed": (
        {"biases": lambda expert, b13, b2: (b13[expert], b2[expert] + 1)},
        "is no bias of expert 0",
    ),
}


@pytest.mark.parametrize("what", NOT_CUT)
def test_parts_and_biases_of_something_else_stay(what):
    parts, reason = NOT_CUT[what]
    result = rewrite(cut_with(**parts), *biased(5), passes=PIPELINE)
    assert not result.log.raised and not result.ops()
    assert any(reason in each for each in result.reasons), result.reasons


def test_autocast():
    """It casts what every expert reads, and its weights, each anew."""

    def cast(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return stock.looped(*inputs)

    inputs = layer(7, torch.float32)
    result, out = computed(cast, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out.bfloat16(), oracle(inputs, stock.looped))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 takes casts there and back for nothing")
def test_one_expert_that_reads_other_casts_stays():
    def rounded(x, w13, expert):
        return F.linear(x if expert != 4 else x.bfloat16().float(), w13[expert])

    (reason,) = rewrite(looped_with(first=rounded), *layer(5, torch.float32), passes=PIPELINE).reasons
    assert "reads something else than the others" in reason


def test_one_expert_whose_gate_is_the_others_up_projection_stays():
    def swapped(x, router, w13, w2):
        (weights, ids), total = stock.softmax_router(F.linear(x, router)), torch.zeros_like(x)
        for expert in range(len(w2)):
            gate, up = w13.chunk(2, 1) if expert != 2 else reversed(w13.chunk(2, 1))
            hidden = F.silu(F.linear(x, gate[expert])) * F.linear(x, up[expert])
            weight = (weights * (ids == expert)).sum(-1, keepdim=True)
            total = total + F.linear(hidden, w2[expert]) * weight
        return total

    (reason,) = rewrite(swapped, *layer(5, torch.float32), passes=PIPELINE).reasons
    assert "reads something else than the others" in reason


def test_gathered_weights_that_autocast_casts_say_so():
    """All of them would have to be cast, for the few that are read."""

    def cast(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return stock.batched(*inputs)

    (reason,) = rewrite(cast, *layer(7, torch.float32), passes=PIPELINE).reasons
    assert "is cast (autocast)" in reason


def test_gathered_biases_are_no_experts_of_one_neuron():
    def cast(x, router, w13, w2, b13, b2):
        weights, ids = stock.softmax_router(F.linear(x, router))
        with torch.autocast("cpu", torch.bfloat16):
            rows = stock.swiglu((w13[ids] @ x[:, None, :, None]).squeeze(-1) + b13[ids])
            out = (w2[ids] @ rows.unsqueeze(-1)).squeeze(-1) + b2[ids]
        return (out * weights.unsqueeze(-1)).sum(1)

    (reason,) = rewrite(cast, *biased(5, torch.float32), passes=PIPELINE).reasons
    assert "is cast (autocast)" in reason
