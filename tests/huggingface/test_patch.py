"""What `patch` changes, what it leaves alone, and what it says about it."""

import copy
import dataclasses
import pickle
from inspect import unwrap
from types import FunctionType, MethodType

import pytest
import torch
import transformers
from torch import nn

from layers import huggingface
from layers.huggingface.recognise import Recogniser
from moe_ops import RoutingConfig
from tests.forked import run_python
from tests.helpers import relative_error
from tests.huggingface.families import (
    CONFIGS,
    EXPERTS,
    FAMILIES,
    HIDDEN,
    INTER,
    pair,
    tiny_config,
    tiny_model,
    tokens,
)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_experts_that_blocks_share(family):
    """Each block has a router of its own, and its experts under a name of its own."""
    stock, ours = pair(family)
    for model in (stock, ours):
        model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    report = huggingface.patch(ours)
    assert (report.experts, len(report.routers), report.left) == (("model.layers.0.mlp.experts",), 2, ())
    for model in (stock, ours):
        model(tokens(2, 6)).logits.square().sum().backward()
    for (name, expected), actual in zip(stock.named_parameters(), ours.parameters(), strict=True):
        assert relative_error(actual.grad, expected.grad) < 1e-4, name
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens(2, 6)).logits, stock(tokens(2, 6)).logits)
        stock.set_experts_implementation("moe_ops")
        huggingface.unpatch(ours)
        torch.testing.assert_close(ours(tokens(2, 6)).logits, stock(tokens(2, 6)).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_report_names_every_module_that_changed(family):
    model = tiny_model(family)
    report = huggingface.patch(model)
    router = "router" if family == "gpt_oss" else "gate"
    assert report.experts == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert report.routers == (f"model.layers.0.mlp.{router}", f"model.layers.1.mlp.{router}")
    assert report.left == ()
    assert "2 experts and 2 routers" in str(report)
    assert f"model.layers.1.mlp.{router}" in str(report)


def test_report_is_frozen():
    report = huggingface.PatchReport((), (), (("mlp", "reason"),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.experts = ("other",)
    assert "mlp: reason" in str(report)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_no_weight_is_copied_or_renamed(family):
    model = tiny_model(family)
    before = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in model.state_dict().items()}
    huggingface.patch(model)
    model(tokens(1, 4))
    after = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in model.state_dict().items()}
    assert after == before


@torch.no_grad()
def test_models_that_share_a_config_are_not_affected():
    config = tiny_config("mixtral")
    config._experts_implementation = "eager"
    first, second = (transformers.MixtralForCausalLM(config).eval() for _ in range(2))
    assert first.config is second.config
    expected = second(tokens(1, 6)).logits
    huggingface.patch(first)
    assert first.config is not config
    assert first.config._experts_implementation == "moe_ops"
    assert config._experts_implementation == second.config._experts_implementation == "eager"
    assert torch.equal(second(tokens(1, 6)).logits, expected)
    assert all(module.config is first.config for module in first.modules() if hasattr(module, "config"))


@torch.no_grad()
def test_patching_twice_changes_nothing_more():
    model = tiny_model("qwen3_moe")
    report = huggingface.patch(model)
    config, expected = model.config, model(tokens(1, 6)).logits
    assert huggingface.patch(model) == report
    assert model.config is config
    assert torch.equal(model(tokens(1, 6)).logits, expected)


def test_registering_twice_is_harmless():
    huggingface.register()
    huggingface.register()
    assert tiny_model("mixtral", implementation="moe_ops").config._experts_implementation == "moe_ops"


@torch.no_grad()
def test_a_single_block_can_be_patched():
    stock, ours = (model.model.layers[0].mlp for model in pair("mixtral"))
    report = huggingface.patch(ours)
    assert (report.experts, report.routers) == (("experts",), ("gate",))
    hidden = torch.randn(1, 5, HIDDEN)
    torch.testing.assert_close(ours(hidden), stock(hidden))


@torch.no_grad()
def test_copies_of_a_patched_model():
    model = tiny_model("deepseek_v3")
    report = huggingface.patch(model)
    expected = model(tokens(1, 6)).logits
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()
    assert torch.equal(twin(tokens(1, 6)).logits, expected)
    revived = pickle.loads(pickle.dumps(twin))
    torch.testing.assert_close(revived(tokens(1, 6)).logits, expected)
    assert huggingface.patch(revived) == report
    assert torch.equal(revived(tokens(1, 6)).logits, expected)


@torch.no_grad()
def test_families_with_the_same_router_code_are_patched():
    config = transformers.Dots1Config(**{**vars(tiny_config("glm4_moe")), "model_type": "dots1"})
    config._experts_implementation = "eager"
    stock = transformers.Dots1ForCausalLM(config).eval()
    ours = copy.deepcopy(stock)
    report = huggingface.patch(ours)
    assert len(report.routers) == len(report.experts) == 2
    torch.testing.assert_close(ours(tokens(1, 9)).logits, stock(tokens(1, 9)).logits)


def test_a_dense_model_has_nothing_to_report():
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    assert huggingface.patch(transformers.LlamaForCausalLM(config)) == huggingface.PatchReport((), (), ())


def own_router(model, change):
    """The model with a router of its own class in layer 0, whose weights are changed."""

    class OwnRouter(type(model.model.layers[0].mlp.gate)):
        def forward(self, hidden_states):
            logits, weights, ids = super().forward(hidden_states)
            return logits, change(weights), ids

    model.model.layers[0].mlp.gate.__class__ = OwnRouter
    return model


@torch.no_grad()
def test_an_unknown_router_keeps_its_code_and_is_named():
    stock, ours = (own_router(model, lambda weights: weights**2) for model in pair("mixtral"))
    report = huggingface.patch(ours)
    assert len(report.experts) == 2
    assert report.routers == ("model.layers.1.mlp.gate",)
    reason = "OwnRouter computes nothing that topk_routing does: it keeps its own code"
    assert report.left == (("model.layers.0.mlp.gate", reason),)
    torch.testing.assert_close(ours(tokens(1, 6)).logits, stock(tokens(1, 6)).logits)


@torch.no_grad()
def test_a_router_is_known_by_what_it_computes():
    stock, ours = (own_router(model, lambda weights: 2 * weights) for model in pair("mixtral"))
    report = huggingface.patch(ours)
    assert report.left == ()
    assert ours.model.layers[0].mlp.gate.moe_ops_routing == RoutingConfig(3, scale=2.0)
    torch.testing.assert_close(ours(tokens(1, 6)).logits, stock(tokens(1, 6)).logits)


def test_forwards_replaced_by_others_are_left_alone():
    model = tiny_model("mixtral")
    for layer, name in ((0, "gate"), (1, "experts")):
        module = getattr(model.model.layers[layer].mlp, name)
        module.forward = MethodType(lambda self, *args: type(self).forward(self, *args), module)
    report = huggingface.patch(model)
    assert report.experts == report.routers == ()
    reasons = dict(report.left)
    assert "replaced" in reasons["model.layers.1.mlp.experts"]
    assert "shares its config" in reasons["model.layers.0.mlp.experts"]
    assert model.config._experts_implementation == "eager"


def test_a_router_with_a_replaced_forward_is_left_alone():
    model = tiny_model("mixtral")
    gate = model.model.layers[0].mlp.gate
    gate.forward = MethodType(lambda self, *args: type(self).forward(self, *args), gate)
    report = huggingface.patch(model)
    assert len(report.experts) == 2
    assert report.routers == ("model.layers.1.mlp.gate",)
    assert report.left == (("model.layers.0.mlp.gate", "its forward has been replaced on the instance"),)


def test_a_router_of_the_same_code_with_other_constants_is_unknown():
    gate = tiny_model("mixtral").model.layers[0].mlp.gate
    code = unwrap(type(gate).forward).__code__
    constants = tuple(-2 if constant == -1 else constant for constant in code.co_consts)

    class Other(type(gate)):
        forward = FunctionType(code.replace(co_consts=constants), globals())

    assert Recogniser().known(gate) is not None
    gate.__class__ = Other
    assert Recogniser().known(gate) is None


def test_quantised_experts_are_left_alone():
    model = tiny_model("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.data.to(torch.float8_e4m3fn), requires_grad=False)
    report = huggingface.patch(model)
    assert report.experts == ()
    assert "float8_e4m3fn" in dict(report.left)["model.layers.0.mlp.experts"]


def test_only_modules_can_be_patched():
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        huggingface.patch("mixtral")
    with pytest.raises(TypeError, match="stack_experts='no': expected bool, got str"):
        huggingface.patch(nn.Identity(), stack_experts="no")


def test_layers_import_without_transformers():
    code = """
import sys
sys.modules["transformers"] = None
import layers, layers.huggingface
assert layers.huggingface.PatchReport((), (), ())
try:
    layers.huggingface.register()
except ImportError:
    print("refused")
"""
    done = run_python(code)
    assert done.stdout.strip() == "refused", done.stderr


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@torch.no_grad()
def test_checkpoint_round_trip(family, tmp_path):
    model = tiny_model(family)
    expected_stock = model(tokens(2, 7)).logits
    model.save_pretrained(tmp_path)
    model_class = getattr(transformers, f"{CONFIGS[family][0]}ForCausalLM")
    huggingface.patch(model)
    expected = model(tokens(2, 7)).logits
    loaded = model_class.from_pretrained(tmp_path).eval()
    assert len(huggingface.patch(loaded).routers) == 2
    assert torch.equal(loaded(tokens(2, 7)).logits, expected)
    by_name = model_class.from_pretrained(tmp_path, experts_implementation="moe_ops").eval()
    torch.testing.assert_close(by_name(tokens(2, 7)).logits, expected_stock)
    assert by_name.model.layers[0].mlp.experts.gate_up_proj.shape == (EXPERTS, 2 * INTER, HIDDEN)
    loaded.save_pretrained(tmp_path / "patched")
    again = model_class.from_pretrained(tmp_path / "patched").eval()
    torch.testing.assert_close(again(tokens(2, 7)).logits, expected_stock)
