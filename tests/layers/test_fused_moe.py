import copy
import itertools
import pickle

import pytest
import torch

from layers import ExpertsConfig, FusedMoE, MoEConfig, RouterConfig, SharedExpertConfig, SharedExperts
from moe_ops import Activation, RoutingConfig
from tests.layers import oracle

H, I, E, K = 16, 24, 8, 2


def make_config(**options) -> MoEConfig:
    return MoEConfig(**{"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I, **options})


def inputs(*leading: int, dtype=torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*leading, H, generator=generator).to(dtype)
    return hidden, torch.randn(*leading, E, generator=generator)


def make(config: MoEConfig | None = None, dtype=torch.float32, **options) -> FusedMoE:
    torch.manual_seed(1)
    module = FusedMoE(config or make_config(), **options).to(dtype)
    if module.e_score_correction_bias is not None:
        torch.nn.init.normal_(module.e_score_correction_bias, std=0.3)
    return module


OPTIONS = {
    "plain": {},
    "bias": {"has_bias": True},
    "correction": {
        "router": RouterConfig(has_correction_bias=True),
        "routing": RoutingConfig(K, "sigmoid", scale=2.5),
    },
    "no_renorm": {"routing": RoutingConfig(K, renormalize=False)},
    "relu2": {"activation": "relu2", "has_bias": True},
    "gpt_oss": {"activation": Activation("swiglu_oai", interleaved=True), "has_bias": True},
    "situ": {"activation": Activation("situ", beta=4.0, linear_beta=25.0)},
    "ungated": {"activation": "gelu_no_mul", "routing": RoutingConfig(K, "sqrtsoftplus")},
    "weight_on_input": {
        "top_k": 1,
        "router": RouterConfig(weight_on="input"),
        "routing": RoutingConfig(1, "sigmoid"),
    },
    "stages": {"emit": "stages"},
    "fused": {"emit": "fused"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_matches_the_oracle(options, dtype, tolerance):
    options = dict(options)
    if options.get("top_k") == 1:  # renormalising one weight leaves nothing to weigh with
        options["routing"] = RoutingConfig(1, "sigmoid", renormalize=False)
    module = make(make_config(**options), dtype)
    hidden, logits = inputs(11, dtype=dtype)
    logits = logits.to(dtype)
    assert oracle.relative_error(module(hidden, logits), oracle.experts(module, hidden, logits)) < tolerance


def test_bfloat16_error_is_of_rounding_size():
    module = make(dtype=torch.bfloat16)
    hidden, logits = inputs(33, dtype=torch.bfloat16)
    out = module(hidden, logits)
    assert out.dtype == torch.bfloat16
    assert oracle.relative_error(out, oracle.experts(module, hidden, logits)) < 8e-3


@pytest.mark.parametrize("leading", [(5,), (2, 3), (2, 1, 3), (0,), (2, 0), ()])
@pytest.mark.parametrize(
    "options", [{}, {"router": RouterConfig(has_expert_scale=True)}], ids=["whole", "apart"]
)
def test_leading_dimensions_are_kept(leading, options):
    """Of a layer that is one operator, and of one whose routing is a step of its own."""
    module = make(make_config(**options))
    hidden, logits = inputs(*leading)
    out = module(hidden, logits)
    assert out.shape == hidden.shape
    flat = module(hidden.reshape(-1, H), logits.reshape(-1, E))
    assert torch.equal(out.reshape(-1, H), flat)


def test_shared_is_added():
    module = make()
    hidden, logits = inputs(2, 3)
    shared = torch.randn(2, 3, H)
    torch.testing.assert_close(module(hidden, logits, shared), module(hidden, logits) + shared)


def test_parameters_sit_on_the_module_in_order():
    module = FusedMoE(make_config(has_bias=True, router=RouterConfig(has_correction_bias=True)))
    assert [name for name, _ in module.named_parameters()] == [
        "w13_weight",
        "w2_weight",
        "w13_bias",
        "w2_bias",
    ]
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "w13_weight": (E, 2 * I, H),
        "w2_weight": (E, H, I),
        "w13_bias": (E, 2 * I),
        "w2_bias": (E, H),
    }
    assert list(module.state_dict())[-1] == "e_score_correction_bias"
    plain = FusedMoE(make_config(activation="relu2"))
    assert list(plain.state_dict()) == ["w13_weight", "w2_weight"]
    assert plain.w13_weight.shape == (E, I, H)
    assert plain.w13_bias is None
    assert plain.e_score_correction_bias is None


def test_meta_device_then_materialise(poisoned_empty):
    expert_map = torch.tensor([0, -1, 1, -1, 2, -1, 3, -1])
    config = make_config(has_bias=True, router=RouterConfig(has_correction_bias=True))
    module = FusedMoE(config, expert_map, device="meta", dtype=torch.bfloat16)
    assert all(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    assert all(torch.isfinite(parameter).all() and parameter.std() > 0 for parameter in module.parameters())
    assert module.w13_weight.dtype == torch.bfloat16
    assert module.expert_map.tolist() == expert_map.tolist()
    assert not module.e_score_correction_bias.any()
    hidden, logits = inputs(4, dtype=torch.bfloat16)
    assert torch.isfinite(module(hidden, logits)).all()


def test_meta_forward_allocates_nothing():
    module = FusedMoE(make_config(), device="meta")
    out = module(torch.empty(3, 5, H, device="meta"), torch.empty(3, 5, E, device="meta"))
    assert out.is_meta
    assert out.shape == (3, 5, H)


def test_copies_and_saved_states_compute_the_same():
    module = make(make_config(has_bias=True, router=RouterConfig(has_correction_bias=True)))
    hidden, logits = inputs(7)
    expected = module(hidden, logits)
    loaded = FusedMoE(module.config)
    assert not torch.equal(loaded(hidden, logits), expected)
    loaded.load_state_dict(module.state_dict())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert twin.w13_weight.data_ptr() != module.w13_weight.data_ptr()
        assert torch.equal(twin(hidden, logits), expected)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()])
def test_the_selection_bias_is_never_rounded(cast):
    module = make(make_config(router=RouterConfig(has_correction_bias=True)))
    expected = module.e_score_correction_bias.clone()
    cast(torch.nn.Sequential(module))
    assert module.w13_weight.dtype != torch.float32
    assert module.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(module.e_score_correction_bias, expected)
    assert "e_score_correction_bias" in dict(module.named_buffers())


def test_two_halves_of_the_experts_add_up_to_all():
    whole = make(make_config(has_bias=True))
    hidden, logits = inputs(9)
    halves = []
    for rank in range(2):
        expert_map = torch.tensor([e // 2 if e % 2 == rank else -1 for e in range(E)])
        half = FusedMoE(whole.config, expert_map)
        assert half.w13_weight.shape[0] == half.num_local_experts == E // 2
        half.load_state_dict({name: tensor[rank::2] for name, tensor in whole.state_dict().items()})
        assert oracle.relative_error(half(hidden, logits), oracle.experts(half, hidden, logits)) < 1e-5
        halves.append(half(hidden, logits))
    torch.testing.assert_close(sum(halves), whole(hidden, logits))


@pytest.mark.parametrize(
    ("expert_map", "error", "text"),
    [
        (torch.zeros(E), TypeError, "integer tensor"),
        ([0] * E, TypeError, "integer tensor"),
        (torch.zeros(E - 1, dtype=torch.int32), ValueError, r"expected \(8,\)"),
        (torch.tensor([0, 0, *[-1] * 6]), ValueError, "once"),
        (torch.tensor([0, 2, *[-1] * 6]), ValueError, "once"),
        (torch.tensor([-1] * 8), ValueError, "once"),
        (torch.tensor([0, -2, *[-1] * 6]), ValueError, "once"),
    ],
)
def test_a_bad_expert_map_raises(expert_map, error, text):
    with pytest.raises(error, match=text):
        FusedMoE(make_config(), expert_map)


def test_gradients_match_the_oracle():
    module = make(make_config(has_bias=True), torch.float64)
    hidden, logits = inputs(6, dtype=torch.float64)
    hidden, logits = hidden.requires_grad_(), logits.double().requires_grad_()

    def dense() -> torch.Tensor:
        weights, ids = logits.softmax(-1).topk(K)
        weights = weights / weights.sum(-1, keepdim=True)
        gate_up = torch.einsum("th,eih->tei", hidden, module.w13_weight) + module.w13_bias
        gate, up = gate_up.chunk(2, -1)
        every = (
            torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, module.w2_weight)
            + module.w2_bias
        )
        return (every.gather(1, ids[..., None].expand(-1, -1, H)) * weights[..., None]).sum(1)

    leaves = [hidden, logits, *module.parameters()]
    cotangent = torch.randn(6, H, dtype=torch.float64)
    expected = torch.autograd.grad(dense(), leaves, cotangent)
    actual = torch.autograd.grad(module(hidden, logits), leaves, cotangent)
    for got, want in zip(actual, expected, strict=True):
        assert want.abs().sum() > 0
        assert oracle.relative_error(got, want) < 1e-12


def test_wrong_inputs_name_what_is_wrong():
    module = make()
    hidden, logits = inputs(5)
    with pytest.raises(ValueError, match=r"hidden_states has last dimension 17: expected 16"):
        module(torch.randn(5, H + 1), logits)
    with pytest.raises(ValueError, match="router_logits"):
        module(hidden, torch.randn(4, E))
    with pytest.raises(ValueError, match=r"router_logits has last dimension 7: expected 8"):
        module(hidden, torch.randn(5, E - 1))
    with pytest.raises(TypeError, match="dtype"):
        module(hidden.half(), logits)


def test_logits_may_have_any_floating_dtype():
    module = make()
    hidden, logits = inputs(5)
    logits = logits.to(torch.bfloat16)
    outs = [module(hidden, logits.to(dtype)) for dtype in (torch.bfloat16, torch.float32)]
    for left, right in itertools.pairwise(outs):
        assert torch.equal(left, right)


def test_a_shared_expert_beside_a_layer_that_has_no_place_for_it():
    config = MoEConfig(E, K, H, I, experts=ExpertsConfig(post_norm_eps=1e-5))
    module, shared = FusedMoE(config), SharedExperts(config, SharedExpertConfig(8))
    hidden, logits = inputs(3)
    with pytest.raises(ValueError, match=r"experts.post_norm_eps=1e-05 with an overlapped shared expert"):
        module(hidden, logits, shared.operand(hidden))


@pytest.mark.parametrize("is_routed", [False, True])
@pytest.mark.parametrize("shared", [lambda: torch.ones(3, H), "ones"], ids=["function", "text"])
def test_a_shared_output_that_is_no_tensor(shared, is_routed):
    """A function is for experts that ranks share: others would leave it out."""
    module, (hidden, logits) = FusedMoE(MoEConfig(E, K, H, I)), inputs(3)
    with pytest.raises(TypeError, match=r"shared=.*: expected a torch.Tensor"):
        module(hidden, module.route(logits) if is_routed else logits, shared)
