"""Linear modules inside routers and blocks, replaced by quantised ones, before `patch` and after it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from layers import huggingface
from layers.huggingface.recognise import Recogniser
from tests.counting import Calls
from tests.coverage.cases import outputs, stock_model
from tests.huggingface.test_changed_since import halve
from tests.huggingface.test_routers import EXPERTS, HIDDEN, Nested


class Packed(nn.Module):
    """Its weight is a buffer, and has no usual name."""

    def __init__(self, linear):
        super().__init__()
        self.bias = linear.bias
        self.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer("packed", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x):
        return F.linear(x, self.packed.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class Narrow(nn.Linear):
    """A linear whose weight is a parameter of another dtype."""

    def __init__(self, linear, dtype, top):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / top)
        self.bias = linear.bias
        narrow = (linear.weight.detach() / self.scale).to(dtype)
        self.weight = nn.Parameter(narrow, requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


KINDS = {
    "packed": Packed,
    "int8": lambda linear: Narrow(linear, torch.int8, 127),
    "float8": lambda linear: Narrow(linear, torch.float8_e4m3fn, 400),
}


def quantise(model, kind):
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and name != "lm_head":
                setattr(module, name, KINDS[kind](child))


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["afmoe", "gemma4", "jetmoe", "dbrx"])
@torch.no_grad()
def test_quantised_linears(name, kind, before):
    stock = stock_model(name)
    ours = copy.deepcopy(stock)
    options = {"stack_experts": name == "dbrx"}
    if not before:
        huggingface.patch(ours, **options)
    for model in (stock, ours):
        quantise(model, kind)
    if before:
        huggingface.patch(ours, **options)
    expected = outputs(stock, name)[0]
    torch.testing.assert_close(outputs(ours, name)[0], expected, rtol=1e-4, atol=1e-4)
    huggingface.unpatch(ours)
    assert torch.equal(outputs(ours, name)[0], expected) or name == "dbrx"


class InFloat32(Nested):
    """Its linear module takes float32 and nothing else."""

    def logits(self, tokens):
        return self.product(tokens.float())


@torch.no_grad()
def test_hooks_on_a_module_that_our_code_calls():
    """They run there, and need none of the router's own code."""
    stock, ours = Nested(), Nested()
    ours.load_state_dict(stock.state_dict())
    huggingface.routers.install(ours, Recogniser().known(ours), object())
    for router in (stock, ours):
        router.product.register_forward_hook(halve)
    tokens = torch.randn(20, HIDDEN)
    with Calls("moe.topk_routing") as calls:
        assert torch.equal(stock(tokens)[0], ours(tokens)[0])
    assert calls.total == 1


@torch.no_grad()
def test_hooks_on_a_module_that_our_code_does_not_call():
    stock, ours = InFloat32(), InFloat32()
    ours.load_state_dict(stock.state_dict())
    known = Recogniser().known(ours)
    assert known.details.product_dtype is torch.float32
    huggingface.routers.install(ours, known, object())
    for router in (stock, ours):
        router.product.register_forward_hook(halve)
    tokens = torch.randn(20, HIDDEN)
    (logits, *rest), (our_logits, *ours_rest) = stock(tokens), ours(tokens)
    assert logits.shape == (20, EXPERTS) and torch.equal(logits, our_logits)
    assert all(map(torch.equal, rest, ours_rest))
