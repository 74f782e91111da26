"""Where gradients stop on what has changed in place: functional code shows such a view anew wherever it is read."""

import pytest
import torch
from torch.nn import functional as F

from tests.passes import stock
from tests.passes.test_before_autograd import RAISED, check, float32

STOPS = {
    "read": lambda weights: weights.detach() * 1,
    "seen": lambda weights: weights.detach().view(-1).view(weights.shape),
    "in place": torch.Tensor.detach_,
}


def weighed(change):
    """A layer whose routing weights change in place, then by `change`."""

    def function(x, router, w13, w2):
        weights, ids = F.linear(x, router).softmax(-1).topk(stock.TOP_K)
        weights /= weights.sum(-1, keepdim=True)
        hidden = stock.swiglu(torch.einsum("th,tkih->tki", x, w13[ids]))
        return torch.einsum("tki,tkhi,tk->th", hidden, w2[ids], change(weights)) + router.sum()

    return function


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_a_layer_is_left_where_gradients_stop_at_its_weights(stop):
    run = check(weighed(stop), float32())
    assert not run.raised and "gradients stop at" in run.refused[0]


def test_a_mask_that_has_none_stops_none():
    def masked(weights):
        mask = torch.ones(weights.shape)
        view = mask.view(weights.shape)
        mask *= 2
        return weights * view

    assert check(weighed(masked), float32()).raised == RAISED
