import copy
import pickle

import pytest
import torch
from torch.nn.utils.parametrizations import spectral_norm

from layers import ExpertsConfig, MoEBlock, MoEConfig, RouterConfig, SharedExpertConfig
from moe_ops import RoutingConfig, gated_activation
from tests.counting import Calls
from tests.layers import oracle

H, I, E, K = 16, 24, 8, 2
DEEPSEEK = {
    "routing": RoutingConfig(K, "sigmoid", renorm_eps=1e-20, scale=2.5),
    "router": RouterConfig(has_correction_bias=True, gate_dtype=torch.float32),
    "shared_experts": SharedExpertConfig(40),
}
OPTIONS = {
    "mixtral": {},
    "qwen2_moe": {
        "routing": RoutingConfig(K, renormalize=False),
        "shared_experts": SharedExpertConfig(40, "sigmoid"),
    },
    "deepseek_v3": DEEPSEEK,
    "gate_bias": {"router": RouterConfig(has_bias=True), "has_bias": True},
    "relu2_shared": {"activation": "relu2", "shared_experts": SharedExpertConfig(40)},
}


def make(options: dict, dtype=torch.float32) -> MoEBlock:
    torch.manual_seed(2)
    block = MoEBlock(MoEConfig(E, K, H, I, **options), dtype=dtype)
    torch.nn.init.normal_(block.gate.weight, std=1.0)
    if block.experts.e_score_correction_bias is not None:
        torch.nn.init.normal_(block.experts.e_score_correction_bias, std=0.3)
    return block


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_matches_the_oracle(options, dtype, tolerance):
    block = make(options, dtype)
    hidden = torch.randn(3, 4, H, generator=torch.Generator().manual_seed(3)).to(dtype)
    out = block(hidden)
    assert out.dtype == dtype
    assert out.shape == hidden.shape
    assert oracle.relative_error(out, oracle.block(block, hidden)) < tolerance


def test_logits_come_in_the_gate_dtype():
    hidden = torch.randn(3, H).to(torch.bfloat16)
    assert make({}, torch.bfloat16).gate(hidden).dtype == torch.bfloat16
    assert make(DEEPSEEK, torch.bfloat16).gate(hidden).dtype == torch.float32


@pytest.mark.parametrize("has_bias", [False, True])
def test_float32_logits_of_halves_are_one_product_where_no_gradient_follows(has_bias):
    options = {"router": RouterConfig(has_bias=has_bias, gate_dtype=torch.float32)}
    gate, of_floats = make(options, torch.bfloat16).gate, make(options).gate
    hidden = torch.randn(2, 3, H).to(torch.bfloat16)
    with Calls() as calls:
        recorded = gate(hidden)
        assert recorded.requires_grad and not calls.counts
        with torch.no_grad():
            found = gate(hidden)
            assert calls.counts == {"moe.dense_gemm": 1}
            assert of_floats(hidden).dtype == gate(hidden.float()).dtype == torch.float32
    assert found.shape == (2, 3, E) and torch.equal(found, recorded)


OTHER_DTYPES = {
    "plain": {},
    "shared": {"shared_experts": SharedExpertConfig(40)},
    "overlapped": {"shared_experts": SharedExpertConfig(40, "sigmoid", overlap=True)},
    "latent": {"experts": ExpertsConfig(latent_size=8)},
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_tokens_of_another_dtype(name, compiled):
    block = make(OTHER_DTYPES[name])
    hidden = torch.randn(3, H, generator=torch.Generator().manual_seed(3)).bfloat16()
    run = torch.compile(block, fullgraph=True, backend="eager") if compiled else block
    message = "has dtype torch.(bfloat16|float32): expected torch.(bfloat16|float32), (that|the dtype) of"
    with pytest.raises(Exception if compiled else TypeError, match=message):
        run(hidden)
    with torch.autocast("cpu", torch.bfloat16):
        assert oracle.relative_error(block(hidden), oracle.block(block, hidden)) < 2e-2


def test_latent_experts_return_their_routing():
    block, hidden = make(OTHER_DTYPES["latent"]), torch.randn(3, H)
    output, routed = block.forward_with_routing(hidden)
    torch.testing.assert_close(output, block(hidden))
    assert torch.equal(routed.topk_ids, block.experts.route(block.gate(hidden), hidden).topk_ids)


def test_a_module_in_a_linears_place_may_cast():
    class Casts(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x.to(self.weight.dtype)).to(x.dtype)

    block, hidden = make({"shared_experts": SharedExpertConfig(40)}), torch.randn(3, H).bfloat16()
    expected = block.shared_experts(hidden.float())
    for name in ("gate_up_proj", "down_proj"):
        linear = getattr(block.shared_experts, name)
        linear.__class__ = Casts
    assert oracle.relative_error(block.shared_experts(hidden), expected) < 2e-2


def test_empty_input():
    assert make(DEEPSEEK)(torch.empty(2, 0, H)).shape == (2, 0, H)


def test_copies_and_saved_states_compute_the_same():
    block = make(DEEPSEEK)
    hidden = torch.randn(5, H)
    expected = block(hidden)
    loaded = MoEBlock(block.config)
    loaded.load_state_dict(block.state_dict())
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), loaded):
        assert torch.equal(twin(hidden), expected)


