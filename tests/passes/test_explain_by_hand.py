"""explain() on modules written by hand: layers that train have one name each, and what is refused is not nothing."""

import torch
from torch import nn
from torch.nn import functional as F

import inductor_passes
from tests.passes import stock
from tests.passes.stock import EXPERTS, HIDDEN, TOP_K, softmax_router, swiglu


class Block(nn.Module):
    """With weights gathered; its products are functions, or methods of tensors."""

    def __init__(self, methods=False):
        super().__init__()
        _, *weights = stock.layer(3, torch.float32)
        self.router, self.w13, self.w2 = map(nn.Parameter, weights)
        self.methods = methods

    def forward(self, x):
        if not self.methods:
            return stock.batched(x, self.router, self.w13, self.w2)
        weights, ids = softmax_router(F.linear(x, self.router))
        rows, experts = x.repeat_interleave(TOP_K, 0).unsqueeze(-1), ids.flatten()
        out = self.w2[experts].bmm(swiglu(self.w13[experts].bmm(rows).squeeze(-1)).unsqueeze(-1))
        return (out.view(-1, TOP_K, HIDDEN) * weights.unsqueeze(-1)).sum(1)


class Odd(nn.Module):
    """Modules under names that are no names in Python."""

    def __init__(self):
        super().__init__()
        self.add_module("a-b", Block())
        self.add_module('<"c">', Block(methods=True))

    def forward(self, x):
        return getattr(self, '<"c">')(getattr(self, "a-b")(x))


def named(module):
    """The layers of a training graph, and those of which records say that they were raised."""
    report = inductor_passes.explain(module, torch.randn(5, HIDDEN))
    assert report.is_training and "raised: experts, topk_routing" in str(report)
    return [each.name for each in report.layers], sorted({each.layer for each in report.raised})


def test_a_module_that_is_called_twice_trains_under_its_name():
    block = Block()
    assert named(nn.Sequential(block, block)) == (["0", "0#2"], ["0", "0#2"])


def test_modules_under_odd_names_train_under_these():
    assert named(Odd()) == (["a-b", '<"c">'], ['<"c">', "a-b"])


def test_what_is_refused_is_not_called_nothing():
    class Apart(nn.Module):
        """Experts in modules of their own, all of which read all tokens."""

        def __init__(self):
            super().__init__()
            self.each = nn.ModuleDict({str(index): nn.Linear(HIDDEN, HIDDEN) for index in range(EXPERTS)})
            self.router = nn.Linear(HIDDEN, EXPERTS)

        def forward(self, x):
            best, ids = self.router(x).softmax(-1).topk(1)
            outs = (out(x) * (ids == int(name)) * best for name, out in self.each.items())
            return sum(outs, torch.zeros_like(x))

    with torch.no_grad():
        report = inductor_passes.explain(Apart(), torch.randn(5, HIDDEN))
    assert report.refused and not report.layers and not report.remarks


def _told_of_gathered(products):
    def two_layers(x, router, w13, w2):
        for _ in range(2):
            weights, ids = softmax_router(F.linear(x, router))
            x = x + (products(x, ids, w13, w2) * weights.unsqueeze(-1)).sum(1)
        return x

    report = inductor_passes.explain(two_layers, *stock.layer(7, torch.float32))
    return {each.reason.partition(",")[0] for each in report.refused}


@torch.no_grad()
def test_weights_that_are_gathered_and_cast_are_not_taken_for_all_experts():
    def by_autocast(x, ids, w13, w2):
        hidden = swiglu(torch.einsum("th,tkih->tki", x, w13[ids]))
        return torch.einsum("tki,tkhi->tkh", hidden, w2[ids])

    def by_hand(x, ids, w13, w2):
        slots, ids_of = x.bfloat16().repeat_interleave(ids.shape[1], 0), ids.flatten()
        hidden = swiglu((slots[:, None] @ w13[ids_of].bfloat16().mT).squeeze(1))
        return (hidden[:, None] @ w2[ids_of].bfloat16().mT).view(*ids.shape, -1)

    with torch.autocast("cpu", torch.bfloat16):
        assert _told_of_gathered(by_autocast) == {"rows are multiplied with weight[ids]"}
    assert _told_of_gathered(by_hand) == {"rows are multiplied with weight[ids]"}
