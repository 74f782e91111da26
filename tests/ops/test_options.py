"""Option objects: what they refuse, and their canonical strings."""

from typing import get_args

import pytest
import torch

import moe_ops
from moe_ops import Activation, RoutingConfig
from moe_ops.types import ActivationAlias, ActivationName, is_gated_spec
from tests.cases import MORE_ACTIVATIONS

BAD_OPTIONS = {
    "top_k": (lambda: RoutingConfig(top_k=0), ValueError, "top_k=0: expected at least 1"),
    "top_k type": (lambda: RoutingConfig(top_k=2.0), TypeError, "top_k=2.0: expected an int"),
    "score": (lambda: RoutingConfig(score_fn="tanh"), ValueError, "score_fn='tanh': expected one of 'softmax', 'sig"),
    "order": (lambda: RoutingConfig(order="both"), ValueError, "order='both': expected one of 'score_then_topk'"),
    "group score": (lambda: RoutingConfig(group_score="sum"), ValueError, "group_score='sum': expected one of 'max'"),
    "groups": (lambda: RoutingConfig(topk_groups=3, num_groups=2), ValueError, "topk_groups=3: expected at most"),
    "eps": (lambda: RoutingConfig(renorm_eps=-1.0), ValueError, "renorm_eps=-1.0: expected a number >= 0"),
    "eps type": (lambda: RoutingConfig(renorm_eps="0"), TypeError, "renorm_eps='0': expected a number, got str"),
    "scale": (lambda: RoutingConfig(scale=float("nan")), ValueError, "scale=nan: expected a number"),
    "fill type": (lambda: RoutingConfig(group_fill=None), TypeError, "group_fill=None: expected a number"),
    "renormalize": (lambda: RoutingConfig(renormalize="no"), TypeError, "renormalize='no': expected True or False"),
    "renormalize int": (lambda: RoutingConfig(renormalize=1), TypeError, "renormalize=1: expected True or False"),
    "limit type": (lambda: Activation("silu", limit="7"), TypeError, "limit='7': expected a number, got str"),
    "interleaved type": (lambda: Activation(interleaved=1), TypeError, "interleaved=1: expected True or False"),
    "alpha": (lambda: Activation("silu", alpha=1.0), ValueError, "alpha=1.0: activation 'silu' has no alpha"),
    "limit": (lambda: Activation("gelu", limit=1.0), ValueError, "limit=1.0: activation 'gelu' has no limit"),
    "limit sign": (lambda: Activation("silu", limit=-1.0), ValueError, "limit=-1.0: expected a positive number"),
    "name": (lambda: Activation(["silu"]), ValueError, "activation=.'silu'.: expected one of 'silu', .*'swigluoai'"),
    "beta": (lambda: Activation("silu", beta=1.0), ValueError, "beta=1.0: activation 'silu' has no beta"),
    "no beta": (lambda: Activation("situ"), ValueError, "beta=None: activation 'situ' has no default"),
    "beta sign": (lambda: Activation("situ", beta=0), ValueError, "beta=0.0: expected a positive number"),
    "bound": (lambda: Activation("situ", beta=1, linear_beta=-1), ValueError, "linear_beta=-1.0: expected a positive"),
    "no bound": (lambda: Activation("silu", linear_beta=1), ValueError, "'silu' has no linear_beta; expected None"),
    "ungated": (lambda: Activation("silu_no_mul", interleaved=True), ValueError, "has no gate to interleave"),
    "ungated limit": (lambda: Activation("silu_no_mul", limit=7), ValueError, "'silu_no_mul' has no limit"),
    "interleaved": (lambda: Activation("relu2", interleaved=True), ValueError, "has no gate to interleave"),
    "no value": (lambda: RoutingConfig.from_spec("top_k"), ValueError, "option 'top_k': expected name=value"),
    "spec": (lambda: RoutingConfig.from_spec(None), TypeError, "spec=None: expected a str, got NoneType"),
    "spec of bytes": (lambda: Activation.from_spec(b"silu"), TypeError, "spec=b'silu': expected a str, got bytes"),
    "empty value": (lambda: Activation.from_spec("silu;limit="), ValueError, "option 'limit=': expected name=value"),
    "group of one": (
        lambda: moe_ops.topk_routing(
            torch.randn(2, 4), RoutingConfig(2, num_groups=4, topk_groups=2, group_score="top2_sum")
        ),
        ValueError,
        "groups of 1 expert: expected at least 2",
    ),
    "few in groups": (
        lambda: moe_ops.topk_routing(torch.randn(2, 8), RoutingConfig(3, num_groups=4, topk_groups=1)),
        ValueError,
        "top_k=3: expected at most 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options(name):
    build, error, message = BAD_OPTIONS[name]
    with pytest.raises(error, match=message):
        build()


def test_specs_round_trip_and_are_canonical():
    routing = RoutingConfig(
        8, "sigmoid", num_groups=8, topk_groups=4, group_score="top2_sum", group_fill=0, scale=2.5
    )
    assert RoutingConfig.from_spec(routing.spec) == routing
    assert RoutingConfig(2).spec == RoutingConfig().spec == "top_k=2"
    for number in (7, 7.0):
        assert Activation("silu", limit=number).spec == "silu;limit=7.0"
    assert RoutingConfig(scale=2).spec == RoutingConfig(scale=2.0).spec
    activation = Activation("swiglu_oai", limit=5, interleaved=True)
    assert Activation.from_spec(activation.spec) == activation
    assert Activation("swiglu_oai", 1.702, 7.0, beta=1).spec == "swiglu_oai"
    for activation in MORE_ACTIVATIONS:
        assert Activation.from_spec(activation.spec) == activation
        assert Activation.from_spec(activation.spec).spec == activation.spec
    assert Activation("situ", beta=4, linear_beta=25).spec == "situ;beta=4.0;linear_beta=25.0"
    assert Activation("swiglu_oai", beta=0).spec == "swiglu_oai;beta=0.0"


ALIASES = {
    "swigluoai": Activation("swiglu_oai", interleaved=True),
    "swigluoai_uninterleave": Activation("swiglu_oai"),
    "gelu_pytorch_tanh": Activation("gelu_tanh"),
    "relu2_no_mul": Activation("relu2"),
}


@pytest.mark.parametrize("alias", ALIASES)
def test_names_of_others_are_names_of_ours(alias):
    activation = ALIASES[alias]
    assert set(ALIASES) == set(get_args(ActivationAlias))
    assert Activation(alias) == activation and Activation(alias).spec == activation.spec
    assert Activation.from_spec(alias) == activation
    assert is_gated_spec(alias) == activation.is_gated
    gate_up = torch.randn(3, 8)
    assert torch.equal(
        moe_ops.gated_activation(gate_up, alias), moe_ops.gated_activation(gate_up, activation)
    )
    w13, w2, weights = (
        torch.randn(2, 8, 6),
        torch.randn(2, 6, 4 if activation.is_gated else 8),
        torch.rand(3, 2),
    )
    ids = torch.tensor([[0, 1], [1, 0], [0, 1]])
    for emit in ("fused", "stages"):
        by_alias, by_value = (
            moe_ops.fused_experts(torch.ones(3, 6), w13, w2, weights, ids, each, emit=emit)
            for each in (alias, activation)
        )
        assert torch.equal(by_alias, by_value)


def test_whether_a_spec_is_gated_is_read_without_parsing():
    for name in get_args(ActivationName):
        activation = Activation(name, beta=1.0) if name == "situ" else Activation(name)
        assert (
            is_gated_spec(activation.spec)
            == activation.is_gated
            == (name in ("silu", "gelu", "gelu_tanh", "swiglu_oai", "swiglustep", "situ"))
        )
