"""Capture and replay of routed experts: logical ids, no callback, the same eager, compiled and in training."""

import pytest
import torch

import inductor_passes
from layers import (
    EplbState,
    FusedMoE,
    HashRouting,
    MoEBlock,
    MoEConfig,
    RoutedExpertsCapture,
    RoutedExpertsReplay,
    RouterConfig,
)
from moe_ops import RoutingConfig
from moe_ops.reference import reference_experts
from tests.helpers import assert_matches_oracle, usually
from tests.layers import oracle

E, MOST = 6, 40
CONFIG = MoEConfig(E, 2, 12, 20)
# Every number of tokens is a compile where it is static.
TOKENS = {"eager": (33, 7, 1, 0), "aot_eager": (33, 7, 0), "passes": (7, 1), "dynamic": (33, 7, 1, 0)}
HOW = {
    "eager": lambda module: module,
    "aot_eager": lambda module: torch.compile(module, backend="aot_eager", fullgraph=True),
    "passes": lambda module: torch.compile(module, options=inductor_passes.options(), fullgraph=True),
    "dynamic": lambda module: torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True),
}


def buffer_of(rows=MOST, fill=-9):
    return torch.full((rows, 2), fill, dtype=torch.int32)


def inputs(tokens):
    return torch.randn(tokens, 12), torch.randn(tokens, E)


@pytest.mark.parametrize("how", usually(HOW, ("eager", "passes", "dynamic")))
@torch.no_grad()
def test_a_forward_writes_its_tokens(how):
    module, buffer = FusedMoE(CONFIG), buffer_of()
    module.capture = RoutedExpertsCapture(buffer)
    run = HOW[how](module)
    for tokens in TOKENS[how]:
        (hidden, logits), before = inputs(tokens), buffer.clone()
        assert_matches_oracle(run(hidden, logits), oracle.experts(module, hidden, logits))
        assert buffer[:tokens].tolist() == logits.topk(2).indices.tolist()
        assert torch.equal(buffer[tokens:], before[tokens:])


@torch.no_grad()
def test_ids_are_logical_ones_and_hand_made_routing_counts():
    module, buffer = FusedMoE(MoEConfig(E, 2, 12, 20, num_redundant_experts=2)), buffer_of()
    state = EplbState.initial(1, E, 2)
    module.set_eplb_state(0, *state)
    state.logical_to_physical_map[0, :, 0] = torch.arange(E).roll(1).int()
    module.capture = RoutedExpertsCapture(buffer)
    hidden, logits = inputs(7)
    module(hidden, logits)
    assert buffer[:7].tolist() == logits.topk(2).indices.tolist()
    routed = module.route(logits)
    module(hidden, routed._replace(topk_ids=(routed.topk_ids + 1) % E))
    assert buffer[:7].tolist() == ((logits.topk(2).indices + 1) % E).tolist()


@pytest.mark.parametrize("how", usually(HOW, ("eager", "passes", "dynamic")))
@torch.no_grad()
def test_a_replay_uses_the_buffers_experts_and_these_logits(how):
    module, buffer = FusedMoE(CONFIG), buffer_of()
    module.routing_override = RoutedExpertsReplay(buffer, CONFIG.routing)
    run = HOW[how](module)
    for tokens in TOKENS[how]:
        hidden, logits = inputs(tokens)
        buffer.copy_(torch.stack([torch.randperm(E)[:2] for _ in range(MOST)]))
        expected = torch.zeros(tokens, 12, dtype=torch.float64)
        for token in range(tokens):
            ids = buffer[token].tolist()
            for weight, expert in zip(logits[token, ids].double().softmax(0), ids, strict=True):
                expected[token] += weight * oracle._expert(module, hidden[token].double(), expert)
        assert_matches_oracle(run(hidden, logits), expected)


