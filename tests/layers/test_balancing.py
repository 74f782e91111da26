"""Layers with replicas: the same function, exact load, and a placement that graphs read when they run."""

import copy
import itertools
import re

import pytest
import torch

import inductor_passes
from layers import (
    EplbState,
    ExpertBalancing,
    ExpertPlacement,
    FusedMoE,
    MoEBlock,
    MoEConfig,
    load_checkpoint,
    rebalance_experts,
)
from tests.helpers import assert_matches_oracle, usually
from tests.kernels import oracles
from tests.layers import oracle
from tests.layers.test_compile import STAGES, Capture, aot

E, REDUNDANT, P = 6, 3, 9
CONFIG = MoEConfig(E, 2, 12, 20, num_redundant_experts=REDUNDANT, has_bias=True)
HELD = [3, 1, 0, 2, 4, 5, 0, 0, 3]  # by place: expert 0 three times, 3 twice


def placement_of(held):
    rows = [[place for place, expert in enumerate(held) if expert == e] for e in range(E)]
    counts = [len(row) for row in rows]
    padded = [row + [-1] * (max(counts) - len(row)) for row in rows]
    return ExpertPlacement(*map(torch.tensor, (held, padded, counts)))


def balanced(num_layers=1, config=CONFIG, **options):
    """Layers of one state, and for each the layer without replicas that it must equal."""
    state = EplbState.initial(num_layers, E, config.num_redundant_experts)
    modules = [FusedMoE(config) for _ in range(num_layers)]
    for index, module in enumerate(modules):
        module.set_eplb_state(index, *state, **options)
    return state, modules, [oracle_of(module) for module in modules]


def oracle_of(module):
    """Experts by their logical number, as they are before any placement."""
    plain = FusedMoE(MoEConfig(E, 2, 12, 20, has_bias=True, router=module.config.router))
    with torch.no_grad():
        for mine, other in zip(plain.parameters(), module.parameters(), strict=True):
            mine.copy_(other[:E])
    return plain


def place(module, held=HELD):
    module.balancing.place(placement_of(held), module.get_expert_weights())


def inputs(tokens):
    return torch.randn(tokens, 12), torch.randn(tokens, E)


WAYS = tuple(itertools.product(("eager", "aot_eager", "dynamic", "passes"), (0, 1, 7, 33)))


@pytest.mark.parametrize(("how", "tokens"), usually(WAYS, (*WAYS[:4], WAYS[6], WAYS[9], WAYS[15])))
@torch.no_grad()
def test_a_layer_with_replicas_is_the_layer_without(tokens, how):
    _, (module,), (plain,) = balanced()
    place(module)
    run = {
        "eager": lambda: module,
        "aot_eager": lambda: torch.compile(module, backend="aot_eager", fullgraph=True),
        "dynamic": lambda: torch.compile(module, backend="aot_eager", dynamic=True, fullgraph=True),
        "passes": lambda: torch.compile(module, options=inductor_passes.options(), fullgraph=True),
    }[how]()
    hidden, logits = inputs(tokens)
    assert_matches_oracle(run(hidden, logits), oracle.experts(plain, hidden, logits))
    routed = module.route(logits)
    assert_matches_oracle(run(hidden, routed), oracle.experts(plain, hidden, logits))
    placed = placement_of(HELD)
    physical = oracles.replicas(routed.topk_ids, placed.logical_to_physical, placed.replica_count, None)
    assert module.balancing.load.tolist() == [2 * load for load in oracles.load_of(physical, P)]
    assert module.balancing.load_per_expert().tolist() == (2 * routed.tokens_per_expert()).tolist()


@torch.no_grad()
def test_redundant_experts_without_a_state_are_left_alone():
    module = FusedMoE(CONFIG)
    plain, (hidden, logits) = oracle_of(module), inputs(7)
    assert module.w13_weight.shape[0] == P
    assert_matches_oracle(module(hidden, logits), oracle.experts(plain, hidden, logits))


