"""Where gradients stop on what has changed in place: functional code shows such a view anew wherever it is read."""

import pytest
import torch
from torch.nn import functional as F

from tests.passes import stock
from tests.passes.test_before_autograd import RAISED, check, float32


@pytest.mark.parametrize("detach", [torch.Tensor.detach, torch.Tensor.detach_])
def test_where_gradients_stop_behind_what_has_changed_in_place_the_layer_is_left(detach):
    def function(x, router, w13, w2):
        weights, ids = F.linear(x, router).softmax(-1).topk(stock.TOP_K)
        weights /= weights.sum(-1, keepdim=True)
        weights = detach(weights).view(-1).view(ids.shape)
        hidden = stock.swiglu(torch.einsum("th,tkih->tki", x, w13[ids]))
        return torch.einsum("tki,tkhi,tk->th", hidden, w2[ids], weights) + router.sum()

    run = check(function, float32())
    assert not run.raised and "gradients stop at" in run.refused[0]


def test_a_mask_without_gradients_that_has_changed_in_place_stops_none():
    def function(x, router, w13, w2):
        mask = torch.ones(x.shape[0], 1)
        view = mask.view(-1)
        mask *= 2
        return stock.batched(x * view[:, None], router, w13, w2)

    assert check(function, float32()).raised == RAISED
