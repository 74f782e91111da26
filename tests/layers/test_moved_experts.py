"""Weights and adapters that are loaded while experts are elsewhere."""

from functools import partial

import pytest
import torch
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.prune import random_unstructured

from layers import EplbState, ExpertPlacement, WeightScale, quantise_experts
from tests.helpers import assert_matches_oracle
from tests.layers.lora import attach, draw_ids, make_adapters, oracle
from tests.layers.test_lora import E, H, I, make_layer, tokens

PLACES = [12, 0, 5, 3, 6, 10, 9, 2, 1, 4, 7, 8, 11, 5, 12]
spares = pytest.mark.parametrize("spare", [0, 2])


@pytest.mark.parametrize("change", [spectral_norm, partial(random_unstructured, amount=0.5)])
def test_weights_that_are_computed_do_not_move(change):
    """What they are computed of would have stayed, and the rest of an expert would have moved."""
    experts = make_layer()
    change(experts, "w2_weight")
    with pytest.raises(ValueError, match="w2_weight is parametrised or pruned: expected a plain parameter"):
        experts.get_expert_weights()


@spares
def test_fused_checkpoints_find_experts_that_have_moved(spare):
    experts = make_layer(num_redundant_experts=spare)
    experts.set_eplb_state(0, *EplbState.initial(1, E, spare))
    places = PLACES[: E + spare]
    experts.balancing.place(ExpertPlacement.of(torch.tensor(places), E), experts.get_expert_weights())
    down = torch.randn(E, H, I)
    experts.weight_loader(experts.w2_weight, down, "experts.weight", "w2", 0)
    assert torch.equal(experts.w2_weight, down[places])


def test_input_scales_are_those_of_the_experts_at_their_places():
    """Of experts at the places of others, one number was written over and another never there."""
    experts = make_layer(num_redundant_experts=2)
    quantise_experts(experts, WeightScale.CHANNEL, rows="static")
    experts.set_eplb_state(0, *EplbState.initial(1, E, 2))
    experts.balancing.place(ExpertPlacement.of(torch.tensor(PLACES), E), experts.get_expert_weights())
    scales = torch.rand(E, 2)
    for place, expert in enumerate(PLACES):
        for shard_id, scale in zip(("w1", "w3"), scales[expert], strict=True):
            experts.weight_loader(experts.w13_input_scale, scale, "input_scale", shard_id, place)
        experts.weight_loader(experts.w2_input_scale, scales[expert, 0], "input_scale", "w2", place)
    assert torch.equal(experts.w13_input_scale, scales)
    assert torch.equal(experts.w2_input_scale, scales[:, 0])


def test_adapters_of_experts_are_loaded_before_any_balancing():
    plain, layer = make_layer(), make_layer(num_redundant_experts=2)
    lora = attach(layer, make_adapters(plain), draw_ids(9))
    gate_up, _, _ = make_adapters(plain)[0]
    assert torch.equal(lora.a13[:, 0], gate_up.a[[*range(E), 0, 1]])


@spares
def test_adapters_loaded_after_experts_have_moved(spare):
    """They come as those of experts 0, 1, 2, ..., which are elsewhere by now."""
    plain, layer, ids = make_layer(), make_layer(num_redundant_experts=spare), draw_ids(9)
    copies = [*range(E), *range(spare)]
    layer.load_state_dict({name: tensor[copies] for name, tensor in plain.state_dict().items()})
    layer.set_eplb_state(0, *EplbState.initial(1, E, spare))
    adapters = make_adapters(plain)
    lora = attach(layer, adapters, ids)  # of experts that are where they begin
    assert torch.equal(lora.a2[E:, 0], adapters[0].down.a[:spare])
    hidden, routed = tokens(9)
    expected = oracle(plain, adapters, hidden, routed, ids)
    assert_matches_oracle(layer(hidden, routed), expected)
    places = PLACES[: E + spare]
    layer.balancing.place(ExpertPlacement.of(torch.tensor(places), E), layer.get_expert_weights())
    for number, adapter in enumerate(adapters):
        lora.load_adapter(number, *adapter)
    assert_matches_oracle(layer(hidden, routed), expected)
    if spare:  # of places, each where it is given
        gate_up, down, _ = make_adapters(layer)[0]
        lora.load_adapter(0, gate_up, down)
        assert torch.equal(lora.a13[:, 0], gate_up.a)
        with pytest.raises(ValueError, match=r"down.a has shape \[13, 5, 11\]: expected \[15, r, 11\]"):
            lora.load_adapter(0, gate_up, adapters[0].down)
