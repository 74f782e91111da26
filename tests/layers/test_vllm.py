"""vLLM's constructor arguments: all of them, with its meaning or an error that says what to use."""

import dataclasses

import pytest
import torch

import layers.vllm
from layers import FusedMoE, MoEConfig, RouterConfig
from moe_ops import RoutingConfig

SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 16, "intermediate_size": 12}
# Name and default of every argument, as vLLM's page of mid-2025 lists them.
ARGUMENTS = {
    "params_dtype": None, "reduce_results": False, "renormalize": True, "use_grouped_topk": False,
    "num_expert_group": None, "topk_group": None, "quant_config": None, "tp_size": None, "ep_size": None,
    "dp_size": None, "prefix": "", "custom_routing_function": None, "scoring_func": "softmax",
    "e_score_correction_bias": None, "apply_router_weight_on_input": False, "activation": "silu",
    "enable_eplb": False, "num_redundant_experts": 0,
}  # fmt: skip


def _made(**arguments) -> FusedMoE:
    return layers.vllm.fused_moe(**SIZES | arguments)


def test_takes_every_argument_with_its_default():
    fields = {field.name: field.default for field in dataclasses.fields(layers.vllm.FusedMoEArguments)}
    assert {name: default for name, default in fields.items() if name not in SIZES} == ARGUMENTS
    layer = _made(**ARGUMENTS)
    assert layer.config == MoEConfig(8, 2, 16, 12)
    assert layer.w13_weight.dtype == torch.get_default_dtype()


def _by_logit(hidden_states, gating_output, topk, renormalize):
    return gating_output.topk(topk)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"renormalize": False}, {"routing": RoutingConfig(2, renormalize=False)}),
        ({"scoring_func": "sigmoid"}, {"routing": RoutingConfig(2, "sigmoid")}),
        (
            {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2},
            {"routing": RoutingConfig(2, num_groups=4, topk_groups=2)},
        ),
        ({"num_expert_group": 4, "topk_group": 2}, {}),
        ({"top_k": 1, "apply_router_weight_on_input": True}, {"top_k": 1, "router": RouterConfig(weight_on="input")}),
        ({"activation": "relu2"}, {"activation": "relu2"}),
        ({"activation": "swigluoai"}, {"activation": "swiglu_oai;interleaved=True"}),
        ({"enable_eplb": True, "num_redundant_experts": 2}, {"num_redundant_experts": 2}),
        ({"custom_routing_function": _by_logit}, {"router": RouterConfig(routing_function=_by_logit)}),
        ({"prefix": "model.layers.0", "tp_size": 1, "ep_size": 1, "dp_size": 1, "reduce_results": True}, {}),
    ],
)  # fmt: skip
def test_arguments_become_fields(arguments, expected):
    assert _made(**arguments).config == MoEConfig(**SIZES | expected)


def test_a_correction_bias_selects_groups_by_their_two_best_and_keeps_its_values():
    bias = torch.randn(8, dtype=torch.bfloat16)
    groups = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
    layer = _made(**groups, e_score_correction_bias=bias, params_dtype=torch.bfloat16)
    assert layer.config.routing == RoutingConfig(2, num_groups=4, topk_groups=2, group_score="top2_sum")
    assert layer.w13_weight.dtype == torch.bfloat16
    assert layer.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(layer.e_score_correction_bias, bias.float())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 2}, r"tp_size=2: expected 1; .*TensorShard"),
        ({"ep_size": 4}, r"ep_size=4: expected 1; .*determine_expert_map"),
        ({"dp_size": 2}, r"dp_size=2: expected 1; gather tokens"),
        ({"num_redundant_experts": 2}, "num_redundant_experts=2 with enable_eplb=False"),
        ({"quant_config": "fp8"}, r"quant_config='fp8': expected None; .*floating"),
        ({"use_grouped_topk": True}, r"num_expert_group=None, topk_group=None: expected both"),
        (
            {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "custom_routing_function": _by_logit},
            "use_grouped_topk=True with custom_routing_function",
        ),
    ],
)  # fmt: skip
def test_what_has_another_form_here_says_which(arguments, message):
    with pytest.raises(ValueError, match=message):
        _made(**arguments)


def test_unknown_arguments_are_named():
    with pytest.raises(TypeError, match="num_local_experts"):
        _made(num_local_experts=4)