@torch.no_grad()
def test_one_compiled_function_sees_each_new_placement():
    """First weights and maps move together; then maps alone, so that other experts answer."""
    _, (module,), (plain,) = balanced()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._inductor.compile(graph, example_inputs)

    run, (hidden, logits) = torch.compile(module, backend=backend, fullgraph=True), inputs(7)
    expected = oracle.experts(plain, hidden, logits)
    for held in (None, HELD, [5, 4, 3, 2, 1, 0, 1, 1, 2]):
        if held is not None:
            place(module, held)
        before = module.balancing.load.clone()
        assert_matches_oracle(run(hidden, logits), expected)
        assert (module.balancing.load - before).sum() == 7 * 2
    swapped = [1, 0, 2, 3, 4, 5]
    module.balancing.logical_to_physical.copy_(module.balancing.logical_to_physical[swapped])
    module.balancing.replica_count.copy_(module.balancing.replica_count[swapped])
    for parameter in plain.parameters():
        parameter.copy_(parameter[swapped])
    assert_matches_oracle(run(hidden, logits), oracle.experts(plain, hidden, logits))
    assert len(graphs) == 1


@torch.no_grad()
def test_layers_record_in_their_rows_and_share_a_graph():
    state, modules, _ = balanced(num_layers=4)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    for index, module in enumerate(modules):
        hidden, logits = inputs(7)
        before = state.expert_load_view.clone()
        torch.compile(module, backend=backend, fullgraph=True)(hidden, logits)
        grown = state.expert_load_view - before
        assert grown[index, :E].tolist() == module.route(logits).tokens_per_expert().tolist()
        assert grown.sum() == 14
    assert len(graphs) <= 2


@torch.no_grad()
def test_padding_and_a_switch_on_the_device():
    num_real, recording, seed = torch.tensor(5), torch.tensor(True), torch.tensor(3)
    options = {"num_real_tokens": num_real, "is_recording": recording, "seed": seed}
    _, (module,), (plain,) = balanced(**options)
    place(module)
    hidden, logits = inputs(7)
    assert_matches_oracle(module(hidden, logits), oracle.experts(plain, hidden, logits))
    placed, ids = placement_of(HELD), module.route(logits).topk_ids
    physical = oracles.replicas(ids, placed.logical_to_physical, placed.replica_count, 3)
    assert module.balancing.load.tolist() == oracles.load_of(physical[:5], P)
    recording.fill_(False)
    module(hidden, logits)
    assert module.balancing.load.sum() == 10


@torch.no_grad()
def test_two_halves_of_the_physical_experts_add_up():
    state, (whole,), (plain,) = balanced()
    place(whole)
    hidden, logits = inputs(33)
    total = torch.zeros(33, 12)
    for here in (range(4), range(4, P)):
        expert_map = torch.full((P,), -1)
        expert_map[list(here)] = torch.arange(len(here))
        half = FusedMoE(CONFIG, expert_map)
        half.set_eplb_state(0, *state)
        for mine, other in zip(half.parameters(), whole.parameters(), strict=True):
            mine.copy_(other[list(here)])
        total += half(hidden, logits)
    assert_matches_oracle(total, oracle.experts(plain, hidden, logits))


@torch.no_grad()
def test_places_hold_what_the_placement_says():
    _, (module,), (plain,) = balanced()
    weights = module.get_expert_weights()
    for held in (HELD, [5, 4, 3, 2, 1, 0, 1, 1, 2], list(range(E)) * 2):
        held = held[:P]
        place(module, held)
        for weight, logical in zip(weights, plain.get_expert_weights(), strict=True):
            assert torch.equal(weight, logical[held])
        for expert, (row, count) in enumerate(
            zip(module.balancing.logical_to_physical.tolist(), module.balancing.replica_count, strict=True)
        ):
            found = [spot for spot, each in enumerate(held) if each == expert]
            assert row == found + [-1] * (REDUNDANT + 1 - len(found)) and count == len(found)


@torch.no_grad()
def test_a_replica_that_stays_is_not_copied_over():
    """Places that keep their expert keep their bits: only what moves is written."""
    _, (module,), _ = balanced()
    place(module)
    module.w2_weight[6].fill_(7.0)  # a replica of expert 0 that differs
    place(module)
    assert (module.w2_weight[6] == 7.0).all() and not (module.w2_weight[2] == 7.0).any()


