"""Patched blocks that compute their sum themselves, eagerly and without gradients, and when they do not."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from layers import huggingface
from layers.huggingface import forwards, whole
from tests.counting import Calls
from tests.helpers import relative_error
from tests.huggingface import blocks
from tests.huggingface.families import HIDDEN, tiny_config, tiny_model

WHOLE = {"moe.fused_moe": 1}
PARTS = {"moe.topk_routing": 1, "moe.fused_experts": 1}
"""Operators of a block whose modules are called, and of one whose routed sum something is added to."""
TOGETHER = {"moe.topk_routing": 1, "moe.fused_experts_with_shared": 1}
"""Those of the latter for a few tokens."""
EXPECTED = {
    "afmoe": PARTS, "deepseek_v2": PARTS, "dots1": PARTS, "ernie4_5_moe": PARTS, "flex_olmo": WHOLE,
    "granitemoe": WHOLE, "hunyuan_v1_moe": PARTS, "lfm2_moe": WHOLE, "minimax": WHOLE, "minimax_m2": WHOLE,
    "nemotron_h": PARTS, "qwen3_next": PARTS,
}  # fmt: skip


def hidden(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


def ran(block, *args, **named):
    """What a block returns, and which operators that took."""
    with Calls("moe.fused_moe", "moe.fused_experts", *TOGETHER) as calls:
        output = block(*args, **named)
    return output, dict(calls.counts)


def is_whole(block):
    return forwards.current(block) is whole.forward


@pytest.mark.parametrize("family", EXPECTED)
@pytest.mark.parametrize("shape", [(2, 11), (1, 1), (0, 3), (2, 2), (1, 5)])
@torch.no_grad()
def test_families(family, shape):
    stock = blocks.block(family, "eager")
    ours = copy.deepcopy(stock)
    huggingface.patch(ours)
    hidden_states = hidden(*shape, blocks.HIDDEN)
    expected = stock.double()(hidden_states.double())
    actual, operators = ran(ours, hidden_states)
    assert is_whole(ours)
    is_few = shape[0] * shape[1] <= 4
    assert operators == (TOGETHER if is_few and EXPECTED[family] is PARTS else EXPECTED[family])
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_weights_that_a_block_returns(dtype):
    model = tiny_model("gpt_oss", dtype)
    stock = model.model.layers[0].mlp
    ours = copy.deepcopy(stock)
    huggingface.patch(ours)
    hidden_states = hidden(2, 7, HIDDEN).to(dtype)
    (output, weights), operators = ran(ours, hidden_states)
    expected, expected_weights = stock(hidden_states)
    assert is_whole(ours)
    assert operators == PARTS
    assert relative_error(output, expected) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert relative_error(weights, expected_weights) < (1e-5 if dtype == torch.float32 else 1e-2)


def mixtral(block_class=MixtralSparseMoeBlock, **overrides):
    """A block and the same patched."""
    torch.manual_seed(0)
    config = tiny_config("mixtral", **overrides)
    config._experts_implementation = "eager"
    stock = block_class(config).eval()
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = copy.deepcopy(stock)
    assert huggingface.patch(ours).routers == ("gate",)
    return stock, ours


@pytest.mark.parametrize("features", [16, 32])
@torch.no_grad()
def test_as_many_features_as_experts(features):
    """Qwen3-Next has 512 of both: on small twins, too, one is the size of the other."""
    stock, ours = mixtral(intermediate_size=features, num_local_experts=32)
    output, operators = ran(ours, hidden(2, 5, HIDDEN))
    assert operators == WHOLE
    torch.testing.assert_close(output, stock(hidden(2, 5, HIDDEN)))


def test_with_gradients_a_block_runs_its_own_code():
    stock, ours = mixtral()
    output, operators = ran(ours, hidden(2, 5, HIDDEN))
    assert operators["moe.topk_routing"] == 1
    assert "moe.fused_moe" not in operators
    torch.testing.assert_close(output, stock(hidden(2, 5, HIDDEN)))


@torch.no_grad()
def test_noise_in_training():
    stock, ours = mixtral(router_jitter_noise=0.5)
    outputs = []
    for block in (stock, ours):
        torch.manual_seed(3)
        outputs.append(block.train()(hidden(2, 5, HIDDEN)))
    torch.testing.assert_close(*outputs)
    assert ran(ours.eval(), hidden(2, 5, HIDDEN))[1] == WHOLE


@torch.no_grad()
def test_autocast():
    stock, ours = mixtral()
    with torch.autocast("cpu", torch.bfloat16):
        output, operators = ran(ours, hidden(2, 5, HIDDEN))
        assert operators == PARTS
        assert relative_error(output, stock(hidden(2, 5, HIDDEN))) < 2e-2


@torch.no_grad()
def test_an_argument_by_name():
    stock, ours = mixtral()
    output, operators = ran(ours, hidden_states=hidden(2, 5, HIDDEN))
    assert operators == PARTS
    torch.testing.assert_close(output, stock(hidden(2, 5, HIDDEN)))


@torch.no_grad()
def test_compiled_it_is_its_own_code():
    """In which passes know modules by their names."""
    _, ours = mixtral()
    inside = []

    def backend(graph_module, example_inputs):
        for node in graph_module.graph.nodes:
            inside.append((str(node.target), str(node.meta.get("nn_module_stack"))))
        return graph_module

    output = torch.compile(ours, backend=backend, fullgraph=True)(hidden(2, 5, HIDDEN))
    assert [".gate" in stack for target, stack in inside if "topk_routing" in target] == [True]
    torch.testing.assert_close(output, ours(hidden(2, 5, HIDDEN)))


def halve(module, args, output):
    return output / 2


def halve_weights(module, args, output):
    return output[0], output[1] / 2, output[2]


def hook_experts(block):
    block.experts.register_forward_hook(halve)


def hook_router(block):
    block.gate.register_forward_hook(halve_weights)


def forward_of_experts(block):
    own = block.experts.forward
    block.experts.forward = lambda *args: own(*args) / 2


def another_router(block):
    block.gate.top_k = 1


def another_activation(block):
    block.experts.act_fn = nn.ReLU()


def wrapped_experts(block):
    block.experts = Halved(block.experts)


class Halved(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, *args):
        return self.own(*args) / 2


CHANGES = [hook_experts, hook_router, forward_of_experts, another_router, another_activation, wrapped_experts]


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_since(change):
    stock, ours = mixtral()
    before = ours(hidden(2, 5, HIDDEN))
    for block in (stock, ours):
        change(block)
    output, operators = ran(ours, hidden(2, 5, HIDDEN))
    assert "moe.fused_moe" not in operators
    torch.testing.assert_close(output, stock(hidden(2, 5, HIDDEN)))
    assert relative_error(output, before) > 1e-2


@torch.no_grad()
def test_what_experts_get_beside_their_weights():
    """Adapters, and what records loads."""
    _, ours = mixtral()
    before = ours(hidden(1, 6, HIDDEN))
    huggingface.add_adapters(ours, 2, 2, torch.ones(6, dtype=torch.int32))
    for parameter in ours.experts.moe_ops_lora.parameters():
        nn.init.normal_(parameter)
    assert relative_error(ours(hidden(1, 6, HIDDEN)), before) > 1e-2
    huggingface.unpatch(ours)
    huggingface.patch(ours)
    ours.experts.moe_ops_balancing = torch.zeros_like
    assert relative_error(ours(hidden(1, 6, HIDDEN)), before) > 1e-2


class Doubled(MixtralSparseMoeBlock):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 2


class ScalesOneToken(MixtralSparseMoeBlock):
    def forward(self, hidden_states):
        scale = 2 if hidden_states.shape[1] == 1 else 1
        return super().forward(hidden_states) * scale


class Skips(MixtralSparseMoeBlock):
    def forward(self, hidden_states):
        return super().forward(hidden_states) + hidden_states


class ScalesByOption(MixtralSparseMoeBlock):
    scale = 1.0

    def __init__(self, config):
        super().__init__(config)
        self.scale = 1.0

    def forward(self, hidden_states):
        return super().forward(hidden_states) * self.scale


class OtherNames(MixtralSparseMoeBlock):
    def __init__(self, config):
        super().__init__(config)
        self.mixture = self.experts
        del self.experts

    def forward(self, hidden_states):
        tokens = hidden_states.flatten(0, -2)
        _, weights, ids = self.gate(tokens)
        return self.mixture(tokens, ids, weights).view(hidden_states.shape)


@torch.no_grad()
def test_experts_of_another_name():
    stock, ours = mixtral(OtherNames)
    output, operators = ran(ours, hidden(2, 5, HIDDEN))
    assert operators == WHOLE
    torch.testing.assert_close(output, stock(hidden(2, 5, HIDDEN)))


@pytest.mark.parametrize("block_class", [Doubled, ScalesOneToken, Skips])
@torch.no_grad()
def test_blocks_that_compute_something_else(block_class):
    stock, ours = mixtral(block_class)
    for shape in ((2, 5), (3, 1)):
        output, operators = ran(ours, hidden(*shape, HIDDEN))
        assert not is_whole(ours)
        assert operators == PARTS
        torch.testing.assert_close(output, stock(hidden(*shape, HIDDEN)))


@torch.no_grad()
def test_an_option_of_a_block():
    stock, ours = mixtral(ScalesByOption)
    assert ran(ours, hidden(2, 5, HIDDEN))[1] == WHOLE
    stock.scale = ours.scale = 2.0
    output, operators = ran(ours, hidden(2, 5, HIDDEN))
    assert operators == PARTS
    torch.testing.assert_close(output, stock(hidden(2, 5, HIDDEN)))


@torch.no_grad()
def test_unpatch_and_another_patch():
    stock, ours = mixtral()
    ours.jitter_noise = 0.5
    assert ran(ours, hidden(2, 5, HIDDEN))[1] == PARTS
    huggingface.patch(ours)
    assert ran(ours, hidden(2, 5, HIDDEN))[1] == WHOLE
    huggingface.unpatch(ours)
    assert not any(name.startswith("moe_ops") or name == "forward" for name in vars(ours))
    output, operators = ran(ours, hidden(2, 5, HIDDEN))
    assert operators == {}
    assert torch.equal(output, stock(hidden(2, 5, HIDDEN)))


@pytest.mark.gpu
@pytest.mark.parametrize("family", EXPECTED)
@torch.no_grad()
def test_on_a_gpu(family):
    """It gives what the block's own code gives on our operators, and is captured with other contents later."""
    ours = blocks.block(family, "eager").to("cuda", torch.bfloat16)
    parts = copy.deepcopy(ours)
    huggingface.patch(ours)
    huggingface.patch(parts)
    whole.uninstall(parts)
    for tokens in (1, 7, 33, 300):
        static = hidden(1, tokens, blocks.HIDDEN).to("cuda", torch.bfloat16)
        expected, output = parts(static), ours(static)
        assert expected.abs().max() > 0
        assert relative_error(output, expected) < 1e-2
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ours(static)
        static.copy_(static.flip(1))
        graph.replay()
        assert torch.equal(captured, ours(static))
