"""Options of a layer in code that is compiled for a GPU: values and gradients beside those without a compiler.

Each with a number of tokens that is known and with one that is open, which are launches and operator calls.
"""

import copy

import pytest
import torch

import inductor_passes
import layers
import moe_ops
from layers import ExpertsConfig, MoEBlock, MoEConfig, RouterConfig, SharedExpertConfig
from tests.helpers import mixed, relative_error

pytestmark = pytest.mark.gpu
E, K, H, I = 16, 4, 256, 192
GROUPS = moe_ops.RoutingConfig(K, "sigmoid", num_groups=4, topk_groups=2, group_score="top2_sum", scale=2.5)
OPTIONS = {
    "plain": {},
    "biases": {"has_bias": True},
    "gpt-oss": {"activation": moe_ops.Activation("swiglu_oai", interleaved=True), "has_bias": True},
    "without a gate": {"activation": "relu2_no_mul"},
    "groups": {"routing": GROUPS, "router": RouterConfig(has_correction_bias=True)},
    "weighed inputs": {
        "top_k": 1,
        "routing": moe_ops.RoutingConfig(1, "sigmoid", renormalize=False),
        "router": RouterConfig(weight_on="input"),
    },
    "scales": {"router": RouterConfig(has_expert_scale=True)},
    "shared": {"shared_experts": SharedExpertConfig(128, gated="sigmoid")},
    "shared, overlapped": {"shared_experts": SharedExpertConfig(128, overlap=True)},
    "zero experts": {"experts": ExpertsConfig(num_zero_experts=4)},
    "latent": {"experts": ExpertsConfig(latent_size=128)},
    "padded": {"experts": ExpertsConfig(padded_size=320)},
    "norms": {"experts": ExpertsConfig(post_norm_eps=1e-6)},
    "chunks": {"experts": ExpertsConfig(chunk_size=48)},
    "inputs saved": {"save_for_backward": "inputs"},
    "activations saved": {"save_for_backward": "activations"},
    "stages": {"emit": "stages"},
}
QUANTISED = {
    "float8": (layers.WeightScale.BLOCK, (64, 64), torch.float8_e4m3fn, False),
    "int8": (layers.WeightScale.CHANNEL, (1, 1), torch.int8, False),
    "MXFP4": (layers.WeightScale.GROUP, (1, 32), torch.uint8, False),
    "NVFP4": (layers.WeightScale.GROUP, (1, 16), torch.float4_e2m1fn_x2, False),
    "int4": (layers.WeightScale.GROUP, (1, 32), torch.uint4, True),
}


def _block(top_k=K, **options):
    torch.manual_seed(0)
    block = MoEBlock(MoEConfig(E, top_k, H, I, **options), dtype=torch.bfloat16)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return block


def _tokens(count, requires_grad=False):
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randn(count, H, generator=generator).bfloat16().cuda()
    return tokens.requires_grad_(requires_grad)


def _compiled(block, dynamic):
    return torch.compile(block, fullgraph=True, dynamic=dynamic, options=inductor_passes.options())


def _gradients(run, block, tokens):
    block.zero_grad(set_to_none=True)
    out = run(tokens)
    (out.float() * torch.linspace(0.5, 1.5, out.numel(), device="cuda").view(out.shape)).sum().backward()
    named = {name: each.grad for name, each in block.named_parameters() if each.grad is not None}
    return {"output": out.detach(), "tokens": tokens.grad, **named}


def _expect_alike(block, compiled):
    eager = copy.deepcopy(block)
    for count in (64, 33):
        with torch.no_grad():
            assert relative_error(compiled(_tokens(count)), eager(_tokens(count))) < 2e-2
        ours = _gradients(compiled, block, _tokens(count, True))
        theirs = _gradients(eager, eager, _tokens(count, True))
        assert ours.keys() == theirs.keys()
        worst = {name: relative_error(each, theirs[name]) for name, each in ours.items()}
        assert max(worst.values()) < 3e-2, worst


@pytest.mark.parametrize(("name", "dynamic"), mixed(OPTIONS, (False, True)))
def test_an_option(name, dynamic):
    block = _block(**OPTIONS[name]).cuda()
    _expect_alike(block, _compiled(block, dynamic))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("num_adapters", [1, 2])
def test_adapters(num_adapters, dynamic):
    block = _block()
    ids = torch.arange(64, dtype=torch.int32) % (num_adapters + 1) - 1
    block.experts.lora = layers.ExpertLora(block.experts, num_adapters, 8, ids)
    torch.nn.init.normal_(block.experts.lora.b13, std=0.1)
    torch.nn.init.normal_(block.experts.lora.b2, std=0.1)
    block.cuda()
    _expect_alike(block, _compiled(block, dynamic))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", QUANTISED)
def test_fewer_bits(name, dynamic):
    kind, size, dtype, zero_points = QUANTISED[name]
    block = _block()
    layers.quantise_experts(block.experts, kind, size, dtype=dtype, rows="exact", zero_points=zero_points)
    block.cuda()
    _expect_alike(block, _compiled(block, dynamic))