@pytest.mark.parametrize(
    "routing",
    [
        RoutingConfig(2),
        RoutingConfig(2, score_fn="sigmoid", scale=2.0),
        RoutingConfig(2, order="topk_then_score"),
    ],
    ids=lambda routing: routing.spec,
)
def test_a_replay_of_what_was_captured_is_the_same_layer_with_the_same_gradients(routing):
    config = MoEConfig(E, 2, 12, 20, routing=routing, router=RouterConfig(has_correction_bias=True))
    module, buffer = FusedMoE(config, dtype=torch.float64), buffer_of()
    module.e_score_correction_bias.copy_(torch.randn(E))
    hidden, logits = (each.double().requires_grad_() for each in inputs(7))
    module.capture = RoutedExpertsCapture(buffer)
    first = module(hidden, logits)
    expected = torch.autograd.grad(first.square().sum(), (hidden, logits, module.w13_weight))
    module.capture = None
    module.routing_override = RoutedExpertsReplay(buffer, routing)
    again = module(hidden, logits)
    buffer.fill_(0)  # the next batch arrives before the backward
    actual = torch.autograd.grad(again.square().sum(), (hidden, logits, module.w13_weight))
    for mine, other in zip((again, *actual), (first, *expected), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["replay", "hash"])
@torch.no_grad()
def test_a_scaled_output_is_scaled_once(kind, compiled):
    config = MoEConfig(
        E, 2, 12, 20, routing=RoutingConfig(2, scale=2.5), router=RouterConfig(scale_on="output")
    )
    module, (hidden, logits) = FusedMoE(config), inputs(7)
    expected, ids = oracle.experts(module, hidden, logits), logits.topk(2).indices.int()
    module.routing_override = (
        RoutedExpertsReplay(ids, config.routing)
        if kind == "replay"
        else HashRouting(ids, torch.arange(7), config.routing)
    )
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    assert_matches_oracle(run(hidden, logits), expected)
    assert_matches_oracle(module(hidden, module.route(logits, hidden)), expected)


@torch.no_grad()
def test_a_slot_without_a_usable_expert_is_left_out_by_its_id():
    """Fewer usable experts than K: what a replay has to be told."""
    module, buffer = (
        FusedMoE(MoEConfig(E, 2, 12, 20, router=RouterConfig(has_correction_bias=True))),
        buffer_of(),
    )
    module.e_score_correction_bias[1:] = float("-inf")
    (hidden, logits), module.capture = inputs(7), RoutedExpertsCapture(buffer)
    routed = module.route(logits)
    expected, module.capture = module(hidden, routed), None
    assert routed.topk_weights[0].tolist() == [1.0, 0.0]
    module.routing_override = RoutedExpertsReplay(buffer, module.config.routing)
    assert module.route(logits).topk_weights[:, 1].all()
    buffer[:7][routed.topk_weights == 0] = -1
    torch.testing.assert_close(module(hidden, logits), expected)


@torch.no_grad()
def test_blocks_capture_and_replay_and_stop():
    block, hidden = MoEBlock(CONFIG), torch.randn(2, 3, 12)
    plain, buffer = block(hidden), buffer_of()
    block.experts.capture = RoutedExpertsCapture(buffer)
    _, routed = block.forward_with_routing(hidden)
    assert torch.equal(buffer[:6], routed.topk_ids)
    buffer.copy_((buffer + 1) % E)
    block.experts.capture = None
    block.experts.routing_override = RoutedExpertsReplay(buffer, CONFIG.routing)
    output, replayed = block.forward_with_routing(hidden)
    assert torch.equal(replayed.topk_ids, buffer[:6])
    assert torch.equal(block(hidden), output) and not torch.allclose(output, plain)
    told = replayed.topk_ids.tolist()
    buffer.fill_(0)  # the next batch
    assert replayed.topk_ids.tolist() == told
    block.experts.routing_override = None
    assert torch.equal(block(hidden), plain)
    assert set(block.state_dict()) == {"gate.weight", "experts.w13_weight", "experts.w2_weight"}


def test_an_override_sees_hidden_states_and_logits():
    class ByNorm(torch.nn.Module):
        def forward(self, hidden_states, router_logits):
            first = (hidden_states.norm(dim=1) > router_logits.norm(dim=1)).int()
            return torch.full((7, 2), 0.5), torch.stack([first, first + 2], 1)

    module, (hidden, logits) = FusedMoE(CONFIG), inputs(7)
    module.routing_override, module.capture = ByNorm(), RoutedExpertsCapture(buffer_of())
    module(hidden, logits)
    larger = hidden.norm(dim=1) > logits.norm(dim=1)
    assert module.capture.buffer[:7, 0].tolist() == larger.int().tolist()


