"""Every pair of a layer's options: against the oracle, eager and compiled, or refused at construction, both named."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from layers import ExpertsConfig, MoEBlock, MoEConfig, RouterConfig, SharedExpertConfig
from moe_ops import RoutingConfig
from tests.helpers import usually
from tests.layers import oracle

H, I, E = 16, 20, 8


def sigmoid_of_the_best(
    hidden_states: Tensor, router_logits: Tensor, top_k: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """Llama 4's: the best logits, their sigmoid."""
    best, ids = router_logits.topk(top_k)
    weights = best.sigmoid()
    return (weights / weights.sum(1, keepdim=True) if renormalize else weights), ids


# What an option adds to the fields of `MoEConfig` and of the configs inside it.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "sigmoid": {"routing": {"score_fn": "sigmoid", "scale": 2.5}},
    "groups": {"routing": {"num_groups": 4, "topk_groups": 2}},
    "not renormalized": {"routing": {"renormalize": False}},
    "correction bias": {"router": {"has_correction_bias": True}},
    "gate bias": {"router": {"has_bias": True}},
    "routing function": {"router": {"routing_function": sigmoid_of_the_best}},
    "scale on output": {"routing": {"scale": 1.5}, "router": {"scale_on": "output"}},
    "weight on input": {"layer": {"top_k": 1}, "router": {"weight_on": "input"}},
    "expert scale": {"router": {"has_expert_scale": True}},
    "zero experts": {"experts": {"num_zero_experts": 4}},
    "latent": {"experts": {"latent_size": 12}},
    "padded": {"experts": {"padded_size": 24}},
    "post norm": {"experts": {"post_norm_eps": 1e-5}},
    "chunks": {"experts": {"chunk_size": 3}},
    "redundant experts": {"layer": {"num_redundant_experts": 2}},
    "biases": {"layer": {"has_bias": True}},
    "ungated": {"layer": {"activation": "relu2"}},
    "interleaved": {"layer": {"activation": "swiglu_oai;interleaved=True"}},
    "shared": {"shared": {"intermediate_size": 28}},
    "gated shared": {"shared": {"intermediate_size": 28, "gated": "sigmoid"}},
    "averaged shared": {"shared": {"intermediate_size": 28, "combination": "average"}},
    "overlapped shared": {"shared": {"intermediate_size": 28, "gated": "sigmoid", "overlap": True}},
    "expert map": {"placement": {"expert_map": [2, -1, 0, 1, -1, 3, -1, -1]}},
}
REFUSED = {
    ("sigmoid", "routing function"): "routing='.*score_fn=sigmoid.*' with router.routing_function",
    ("groups", "routing function"): "routing='.*num_groups=4.*' with router.routing_function",
    ("correction bias", "routing function"): "routing_function with has_correction_bias",
    ("weight on input", "zero experts"): "num_zero_experts=4 with router.weight_on='input'",
    ("zero experts", "redundant experts"): "num_redundant_experts=2 with experts.num_zero_experts=4",
    ("zero experts", "latent"): "num_zero_experts=4 with latent_size=12",
    ("scale on output", "overlapped shared"): "router.scale_on='output' with an overlapped shared expert",
    ("weight on input", "overlapped shared"): "router.weight_on='input' with an overlapped shared expert",
    ("latent", "overlapped shared"): "experts.latent_size=12 with an overlapped shared expert",
    ("padded", "overlapped shared"): "experts.padded_size=24 with an overlapped shared expert",
    ("post norm", "overlapped shared"): "experts.post_norm_eps=1e-05 with an overlapped shared expert",
    ("chunks", "overlapped shared"): "experts.chunk_size=3 with an overlapped shared expert",
}
# Two values of one thing: there is no layer to be built.
EITHER = [{"ungated", "interleaved"}, {"shared", "gated shared", "averaged shared", "overlapped shared"}]
PAIRS = [
    pair
    for pair in itertools.combinations(OPTIONS, 2)
    if not any(len(one.intersection(pair)) > 1 for one in EITHER)
]


def _block(*names: str) -> MoEBlock:
    fields: dict[str, dict[str, Any]] = {}
    for name in names:
        for config, values in OPTIONS[name].items():
            fields.setdefault(config, {}).update(values)
    layer = {"top_k": 3, **fields.get("layer", {})}
    config = MoEConfig(
        E,
        hidden_size=H,
        intermediate_size=I,
        **layer,
        routing=RoutingConfig(layer["top_k"], **fields.get("routing", {})),
        router=RouterConfig(**fields.get("router", {})),
        experts=ExpertsConfig(**fields.get("experts", {})),
        shared_experts=SharedExpertConfig(**fields["shared"]) if "shared" in fields else None,
    )
    placement = fields.get("placement", {}).get("expert_map")
    if placement is not None:
        placement = placement + [-1] * config.num_redundant_experts
    torch.manual_seed(5)
    block = MoEBlock(config, None if placement is None else torch.tensor(placement))
    for tensor in [*block.parameters(), *block.buffers()]:
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor, std=0.5)
    return block


def _expect_the_oracles(block: MoEBlock, tokens: int, run) -> None:
    hidden = torch.randn(tokens, H, generator=torch.Generator().manual_seed(tokens))
    assert oracle.relative_error(run(hidden), oracle.block(block, hidden)) < 2e-6


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in REFUSED], ids=" and ".join)
def test_pairs_compute_what_the_oracle_does(pair):
    block = _block(*pair)
    for tokens in (1, 7):
        _expect_the_oracles(block, tokens, block)
    assert block(torch.empty(2, 0, H)).shape == (2, 0, H)


_TAKEN = [pair for pair in PAIRS if pair not in REFUSED]


@pytest.mark.parametrize(("first", "second"), usually(_TAKEN, _TAKEN[::11]))
def test_pairs_compile_whole(first, second):
    block = _block(first, second)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        _expect_the_oracles(block, 7, compiled)


@pytest.mark.parametrize(("pair", "message"), REFUSED.items(), ids=map(" and ".join, REFUSED))
def test_pairs_that_make_no_sense_name_both_fields(pair, message):
    with pytest.raises(ValueError, match=message):
        _block(*pair)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_changes_the_output_and_has_gradients(name):
    """An option that is dropped on its way would pass for one that works with all the others."""
    hidden = torch.randn(33, H, generator=torch.Generator().manual_seed(1))
    block = _block(name)
    block(hidden).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in block.parameters())
    if name not in ("chunks", "padded"):  # these change how, not what
        plain, state = _block(), block.state_dict()
        fitting = {k: state[k] for k, v in plain.state_dict().items() if state[k].shape == v.shape}
        plain.load_state_dict(fitting, strict=False)
        assert oracle.relative_error(block(hidden), plain(hidden)) > 1e-3
