"""vLLM's constructor arguments: all of them, with its meaning or an error that says what to use."""

import copy
import dataclasses
import pickle

import pytest
import torch

import layers.vllm
from layers import FusedMoE, MoEConfig, RouterConfig, RouterOutput
from layers.vllm import ByKeyword
from moe_ops import RoutingConfig

SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 16, "intermediate_size": 12}
# Name and default of every argument, as vLLM's page of mid-2025 lists them, and of three later ones.
ARGUMENTS = {
    "params_dtype": None, "reduce_results": False, "renormalize": True, "use_grouped_topk": False,
    "num_expert_group": None, "topk_group": None, "quant_config": None, "tp_size": None, "ep_size": None,
    "dp_size": None, "prefix": "", "custom_routing_function": None, "scoring_func": "softmax",
    "e_score_correction_bias": None, "apply_router_weight_on_input": False, "activation": "silu",
    "enable_eplb": False, "num_redundant_experts": 0,
    "has_bias": False, "routed_scaling_factor": 1.0, "apply_routed_scale_to_output": False,
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
        (
            {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2, "renormalize": False},
            {"routing": RoutingConfig(2, renormalize=False, num_groups=4, topk_groups=2)},
        ),
        ({"num_expert_group": 4, "topk_group": 2}, {}),
        ({"top_k": 1, "apply_router_weight_on_input": True}, {"top_k": 1, "router": RouterConfig(weight_on="input")}),
        ({"activation": "relu2_no_mul"}, {"activation": "relu2"}),
        ({"activation": "silu_no_mul", "has_bias": True}, {"activation": "silu_no_mul", "has_bias": True}),
        ({"activation": "gelu"}, {"activation": "gelu"}),
        ({"routed_scaling_factor": 2.5}, {"routing": RoutingConfig(2, scale=2.5)}),
        (
            {"routed_scaling_factor": 2.5, "apply_routed_scale_to_output": True},
            {"routing": RoutingConfig(2, scale=2.5), "router": RouterConfig(scale_on="output")},
        ),
        ({"activation": "swigluoai"}, {"activation": "swiglu_oai;interleaved=True"}),
        ({"enable_eplb": True, "num_redundant_experts": 2}, {"num_redundant_experts": 2}),
        ({"custom_routing_function": _by_logit}, {"router": RouterConfig(routing_function=ByKeyword(_by_logit))}),
        ({"prefix": "model.layers.0", "tp_size": 1, "ep_size": 1, "dp_size": 1, "reduce_results": True}, {}),
    ],
)  # fmt: skip
def test_arguments_become_fields(arguments, expected):
    assert _made(**arguments).config == MoEConfig(**SIZES | expected)


def test_a_correction_bias_selects_groups_by_their_two_best_and_is_shared():
    """Models make it first and load it last: a copy would never be filled."""
    bias = torch.nn.Parameter(torch.zeros(8))
    groups = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}
    layer = _made(**groups, e_score_correction_bias=bias, params_dtype=torch.bfloat16)
    assert layer.config.routing == RoutingConfig(2, num_groups=4, topk_groups=2, group_score="top2_sum")
    assert layer.w13_weight.dtype == torch.bfloat16
    with torch.no_grad():
        bias.copy_(torch.arange(8.0))
    assert layer.e_score_correction_bias.tolist() == list(range(8))
    assert not isinstance(layer.e_score_correction_bias, torch.nn.Parameter)
    assert layer.route(torch.zeros(1, 8)).topk_ids.tolist() == [[7, 6]]


def _reordered(gating_output, topk, renormalize, hidden_states):
    scores = gating_output + 3 * hidden_states[:, : gating_output.shape[1]]
    return scores.sigmoid().topk(topk) if renormalize else scores.topk(topk)


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_routing_function_is_called_by_the_names_of_its_arguments(renormalize):
    layer = _made(custom_routing_function=_reordered, renormalize=renormalize)
    hidden, logits = torch.randn(7, 16), torch.randn(7, 8)
    weights, ids = _reordered(logits, 2, renormalize, hidden)
    expected = layer(hidden, RouterOutput(logits, weights, ids.int()))
    with torch.no_grad():
        for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            torch.testing.assert_close(run(hidden, logits), expected)
    assert pickle.loads(pickle.dumps(layer.config)) == layer.config


