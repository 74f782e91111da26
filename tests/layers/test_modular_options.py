"""What a layer is configured to do, behind an exchange: any routing, replicas, padding, latent experts, chunks."""

import copy

import pytest
import torch

from layers import (
    BatchedExperts,
    EplbState,
    ExpertLora,
    ExpertPlacement,
    ExpertsConfig,
    FusedMoE,
    MoEBlock,
    RoutedExpertsCapture,
    RoutedExpertsReplay,
    RouterConfig,
    SharedExpertConfig,
    StandardExperts,
)
from moe_ops import RoutingConfig
from tests.helpers import assert_matches_oracle, mixed
from tests.layers import oracle
from tests.layers.modular import FORMATS, E, H, I, K, config, standard
from tests.layers.test_expert_options import _seen

formats = pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
REDUNDANT = 3
HELD = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4, 0, 0, 3])  # by place


def _of_tokens(hidden_states, router_logits, top_k, renormalize):
    """Logits of one feature more or less: another choice than that of the logits alone."""
    weights, ids = (router_logits + 3 * hidden_states[:, :E].to(router_logits.dtype)).topk(top_k)
    return weights.sigmoid(), ids


OPTIONS = {
    "routing function": {"router": RouterConfig(routing_function=_of_tokens)},
    "scale of each expert": {"router": RouterConfig(has_expert_scale=True)},
    "latent": {"experts": ExpertsConfig(latent_size=12), "shared_experts": SharedExpertConfig(40)},
    "padded": {"experts": ExpertsConfig(padded_size=19), "shared_experts": SharedExpertConfig(40)},
    "padded latent": {"experts": ExpertsConfig(latent_size=12, padded_size=13)},
}

KERNELS = {name: lambda make=make: make(FusedMoE(config())) for name, make in FORMATS.items()}
KERNELS["chunks"] = lambda: standard(FusedMoE(config(experts=ExpertsConfig(chunk_size=2))))


def _block(**options) -> MoEBlock:
    torch.manual_seed(5)
    block = MoEBlock(config(**options))
    if block.experts.expert_scale is not None:
        torch.nn.init.uniform_(block.experts.expert_scale, 0.5, 2)
    return block


@formats
@pytest.mark.parametrize("name", OPTIONS)
def test_values(make, name):
    block = _block(**OPTIONS[name])
    twin = copy.deepcopy(block)
    twin.experts = make(twin.experts)
    for tokens in (0, 1, 7, 33):
        hidden = torch.randn(tokens, H)
        assert_matches_oracle(twin(hidden), oracle.block(block, hidden))


@pytest.mark.parametrize(("form", "name"), mixed(FORMATS, OPTIONS))
def test_compiled(form, name):
    block = _block(**OPTIONS[name])
    twin = copy.deepcopy(block)
    twin.experts = FORMATS[form](twin.experts)
    hidden = torch.randn(7, H)
    run = torch.compile(twin, fullgraph=True, backend="aot_eager")
    assert_matches_oracle(run(hidden), oracle.block(block, hidden))


def _with_replicas():
    """A layer whose experts have moved, the layer that it was, and its state."""
    torch.manual_seed(6)
    plain, layer = FusedMoE(config()), FusedMoE(config(num_redundant_experts=REDUNDANT))
    state = EplbState.initial(1, E, REDUNDANT)
    with torch.no_grad():
        for mine, other in zip(layer.parameters(), plain.parameters(), strict=True):
            mine[:E] = other
        layer.set_eplb_state(0, *state)
        layer.balancing.place(ExpertPlacement.of(HELD, E), layer.get_expert_weights())
    return layer, plain, state


@formats
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@torch.no_grad()
def test_replicas_and_their_load(make, compiled):
    layer, plain, state = _with_replicas()
    layer.capture = RoutedExpertsCapture(torch.full((9, K), -5, dtype=torch.int32))
    kernel = make(layer)
    run = torch.compile(kernel, fullgraph=True, backend="aot_eager") if compiled else kernel
    hidden, logits = torch.randn(7, H), torch.randn(7, E)
    expected, routed = oracle.experts(plain, hidden, logits), plain.route(logits)
    assert_matches_oracle(run(hidden, logits), expected)
    assert state.expert_load_view.sum() == 7 * K
    assert torch.equal(layer.capture.buffer[:7], routed.topk_ids)
    assert_matches_oracle(run(hidden, routed), expected)  # of logical experts, whoever has chosen them
    assert layer.balancing.load_per_expert().tolist() == (2 * routed.tokens_per_expert()).tolist()


