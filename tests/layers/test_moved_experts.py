"""Weights and adapters that are loaded while experts are elsewhere."""

import pytest
import torch

from layers import EplbState, ExpertPlacement
from tests.helpers import assert_matches_oracle
from tests.layers.lora import attach, draw_ids, make_adapters, oracle
from tests.layers.test_lora import E, H, I, make_layer, tokens

PLACES = [12, 0, 5, 3, 6, 10, 9, 2, 1, 4, 7, 8, 11, 5, 12]
spares = pytest.mark.parametrize("spare", [0, 2])


@spares
def test_fused_checkpoints_find_experts_that_have_moved(spare):
    experts = make_layer(num_redundant_experts=spare)
    experts.set_eplb_state(0, *EplbState.initial(1, E, spare))
    places = PLACES[: E + spare]
    experts.balancing.place(ExpertPlacement.of(torch.tensor(places), E), experts.get_expert_weights())
    down = torch.randn(E, H, I)
    experts.weight_loader(experts.w2_weight, down, "experts.weight", "w2", 0)
    assert torch.equal(experts.w2_weight, down[places])


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
