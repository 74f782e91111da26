"""Blocks inside torch.autocast: a gate keeps its own dtype when it has one, all else has autocast's."""

import copy

import pytest
import torch

from layers import ExpertLora, ExpertsConfig, FusedMoE, MoEBlock, MoEConfig, RouterConfig, SharedExpertConfig
from layers.router import Router
from moe_ops import RoutingConfig

H, I, E, K, T = 64, 8, 64, 4, 2000


def make_block(gate_dtype, **options) -> MoEBlock:
    torch.manual_seed(1)
    config = MoEConfig(E, K, H, I, router=RouterConfig(has_bias=True, gate_dtype=gate_dtype), **options)
    return MoEBlock(config)


def exact_ids(gate: Router, hidden: torch.Tensor) -> torch.Tensor:
    logits = hidden.double() @ gate.weight.double().T + gate.bias.double()
    return logits.topk(K).indices.sort(-1).values


@pytest.fixture(params=["eager", "compiled"])
def routed(request):
    """The routing of a forward inside autocast."""

    def run(block, hidden):
        forward = block.forward_with_routing
        if request.param == "compiled":
            forward = torch.compile(forward, backend="aot_eager", fullgraph=True)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            return forward(hidden)[1]

    return run


def test_a_float32_gate_picks_the_exact_experts(routed):
    block, hidden = make_block(torch.float32), torch.randn(T, H)
    routing = routed(block, hidden)
    assert routing.router_logits.dtype == torch.float32
    assert torch.equal(routing.topk_ids.long().sort(-1).values, exact_ids(block.gate, hidden))


def test_a_float64_gate_is_float64(routed):
    block, hidden = make_block(torch.float64), torch.randn(5, H)
    logits = routed(block, hidden).router_logits
    expected = hidden.double() @ block.gate.weight.double().T + block.gate.bias.double()
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits, expected)


def test_a_gate_of_no_dtype_follows_autocast(routed):
    block, hidden = make_block(None), torch.randn(T, H)
    routing = routed(block, hidden)
    assert routing.router_logits.dtype == torch.bfloat16
    others = (routing.topk_ids.long().sort(-1).values != exact_ids(block.gate, hidden)).any(-1)
    assert others.float().mean() > 0.01  # what a float32 gate is for


def test_gradients_of_a_float32_gate():
    block, hidden = make_block(torch.float32), torch.randn(9, H)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = block.gate(hidden)
    cotangent = torch.randn(9, E)
    (gradient,) = torch.autograd.grad(logits, block.gate.weight, cotangent)
    torch.testing.assert_close(gradient, cotangent.T @ hidden)


def test_meta_tensors_inside_autocast():
    gate = Router(make_block(torch.float32).config, device="meta")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gate(torch.empty(3, H, device="meta")).dtype == torch.float32


SCALED = {
    "router": RouterConfig(scale_on="output"),
    "routing": RoutingConfig(K, "sigmoid", scale=2.5),
}


@pytest.mark.parametrize(
    "options", [SCALED, {"experts": ExpertsConfig(padded_size=H + 8)}], ids=["scaled", "padded"]
)
def test_shared_experts_join_an_output_that_is_changed_before(options):
    torch.manual_seed(1)
    block = MoEBlock(MoEConfig(E, K, H, I, shared_experts=SharedExpertConfig(8), **options))
    hidden, cast = torch.randn(9, H), copy.deepcopy(block).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(block(hidden), cast(hidden.bfloat16()))


@pytest.mark.parametrize("num_adapters", [0, 1, 2])
@pytest.mark.parametrize("tokens", [5, 0])
def test_what_joins_experts_with_adapters_or_a_norm_is_cast_as_with_others(tokens, num_adapters):
    """`shared` of a layer, in the dtype that tokens have."""
    torch.manual_seed(1)
    experts = ExpertsConfig(post_norm_eps=1e-5 if num_adapters != 1 else None)
    layer = FusedMoE(MoEConfig(E, K, H, I, experts=experts))
    if num_adapters:
        layer.lora = ExpertLora(layer, num_adapters, 2, torch.zeros(8, dtype=torch.int32))
        torch.nn.init.normal_(layer.lora.b2)
    hidden, logits, shared = torch.randn(tokens, H), torch.randn(tokens, E), torch.randn(tokens, H)
    cast = copy.deepcopy(layer).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(hidden, logits, shared)
    assert torch.equal(output, cast(hidden.bfloat16(), logits, shared.bfloat16()))


@pytest.mark.parametrize("tokens", [5, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_return_their_input_follow_autocast(dtype, tokens):
    options = {"plain": ExpertsConfig(), "zero experts": ExpertsConfig(num_zero_experts=2)}
    for experts in options.values():
        block, hidden = MoEBlock(MoEConfig(4, 2, H, I, experts=experts)), torch.randn(tokens, H, dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert block(hidden).dtype == torch.bfloat16
            compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
            assert compiled(hidden).dtype == torch.bfloat16
