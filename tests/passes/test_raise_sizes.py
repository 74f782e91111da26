"""Tokens [B, S, H], B and S open, that a model flattens: sizes B * S are read off no tensor inside of a layer."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import RELATIVE_NORM, relative_error
from tests.passes import stock
from tests.passes.at_once import AT_ONCE, routed
from tests.passes.capture import computed
from tests.passes.spellings import gathered, of_best
from tests.passes.stock import HIDDEN, layer, swiglu
from tests.passes.strangers import adapters, dense, of_weights, softmax_of_the_best
from tests.passes.test_before_autograd import ALLOWED, RAISED, Run, grads

PIPELINE = (*RAISES, *FUSIONS)
BATCH, TOKENS = 3, 5


def of_hardswish(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.hardswish(gate) * up


LAYERS = {
    "einsums over all experts": of_weights(dense),
    "at once, picked": routed(AT_ONCE["at once, picked"]),
    "at once, over choices": routed(AT_ONCE["at once, over choices"]),
    "a softmax over logits": softmax_of_the_best,
    "LoRA": adapters,
    "a gate that is a formula": of_best(gathered(of_hardswish)),
    "a gate of ours": of_best(gathered(swiglu)),
    "a loop": stock.looped,
}


def flattened(name):
    def run(x, *weights):
        return LAYERS[name](x.view(-1, HIDDEN), *weights).view(x.shape)

    return run


def inputs(dims=(0, 1)):
    made = layer(BATCH * TOKENS, torch.float32)
    rows = made.hidden_states.view(BATCH, TOKENS, HIDDEN).clone()
    for dim in dims:
        torch._dynamo.mark_dynamic(rows, dim)
    return made._replace(hidden_states=rows)


@pytest.mark.parametrize("name", LAYERS)
def test_it_is_raised_whole(name):
    given = inputs()
    result, out = computed(flattened(name), *given, passes=PIPELINE)
    assert [each.kind for each in result.log.raised] == ["experts", "topk_routing"] and not result.reasons
    assert len(result.ops()) == 1
    right = LAYERS[name](*(each.double() for each in layer(BATCH * TOKENS, torch.float32)))
    assert relative_error(out.view(-1, HIDDEN), right) <= RELATIVE_NORM[torch.float32]


def test_other_sizes():
    run = Run().compile(flattened("einsums over all experts"))
    with torch.no_grad():
        for size in (BATCH, 7, 1):
            given = inputs((0,))
            given = given._replace(hidden_states=given.hidden_states[:1].repeat(size, 1, 1))
            right = flattened("einsums over all experts")(*(each.double() for each in given))
            assert relative_error(run(*given), right) <= RELATIVE_NORM[torch.float32]


@pytest.mark.parametrize("name", ["einsums over all experts", "a gate of ours"])
def test_gradients(name):
    given, run = inputs(()), Run()
    right = grads(flattened(name), [each.double() for each in given])
    for ours, expected in zip(grads(run.compile(flattened(name)), given, dynamic=True), right, strict=True):
        assert relative_error(ours, expected) <= ALLOWED
    assert run.raised == RAISED and not run.refused


@pytest.mark.parametrize("what", ["the gate's", "the products'"])
def test_what_a_layer_gives_elsewhere_stays(what):
    """Numbers that are read, not sizes."""

    def run(x, router, w13, w2):
        flat = x.view(-1, HIDDEN)
        logits = F.linear(flat, router)
        weights = torch.zeros_like(logits).scatter(1, logits.topk(2).indices, 1.0)
        inner = torch.einsum("th,eih->tei", flat, w13)
        hidden = swiglu(inner)
        out = torch.einsum("tei,ehi->teh", hidden, w2)
        return (out * weights.unsqueeze(-1)).sum(1).view(x.shape), (
            hidden if what == "the gate's" else inner
        ).mean()

    result, _ = computed(run, *inputs(), passes=PIPELINE)
    assert not result.ops() and result.reasons
