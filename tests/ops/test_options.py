"""Option objects: what they refuse, and their canonical strings."""

import pytest
import torch

import moe_ops
from moe_ops import Activation, RoutingConfig

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
    "interleaved": (lambda: Activation("relu2", interleaved=True), ValueError, "has no gate to interleave"),
    "no value": (lambda: RoutingConfig.from_spec("top_k"), ValueError, "option 'top_k': expected name=value"),
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
    assert Activation("swiglu_oai", 1.702, 7.0).spec == "swiglu_oai"
