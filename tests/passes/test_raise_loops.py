"""RaiseExperts on loops over all experts: what means the same is raised, what does something else stays."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, mixed
from tests.passes import stock
from tests.passes.capture import computed, rewrite
from tests.passes.stock import EXPERTS, layer, oracle, softmax_router, swiglu

PIPELINE = (*RAISES, *FUSIONS)


def weigh(weights, ids, expert):
    return (weights * (ids == expert)).sum(-1, keepdim=True)


def looped_with(**parts):
    """`stock.looped`, with some parts written differently."""
    part = {
        "experts": range(EXPERTS),
        "first": lambda x, w13, expert: F.linear(x, w13[expert]),
        "gate": lambda gate_up, expert: swiglu(gate_up),
        "second": lambda rows, w2, expert: F.linear(rows, w2[expert]),
        "weight": weigh,
        "term": lambda out, weight: out * weight,
        "start": torch.zeros_like,
        "add": torch.add,
        "result": lambda total, terms, firsts: total.to(torch.bfloat16),
        **parts,
    }

    def run(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        weights, total, terms, firsts = weights.to(x.dtype), part["start"](x), [], []
        for expert in part["experts"]:
            firsts.append(part["first"](x, w13, expert))
            rows = part["gate"](firsts[-1], expert)
            weight = part["weight"](weights, ids, expert)
            terms.append(part["term"](part["second"](rows, w2, expert), weight))
            total = part["add"](total, terms[-1])
        return part["result"](total, terms, firsts)

    return run


SAME = {
    "in another order": {"experts": [*range(5, EXPERTS), *range(5)]},
    "summed in float32": {
        "start": lambda x: torch.zeros_like(x, dtype=torch.float32),
        "term": lambda out, weight: out.float() * weight,
    },
    "weights picked by where": {
        "weight": lambda weights, ids, expert: torch.where(ids == expert, weights, 0.0).sum(1).unsqueeze(-1)
    },
    "stored transposed": {"first": lambda x, w13, expert: x @ w13.transpose(1, 2)[expert]},
}


@pytest.mark.parametrize(("what", "sizes"), mixed(SAME, ((5, False), (3, True))), ids=str)
def test_what_means_the_same_is_raised(what, sizes):
    tokens, dynamic = sizes
    inputs = layer(tokens, dynamic=dynamic)
    result, out = computed(looped_with(**SAME[what]), *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out, oracle(inputs, stock.looped))


def test_matrices_of_experts_that_are_stored_as_one():
    """DBRX's: [E * 2I, H], and [E * I, H]."""

    def seen(matrices, expert):
        return matrices.view(EXPERTS, -1, matrices.shape[1])[expert]

    parts = {
        "first": lambda x, w13, expert: F.linear(x, seen(w13, expert)),
        "second": lambda rows, w2, expert: rows @ seen(w2, expert),
    }
    inputs = layer(7)
    stored = inputs._replace(w13=inputs.w13.flatten(0, 1), w2=inputs.w2.mT.contiguous().flatten(0, 1))
    result, out = computed(looped_with(**parts), *stored, passes=PIPELINE)
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out, oracle(inputs, stock.looped))


def test_weights_with_input_features_first():
    def transposed(x, router, w13, w2):
        apart = {"first": lambda x, w13, e: x @ w13[e], "second": lambda rows, w2, e: rows @ w2[e]}
        return looped_with(**apart)(x, router, w13, w2)

    inputs = layer(7)
    turned = inputs._replace(w13=inputs.w13.mT.contiguous(), w2=inputs.w2.mT.contiguous())
    result, out = computed(transposed, *turned, passes=PIPELINE)
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out, oracle(inputs, stock.looped))


GATES = {
    "of their own": {"gate": lambda gate_up, expert: swiglu(gate_up) + 1},
    "filled": {
        "gate": lambda gate_up, expert: (
            torch.where(gate_up > 1, gate_up, torch.zeros_like(gate_up))[:, ::2] * gate_up[:, 1::2]
        )
    },
    "a slope": {"gate": lambda gate_up, expert: F.leaky_relu(gate_up[:, ::2], 0.1) * gate_up[:, 1::2]},
    "named columns": {
        "gate": lambda gate_up, expert: (
            (g := gate_up.view(gate_up.shape[0], -1, 2))[..., 0] * g[..., 1].tanh()
        )
    },
}


