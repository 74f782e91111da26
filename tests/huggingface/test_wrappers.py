"""Models whose experts or routers sit inside wrappers: PEFT before and after `patch`, and others."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from layers import huggingface
from tests.counting import Calls
from tests.coverage.cases import outputs, stock_model
from tests.helpers import mixed
from tests.huggingface.families import pair, tiny_model, tokens
from tests.huggingface.loops import HIDDEN, Loop, block

peft = pytest.importorskip("peft")  # this module is also collected where only GPU tests run

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# What is trained: (LoraConfig's options, experts modules, routers) of each of two layers.
TRAINED = {
    "attention": ({"target_modules": ["o_proj"]}, 1, 1),
    "experts": ({"target_modules": [], "target_parameters": EXPERTS}, 1, 1),
    "one_projection": ({"target_modules": [], "target_parameters": EXPERTS[:1]}, 1, 1),
    "router": ({"target_modules": [], "target_parameters": ["mlp.{router}.weight"]}, 1, 1),
    "all": ({"target_modules": ["o_proj"], "target_parameters": [*EXPERTS, "mlp.{router}.weight"]}, 1, 1),
    "whole_router": ({"target_modules": ["o_proj"], "modules_to_save": ["{router}"]}, 1, 2),
    "whole_experts": ({"target_modules": ["o_proj"], "modules_to_save": ["experts"]}, 2, 1),
}
FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss")


def lora(family, trained):
    """Adapters that start random, so that they matter before the first step."""
    router = "router" if family == "gpt_oss" else "gate"
    options = {
        name: [value.format(router=router) for value in values]
        for name, values in TRAINED[trained][0].items()
    }
    return peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **options)


def adapted(model, config):
    torch.manual_seed(3)
    return peft.get_peft_model(model, config)


def stock_and_ours(family, trained, patch_first):
    stock, ours = pair(family)
    config = lora(family, trained)
    if patch_first:
        huggingface.patch(ours)
    stock, ours = adapted(stock, copy.deepcopy(config)), adapted(ours, config)
    return stock, ours, huggingface.patch(ours)


@pytest.mark.parametrize(
    ("trained", "family", "patch_first"), mixed(TRAINED, FAMILIES, (False, True), rounds=2)
)
def test_adapters_train_as_in_the_stock_model(family, trained, patch_first):
    stock, ours, report = stock_and_ours(family, trained, patch_first)
    _, experts, routers = TRAINED[trained]
    assert (len(report.experts), len(report.routers), report.left) == (2 * experts, 2 * routers, ())
    ids = tokens(2, 12)
    with Calls("moe.topk_routing", "moe.fused_experts") as calls:
        loss = ours(ids, labels=ids).loss
    assert calls.names == ["moe.fused_experts"] * 2 + ["moe.topk_routing"] * 2
    stock_loss = stock(ids, labels=ids).loss
    torch.testing.assert_close(loss, stock_loss)
    loss.backward()
    stock_loss.backward()
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    expected = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    assert gradients
    for name, gradient in gradients.items():
        assert expected[name].any(), name
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("patch_first", [False, True], ids=["peft_then_patch", "patch_then_peft"])
@torch.no_grad()
def test_merged_adapters_and_the_way_back(patch_first):
    stock, ours, _ = stock_and_ours("mixtral", "all", patch_first)
    ids = tokens(2, 9)
    torch.testing.assert_close(ours(ids).logits, stock(ids).logits)
    with ours.disable_adapter(), stock.disable_adapter():
        torch.testing.assert_close(ours(ids).logits, stock(ids).logits)
    huggingface.unpatch(ours)
    assert torch.equal(ours(ids).logits, stock(ids).logits)
    huggingface.patch(ours)
    merged, stock_merged = ours.merge_and_unload(), stock.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, stock_merged(ids).logits)
    huggingface.unpatch(merged)
    assert torch.equal(merged(ids).logits, stock_merged(ids).logits)
    assert merged.config._experts_implementation == "eager"


# Routers around a linear module, or in a block of their own, and the experts of such a block: what of them is trained.
INSIDE = (
    ("afmoe", {"target_modules": ["q_proj"], "modules_to_save": ["router.gate"]}),
    ("longcat_flash", {"target_modules": ["classifier"]}),
    ("llama4", {"target_modules": [], "target_parameters": ["feed_forward.router.weight"]}),
    ("llama4", {"target_modules": [], "target_parameters": ["feed_forward.experts.gate_up_proj"]}),
)


@pytest.mark.parametrize("patch_first", [False, True], ids=["peft_then_patch", "patch_then_peft"])
@pytest.mark.parametrize(
    ("name", "trained"), INSIDE, ids=["afmoe", "longcat_flash", "llama4", "llama4_experts"]
)
@torch.no_grad()
def test_what_is_trained_inside_a_block(name, trained, patch_first):
    stock = stock_model(name)
    ours = copy.deepcopy(stock)
    if patch_first:
        huggingface.patch(ours)
    stock, ours = (
        adapted(model, peft.LoraConfig(r=2, init_lora_weights=False, **trained)) for model in (stock, ours)
    )
    huggingface.patch(ours)
    for model in (stock, ours):
        for key, parameter in model.named_parameters():
            if "modules_to_save" in key:
                parameter.mul_(-1.5)
    torch.testing.assert_close(*(outputs(model, name)[0] for model in (ours, stock)), rtol=1e-4, atol=1e-4)
    with ours.disable_adapter(), stock.disable_adapter():
        torch.testing.assert_close(
            *(outputs(model, name)[0] for model in (ours, stock)), rtol=1e-4, atol=1e-4
        )
    merged = [outputs(model.merge_and_unload(), name)[0] for model in (ours, stock)]
    torch.testing.assert_close(*merged, rtol=1e-4, atol=1e-4)


def test_a_router_around_a_wrapper_keeps_its_own_code_and_is_named():
    name, trained = INSIDE[0]
    report = huggingface.patch(adapted(stock_model(name), peft.LoraConfig(r=2, **trained)))
    assert report.routers == () and len(report.left) == 2
    assert all(path.endswith(".router") and "keeps its own code" in why for path, why in report.left)


@torch.no_grad()
def test_stacked_experts_come_back_once_their_adapters_are_merged():
    """Half brought back, the next forward would be an AttributeError of experts that have no forward."""
    ours = block(Loop)
    huggingface.patch(ours, stack_experts=True)
    options = {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}
    changed = adapted(ours, peft.LoraConfig(r=2, init_lora_weights=False, **options))
    hidden = torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(3))
    expected = changed(hidden)[0]
    with pytest.raises(ValueError, match=r"experts\.base_layer is stacked, and inside a wrapper: expected"):
        huggingface.unpatch(changed)
    assert torch.equal(changed(hidden)[0], expected)
    merged = changed.merge_and_unload()
    huggingface.unpatch(merged)
    assert isinstance(merged.experts, nn.ModuleList)
    torch.testing.assert_close(merged(hidden)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("save_for_backward", ["inputs", "activations"])
def test_adapters_of_experts_under_gradient_checkpointing(save_for_backward):
    stock, ours = pair("mixtral")
    config = lora("mixtral", "experts")
    stock, ours = adapted(stock, copy.deepcopy(config)), adapted(ours, config)
    huggingface.patch(ours, save_for_backward=save_for_backward)
    ids = tokens(2, 12)
    for model in (stock, ours):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        model(ids, labels=ids).loss.backward()
    for (name, expected), actual in zip(stock.named_parameters(), ours.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "wrap",
    [checkpoint_wrapper, lambda module: torch.compile(module, backend="eager")],
    ids=["checkpoint", "compile"],
)
@torch.no_grad()
def test_other_wrappers_are_looked_through(wrap):
    stock, ours = pair("mixtral")
    for layer in ours.model.layers:
        layer.mlp.gate, layer.mlp.experts = wrap(layer.mlp.gate), wrap(layer.mlp.experts)
    report = huggingface.patch(ours)
    assert (len(report.experts), len(report.routers), report.left) == (2, 2, ())
    torch.testing.assert_close(ours(tokens(1, 9)).logits, stock(tokens(1, 9)).logits)


class Twice(nn.Module):
    """A wrapper that nobody knows, around whatever it is given."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