@torch.no_grad()
def test_rebalanced_load_is_even():
    config = MoEConfig(32, 2, 8, 8, num_redundant_experts=8)
    module = FusedMoE(config)
    module.set_eplb_state(0, *EplbState.initial(1, 32, 8))
    hidden = torch.randn(4096, 8)
    logits = torch.randn(4096, 32) + torch.linspace(0, 2, 32)
    output = module(hidden, logits)
    ranks = module.balancing.load.view(4, -1).sum(1).double()
    placement = rebalance_experts(module.balancing.load_per_expert(), 40, 1, 1, 4)
    module.balancing.place(placement, module.get_expert_weights())
    assert (module.balancing.load == 0).all()
    assert torch.allclose(module(hidden, logits), output, atol=1e-5)
    rebalanced = module.balancing.load.view(4, -1).sum(1).double()
    assert ranks.max() / ranks.mean() > 1.2 > 1.05 > rebalanced.max() / rebalanced.mean()


def test_weights_are_views_and_only_contiguous_ones():
    module = FusedMoE(CONFIG)
    views = module.get_expert_weights()
    assert [view.shape for view in views] == [(P, 480), (P, 240), (P, 40), (P, 12)]
    for view, parameter in zip(views, module.parameters(), strict=True):
        view[2] = 5.0
        assert (parameter[2] == 5.0).all() and parameter.requires_grad and not view.requires_grad
    module.w2_weight = torch.nn.Parameter(torch.randn(P, 20, 12).transpose(1, 2))
    with pytest.raises(ValueError, match="w2_weight has strides"):
        module.get_expert_weights()


def test_state_is_no_weight_and_copies_have_their_own():
    state, (module,), _ = balanced()
    assert "balancing" not in " ".join(module.state_dict())
    twin = copy.deepcopy(module)
    twin(*inputs(7))
    assert state.expert_load_view.sum() == 0 and twin.balancing.load.sum() == 14
    module.double()
    module(*(each.double() for each in inputs(7)))
    assert state.expert_load_view.sum() == 14


def test_a_checkpoint_is_of_experts_in_their_own_places():
    """Loaded before the replicas are placed, and refused after: places would be taken for experts."""
    block = MoEBlock(MoEConfig(E, 2, 12, 20, num_redundant_experts=REDUNDANT))
    block.experts.set_eplb_state(0, *EplbState.initial(1, E, REDUNDANT))
    model, stored = torch.nn.ModuleDict({"mlp": block}), {"mlp.gate.weight": torch.randn(E, 12)}
    for expert in range(E):
        stored[f"mlp.experts.{expert}.gate_proj.weight"] = torch.randn(20, 12)
        stored[f"mlp.experts.{expert}.up_proj.weight"] = torch.randn(20, 12)
        stored[f"mlp.experts.{expert}.down_proj.weight"] = torch.randn(12, 20)
    load_checkpoint(model, stored, progress=False)
    place(block.experts)
    for spot, expert in enumerate(HELD):
        assert torch.equal(block.experts.w2_weight[spot], stored[f"mlp.experts.{expert}.down_proj.weight"])
    with pytest.raises(ValueError, match="experts have moved"):
        load_checkpoint(model, stored, progress=False)


def test_gradients_reach_router_and_experts():
    _, (module,), (plain,) = balanced()
    hidden, logits = (each.double().requires_grad_() for each in inputs(7))
    module.double(), plain.double()
    actual = torch.autograd.grad(module(hidden, logits).square().sum(), (hidden, logits))
    expected = torch.autograd.grad(plain(hidden, logits).square().sum(), (hidden, logits))
    for mine, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


