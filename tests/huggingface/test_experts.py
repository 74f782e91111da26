"""The registered experts function, on every layout and gate that transformers can declare."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from layers import huggingface
from layers.huggingface.experts import experts_forward, known_activation
from tests.huggingface.families import HIDDEN, pair

E, H, I, T, K = 5, 16, 12, 9, 2


class Base(nn.Module):
    """Experts by the loop of the definition; subclasses choose the layout."""

    act_name = "silu"

    def __init__(self, config):
        super().__init__()
        self.num_experts = E
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, H) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(E, H, I) * 0.3)
        self.act_fn = ACT2FN[self.act_name]

    def expert(self, index, hidden):
        gate_up = nn.functional.linear(hidden, self.gate_up_proj[index])
        return nn.functional.linear(self._apply_gate(gate_up), self.down_proj[index])

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for token, slot in torch.cartesian_prod(torch.arange(T), torch.arange(K)).tolist():
            index = top_k_index[token, slot].item()
            if index < E:
                out[token] += top_k_weights[token, slot] * self.expert(index, hidden_states[token])
        return out


@use_experts_implementation
class Silu(Base):
    pass


@use_experts_implementation
class Gelu(Base):
    act_name = "gelu"


@use_experts_implementation
class GeluTanh(Base):
    act_name = "gelu_pytorch_tanh"


@use_experts_implementation
class GeluNew(Base):
    act_name = "gelu_new"


@use_experts_implementation
class Mish(Base):
    act_name = "mish"


@use_experts_implementation
class OwnGate(Base):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.tanh(gate) * (up + 0.5)


@use_experts_implementation(has_gate=False)
class Ungated(Base):
    act_name = "relu2"

    def __init__(self, config):
        super().__init__(config)
        del self.gate_up_proj
        self.up_proj = nn.Parameter(torch.randn(E, I, H) * 0.3)

    def expert(self, index, hidden):
        hidden = self.act_fn(nn.functional.linear(hidden, self.up_proj[index]))
        return nn.functional.linear(hidden, self.down_proj[index])


@use_experts_implementation(has_gate=False)
class UngatedSilu(Ungated):
    act_name = "silu"


@use_experts_implementation(has_gate=False)
class UngatedGelu(Ungated):
    act_name = "gelu_pytorch_tanh"


@use_experts_implementation(has_gate=False)
class UngatedMish(Ungated):
    act_name = "mish"


@use_experts_implementation(is_transposed=True, has_bias=True)
class Transposed(Base):
    def __init__(self, config):
        super().__init__(config)
        self.gate_up_proj = nn.Parameter(torch.randn(E, H, 2 * I) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(E, I, H) * 0.3)
        self.gate_up_proj_bias = nn.Parameter(torch.randn(E, 2 * I))
        self.down_proj_bias = nn.Parameter(torch.randn(E, H))

    def expert(self, index, hidden):
        gate_up = hidden @ self.gate_up_proj[index] + self.gate_up_proj_bias[index]
        return self._apply_gate(gate_up) @ self.down_proj[index] + self.down_proj_bias[index]


@use_experts_implementation
class PostNorm(Base):
    def __init__(self, config):
        super().__init__(config)
        self.post_expert_norm = nn.RMSNorm(H)

    def expert(self, index, hidden):
        return self.post_expert_norm(super().expert(index, hidden))


FUSED = {
    Silu: "silu",
    Gelu: "gelu",
    GeluTanh: "gelu_tanh",
    GeluNew: "gelu_tanh",
    Ungated: "relu2",
    UngatedSilu: "silu_no_mul",
    UngatedGelu: "gelu_tanh_no_mul",
    Transposed: "silu",
}
UNFUSED = [Mish, OwnGate, UngatedMish, PostNorm]


def make(experts_class, implementation: str = "moe_ops"):
    huggingface.register()
    torch.manual_seed(0)
    experts = experts_class(SimpleNamespace(_experts_implementation=implementation))
    if experts_class is PostNorm:
        experts.has_post_expert_norm = True  # an argument of the decorator in newer transformers only
    return experts


def inputs(index_dtype=torch.int64):
    hidden, scores = torch.randn(T, H), torch.rand(T, E)
    weights, ids = scores.topk(K)
    return hidden, ids.to(index_dtype), weights


@pytest.mark.parametrize("experts_class", [*FUSED, *UNFUSED])
@torch.no_grad()
def test_equals_the_definition(experts_class):
    args = inputs()
    expected = make(experts_class, "eager")(*args)
    experts = make(experts_class)
    assert known_activation(experts) == FUSED.get(experts_class)
    torch.testing.assert_close(experts(*args), expected)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*args), expected)


@pytest.mark.parametrize("experts_class", [Silu, OwnGate, Transposed])
@torch.no_grad()
def test_sentinel_ids_contribute_nothing(experts_class):
    hidden, ids, weights = inputs()
    ids[0, 0] = ids[3] = E  # transformers' "not on this rank"
    expected = make(experts_class, "eager")(hidden, ids, weights)
    actual = make(experts_class)(hidden, ids, weights)
    torch.testing.assert_close(actual, expected)
    assert not actual[3].any()


@torch.no_grad()
def test_index_and_weight_dtypes():
    hidden, ids, weights = inputs()
    experts = make(Silu)
    expected = experts(hidden, ids, weights)
    assert torch.equal(experts(hidden, ids.int(), weights), expected)
    half = experts(hidden, ids, weights.to(torch.bfloat16))
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, experts(hidden, ids, weights.to(torch.bfloat16).float()))


@torch.no_grad()
def test_modules_without_the_newer_flags():
    experts = make(Silu)
    expected = experts(*(args := inputs()))
    for flag in ("has_bias", "has_gate", "is_transposed", "is_concatenated", "has_post_expert_norm"):
        if flag in vars(experts):
            delattr(experts, flag)
    assert torch.equal(experts_forward(experts, *args), expected)


@torch.no_grad()
def test_a_clamp_of_another_limit_without_a_patch():
    """Nothing has been settled for it then: the module computes its gate itself."""
    stock, ours = pair("gpt_oss", num_hidden_layers=1)
    for model in (stock, ours):
        model.model.layers[0].mlp.experts.limit = 0.5  # instead of 7.0, so that it clamps
    huggingface.register()
    ours.set_experts_implementation("moe_ops")
    hidden = torch.randn(2, 9, HIDDEN)
    torch.testing.assert_close(ours.model.layers[0].mlp(hidden)[0], stock.model.layers[0].mlp(hidden)[0])
