"""`patch(model, emit=..., save_for_backward=...)`: what runs, what is saved, and nothing else."""

import pytest
import torch

from layers import huggingface
from tests.counting import Calls, saved_bytes
from tests.huggingface.families import HIDDEN, INTER, TOP_K, pair, tiny_model, tokens

TOKENS = 200
# What the stages return for each slot: rows, gate and up, activated, expert outputs.
ACTIVATIONS = TOKENS * TOP_K * (2 * HIDDEN + 3 * INTER) * 4
OWN_GATE = {"hidden_act": "mish"}  # an activation that only the module itself can compute


def patched_block(options, **overrides):
    model = tiny_model("mixtral", **overrides)
    assert huggingface.patch(model, **options).left == ()
    return model.model.layers[0].mlp


def hidden():
    return torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5)).requires_grad_()


@pytest.mark.parametrize("overrides", [{}, OWN_GATE], ids=["known_gate", "own_gate"])
def test_activations_are_saved_on_demand(overrides):
    saved = {
        choice: saved_bytes(patched_block({"save_for_backward": choice}, **overrides), hidden())
        for choice in ("auto", "inputs", "projections", "activations")
    }
    of_gate_up = TOKENS * TOP_K * 2 * INTER * 4
    more = (
        saved["activations" if overrides else "projections"] - saved["projections" if overrides else "inputs"]
    )
    assert more == (0 if overrides else of_gate_up)
    assert 0.9 * ACTIVATIONS <= saved["activations"] - saved["inputs"] <= 1.6 * ACTIVATIONS
    # What eager PyTorch records on its own: our operator's inputs, or every stage around a gate of their own.
    assert saved["auto"] == saved["activations" if overrides else "inputs"]


@pytest.mark.parametrize("overrides", [{}, OWN_GATE], ids=["known_gate", "own_gate"])
@pytest.mark.parametrize("choice", ["auto", "inputs", "projections", "activations"])
def test_gradients_are_the_same(choice, overrides):
    stock, ours = pair("mixtral", **overrides)
    huggingface.patch(ours, save_for_backward=choice)
    ids = tokens(2, 12)
    for model in (stock, ours):
        model(ids, labels=ids).loss.backward()
    for (name, expected), actual in zip(stock.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("choice", "overrides", "plain", "checkpointed"),
    [
        ("auto", {}, 2, 3),
        ("inputs", {}, 2, 3),
        ("activations", {}, 1, 2),
        ("inputs", OWN_GATE, 2, 2),  # a checkpoint inside a checkpoint: the second forward is the last
        ("activations", OWN_GATE, 1, 2),
    ],
)
def test_runs_of_the_experts(choice, overrides, plain, checkpointed):
    """With transformers' checkpointing of a layer, a third time only where inputs were saved."""
    model = tiny_model("mixtral", num_hidden_layers=1, **overrides)
    huggingface.patch(model, save_for_backward=choice)
    model.train()
    ids = tokens(2, 12)
    runs = []
    known_gate = ["moe.gated_activation", "moe.fused_experts", "moe.weighted_activation_backward"]
    once_a_run = ["moe.build_dispatch"] if overrides else known_gate
    for _ in range(2):
        with Calls(*once_a_run) as calls:
            model(ids, labels=ids).loss.backward()
        runs.append(calls.total)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert runs == [plain, checkpointed]


@pytest.mark.parametrize("overrides", [{}, OWN_GATE], ids=["known_gate", "own_gate"])
@pytest.mark.parametrize("choice", ["inputs", "projections", "activations"])
@torch.no_grad()
def test_inference_runs_what_it_ran(choice, overrides):
    ran, traced = [], []

    def backend(graph_module, example_inputs):
        traced.append(graph_module.code)
        return graph_module

    for options in ({}, {"save_for_backward": choice}):
        block = patched_block(options, **overrides)
        with Calls() as calls:
            block(hidden())
        ran.append(calls.names)
        torch.compile(block, backend=backend, fullgraph=True)(hidden())
    assert ran[0] == ran[1]
    assert len({*traced}) == 1, "what is compiled may serve both"


@pytest.mark.parametrize(
    ("emit", "eager", "compiled"),
    [
        ("auto", "fused_moe", "fused_experts.stages"),
        ("stages", "grouped_gemm", "fused_experts.stages"),
        ("fused", "fused_moe", "fused_experts.default"),
    ],
)
@torch.no_grad()
def test_emit(emit, eager, compiled):
    block = patched_block({"emit": emit})
    expected = patched_block({})(hidden())
    with Calls("moe.grouped_gemm", "moe.fused_experts", "moe.fused_moe") as calls:
        torch.testing.assert_close(block(hidden()), expected)
    assert set(calls.names) == {f"moe.{eager}"}
    traced = []

    def backend(graph_module, example_inputs):
        traced.append(graph_module.code)
        return graph_module

    torch.testing.assert_close(torch.compile(block, backend=backend, fullgraph=True)(hidden()), expected)
    assert f"torch.ops.moe.{compiled}(" in traced[0], traced[0]


@pytest.mark.parametrize("overrides", [{}, OWN_GATE], ids=["known_gate", "own_gate"])
@pytest.mark.parametrize("choice", ["inputs", "projections", "activations"])
def test_compiled_training_computes_the_same(choice, overrides):
    block = patched_block({"save_for_backward": choice}, **overrides)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    grads = []
    for function in (block, compiled):
        given = hidden()
        grads.append(torch.autograd.grad(function(given).square().sum(), [given, *block.parameters()]))
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_the_last_patch_counts():
    model = tiny_model("mixtral")
    huggingface.patch(model, save_for_backward="activations")
    block = model.model.layers[0].mlp
    saved = saved_bytes(block, hidden())
    huggingface.patch(model)
    assert saved_bytes(block, hidden()) < saved - 0.9 * ACTIVATIONS
