"""Layers with a part of the experts, a shard of each or places for replicas: what they add, load, move and show."""

import pytest
import torch

from layers import (
    EplbState,
    ExpertPlacement,
    ExpertsConfig,
    FusedMoE,
    RouterConfig,
    TensorShard,
    WeightScale,
    add_weight_scales,
    determine_expert_map,
)
from layers.parallel.layout import experts_layout
from tests.layers.test_fused_moe import E, H, I, inputs, make, make_config


def test_parts_of_a_layer_add_what_zero_experts_return_once():
    config = make_config(experts=ExpertsConfig(num_zero_experts=E))
    whole, hidden, logits = make(config), inputs(9)[0], torch.randn(9, 2 * E)
    outputs = []
    for rank in range(2):
        half = FusedMoE(config, torch.tensor([e // 2 if e % 2 == rank else -1 for e in range(E)]))
        half.load_state_dict({name: tensor[rank::2] for name, tensor in whole.state_dict().items()})
        assert half.is_first_part == (rank == 0)
        outputs.append(half(hidden, logits))
    torch.testing.assert_close(sum(outputs), whole(hidden, logits))
    shards = [FusedMoE(config, shard=TensorShard(rank, 2)) for rank in range(2)]
    gate, up = whole.w13_weight.detach().chunk(2, dim=1)
    for shard in shards:
        for param, tensor, name in ((shard.w13_weight, gate, "w1"), (shard.w13_weight, up, "w3"),
                                    (shard.w2_weight, whole.w2_weight.detach(), "w2")):  # fmt: skip
            shard.weight_loader(param, tensor, "weight", name, 0)
    torch.testing.assert_close(sum(shard(hidden, logits) for shard in shards), whole(hidden, logits))


def test_a_norm_of_whole_outputs_needs_whole_experts():
    with pytest.raises(ValueError, match=r"experts.post_norm_eps=1e-06: expected None in a shard"):
        FusedMoE(make_config(experts=ExpertsConfig(post_norm_eps=1e-6)), shard=TensorShard(0, 2))


def test_what_is_shown_of_a_layer():
    whole = FusedMoE(make_config())
    assert repr(whole) == (
        f"FusedMoE(num_experts=8, hidden_size={H}, intermediate_size={whole.config.intermediate_size}, "
        f"routing={whole.config.routing.spec!r}, activation='silu')"
    )
    part = FusedMoE(make_config(num_redundant_experts=2), shard=TensorShard(1, 2))
    assert "num_experts=8, num_local_experts=10, " in repr(part) and ", shard=1/2, " in repr(part)


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_fused_checkpoints_fill_replicas_too(rank):
    """Places past the experts hold the first ones again, as the mapping of single tensors says."""
    places = [physical % E for physical in range(E + 2)]
    expert_map = None if rank is None else determine_expert_map(2, rank, E + 2)[1]
    mine = places if rank is None else places[5 * rank : 5 * rank + 5]
    experts = FusedMoE(make_config(num_redundant_experts=2), expert_map)
    gate, up, down = torch.randn(E, I, H), torch.randn(E, I, H), torch.randn(E, H, I)
    for param, tensor, shard_id in (
        (experts.w13_weight, gate, "w1"), (experts.w13_weight, up, "w3"), (experts.w2_weight, down, "w2"),
    ):  # fmt: skip
        assert experts.weight_loader(param, tensor, "experts.weight", shard_id, 0, return_success=True)
    assert torch.equal(experts.w13_weight, torch.cat([gate, up], 1)[mine])
    assert torch.equal(experts.w2_weight, down[mine])
    every = torch.randn(E + 2, H, I)
    experts.weight_loader(experts.w2_weight, every, "weight", "w2", 0)  # of places, one by one
    assert torch.equal(experts.w2_weight, every if rank is None else every[5 * rank : 5 * rank + 5])
    with pytest.raises(ValueError, match=r"shape \(9, 16, 24\): expected 8 experts"):
        experts.weight_loader(experts.w2_weight, every[:9], "weight", "w2", 0)


def test_scales_move_with_their_experts():
    module = FusedMoE(make_config(has_bias=True))
    add_weight_scales(module, WeightScale.CHANNEL)
    sizes = [(E, 2 * I * H), (E, H * I), (E, 2 * I), (E, H), (E, 2 * I), (E, H)]
    assert [view.shape for view in module.get_expert_weights()] == sizes
    with torch.no_grad():
        module.w2_weight_scale.copy_(torch.arange(E).view(E, 1, 1))
    module.set_eplb_state(0, *EplbState.initial(1, E))
    held = torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])
    module.balancing.place(ExpertPlacement.of(held, E), module.get_expert_weights())
    assert torch.equal(module.w2_weight_scale[:, 0, 0], held.float())


def test_what_all_experts_share_does_not_move():
    options = {"router": RouterConfig(has_expert_scale=True), "experts": ExpertsConfig(post_norm_eps=1e-6)}
    assert len(FusedMoE(make_config(**options)).get_expert_weights()) == 2


def test_scales_are_not_for_ranks():
    """A style would leave them whole."""
    module = FusedMoE(make_config(router=RouterConfig(has_expert_scale=True)))
    assert experts_layout(module).num_experts == E
    add_weight_scales(module, WeightScale.TENSOR)
    with pytest.raises(
        ValueError, match="module has w13_weight_scale: expected no scales of weights among ranks"
    ):
        experts_layout(module)
