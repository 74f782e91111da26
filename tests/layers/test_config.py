import pickle

import pytest
import torch

from layers import MoEConfig, RouterConfig, SharedExpertConfig
from moe_ops import Activation, RoutingConfig

SIZES = {"num_experts": 8, "top_k": 2, "hidden_size": 16, "intermediate_size": 32}


def test_routing_is_built_from_top_k():
    assert MoEConfig(**SIZES).routing == RoutingConfig(top_k=2)
    routing = RoutingConfig(top_k=2, score_fn="sigmoid")
    assert MoEConfig(**SIZES, routing=routing).routing is routing


def test_activation_is_parsed_once():
    assert MoEConfig(**SIZES, activation="swiglu_oai").activation == Activation("swiglu_oai")
    assert MoEConfig(**SIZES, activation=Activation("gelu")).activation == Activation("gelu")


def test_equal_configs_are_equal_hashable_and_pickle():
    a, b = (MoEConfig(**SIZES, shared_experts=SharedExpertConfig(24)) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert pickle.loads(pickle.dumps(a)) == a


@pytest.mark.parametrize(
    ("change", "error", "texts"),
    [
        ({"top_k": 3, "routing": RoutingConfig(top_k=2)}, ValueError, ("top_k=3", "routing.top_k=2")),
        ({"top_k": 9}, ValueError, ("top_k=9", "num_experts=8")),
        ({"top_k": 0}, ValueError, ("top_k=0", "at least 1")),
        ({"num_experts": 8.0}, TypeError, ("num_experts=8.0", "int")),
        ({"hidden_size": -1}, ValueError, ("hidden_size=-1", "at least 1")),
        ({"intermediate_size": True}, TypeError, ("intermediate_size=True", "int")),
        ({"routing": "softmax"}, TypeError, ("routing='softmax'", "RoutingConfig")),
        ({"activation": "swish"}, ValueError, ("swish", "silu")),
        ({"activation": 3}, TypeError, ("activation=3", "Activation or str")),
        ({"has_bias": 1}, TypeError, ("has_bias=1", "bool")),
        ({"emit": "eager"}, ValueError, ("emit='eager'", "'stages'")),
        ({"save_for_backward": "all"}, ValueError, ("save_for_backward='all'", "'activations'")),
        ({"router": None}, TypeError, ("router=None", "RouterConfig")),
        ({"shared_experts": 64}, TypeError, ("shared_experts=64", "SharedExpertConfig")),
        ({"routing": RoutingConfig(top_k=2, num_groups=3)}, ValueError, ("num_groups=3", "num_experts=8")),
        ({"router": RouterConfig(weight_on="input")}, ValueError, ("top_k=2", "weight_on='input'")),
    ],
)
def test_bad_values_name_field_value_and_expectation(change, error, texts):
    with pytest.raises(error) as caught:
        MoEConfig(**{**SIZES, **change})
    assert all(text in str(caught.value) for text in texts), caught.value


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: RouterConfig(weight_on="both"), ValueError, "weight_on='both'"),
        (lambda: RouterConfig(has_bias=None), TypeError, "has_bias=None"),
        (lambda: RouterConfig(has_correction_bias="yes"), TypeError, "has_correction_bias='yes'"),
        (lambda: RouterConfig(gate_dtype=torch.int32), TypeError, "gate_dtype=torch.int32"),
        (lambda: SharedExpertConfig(0), ValueError, "intermediate_size=0"),
        (lambda: SharedExpertConfig(4, gated="relu"), ValueError, "gated='relu'"),
        (lambda: SharedExpertConfig(4, overlap=1), TypeError, "overlap=1"),
    ],
)
def test_bad_values_of_the_nested_configs(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"emit": "stages"}, "emit='stages' with an overlapped shared expert: expected 'auto' or 'fused'"),
        (
            {"save_for_backward": "activations"},
            "save_for_backward='activations' with an overlapped shared expert",
        ),
    ],
)
def test_what_an_overlapped_shared_expert_excludes(change, text):
    """Options of routing and experts are in test_option_pairs."""
    shared = SharedExpertConfig(4, overlap=True)
    with pytest.raises(ValueError, match=text):
        MoEConfig(**SIZES, shared_experts=shared, **change)
    assert MoEConfig(**SIZES, shared_experts=shared, emit="fused").shared_experts.overlap
