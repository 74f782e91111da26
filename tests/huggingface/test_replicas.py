"""Replicas of a patched model, as `nn.DataParallel` makes them for other devices, which the Trainer asks for."""

import copy
import pickle
import sys

import pytest
import torch
from torch import nn

from layers import huggingface
from layers.huggingface.recognise import form
from tests.coverage.cases import outputs, stock_model
from tests.huggingface.families import FAMILIES, tiny_model, tokens
from tests.huggingface.loops import HIDDEN, Loop, block


@pytest.fixture
def doubled(monkeypatch):
    """Makes a replica of a module, of twice its weights, where PyTorch copies them to a GPU."""

    def copied(tensors, devices, detach=False):
        return [[2 * each for each in tensors] for _ in devices]

    replicate = sys.modules["torch.nn.parallel.replicate"]  # in `torch.nn.parallel` a function has its name
    monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", copied)
    return lambda module: replicate.replicate(module, [0])[0]


def twice(module):
    module = copy.deepcopy(module)
    with torch.no_grad():
        for each in [*module.parameters(), *module.buffers()]:
            each.mul_(2)
    return module


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("with_gradients", [False, True])
def test_they_run_on_their_own_weights(family, with_gradients, doubled):
    stock = tiny_model(family)
    ours = copy.deepcopy(stock)
    huggingface.patch(ours)
    with torch.set_grad_enabled(with_gradients):
        for length in (9, 1):  # which may go another way
            ids = tokens(2, length)
            actual, expected = doubled(ours)(input_ids=ids).logits, twice(stock)(input_ids=ids).logits
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["dbrx", "llama4", "jetmoe"])
@torch.no_grad()
def test_blocks_of_other_kinds(family, doubled):
    stock = stock_model(family)
    ours = copy.deepcopy(stock)
    huggingface.patch(ours)
    expected = outputs(twice(stock), family)[0]
    torch.testing.assert_close(outputs(doubled(ours), family)[0], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_stacked_experts(doubled):
    stock = block(Loop)
    ours = copy.deepcopy(stock)
    huggingface.patch(ours, stack_experts=True)
    given = torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(doubled(ours)(given), twice(stock)(given), rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_model(doubled):
    model = tiny_model("qwen3_moe")
    huggingface.patch(model)
    doubled(model)(input_ids=tokens(2, 9)).logits.sum().backward()
    assert all(each.grad is not None for each in model.model.layers[0].mlp.parameters())


def test_the_way_back():
    model = tiny_model("mixtral")
    before = [set(vars(each)) for each in model.modules()]
    huggingface.patch(model)
    huggingface.unpatch(model)
    assert [set(vars(each)) - {"moe_ops_stock_implementation"} for each in model.modules()] == before


def test_layers_of_a_patched_model_are_still_alike():
    model = tiny_model("mixtral")
    huggingface.patch(model)
    first, second = (form(layer.mlp) for layer in model.model.layers)
    assert first == second


def test_out_of_a_pickle_modules_make_replicas_of_their_class():
    model = tiny_model("mixtral")
    huggingface.patch(model)
    again = pickle.loads(pickle.dumps(model)).model.layers[0].mlp.experts
    assert again._replicate_for_data_parallel.__func__ is nn.Module._replicate_for_data_parallel
