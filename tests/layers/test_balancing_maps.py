"""What the maps of a layer with replicas say, apart from its weights."""

import pytest
import torch

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
