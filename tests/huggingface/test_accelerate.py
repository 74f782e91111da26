"""Models that accelerate's hooks move and load: `patch` works under them, for resident and offloaded layers alike."""

import copy

import pytest
import torch
import transformers

from layers import huggingface
from tests.counting import Calls
from tests.coverage.cases import stock_model
from tests.huggingface.families import CONFIGS, pair, tiny_model, tokens

accelerate = pytest.importorskip("accelerate")  # this module is also collected where only GPU tests run
hooks = pytest.importorskip("accelerate.hooks")

FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss")


def split_with_disk(model, folder):
    """The first layer stays, the second one waits on disk."""
    parts = {name: "cpu" for name, _ in model.named_children() if name != "model"}
    parts |= {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
    parts |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    return accelerate.dispatch_model(model, parts, main_device="cpu", offload_dir=folder)


OFFLOADS = {
    "disk_and_resident": split_with_disk,
    "cpu": lambda model, folder: accelerate.cpu_offload(model, execution_device="cpu"),
    "disk": lambda model, folder: accelerate.disk_offload(model, folder, execution_device="cpu"),
}


def mlps(model):
    return [layer.mlp for layer in model.model.layers]


@pytest.mark.parametrize("patch_first", [False, True], ids=["offload_then_patch", "patch_then_offload"])
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_layer_is_patched(family, offload, patch_first, tmp_path):
    stock, ours = pair(family)
    if patch_first:
        huggingface.patch(ours)
    OFFLOADS[offload](ours, str(tmp_path))
    assert mlps(ours)[1].experts.down_proj.is_meta
    report = huggingface.patch(ours)
    assert (len(report.experts), len(report.routers), report.left) == (2, 2, ())
    for batch, length in ((2, 12), (1, 1)):
        with Calls("moe.topk_routing", "moe.fused_experts") as calls:
            logits = ours(tokens(batch, length)).logits
        assert calls.total == 4
        torch.testing.assert_close(logits, stock(tokens(batch, length)).logits)
    assert mlps(ours)[1].experts.down_proj.is_meta  # put back where it waits


@pytest.mark.parametrize("patch_first", [False, True], ids=["offload_then_patch", "patch_then_offload"])
@pytest.mark.parametrize("offload", OFFLOADS)
@torch.no_grad()
def test_a_selection_bias_in_a_module_of_its_own(offload, patch_first, tmp_path):
    """It is there only while that module is called, by the router's own code."""
    stock = stock_model("ernie4_5_moe")
    ours = copy.deepcopy(stock)
    steps = [huggingface.patch, lambda model: OFFLOADS[offload](model, str(tmp_path))]
    for step in steps if patch_first else reversed(steps):
        step(ours)
    with Calls("moe.fused_experts") as calls:
        torch.testing.assert_close(ours(tokens(2, 6)).logits, stock(tokens(2, 6)).logits)
    assert calls.total >= 1


@pytest.mark.parametrize("patch_first", [False, True], ids=["offload_then_patch", "patch_then_offload"])
@torch.no_grad()
def test_the_way_back_and_the_hooks_gone(patch_first, tmp_path):
    stock, ours = pair("mixtral")
    expected = stock(tokens(2, 6)).logits
    if patch_first:
        huggingface.patch(ours)
    split_with_disk(ours, str(tmp_path))
    huggingface.patch(ours)
    huggingface.unpatch(ours)
    assert torch.equal(ours(tokens(2, 6)).logits, expected)
    huggingface.patch(ours)
    hooks.remove_hook_from_module(ours, recurse=True)
    with Calls("moe.fused_moe") as calls:
        torch.testing.assert_close(ours(tokens(2, 6)).logits, expected)
    assert calls.total == 2
    huggingface.unpatch(ours)
    assert torch.equal(ours(tokens(2, 6)).logits, expected)


@torch.no_grad()
def test_from_pretrained_with_a_device_map(tmp_path):
    model = tiny_model("mixtral")
    expected = model(tokens(2, 6)).logits
    model.save_pretrained(tmp_path / "checkpoint")
    device_map = {
        "model.embed_tokens": "cpu",
        "model.rotary_emb": "cpu",
        "model.norm": "cpu",
        "lm_head": "cpu",
    }
    loaded = getattr(transformers, f"{CONFIGS['mixtral'][0]}ForCausalLM").from_pretrained(
        tmp_path / "checkpoint",
        device_map={**device_map, "model.layers.0": "cpu", "model.layers.1": "disk"},
        offload_folder=str(tmp_path / "offload"),
    )
    report = huggingface.patch(loaded)
    assert (len(report.experts), len(report.routers), report.left) == (2, 2, ())
    torch.testing.assert_close(loaded(tokens(2, 6)).logits, expected)


class Scale(hooks.ModelHook):
    def post_forward(self, module, output):
        return tuple(2 * part if part.is_floating_point() else part for part in output)


@torch.no_grad()
def test_hooks_keep_doing_what_they_do():
    stock, ours = pair("qwen3_moe")
    for model in (stock, ours):
        for mlp in mlps(model):
            hooks.add_hook_to_module(mlp.gate, Scale())
            hooks.add_hook_to_module(mlp.gate, Scale(), append=True)
    huggingface.patch(ours)
    torch.testing.assert_close(ours(tokens(2, 6)).logits, stock(tokens(2, 6)).logits)


def test_a_forward_replaced_under_a_hook_is_left_alone():
    model = tiny_model("mixtral")
    gate = mlps(model)[0].gate
    gate.forward = lambda hidden: None
    hooks.add_hook_to_module(gate, hooks.ModelHook())
    assert huggingface.patch(model).left == (
        ("model.layers.0.mlp.gate", "its forward has been replaced on the instance"),
    )