@formats
def test_someone_else_routes(make):
    layer = FusedMoE(config())
    ids = torch.randint(0, E, (7, K), dtype=torch.int32)
    layer.routing_override = RoutedExpertsReplay(ids, layer.config.routing)
    hidden, logits = torch.randn(7, H), torch.randn(7, E)
    torch.testing.assert_close(make(layer)(hidden, logits), layer(hidden, logits))
    assert torch.equal(make(layer).route(logits).topk_ids, ids)


def _chunked(**options) -> tuple[FusedMoE, FusedMoE]:
    """The same layer in chunks of four tokens, and whole."""
    torch.manual_seed(7)
    whole = FusedMoE(config(**options))
    layer = FusedMoE(config(experts=ExpertsConfig(chunk_size=4, padded_size=19), **options))
    with torch.no_grad():
        for mine, other in zip(layer.parameters(), whole.parameters(), strict=True):
            mine.zero_()[tuple(slice(size) for size in other.shape)] = other
    return layer, whole


@pytest.mark.parametrize("tokens", [0, 1, 4, 7, 13])
def test_chunks(tokens):
    layer, whole = _chunked(has_bias=True)
    hidden, logits = torch.randn(tokens, H), torch.randn(tokens, E)
    shared = torch.randn(tokens, H)
    expected = oracle.experts(whole, hidden, logits) + shared
    assert_matches_oracle(standard(layer)(hidden, logits, shared), expected)
    run = torch.compile(standard(layer), fullgraph=True, backend="aot_eager")
    assert_matches_oracle(run(hidden, logits, shared), expected)


def test_adapters_go_with_the_chunks_of_their_tokens():
    layer, ids = FusedMoE(config(experts=ExpertsConfig(chunk_size=4))), torch.tensor([0, 1, -1, 1, 0, 0, 1])
    layer.lora = ExpertLora(layer, num_adapters=2, rank=3, adapter_ids=ids)
    torch.nn.init.normal_(layer.lora.b13)
    torch.nn.init.normal_(layer.lora.b2)
    hidden, logits = torch.randn(7, H), torch.randn(7, E)
    torch.testing.assert_close(standard(layer)(hidden, logits), layer(hidden, logits))


def test_chunks_bound_what_experts_hold():
    layer, whole = (
        FusedMoE(config(experts=ExpertsConfig(chunk_size=size), emit="stages")) for size in (10, None)
    )
    hidden, logits = torch.randn(100, H), torch.randn(100, E)
    assert _seen(lambda: standard(layer)(hidden, logits)).largest == hidden.nbytes  # the output
    assert _seen(lambda: standard(whole)(hidden, logits)).largest == 100 * K * 2 * I * hidden.itemsize


def test_weights_on_the_input_are_of_one_expert():
    """Of as many experts as features, [T, H] * [T, K] would be of one shape."""
    layer = FusedMoE(config(top_k=1, router=RouterConfig(weight_on="input")))
    routed = FusedMoE(config()).route(torch.randn(7, E))
    with pytest.raises(ValueError, match=r"topk_ids has shape \[7, 2\]: expected \[7, 1\]"):
        standard(layer)(torch.randn(7, H), routed)


@pytest.mark.parametrize(
    ("experts", "options", "message"),
    [
        (StandardExperts, {"experts": ExpertsConfig(num_zero_experts=2)}, r"experts.num_zero_experts=2: expected 0"),
        (StandardExperts, {"experts": ExpertsConfig(post_norm_eps=1e-6)}, r"post_norm_eps=1e-06: expected None"),
        (BatchedExperts, {"experts": ExpertsConfig(chunk_size=4)}, r"config.experts.chunk_size=4: expected None"),
        (
            StandardExperts,
            {"routing": RoutingConfig(K, scale=2.0), "router": RouterConfig(scale_on="output")},
            r"config.router.scale_on='output': expected 'weights'",
        ),
    ],
)  # fmt: skip
def test_what_they_do_not_know(experts, options, message):
    with pytest.raises(ValueError, match=message + " in a ModularKernel"):
        experts(FusedMoE(config(**options)))


@pytest.mark.parametrize("name", KERNELS)
def test_shared_is_what_a_layer_takes(name):
    """Inside autocast in any dtype, and else of the tokens' dtype and length: a sum would promote and broadcast."""
    kernel, hidden, logits = KERNELS[name](), torch.randn(5, H), torch.randn(5, E)
    for shared in (torch.randn(5, H), torch.randn(5, H).bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            out, expected = (each(hidden, logits, shared) for each in (kernel, kernel.experts.layer))
        assert out.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    with pytest.raises(TypeError, match=r"shared has dtype torch.float64: expected torch.float32"):
        kernel(hidden, logits, torch.randn(5, H).double())
    with pytest.raises(ValueError, match=r"shared has shape \[1, 16\]: expected \[5, 16\]"):
        kernel(hidden, logits, torch.randn(1, H))