def test_an_unknown_router_inside_a_wrapper_is_named():
    model = tiny_model("mixtral")
    gate = model.model.layers[0].mlp.gate
    gate.__class__ = type(
        "OwnRouter", (type(gate),), {"forward": lambda self, hidden: None, "__module__": "elsewhere"}
    )
    model.model.layers[0].mlp.gate = Twice(gate)
    report = huggingface.patch(model)
    assert report.routers == ("model.layers.1.mlp.gate",)
    assert report.left == (
        ("model.layers.0.mlp.gate", "Twice computes nothing that topk_routing does: it keeps its own code"),
    )


def test_an_unknown_router_of_transformers_inside_a_wrapper_is_named():
    model = tiny_model("mixtral")
    gate = model.model.layers[0].mlp.gate
    own = {"forward": lambda self, hidden: None, "__module__": "transformers.models.other"}
    gate.__class__ = type("OtherRouter", (type(gate),), own)
    model.model.layers[0].mlp.gate = Twice(gate)
    reason = "OtherRouter computes nothing that topk_routing does: it keeps its own code"
    assert huggingface.patch(model).left == (("model.layers.0.mlp.gate.inner", reason),)


def test_experts_without_a_router_are_named():
    block = tiny_model("mixtral").model.layers[0].mlp
    report = huggingface.patch(block.experts)
    assert report.experts == ("",)
    ((name, reason),) = report.left
    assert name == ""
    assert "no router called gate or router beside it" in reason
    block.dispatch, block.gate = block.gate, None
    assert [name for name, _ in huggingface.patch(block).left] == ["experts"]


@torch.no_grad()
def test_a_router_of_another_layer_is_not_taken():
    model = tiny_model("mixtral")
    model.model.gate = copy.deepcopy(model.model.layers[0].mlp.gate)  # beside the layers, of no block
    for layer in model.model.layers:
        layer.mlp.dispatch = layer.mlp.gate
        del layer.mlp.gate
    report = huggingface.patch(model)
    assert report.routers == ()
    assert len(report.left) == 2


def test_a_router_whose_options_are_not_ours_is_named():
    model = tiny_model("deepseek_v3")
    model.model.layers[1].mlp.gate.topk_group = 0
    report = huggingface.patch(model)
    assert report.routers == ("model.layers.0.mlp.gate",)
    ((name, reason),) = report.left
    assert name == "model.layers.1.mlp.gate"
    assert "DeepseekV3TopkRouter computes nothing that topk_routing does" in reason
