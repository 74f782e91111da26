"""Several layers in one graph, each behind a norm and added to what it reads: all are raised, in any spelling."""

import pytest
import torch
from torch.nn import functional as F

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.helpers import assert_matches_oracle, relative_error
from tests.passes import stock
from tests.passes.capture import computed, rewrite
from tests.passes.spellings import SPELLINGS
from tests.passes.stock import EXPERTS, layer, softmax_router, swiglu
from tests.passes.strangers import STRANGERS
from tests.passes.test_before_autograd import ALLOWED, Run, grads

PIPELINE = (*RAISES, *FUSIONS)
KINDS = {
    "loops": stock.looped,
    "at once": STRANGERS["einsums over all experts, weights scattered"].run,
    "gathered": stock.batched,
    "top-1, gathered": SPELLINGS["top-1 by max of rows"],
    "top-1 by mask": SPELLINGS["top-1 by mask"],
}


def several(function, depth, shared=False):
    """`depth` layers, with the same weights if they are `shared`, other ones else."""

    def run(x, router, w13, w2):
        for each in range(depth):
            first, second = (w13, w2) if shared else (w13[:, each], w2[:, each])
            x = x + function(F.rms_norm(x, x.shape[-1:]), router, first, second)
        return x

    return run


def inputs_of(depth, shared):
    """In float32, of which nothing ties."""
    made = [layer(7, torch.float32)]
    for each in range(1, depth):
        made.append(layer(7 + each, torch.float32))
    if shared:
        return made[0]
    w13, w2 = (torch.stack([getattr(each, name) for each in made], 1) for name in ("w13", "w2"))
    return made[0]._replace(w13=w13, w2=w2)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_is_raised(kind, shared):
    inputs, function = inputs_of(3, shared), several(KINDS[kind], 3, shared)
    result, out = computed(function, *inputs, passes=PIPELINE)
    assert result.ops() == ["fused_moe"] * 3 and not result.reasons
    assert_matches_oracle(out, function(*(each.double() for each in inputs)))


def test_gradients():
    inputs, function, run = inputs_of(2, False), several(stock.looped, 2), Run()
    exact = grads(function, [each.double() for each in inputs])
    for ours, expected in zip(grads(run.compile(function), inputs), exact, strict=True):
        assert relative_error(ours, expected) <= ALLOWED
    assert run.raised == ["experts", "experts", "topk_routing", "topk_routing"]


def test_layers_that_share_weights_and_read_what_others_do_stay():
    """The last expert of the second loop reads what the first one does."""

    def looped(x, other, router, w13, w2):
        weights, ids = softmax_router(F.linear(x, router))
        total = torch.zeros_like(x)
        for expert in range(EXPERTS):
            rows = other if expert == EXPERTS - 1 else x
            out = F.linear(swiglu(F.linear(rows, w13[expert])), w2[expert])
            total = total + out * (weights * (ids == expert)).sum(-1, keepdim=True)
        return total

    def run(x, *weights):
        first = F.rms_norm(x, x.shape[-1:])
        second = F.rms_norm(x + looped(first, first, *weights), x.shape[-1:])
        return looped(second, first, *weights)

    result = rewrite(run, *inputs_of(1, True), passes=PIPELINE)
    assert not result.log.raised
    assert "an expert of the loop reads something else than the others" in result.reasons
