"""Experts that our operators cannot run are left alone with the reason, and those that they can are not."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_map
from transformers import MixtralForCausalLM

from layers import huggingface
from tests.huggingface.families import HIDDEN, pair, tiny_config, tiny_model, tokens
from tests.layers.test_fsdp import mesh  # noqa: F401  # a fixture


class Int8Tensor(torch.Tensor):
    """A weight that says it is float32 and holds int8, the way torchao's tensors do."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=torch.float32, device=values.device
        )

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    @classmethod
    def quantised(cls, weight):
        scale = weight.abs().amax() / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def dequantised(self):
        return self.values.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        if "moe" in str(func):
            raise NotImplementedError(f"{func} on Int8Tensor")
        plain = tree_map(
            lambda leaf: leaf.dequantised() if isinstance(leaf, cls) else leaf, (args, kwargs or {})
        )
        return func(*plain[0], **plain[1])


class FunctionTensor(torch.Tensor):
    """A subclass that knows functions by name, and none of ours."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs or {})


class Tagged(torch.Tensor):
    """A subclass with nothing of its own."""


@torch.no_grad()
def test_tensor_subclasses_are_refused():
    stock, ours = pair("mixtral")
    for model in (stock, ours):
        experts = model.model.layers[0].mlp.experts
        experts.down_proj = nn.Parameter(Int8Tensor.quantised(experts.down_proj.data), requires_grad=False)
    report = huggingface.patch(ours)
    assert report.experts == report.routers == ()
    reasons = dict(report.left)
    assert reasons["model.layers.0.mlp.experts"] == (
        "experts of type Int8Tensor: expected plain tensors, or DTensor shards of them"
    )
    assert reasons["model.layers.1.mlp.experts"] == "shares its config with model.layers.0.mlp.experts"
    assert torch.equal(ours(tokens(1, 6)).logits, stock(tokens(1, 6)).logits)


def test_subclasses_that_override_functions_are_refused():
    model = tiny_model("mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.data.as_subclass(FunctionTensor))
    assert "FunctionTensor" in dict(huggingface.patch(model).left)["model.layers.1.mlp.experts"]


@torch.no_grad()
def test_subclasses_with_nothing_of_their_own_are_fine():
    stock, ours = pair("mixtral")
    for layer in ours.model.layers:
        layer.mlp.experts.down_proj = nn.Parameter(layer.mlp.experts.down_proj.data.as_subclass(Tagged))
    assert huggingface.patch(ours).left == ()
    torch.testing.assert_close(torch.Tensor(ours(tokens(1, 6)).logits), stock(tokens(1, 6)).logits)


def test_shards_that_are_gathered_in_time_are_fine(mesh):  # noqa: F811
    model = tiny_model("mixtral")
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.down_proj = nn.Parameter(distribute_tensor(experts.down_proj.data, mesh, [Shard(0)]))
    assert huggingface.patch(model).left == ()


def test_fake_models_are_patched():
    with FakeTensorMode():
        model = MixtralForCausalLM(tiny_config("mixtral"))
        assert huggingface.patch(model).left == ()
        block = model.model.layers[0].mlp
        assert block(torch.empty(2, 6, HIDDEN)).shape == (2, 6, HIDDEN)


@torch.no_grad()
def test_a_patched_model_from_the_meta_device():
    stock = tiny_model("deepseek_v3").model.layers[1].mlp
    with torch.device("meta"):
        ours = tiny_model("deepseek_v3").model.layers[1].mlp
    report = huggingface.patch(ours)
    assert (len(report.experts), len(report.routers)) == (1, 1)
    ours.to_empty(device="cpu").load_state_dict(stock.state_dict())
    hidden = torch.randn(1, 9, HIDDEN)
    torch.testing.assert_close(ours(hidden), stock(hidden))


@pytest.mark.parametrize("config", [None, {"_experts_implementation": "eager"}])
def test_experts_without_a_transformers_config_are_refused(config):
    block = tiny_model("mixtral").model.layers[0].mlp
    block.experts.config = config
    report = huggingface.patch(block)
    assert report.experts == ()
    assert "no transformers config" in dict(report.left)["experts"]


@torch.no_grad()
def test_experts_of_another_config_are_not_dragged_along():
    model = tiny_model("mixtral")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.config = type(second.config)(**second.config.to_dict())
    second.config._experts_implementation = "eager"
    first.down_proj = nn.Parameter(first.down_proj.data.to(torch.float8_e4m3fn), requires_grad=False)
    report = huggingface.patch(model)
    assert report.experts == ("model.layers.1.mlp.experts",)
    assert report.routers == ("model.layers.1.mlp.gate",)
    assert [name for name, _ in report.left] == ["model.layers.0.mlp.experts"]
