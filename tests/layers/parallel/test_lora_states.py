"""Adapters of sharded experts as what they are to the rest of torch: DTensors of all experts."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from layers import ExpertLora
from layers.parallel import ExpertParallel, ExpertRebalancer, ExpertTensorParallel
from tests.helpers import assert_matches_oracle, assert_same
from tests.layers.lora import attach, make_adapters, oracle
from tests.layers.parallel.exchanges import config, make_layer, tokens_of
from tests.layers.parallel.test_exchanges import loss
from tests.layers.parallel.test_lora import ids_of, parallel
from tests.layers.parallel.world import on_ranks

styles = pytest.mark.parametrize("style", ["alltoall", "tensor"])


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@on_ranks(4)
@styles
def test_checkpoints_are_those_of_any_number_of_ranks(style, tmp_path):
    layer = make_layer(config())
    adapters, rank = make_adapters(layer), dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    pairs = {"alltoall": ExpertParallel, "tensor": ExpertTensorParallel}[style]()
    saved = attach(parallelize_module(copy.deepcopy(layer), mesh["ep"], pairs), adapters, ids_of(rank))
    checkpoint.save(saved.state_dict(), checkpoint_id=tmp_path)
    expected = attach(layer, adapters, ids_of(rank)).state_dict()
    fresh = parallel(make_layer(config()), style)[0].lora
    fresh.reset_parameters()
    state = fresh.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path)
    fresh.load_state_dict(state)
    for each in (saved, fresh):
        for name, tensor in each.state_dict().items():
            assert torch.equal(whole(tensor).reshape(expected[name].shape), expected[name]), name
    assert fresh.b13.to_local().numel() * 4 == expected["b13"].numel()


@on_ranks(1)
@styles
def test_one_rank_has_what_several_have(style):
    """A checkpoint of one rank is one of any number, and the other way round."""
    part, adapters = parallel(make_layer(config()), style)
    b13, (hidden, routed) = part.lora.b13, tokens_of(0, "padded")
    assert b13.placements == ((Shard(3),) if style == "tensor" else (Shard(0),))
    assert b13.shape[2:] == ((2, 24, b13.shape[-1]) if style == "tensor" else (48, b13.shape[-1]))
    assert_matches_oracle(
        part(hidden, routed), oracle(make_layer(config()), adapters, hidden, routed, ids_of(0))
    )


@on_ranks(2)
@styles
def test_norms_and_steps_are_those_of_one_device(style):
    layer, rank = make_layer(config(), torch.float64), dist.get_rank()
    part, adapters = parallel(layer, style)
    plain = attach(layer, adapters, ids_of(0))
    for each in range(2):
        plain.adapter_ids = ids_of(each)
        loss(layer(*tokens_of(each, "padded", dtype=torch.float64))).backward()
    loss(part(*tokens_of(rank, "padded", dtype=torch.float64))).backward()
    for lora in (plain, part.lora):
        lora.norm = torch.nn.utils.clip_grad_norm_(lora.parameters(), 0.1)
        torch.optim.AdamW(lora.parameters(), lr=0.01).step()
    assert_same([whole(part.lora.norm)], [plain.norm])
    for name, parameter in part.lora.named_parameters():
        expected = plain.get_parameter(name)
        assert_same([parameter.full_tensor().view(expected.shape)], [expected])


@on_ranks(2)
def test_what_ranks_have_whole_is_drawn_alike():
    layer = parallelize_module(make_layer(config()), init_device_mesh("cpu", (2,)), ExpertTensorParallel())
    torch.manual_seed(dist.get_rank())
    lora = ExpertLora(layer, 3, 5, ids_of(0))
    for _ in range(2):
        drawn = [torch.empty_like(lora.a13.to_local()) for _ in range(2)]
        dist.all_gather(drawn, lora.a13.to_local().detach())
        assert torch.equal(*drawn) and drawn[0].unique().numel() > 100
        lora.reset_parameters()


@on_ranks(2)
def test_adapters_move_with_their_experts():
    layer, rank = make_layer(config()), dist.get_rank()
    part, adapters = parallel(layer, "allgather")
    rebalancer = ExpertRebalancer(part)
    rebalancer.place("round_robin")
    hidden, routed = tokens_of(rank, "padded")
    with torch.no_grad():
        assert_matches_oracle(part(hidden, routed), oracle(layer, adapters, hidden, routed, ids_of(rank)))
        for number, adapter in enumerate(adapters):  # and are loaded to where these are
            part.lora.load_adapter(number, *adapter)
        assert_matches_oracle(part(hidden, routed), oracle(layer, adapters, hidden, routed, ids_of(rank)))
    assert len(part.get_expert_weights()) == 2 + 4


@on_ranks(2)
def test_whole_adapters_are_not_taken_for_a_ranks_part():
    layer = make_layer(config())
    part, adapters = parallel(layer, "alltoall")
    plain = attach(copy.deepcopy(layer), adapters, ids_of(dist.get_rank()))
    part.lora.load_state_dict(plain.state_dict(), assign=True)
    with pytest.raises(
        TypeError, match="lora has a <Parameter>: expected a DTensor, for ranks share its experts"
    ):
        part(*tokens_of(dist.get_rank(), "padded"))