STATE = EplbState.initial(2, E, REDUNDANT)
WRONG_STATES = {
    "row": ((2, *STATE), ValueError, r"moe_layer_idx=2: expected an int in \[0, 2\)"),
    "negative row": ((-1, *STATE), ValueError, "moe_layer_idx=-1"),
    "no row": ((True, *STATE), ValueError, r"moe_layer_idx=True: expected an int in \[0, 2\)"),
    "rank": ((0, STATE[0][0], *STATE[1:]), ValueError, r"expert_load_view has shape \[9\]: expected rank 2"),
    "experts": ((0, *EplbState.initial(2, 5, 4)), ValueError, r"have \(5, 9\) experts: expected \(6, 9\)"),
    "places": ((0, *EplbState.initial(2, E, 2)), ValueError, r"have \(6, 8\) experts: expected \(6, 9\)"),
    "type": ((0, None, *STATE[1:]), TypeError, "expert_load_view=None"),
    "dtype": (
        (0, STATE[0], STATE[1].long(), STATE[2]),
        TypeError,
        "logical_to_physical has dtype torch.int64",
    ),
    "counts": ((0, STATE[0], STATE[1], STATE[2][:, 1:]), ValueError, "replica_count has shape"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG_STATES.values(), ids=WRONG_STATES)
def test_states_of_another_layer_are_refused(arguments, error, message):
    module = FusedMoE(CONFIG)
    with pytest.raises(error, match=message):
        module.set_eplb_state(*arguments)
    assert module.balancing is None


GOOD = placement_of(HELD)
WRONG_PLACEMENTS = {
    "places": (placement_of(HELD[:8]), r"expected \[9\], \[6\], \[6\]"),
    "too many replicas": (placement_of([0, 1, 2, 3, 4, 5, 0, 0, 0]), None),
    "an expert without a place": (placement_of([0, 1, 2, 3, 4, 4, 0, 0, 3]), "contradicts itself"),
    "another map": (
        GOOD._replace(logical_to_physical=GOOD.logical_to_physical.roll(1, 0)),
        "contradicts itself",
    ),
    "counts": (GOOD._replace(replica_count=GOOD.replica_count.clamp(max=2)), "contradicts itself"),
}


@pytest.mark.parametrize(("placement", "message"), WRONG_PLACEMENTS.values(), ids=WRONG_PLACEMENTS)
def test_placements_that_contradict_themselves_change_nothing(placement, message):
    state, (module,), _ = balanced()
    narrow = EplbState(state[0], state[1][:, :, :3].clone(), state[2])
    module.set_eplb_state(0, *narrow)
    before = [each.clone() for each in (*module.get_expert_weights(), *narrow)]
    with pytest.raises(ValueError, match=message or "up to 4 replicas of an expert: expected 3"):
        module.balancing.place(placement, module.get_expert_weights())
    for mine, other in zip((*module.get_expert_weights(), *narrow), before, strict=True):
        assert torch.equal(mine, other)


def test_weights_of_some_experts_cannot_be_placed():
    _, (module,), _ = balanced()
    for weight in (torch.zeros(4, 3), torch.zeros(())):
        told = re.escape(f"expert_weights[1] has shape {list(weight.shape)}: expected 9 experts first")
        with pytest.raises(ValueError, match=told):
            module.balancing.place(GOOD, [torch.zeros(9, 3), weight])


@pytest.mark.parametrize("bad", [-1, 1.5, True])
def test_redundant_experts_are_counted(bad):
    with pytest.raises((TypeError, ValueError), match="num_redundant_experts"):
        MoEConfig(E, 2, 12, 20, num_redundant_experts=bad)
    with pytest.raises((TypeError, ValueError), match="num_redundant_experts"):
        EplbState.initial(1, E, bad)


def test_a_plain_layer_emits_what_it_did():
    """Off costs nothing: one call in a trace, whose stages AOTAutograd sees, one operator in eager."""
    module, seen = FusedMoE(MoEConfig(E, 2, 12, 20)), Capture()
    with torch.no_grad():
        torch.compile(module, backend=aot(seen), fullgraph=True)(*inputs(7))
    assert seen.operators == [STAGES]
    with torch.profiler.profile() as profile, torch.no_grad():
        module(*inputs(7))
    ours = [event.name for event in profile.events() if event.name.startswith("moe::")]
    assert ours == ["moe::fused_moe"]


def test_balancing_alone_has_the_operators_checks():
    with pytest.raises(TypeError, match="is_recording has dtype"):
        ExpertBalancing(STATE[0][0], STATE[1][0], STATE[2][0], is_recording=torch.tensor(1))
