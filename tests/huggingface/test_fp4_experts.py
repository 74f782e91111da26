"""Experts that transformers keeps in MXFP4, as DeepSeek-V4 is published: two numbers in a torch.int8, and exponents.

The standard is its own loop over them, with products in plain PyTorch of exact tokens.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations import finegrained_fp8

from layers import huggingface
from moe_ops.mxfp4 import powers
from tests.fuzz.quantised import unpacked
from tests.helpers import assert_same, relative_error
from tests.huggingface.families import EXPERTS, HIDDEN, INTER, tiny_model, tokens
from tests.huggingface.test_quantised_experts import _quantised, _routed

EXPONENTS = torch.float8_e8m0fnu


def _dense(weight, scale):
    numbers = unpacked(weight.view(torch.uint8)).double().unflatten(-1, (-1, 32))
    return (numbers * powers(scale.view(torch.uint8), torch.float64)[..., None]).flatten(-2)


def _plain_linear(input, weight, scale, *_, activation_scale=None, **__):
    assert weight.dtype == torch.int8 and activation_scale is None
    return F.linear(input.double(), _dense(weight, scale)).to(input.dtype)


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    """transformers' own are downloaded."""
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", _plain_linear)


def fp4_model(scales=EXPONENTS, inter=INTER):
    """As transformers makes it where a config says that experts are in 4 bits."""
    model = _quantised(tiny_model("qwen3_moe", moe_intermediate_size=inter))
    torch.manual_seed(3)
    for layer in model.model.layers:
        for name, height, width in (("gate_up_proj", 2 * inter, HIDDEN), ("down_proj", HIDDEN, inter)):
            weight = torch.randint(-128, 128, (EXPERTS, height, width // 2), dtype=torch.int8)
            scale = torch.randint(119, 125, (EXPERTS, height, width // 32), dtype=torch.uint8)
            scale = scale.view(scales) if scales.itemsize == 1 else powers(scale, scales)
            setattr(layer.mlp.experts, name, nn.Parameter(weight, requires_grad=False))
            setattr(layer.mlp.experts, f"{name}_scale_inv", nn.Parameter(scale, requires_grad=False))
    return model


def _pair():
    model = fp4_model()
    patched = copy.deepcopy(model)
    report = huggingface.patch(patched)
    assert len(report.experts) == 2 and not report.left, str(report)
    model.config._experts_implementation = "eager"
    return model, patched


@pytest.mark.parametrize("count", [0, 1, 7, 33])
def test_values(count):
    stock, ours = (each.model.layers[0].mlp.experts for each in _pair())
    given = _routed(count)
    actual, expected = ours(*given), stock(*given)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert count == 0 or relative_error(actual, expected) < 1e-5


def test_exponents_in_bytes():
    model = fp4_model(scales=torch.uint8)
    huggingface.patch(model)
    (_, expected), given = _pair(), _routed(7)
    found, wanted = (each.model.layers[0].mlp.experts for each in (model, expected))
    assert torch.equal(found(*given), wanted(*given))


def test_models_compiled_and_unpatched():
    stock, ours = _pair()
    given, names = tokens(2, 9), list(stock.state_dict())
    assert list(ours.state_dict()) == names
    with torch.no_grad():
        expected = stock(given).logits
        assert relative_error(ours(given).logits, expected) < 1e-5
        compiled = torch.compile(ours, backend="moe_inductor", fullgraph=True)
        assert relative_error(compiled(given).logits, expected) < 1e-5
        huggingface.unpatch(ours)
        assert torch.equal(ours(given).logits, expected)


def test_gradients_go_through_to_tokens():
    """Stock has none through such weights."""
    _, model = _pair()
    experts = model.model.layers[0].mlp.experts
    hidden, ids, weights = (each.double() if each.is_floating_point() else each for each in _routed(7))
    hidden.requires_grad_(), weights.requires_grad_()
    up, down = (
        _dense(getattr(experts, name), getattr(experts, f"{name}_scale_inv"))
        for name in ("gate_up_proj", "down_proj")
    )
    gate, rows = torch.einsum("th,ekh->tek", hidden, up).chunk(2, -1)
    outputs = torch.einsum("tei,ehi->teh", F.silu(gate) * rows, down)
    expected = (outputs.gather(1, ids[..., None].expand(-1, -1, HIDDEN)) * weights[..., None]).sum(1)
    towards = torch.randn(expected.shape, dtype=torch.float64)
    found = torch.autograd.grad(experts(hidden, ids, weights), (hidden, weights), towards)
    assert_same(found, torch.autograd.grad(expected, (hidden, weights), towards))


def test_scales_that_are_no_exponents_are_left():
    report = huggingface.patch(fp4_model(scales=torch.float32))
    reason = "weights of 4 bits with scales in torch.float32: expected exponents, in torch.float8_e8m0fnu"
    assert not report.experts and set(dict(report.left).values()) == {reason}


def test_scales_that_were_cast_say_so():
    ours = _pair()[1].half()
    with pytest.raises(TypeError, match=r"proj_scale_inv has dtype torch\.float16: .* was the model cast"):
        ours.model.layers[0].mlp.experts(*_routed(3))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 7, 33, 200])
def test_values_on_a_gpu(count):
    stock, ours = (each.model.layers[0].mlp.experts for each in _pair())
    given = _routed(count)
    with torch.no_grad():
        actual = ours.cuda()(*(each.cuda() for each in given)).cpu()
        assert relative_error(actual, stock(*given)) < 1e-4
        in_16_bits = ours(
            *(each.cuda().bfloat16() if each.is_floating_point() else each.cuda() for each in given)
        )
        assert relative_error(in_16_bits.cpu().float(), stock(*given)) < 2e-2