def test_errors():
    for kind in (RoutedExpertsCapture, lambda buffer: RoutedExpertsReplay(buffer, CONFIG.routing)):
        with pytest.raises(TypeError, match="buffer has dtype"):
            kind(buffer_of().long())
        with pytest.raises(ValueError, match=r"buffer has shape \[2\]: expected \[max_tokens, top_k\]"):
            kind(buffer_of()[0])
        with pytest.raises(TypeError, match="buffer=None"):
            kind(None)
    with pytest.raises(ValueError, match="expected at least 0 tokens and top_k=3"):
        RoutedExpertsReplay(buffer_of(), RoutingConfig(3))
    with pytest.raises(TypeError, match="routing='top_k=2'"):
        RoutedExpertsReplay(buffer_of(), "top_k=2")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("which", ["capture", "routing_override"])
def test_more_tokens_than_rows_is_an_error(which, compiled):
    module = FusedMoE(CONFIG)
    replay = RoutedExpertsReplay(buffer_of(6, 0), CONFIG.routing)
    setattr(module, which, RoutedExpertsCapture(buffer_of(6)) if which == "capture" else replay)
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    run(*inputs(6))
    with pytest.raises(
        Exception, match=r"buffer has shape \[6, 2\]: expected at least .*7.* tokens and top_k=2"
    ):
        run(*inputs(7))


@pytest.mark.parametrize("dtype", usually([torch.int32, torch.int64], [torch.int64]))
@pytest.mark.parametrize("how", usually(HOW, ("eager", "dynamic")))
@torch.no_grad()
def test_experts_by_token_id(how, dtype):
    """The tensor of token ids changes in place; what is no token of the vocabulary has no expert."""
    module, table = FusedMoE(CONFIG), torch.rand(50, E).argsort(1)[:, :2].int()
    table[7] = -1
    token_ids = torch.zeros(MOST, dtype=dtype)
    module.routing_override = HashRouting(table, token_ids, CONFIG.routing)
    run = HOW[how](module)
    for tokens in TOKENS[how]:
        hidden, logits = inputs(tokens)
        token_ids.random_(0, 50)
        token_ids[:3] = torch.tensor([50, -1, 7])
        chosen = table[token_ids.clamp(0, 49)[:tokens].long()]
        chosen[:3] = -1
        assert torch.equal(module.route(logits).topk_ids, chosen)
        probabilities = (
            logits.double().softmax(1).gather(1, chosen.clamp(min=0).long()).masked_fill(chosen < 0, 0)
        )
        weights = (probabilities / probabilities.sum(1, keepdim=True)).nan_to_num(0)
        expected = reference_experts(
            hidden.double(), module.w13_weight.double(), module.w2_weight.double(), weights, chosen,
            CONFIG.activation,
        )  # fmt: skip
        assert_matches_oracle(run(hidden, logits), expected)


IDS = torch.zeros(4).int()


@pytest.mark.parametrize(
    ("table", "token_ids", "error", "message"),
    [
        (torch.zeros(9, 2), IDS, TypeError, "table has dtype torch.float32: expected torch.int32"),
        (torch.zeros(9).int(), IDS, ValueError, r"table has shape \[9\]: expected \[vocabulary, top_k"),
        (torch.zeros(9, 3).int(), IDS, ValueError, r"table has shape \[9, 3\]: .* top_k=2"),
        (torch.zeros(0, 2).int(), IDS, ValueError, r"table has shape \[0, 2\]: expected token ids"),
        (torch.zeros(9, 2).int(), IDS.float(), TypeError, "token_ids has dtype torch.float32: .*int32 or"),
        (torch.zeros(9, 2).int(), IDS.unsqueeze(1), ValueError, r"token_ids has shape \[4, 1\]"),
        (torch.zeros(9, 2).int(), [1, 2], TypeError, "token_ids=.1, 2.: expected Tensor"),
    ],
)
def test_what_hash_routing_refuses(table, token_ids, error, message):
    with pytest.raises(error, match=message):
        HashRouting(table, token_ids, CONFIG.routing)


def test_hash_routing_needs_an_id_of_every_token():
    module = FusedMoE(CONFIG)
    module.routing_override = HashRouting(torch.zeros(9, 2).int(), torch.zeros(4).int(), CONFIG.routing)
    with pytest.raises(ValueError, match=r"token_ids has shape \[4\]: expected at least 5"):
        module(*inputs(5))
