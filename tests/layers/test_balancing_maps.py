"""What the maps of a layer with replicas say, apart from its weights."""

import pytest
import torch

from layers import ExpertPlacement
from tests.layers.test_balancing import HELD, E, balanced, inputs, placement_of


@torch.no_grad()
def test_maps_tell_what_places_hold():
    """Committed alone, they leave the weights to whoever moved them."""
    _, (module,), _ = balanced()
    balancing, before = module.balancing, [weight.clone() for weight in module.get_expert_weights()]
    assert balancing.held().tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1]
    module(*inputs(7))
    balancing.commit(placement_of(HELD))
    assert balancing.held().tolist() == HELD and (balancing.load == 0).all()
    assert all(map(torch.equal, before, module.get_expert_weights()))
    with pytest.raises(ValueError, match="placement contradicts itself"):
        balancing.commit(placement_of(HELD)._replace(replica_count=torch.ones(E, dtype=torch.int64)))
    assert balancing.held().tolist() == HELD


@torch.no_grad()
def test_what_is_held_comes_back_also_before_redundant_places_are_filled():
    """As it is saved with a state dict, and committed where that is loaded."""
    _, (module,), _ = balanced()
    balancing, (hidden, logits) = module.balancing, inputs(7)
    expected, weights = module(hidden, logits), module.get_expert_weights()
    held = balancing.held()
    balancing.place(placement_of(HELD), weights)
    before = weights[0][-1].clone()
    balancing.place(ExpertPlacement.of(held, E), weights)
    assert torch.equal(balancing.held(), held) and balancing.is_initial()
    assert torch.equal(module(hidden, logits), expected)
    assert torch.equal(weights[0][-1], before)  # an empty place is left alone
    with pytest.raises(ValueError, match="placement contradicts itself"):
        balancing.commit(ExpertPlacement.of(held.masked_fill(held == 0, -1), E))


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([0, 1], r"physical_to_logical=\[0, 1\]: expected a tensor of integers"),
        (torch.zeros(3), r"physical_to_logical=tensor.*: expected a tensor of integers"),
        (torch.tensor([0, E]), rf"physical_to_logical=\[0, {E}\]: expected experts in \[0, {E}\), or -1"),
        (torch.tensor([-2, 0]), r"physical_to_logical=\[-2, 0\]: expected experts"),
    ],
)
def test_slots_of_no_experts(held, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ExpertPlacement.of(held, E)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, "expert_weights=None: expected Iterable"),
        ([3], r"expert_weights\[0\]=3: expected a torch.Tensor"),
    ],
)
def test_weights_that_are_none_cannot_be_placed(weights, message):
    _, (module,), _ = balanced()
    with pytest.raises(TypeError, match=message):
        module.balancing.place(placement_of(HELD), weights)
