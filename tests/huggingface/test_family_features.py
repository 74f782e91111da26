"""What users do with a model, for families that are patched in other ways than Mixtral is."""

import copy

import pytest
import torch

from layers import huggingface
from tests.coverage.cases import inputs, outputs, stock_model
from tests.helpers import relative_error

NAMES = ("gemma4", "llama4", "afmoe", "ernie4_5_moe", "jetmoe", "phimoe")
LOGITS = ("llama4", "ernie4_5_moe", "phimoe", "jetmoe")
"""Families that return them."""


def pair(name):
    stock = stock_model(name)
    ours = copy.deepcopy(stock)
    assert huggingface.patch(ours).routers
    return stock, ours


@pytest.mark.parametrize("name", NAMES)
def test_generate_gives_the_same_tokens(name):
    stock, ours = pair(name)
    ids = inputs(name)["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = stock.generate(ids, **options)
    assert expected.shape == (2, ids.shape[1] + 5)
    assert torch.equal(ours.generate(ids, **options), expected)


@pytest.mark.parametrize("name", LOGITS)
@torch.no_grad()
def test_router_logits_and_auxiliary_loss(name):
    stock, ours = pair(name)
    labels = inputs(name)["input_ids"]
    want, got = (outputs(model, name, output_router_logits=True, labels=labels)[1] for model in (stock, ours))
    if not hasattr(want, "router_logits"):
        pytest.skip("not in this transformers")
    assert len(got.router_logits) == len(want.router_logits) >= 2
    for actual, expected in zip(got.router_logits, want.router_logits, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.loss, want.loss)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing(name):
    stock, ours = pair(name)
    if name == "phimoe":  # in training it samples, and which numbers it draws is up to checkpointing
        pytest.skip("stock gives other gradients each time")
    if not ours.supports_gradient_checkpointing:
        pytest.skip("stock has none")
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (stock, ours):
        output = outputs(model.train(), name)[0]
        (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(5))).sum().backward()
    grads = dict(ours.named_parameters())
    for parameter, value in stock.named_parameters():
        if value.grad is not None and value.grad.abs().max() > 1e-3:
            assert relative_error(grads[parameter].grad, value.grad) < 1e-4, parameter


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_saved_and_loaded(name, tmp_path):
    stock, ours = pair(name)
    ours.save_pretrained(tmp_path)
    loaded = type(stock).from_pretrained(tmp_path, experts_implementation="eager").eval()
    expected = outputs(stock, name)[0]
    torch.testing.assert_close(outputs(loaded, name)[0], expected, rtol=1e-4, atol=1e-5)
    huggingface.patch(loaded)
    torch.testing.assert_close(outputs(loaded, name)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma4", "ernie4_5_moe", "step3p7"])
@torch.no_grad()
def test_offloaded_weights(name):
    accelerate = pytest.importorskip("accelerate")
    stock = stock_model(name)
    expected = outputs(stock, name)[0]
    ours = accelerate.cpu_offload(copy.deepcopy(stock), torch.device("cpu"))
    report = huggingface.patch(ours)
    torch.testing.assert_close(outputs(ours, name)[0], expected, rtol=1e-4, atol=1e-4)
    reasons = {why for _, why in report.left}
    offloaded = "modules inside it are offloaded, and get their weights when they are called"
    assert reasons == (set() if name == "step3p7" else {offloaded})
