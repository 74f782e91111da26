"""Layers made on the meta device, the ways big models are loaded; and what moves and casts leave of a map."""

import copy
import pickle

import pytest
import torch

from layers import (
    EplbState,
    ExpertLora,
    FusedMoE,
    HashRouting,
    MoEBlock,
    MoEConfig,
    RoutedExpertsCapture,
    RoutedExpertsReplay,
    RouterConfig,
    SimulatedRouting,
)
from tests.layers import oracle

H, I, E, K = 16, 24, 8, 2
EXPERT_MAP = torch.tensor([0, -1, 1, -1, 2, -1, 3, -1])
CHANGED = torch.tensor([-1, 0, -1, 1, -1, 2, -1, 3], dtype=torch.int32)
CONFIG = MoEConfig(E, K, H, I, has_bias=True, router=RouterConfig(has_correction_bias=True))


def make(**options) -> FusedMoE:
    module = FusedMoE(CONFIG, EXPERT_MAP, **options)
    if not module.w13_weight.is_meta:
        torch.nn.init.normal_(module.e_score_correction_bias, std=0.3)
    return module


def to_empty(module, state):
    module.to_empty(device="cpu").load_state_dict(state)


def assign(module, state):
    module.load_state_dict(state, assign=True)


def move_as_a_part(module, state):
    torch.nn.ModuleList([module]).to_empty(device="cpu")
    module.load_state_dict(state)


def to_empty_alone(module, state):
    module.to_empty(device="cpu", recurse=False).load_state_dict(state)


@pytest.mark.parametrize("load", [to_empty, assign, move_as_a_part, to_empty_alone])
@pytest.mark.parametrize(
    "pass_on",
    [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["as_is", "deepcopy", "pickle"],
)
def test_a_loaded_layer_has_its_map(load, pass_on, poisoned_empty):
    whole = make()
    module = make(device="meta")
    assert module.expert_map.is_meta
    load(module, whole.state_dict())
    module = pass_on(module)
    assert module.expert_map.tolist() == EXPERT_MAP.tolist()
    assert module.expert_map.dtype == torch.int32
    hidden, logits = torch.randn(9, H), torch.randn(9, E)
    assert oracle.relative_error(module(hidden, logits), oracle.experts(whole, hidden, logits)) < 1e-5


@pytest.mark.parametrize(
    "pass_on", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_made_on_the_meta_device_load_too(pass_on):
    module = pass_on(make(device="meta"))
    assert module.expert_map.is_meta
    assign(module, make().state_dict())
    assert module.expert_map.tolist() == EXPERT_MAP.tolist()


def test_a_model_made_inside_the_meta_device():
    with torch.device("meta"):
        block = MoEBlock(CONFIG, EXPERT_MAP)
    assert all(tensor.is_meta for tensor in [*block.parameters(), *block.buffers()])
    block.to_empty(device="cpu").reset_parameters()
    assert block.experts.expert_map.tolist() == EXPERT_MAP.tolist()
    assert all(torch.isfinite(parameter).all() for parameter in block.parameters())


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.to("cpu"),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double().float(),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.share_memory(),
        lambda m: m.load_state_dict(m.state_dict()),
        lambda m: m.load_state_dict(m.state_dict(), assign=True),
        lambda m: m.reset_parameters(),
    ],
    ids=["to", "cast", "casts", "to_empty", "share", "load", "assign", "reset"],
)
def test_a_map_changed_in_place_stays_changed(move):
    module = make()
    module.expert_map.copy_(CHANGED)
    move(module)
    assert torch.equal(module.expert_map, CHANGED)


def test_moving_nothing_keeps_the_buffer_itself():
    module = make()
    expert_map = module.expert_map
    module.to("cpu")
    assert module.expert_map is expert_map


def test_an_assigned_selection_bias_is_float32():
    state = {name: tensor.to(torch.bfloat16) for name, tensor in make().state_dict().items()}
    module = make(device="meta")
    module.load_state_dict(state, assign=True)
    assert module.w13_weight.dtype == torch.bfloat16
    assert module.e_score_correction_bias.dtype == torch.float32


def test_a_map_without_values_is_refused():
    with pytest.raises(ValueError, match=r"expert_map is on the meta device: expected its values"):
        FusedMoE(CONFIG, EXPERT_MAP.to("meta"))


def _balanced(layer):
    layer.set_eplb_state(0, *EplbState.initial(1, E))
    return layer.balancing


def _captured(layer):
    layer.capture = RoutedExpertsCapture(torch.full((9, K), 3, dtype=torch.int32))
    return layer.capture


def _replayed(layer):
    layer.routing_override = RoutedExpertsReplay(torch.full((9, K), 3, dtype=torch.int32), CONFIG.routing)
    return layer.routing_override


def _looked_up(layer):
    table, token_ids = torch.full((5, K), 3, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    layer.routing_override = HashRouting(table, token_ids, CONFIG.routing)
    return layer.routing_override


def _drawn(layer):
    layer.routing_override = SimulatedRouting("uniform", K, seed=7)
    return layer.routing_override


@pytest.mark.parametrize("attach", [_balanced, _captured, _replayed, _looked_up, _drawn])
def test_what_a_layer_was_given_stays_where_it_is_as_weights_get_memory(attach):
    """They would have held what the memory did, and nobody else would have seen what is written to them."""
    layer = FusedMoE(CONFIG, device="meta")
    given = attach(layer)
    before = dict(given.named_buffers())
    values = {name: tensor.clone() for name, tensor in before.items()}
    layer.to_empty(device="cpu")
    for name, tensor in given.named_buffers():
        assert tensor is before[name] and torch.equal(tensor, values[name])
    layer.to("meta")
    assert all(tensor.is_meta for tensor in given.buffers()) and len(before) > 0


def test_what_an_override_of_ones_own_was_given_is_cast():
    layer = make()
    layer.routing_override = RoutedExpertsReplay(torch.zeros(9, K, dtype=torch.int32), CONFIG.routing)
    layer.routing_override.register_buffer("popularity", torch.ones(E))
    layer.to(torch.bfloat16)
    assert layer.routing_override.popularity.dtype == torch.bfloat16
    assert layer.routing_override.buffer.dtype == torch.int32


def test_adapters_keep_the_ids_that_they_are_given():
    layer, adapter_ids = FusedMoE(CONFIG, device="meta"), torch.zeros(5, dtype=torch.int32)
    layer.lora = ExpertLora(layer, 1, 2, adapter_ids)
    layer.to_empty(device="cpu")
    assert layer.lora.adapter_ids is adapter_ids