@pytest.mark.parametrize(("what", "dynamic"), mixed(GATES, (False, True)))
def test_a_gate_of_their_own_is_captured(what, dynamic):
    inputs, function = layer(5, dynamic=dynamic), looped_with(**GATES[what])
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe_formula"]
    torch.testing.assert_close(out, function(*inputs), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("dynamic", [False, True])
def test_gate_and_up_in_tensors_of_their_own(dynamic):
    """What most people write: w2[e](silu(w1[e](x)) * w3[e](x))."""

    def function(x, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        (w1, w3), total = w13.chunk(2, dim=1), torch.zeros_like(x)
        for expert in range(EXPERTS):
            hidden = F.silu(F.linear(x, w1[expert])) * F.linear(x, w3[expert])
            total += F.linear(hidden, w2[expert]) * weigh(weights, ids, expert).to(x.dtype)
        return total

    inputs = layer(5, dynamic=dynamic)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"]
    assert result.ops() == ["fused_moe"]
    assert_matches_oracle(out, oracle(inputs, stock.looped))


NOT_THE_SUM = "aten.add.Tensor is not the sum of what experts give, weighed by one tensor"
OTHER = {
    "one expert has another gate": (
        {"gate": lambda gate_up, expert: swiglu(gate_up if expert != 4 else -gate_up)},
        "the experts of the loop have different gates",
    ),
    "one expert has another input": (
        {"first": lambda x, w13, expert: F.linear(x if expert != 4 else x + 1, w13[expert])},
        "an expert of the loop reads something else than the others",
    ),
    "one expert reads another's product": (
        {"second": lambda rows, w2, expert: F.linear(rows, w2[{4: 5, 5: 4}.get(expert, expert)])},
        "an expert of the loop reads something else than the others",
    ),
    "one expert reads sorted columns": (
        {
            "second": lambda rows, w2, expert: F.linear(
                rows.sort().values if expert == 4 else rows, w2[expert]
            )
        },
        "an expert of the loop reads something else than the others",
    ),
    "a gate that tells tokens apart": (
        {"gate": lambda gate_up, expert: swiglu(gate_up) * torch.arange(gate_up.shape[0])[:, None]},
        "the gate tells rows apart by where they lie",
    ),
    "nothing weighs them": (
        {"term": lambda out, weight: out + weight},
        NOT_THE_SUM,
    ),
    "a weight for each column": (
        {"term": lambda out, weight: out * weight.expand_as(out).relu()},
        NOT_THE_SUM,
    ),
    "one is subtracted": ({"add": torch.sub}, "aten.sub.Tensor is not the sum of what experts give"),
    "weighed by the next expert's": (
        {"weight": lambda weights, ids, expert: weigh(weights, ids, (expert + 1) % EXPERTS)},
        NOT_THE_SUM,
    ),
    "weighed twice as much": (
        {"weight": lambda weights, ids, expert: 2 * weigh(weights, ids, expert)},
        NOT_THE_SUM,
    ),
    "weighed by other weights": (
        {"weight": lambda weights, ids, expert: weigh(weights + (expert == 4), ids, expert)},
        NOT_THE_SUM,
    ),
    "weights that no ids choose": (
        {"weight": lambda weights, ids, expert: weights[:, :1] + expert},
        "the weights of an expert come from",
    ),
    "one is left out": (
        {"result": lambda total, terms, firsts: total - terms[3]},
        "aten.sub.Tensor is not the sum of what experts give",
    ),
    "one is read by another": (
        {"result": lambda total, terms, firsts: (total, terms[3])},
        "output reads what experts give, not a weighted sum",
    ),
    "one counts twice": (
        {"term": lambda out, weight: out * weight, "result": lambda total, terms, firsts: total + terms[0]},
        NOT_THE_SUM,
    ),
    "each counts twice": (
        {"term": lambda out, weight: (term := out * weight) + term},
        NOT_THE_SUM,
    ),
    "the sum is multiplied on its way": (
        {"term": lambda out, weight: (out * weight).relu()},
        "aten.relu reads what experts give, not a weighted sum",
    ),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_does_something_else_stays(what):
    parts, reason = OTHER[what]
    result = rewrite(looped_with(**parts), *layer(5), passes=PIPELINE)
    assert not result.log.raised and not result.ops()
    (refused,) = result.reasons
    assert reason in refused


def test_a_part_of_the_experts_is_no_layer():
    result = rewrite(looped_with(experts=range(EXPERTS - 1)), *layer(5), passes=PIPELINE)
    assert not result.log.raised and "every weight[expert]" in result.reasons[0]


def test_a_product_that_something_else_reads_stays():
    parts = {"result": lambda total, terms, firsts: (total, firsts[4])}
    result = rewrite(looped_with(**parts), *layer(5), passes=PIPELINE)
    assert not result.log.raised
    assert "is also read by" in result.reasons[0]


def test_raising_again_finds_nothing():
    result = rewrite(stock.looped, *layer(7), passes=(*RAISES, *RAISES))
    assert len(result.log.raised) == 2 and not result.reasons


def test_a_gate_that_names_its_number_of_tokens_stays():
    def gate(gate_up, expert):
        return swiglu(gate_up) * gate_up.shape[0]

    result = rewrite(looped_with(gate=gate), *layer(5, dynamic=True), passes=PIPELINE)
    assert not result.log.raised
    assert any("the gate of an expert names its shape: aten.mul.Tensor" in each for each in result.reasons)