def test_meta_device():
    block = MoEBlock(MoEConfig(E, K, H, I, **DEEPSEEK), device="meta", dtype=torch.bfloat16)
    assert all(tensor.is_meta for tensor in [*block.parameters(), *block.buffers()])


def test_every_parameter_gets_a_gradient():
    block = make(OPTIONS["qwen2_moe"])
    block(torch.randn(64, H)).square().sum().backward()
    without = [name for name, parameter in block.named_parameters() if not parameter.grad.any()]
    assert without == []


def test_an_overlapped_shared_expert_is_part_of_the_operator():
    shared = SharedExpertConfig(40, "sigmoid", activation="relu2", overlap=True)
    block = make(OPTIONS["deepseek_v3"] | {"shared_experts": shared})
    hidden = torch.randn(2, 5, H)
    with torch.no_grad(), Calls() as calls:
        out = block(hidden)
    assert calls.names == ["moe.fused_experts_with_shared", "moe.topk_routing"]
    assert oracle.relative_error(out, oracle.block(block, hidden)) < 1e-6


class _Adapted(torch.nn.Linear):
    """As PEFT's: its weight is not all that it computes with."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) + hidden_states.sum(1, keepdim=True)


def _with_a_bias(linear):
    other = torch.nn.Linear(linear.in_features, linear.out_features)
    other.weight = linear.weight
    return other


def _adapted(linear):
    other = _Adapted(linear.in_features, linear.out_features, bias=False)
    other.weight = linear.weight
    return other


@pytest.mark.parametrize("change", [_with_a_bias, _adapted])
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"shared_experts": SharedExpertConfig(9, "sigmoid", overlap=True)}, ["gate_up_proj", "down_proj"]),
        (
            {"shared_experts": SharedExpertConfig(9, "sigmoid"), "emit": "batch_invariant"},
            ["gate", "gate_up_proj", "down_proj"],
        ),
    ],
    ids=["overlap", "batch_invariant"],
)
def test_linear_layers_that_are_more_than_their_weight(change, options, names):
    """They are not called here, and what they add was left out without a word."""
    hidden = torch.randn(5, H)
    for name in names:
        block, plain = make(options), make({"shared_experts": SharedExpertConfig(9, "sigmoid")})
        expected = block(hidden)
        setattr(block.shared_experts, name, change(getattr(block.shared_experts, name)))
        with pytest.raises(
            ValueError, match=rf"shared_experts.{name} is a .*: expected torch.nn.Linear without"
        ):
            block(hidden)
        plain.load_state_dict(block.state_dict(), strict=False)
        setattr(plain.shared_experts, name, change(getattr(plain.shared_experts, name)))
        assert oracle.relative_error(plain(hidden), expected) > 1e-3  # where they are called


@pytest.mark.parametrize("options", [{"overlap": True}, {}], ids=["overlap", "batch_invariant"])
def test_a_parametrised_linear_layer_is_its_weight(options):
    emit = "auto" if options else "batch_invariant"
    block = make({"shared_experts": SharedExpertConfig(9, **options), "emit": emit})
    spectral_norm(block.shared_experts.down_proj)
    block.eval()
    plain = copy.deepcopy(block).shared_experts
    hidden = torch.randn(5, H)
    routed = block.experts(hidden, block.gate(hidden))
    expected = routed + plain.down_proj(gated_activation(plain.gate_up_proj(hidden), block.config.activation))
    assert oracle.relative_error(block(hidden), expected) < 1e-5
