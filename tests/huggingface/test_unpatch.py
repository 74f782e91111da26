"""The way back: `unpatch` leaves exactly the stock model, and stock experts work behind patched routers."""

import copy
import pickle
from types import MethodType

import pytest
import torch
from transformers import PreTrainedConfig

from layers import huggingface
from layers.huggingface import patching, routers
from tests.counting import Calls
from tests.helpers import mixed
from tests.huggingface.families import FAMILIES, HIDDEN, pair, tiny_config, tiny_model, tokens

STOCK = ("eager", "batched_mm", "grouped_mm")
FORMAT_ERROR = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def snapshot(model):
    """Everything `patch` could touch: instance attributes, forwards, and configs by value."""
    return {
        name: {key: _by_value(value) for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


def _by_value(value):
    if isinstance(value, PreTrainedConfig):
        return value.to_dict(), value._experts_implementation
    if isinstance(value, MethodType):
        return value.__func__
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value)


@pytest.mark.parametrize(("family", "implementation"), mixed(FAMILIES, (*STOCK, "moe_ops")))
@torch.no_grad()
def test_the_stock_model_is_back(family, implementation):
    huggingface.register()
    model = tiny_model(family, implementation=implementation)
    before, expected = snapshot(model), model(tokens(2, 6)).logits
    report = huggingface.patch(model)
    assert snapshot(model) != before
    huggingface.unpatch(model)
    assert snapshot(model) == before
    assert torch.equal(model(tokens(2, 6)).logits, expected)
    assert huggingface.patch(model) == report
    huggingface.unpatch(model)
    assert snapshot(model) == before


@torch.no_grad()
def test_unpatching_twice_or_for_nothing_changes_nothing():
    model = tiny_model("deepseek_v3")
    before = snapshot(model)
    huggingface.unpatch(model)
    assert snapshot(model) == before
    huggingface.patch(model)
    huggingface.patch(model, emit="stages")
    huggingface.unpatch(model)
    huggingface.unpatch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize(
    "pass_on", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
@torch.no_grad()
def test_copies_of_a_patched_model_find_back_too(family, pass_on):
    model = tiny_model(family, implementation="grouped_mm")
    before, expected = snapshot(model), model(tokens(2, 6)).logits
    huggingface.patch(model)
    twin = pass_on(model)
    huggingface.unpatch(twin)
    assert snapshot(twin) == before
    assert torch.equal(twin(tokens(2, 6)).logits, expected)
    assert model.config._experts_implementation == "moe_ops"
    with Calls("moe.topk_routing") as calls:
        model(tokens(2, 6))
    assert calls.total == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_stock_experts_behind_patched_routers(family, dtype):
    exact = tiny_model(family).model.layers[1].mlp.double()
    hidden = torch.randn(1, 33, HIDDEN, generator=torch.Generator().manual_seed(5)).to(dtype)
    model = tiny_model(family, dtype)
    huggingface.patch(model)
    block = model.model.layers[1].mlp
    router = block.router if family == "gpt_oss" else block.gate
    for implementation in (*STOCK, "moe_ops"):
        model.set_experts_implementation(implementation)
        with Calls("moe.topk_routing", "moe.fused_experts", "moe.fused_moe") as calls:
            output = first(block(hidden))
            _, _, ids = router(hidden.reshape(-1, HIDDEN))
        in_one = calls.counts.pop("moe.fused_moe", 0)  # which routes inside
        ours = {"moe.fused_experts": 1} if implementation == "moe_ops" and not in_one else {}
        assert calls.counts == {"moe.topk_routing": 2 - in_one, **ours}
        assert in_one <= (implementation == "moe_ops")
        assert ids.dtype == (torch.int32 if implementation == "moe_ops" else torch.int64)
        expected = first(with_routing_of(router, exact, hidden))
        error = ((output.double() - expected).norm() / expected.norm()).item()
        assert error < FORMAT_ERROR[dtype], implementation


def first(output):
    return output[0] if isinstance(output, tuple) else output


def with_routing_of(router, exact, hidden):
    """The block in float64, its experts chosen by `router`: rounded logits may choose others."""
    logits, weights, ids = router(hidden.reshape(-1, HIDDEN))
    exact = copy.deepcopy(exact)
    theirs = exact.router if hasattr(exact, "router") else exact.gate
    theirs.forward = lambda _: (logits.double(), weights.double(), ids.long())
    exact.experts.config._experts_implementation = "eager"
    return exact(hidden.double())


@pytest.mark.parametrize("implementation", STOCK)
def test_training_with_stock_experts_behind_patched_routers(implementation):
    stock, ours = pair("qwen3_moe")
    huggingface.patch(ours)
    for model in (stock, ours):
        model.set_experts_implementation(implementation)
        ids = tokens(2, 12)
        model(ids, labels=ids, output_router_logits=True).loss.backward()
    for (name, expected), actual in zip(stock.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-6, msg=name)


@torch.no_grad()
def test_what_was_set_after_patching_is_undone_too():
    model = tiny_model("mixtral", implementation="grouped_mm")
    before = snapshot(model)
    huggingface.patch(model)
    model.set_experts_implementation("eager")
    huggingface.unpatch(model)
    assert snapshot(model) == before
    huggingface.patch(model)
    model.set_experts_implementation("eager")
    huggingface.patch(model)
    assert model.config._experts_implementation == "moe_ops"
    with Calls("moe.fused_moe") as calls:
        model(tokens(1, 6))
    assert calls.total == 2
    huggingface.unpatch(model)
    assert snapshot(model) == before


def test_configs_that_experts_do_not_read_come_back_too():
    """As in models of several parts, whose own config names an implementation that nobody reads."""
    model = tiny_model("mixtral", implementation="grouped_mm")
    part = copy.deepcopy(model.config)
    part._experts_implementation = "batched_mm"
    for layer in model.model.layers:
        layer.mlp.experts.config = part
    before = snapshot(model)
    huggingface.patch(model)
    assert model.config._experts_implementation == "grouped_mm"
    model.set_experts_implementation("eager")
    huggingface.unpatch(model)
    assert snapshot(model) == before


@torch.no_grad()
def test_a_block_can_be_unpatched_alone():
    model = tiny_model("mixtral")
    block = model.model.layers[0].mlp
    before = snapshot(block)
    huggingface.patch(model)
    huggingface.unpatch(block)
    assert snapshot(block) == before
    with Calls("moe.topk_routing") as calls:  # the other router is still ours, and fits what runs behind it
        model(tokens(1, 6))
    assert calls.total == 1


@torch.no_grad()
def test_other_models_of_the_same_config_keep_their_patch():
    config = tiny_config("mixtral")
    first_model, second_model = (type(tiny_model("mixtral"))(config) for _ in range(2))
    huggingface.patch(first_model)
    huggingface.patch(second_model)
    huggingface.unpatch(first_model)
    assert second_model.config._experts_implementation == "moe_ops"
    assert routers.is_installed(second_model.model.layers[0].mlp.gate)


@torch.no_grad()
def test_compiled_code_follows():
    model = tiny_model("qwen3_moe", implementation="grouped_mm", num_hidden_layers=1, use_cache=False)
    ran = []

    def backend(graph_module, example_inputs):
        is_ours = "topk_routing" in graph_module.code
        return lambda *args: ran.append(is_ours) or graph_module(*args)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    expected = compiled(tokens(2, 6)).logits
    for change in (huggingface.patch, huggingface.unpatch, huggingface.patch):
        change(model)
        torch.testing.assert_close(compiled(tokens(2, 6)).logits, expected)
    assert ran == [False, True, False, True]


@pytest.mark.parametrize("broken", ["find", "settle", "deepcopy"])
def test_a_failure_leaves_the_model_as_it_was(broken, monkeypatch):
    model = tiny_model("gpt_oss")
    before = snapshot(model)
    owner = {"find": patching, "settle": patching.experts, "deepcopy": patching.copy}[broken]
    works, calls = getattr(owner, broken), []

    def fails_at_last(*args):
        calls.append(args)
        if broken == "find" or len(calls) > 1:
            raise RuntimeError("no")
        return works(*args)

    monkeypatch.setattr(owner, broken, fails_at_last)
    with pytest.raises(RuntimeError, match="no"):
        huggingface.patch(model)
    monkeypatch.undo()
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"emit": "eager"}, r"emit='eager': expected one of 'auto', 'stages', 'fused'"),
        (
            {"save_for_backward": True},
            r"save_for_backward=True: expected one of 'auto', 'inputs', 'projections', 'activations'",
        ),
    ],
)
def test_options_that_are_none(options, text):
    model = tiny_model("mixtral")
    before = snapshot(model)
    with pytest.raises(ValueError, match=text):
        huggingface.patch(model, **options)
    assert snapshot(model) == before


def test_only_modules_can_be_unpatched():
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        huggingface.unpatch("mixtral")
