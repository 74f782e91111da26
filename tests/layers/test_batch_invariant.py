"""A block with emit="batch_invariant": router, routed and shared experts of a token, whatever else is in the batch."""

import pytest
import torch

from layers import (
    ExpertLora,
    ExpertsConfig,
    FusedMoE,
    LocalPrepareAndFinalize,
    ModularKernel,
    MoEBlock,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
    StandardExperts,
)
from moe_ops import RoutingConfig
from tests.helpers import assert_same

T, H, I, E, K = 23, 45, 19, 7, 3
BLOCKS = {
    "plain": {},
    "shared": {"shared_experts": SharedExpertConfig(29, combination="average")},
    "gated shared, biases": {"shared_experts": SharedExpertConfig(29, "sigmoid"), "has_bias": True},
    "sigmoid, correction, float32 logits": {
        "routing": RoutingConfig(K, "sigmoid", scale=2.5),
        "router": RouterConfig(has_bias=True, has_correction_bias=True, gate_dtype=torch.float32, scale_on="output"),
    },
    "scale per expert, padded, in chunks": {
        "router": RouterConfig(has_expert_scale=True),
        "experts": ExpertsConfig(padded_size=48, chunk_size=8),
    },
}  # fmt: skip
REFUSED = {
    "zero experts": ({"experts": ExpertsConfig(num_zero_experts=1)}, "experts.num_zero_experts=1 with emit="),
    "latent": ({"experts": ExpertsConfig(latent_size=8)}, "experts.latent_size=8 with emit='batch_invariant'"),
    "norm": ({"experts": ExpertsConfig(post_norm_eps=1e-6)}, "experts.post_norm_eps=1e-06 with emit='batch_invariant'"),
    "function": ({"router": RouterConfig(routing_function=print)}, "router.routing_function=<built-in"),
    "replicas": ({"num_redundant_experts": 1}, "num_redundant_experts=1 with emit='batch_invariant': expected 0"),
    "saving": ({"save_for_backward": "inputs"}, "save_for_backward='inputs' with emit='batch_invariant'"),
    "overlap": ({"shared_experts": SharedExpertConfig(8, overlap=True)}, "emit='batch_invariant' with an overlapped"),
}  # fmt: skip


def config(emit="batch_invariant", **options):
    return MoEConfig(E, K, H, I, emit=emit, **options)


def blocks(options, dtype=torch.float32):
    """The invariant one and an ordinary one with the same weights."""
    invariant, ordinary = (
        MoEBlock(config(emit, **options)).to(dtype) for emit in ("batch_invariant", "auto")
    )
    ordinary.load_state_dict(invariant.state_dict())
    return invariant, ordinary


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_does_not_depend_on_the_batch(name, dtype):
    block, _ = blocks(BLOCKS[name], dtype)
    x = torch.randn(T, H).to(dtype)
    with torch.no_grad():
        whole = block(x)
        for rows in ([0], [T - 1], [4, 4, 2], list(range(5, 19)), list(range(T - 1, -1, -1)), []):
            assert torch.equal(block(x[rows]), whole[rows])
        noisy = torch.full_like(x, float("nan"))
        noisy[3] = x[3]
        assert torch.equal(block(noisy)[3], whole[3])
        assert torch.equal(block(x[:20].view(4, 5, H)).view(20, H), whole[:20])
        routed = block.forward_with_routing(x[7:9])[1]
        assert torch.equal(routed.router_logits, block.gate(x)[7:9])


@pytest.mark.parametrize("score_fn", ["sigmoid", "sqrtsoftplus"])
def test_routing_that_somebody_looks_at(score_fn):
    layer = FusedMoE(config(routing=RoutingConfig(K, score_fn)))
    logits = torch.randn(T, E)
    whole = layer.route(logits)
    for tokens in range(T):
        for part, all_ in zip(layer.route(logits[:tokens]), whole, strict=True):
            assert torch.equal(part, all_[:tokens])


@pytest.mark.parametrize("name", BLOCKS)
def test_it_computes_what_an_ordinary_one_does(name):
    invariant, ordinary = blocks(BLOCKS[name], torch.float64)
    x = torch.randn(T, H, dtype=torch.float64)
    outputs = [block(x) for block in (invariant, ordinary)]
    assert_same(outputs[:1], outputs[1:], 1e-6)  # routing is float32 where float32 logits are asked for
    grads = [
        torch.autograd.grad(out.square().sum(), block.gate.weight)
        for out, block in zip(outputs, (invariant, ordinary), strict=True)
    ]
    assert_same(*grads, 1e-5)


def test_a_gate_that_is_not_finite_shows():
    block, _ = blocks(BLOCKS["gated shared, biases"])
    assert block(torch.ones(2, H)).isfinite().all()
    with torch.no_grad():
        block.shared_experts.gate.weight.fill_(float("nan"))
    assert block(torch.ones(2, H)).isnan().all()


def test_float32_logits_inside_autocast():
    options = BLOCKS["sigmoid, correction, float32 logits"]
    invariant, ordinary = blocks(options)
    x = torch.randn(T, H)
    with torch.autocast("cpu", torch.bfloat16):
        logits = invariant.gate(x), ordinary.gate(x)
    assert logits[0].dtype == torch.float32
    assert_same(logits[:1], logits[1:], 1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_could_not_promise_it(name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        config(**options)


def test_what_is_added_later_is_refused():
    layer = FusedMoE(config())
    x, logits = torch.randn(T, H), torch.randn(T, E)
    layer.lora = ExpertLora(layer, 2, 4, torch.zeros(T, dtype=torch.int32))
    with pytest.raises(ValueError, match="lora with emit='batch_invariant': expected None"):
        layer(x, logits)
    with pytest.raises(
        ValueError, match=r"config\.emit='batch_invariant': expected another in a ModularKernel"
    ):
        ModularKernel(LocalPrepareAndFinalize(), StandardExperts(FusedMoE(config())))


def test_a_model_is_refused():
    import layers.huggingface

    with pytest.raises(
        ValueError, match="emit='batch_invariant': expected 'auto', 'stages' or 'fused' for a model"
    ):
        layers.huggingface.patch(torch.nn.Linear(2, 2), emit="batch_invariant")


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_on_a_gpu(name, is_compiled):
    import inductor_passes

    block = blocks(BLOCKS[name], torch.bfloat16)[0].cuda()
    x = torch.randn(700, H, device="cuda").bfloat16()
    run = (
        torch.compile(block, fullgraph=True, dynamic=True, options=inductor_passes.options())
        if is_compiled
        else block
    )
    with torch.no_grad():
        whole = block(x)
        for n in (1, 2, 8, 9, 64, 300, 700):
            assert torch.equal(run(x[-n:]), whole[-n:]), n