def test_parameters_know_their_loader():
    layer = _made(has_bias=True)
    assert {name for name, _ in layer.named_parameters()} == {
        "w13_weight",
        "w2_weight",
        "w13_bias",
        "w2_bias",
    }
    whole = torch.randn(16, 12)
    for name, parameter in layer.named_parameters():
        shard_id, loaded = ("w2", whole) if name == "w2_weight" else ("w1", torch.randn(12, 16))
        loaded = loaded if name.endswith("weight") else torch.randn(16 if name == "w2_bias" else 12)
        shard_id = "w2" if name == "w2_bias" else shard_id
        assert parameter.weight_loader(
            parameter, loaded, name, shard_id=shard_id, expert_id=3, return_success=True
        )
    assert torch.equal(layer.w2_weight[3], whole)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin.w2_weight[3], whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 2}, r"tp_size=2: expected 1; .*TensorShard"),
        ({"ep_size": 4}, r"ep_size=4: expected 1; .*determine_expert_map"),
        ({"dp_size": 2}, r"dp_size=2: expected 1; .*ParallelConfig"),
        ({"scoring_func": "tanh"}, r"scoring_func='tanh': expected one of 'softmax'"),
        ({"activation": "relu2"}, r"activation='relu2': expected 'relu2_no_mul'"),
        ({"activation": "tanh"}, r"activation='tanh': expected one of 'silu'"),
        ({"e_score_correction_bias": torch.zeros(7)}, r"e_score_correction_bias has shape \[7\]: expected \[8\]"),
        (
            {"e_score_correction_bias": torch.zeros(8), "custom_routing_function": _by_logit},
            "e_score_correction_bias with custom_routing_function: expected one of them",
        ),
        (
            {"scoring_func": "sigmoid", "custom_routing_function": _by_logit},
            "scoring_func='sigmoid' with custom_routing_function: expected one of them",
        ),
        (
            {"routed_scaling_factor": 2.5, "custom_routing_function": _by_logit},
            "routed_scaling_factor=2.5 with custom_routing_function: expected 1, or apply_routed_scale_to_output=True",
        ),
        ({"apply_router_weight_on_input": True}, r"top_k=2: expected 1 with router.weight_on='input'"),
        ({"use_grouped_topk": True, "num_expert_group": 3, "topk_group": 1}, r"num_groups=3: expected a divisor"),
        ({"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 5}, r"topk_groups=5: expected at most"),
        ({"top_k": 5, "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}, "top_k=5: expected at most"),
        ({"num_experts": 4, "use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2,
          "e_score_correction_bias": torch.zeros(4)}, r"group_score='top2_sum' with groups of 1 expert"),
        ({"num_redundant_experts": 2}, "num_redundant_experts=2 with enable_eplb=False"),
        ({"quant_config": "fp8"}, r"quant_config='fp8': expected None; .*quantise_experts"),
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


@pytest.mark.parametrize("bias", [[0.0] * 8, torch.zeros(8, dtype=torch.bfloat16)])
def test_a_bias_of_another_type_is_named(bias):
    with pytest.raises(TypeError, match=r"e_score_correction_bias.*: expected"):
        _made(e_score_correction_bias=bias)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params_dtype": "float16"}, "params_dtype='float16': expected None or a floating"),
        ({"params_dtype": torch.int8}, r"params_dtype=torch\.int8: expected None or a floating"),
        ({"custom_routing_function": "sigmoid"}, "custom_routing_function='sigmoid': expected a function"),
        ({"use_grouped_topk": "no"}, "use_grouped_topk='no': expected bool, got str"),
        ({"enable_eplb": None}, "enable_eplb=None: expected bool"),
        (
            {"apply_router_weight_on_input": torch.ones(2)},
            "apply_router_weight_on_input=.*: expected bool, got Tensor",
        ),
        ({"apply_routed_scale_to_output": 1}, "apply_routed_scale_to_output=1: expected bool, got int"),
        ({"reduce_results": 1}, "reduce_results=1: expected bool"),
    ],
)
def test_what_is_of_another_type_is_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        _made(**arguments)


def test_unknown_arguments_are_named():
    with pytest.raises(TypeError, match="num_local_experts"):
        _made(num_local_experts=4)
