"""Who went where: the routing of a block, for those who ask."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from layers import FusedMoE, MoEBlock, MoEConfig, RouterConfig, RouterOutput, SharedExpertConfig
from moe_ops import RoutingConfig
from tests.layers import oracle
from tests.layers.test_compile import STAGES, Capture, aot
from tests.layers.test_fsdp import mesh  # noqa: F401  # a fixture

H, I, E, K = 16, 24, 8, 2
OPTIONS = {
    "plain": {},
    "biases": {"has_bias": True},
    "deepseek": {
        "routing": RoutingConfig(
            K, "sigmoid", num_groups=4, topk_groups=2, group_score="top2_sum", scale=2.5
        ),
        "router": RouterConfig(has_correction_bias=True, gate_dtype=torch.float32),
        "shared_experts": SharedExpertConfig(40),
    },
    "weight_on_input": {
        "top_k": 1,
        "routing": RoutingConfig(1, "sigmoid", renormalize=False),
        "router": RouterConfig(weight_on="input"),
    },
}


def make_block(options="plain", expert_map=None) -> MoEBlock:
    torch.manual_seed(2)
    sizes = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I}
    block = MoEBlock(MoEConfig(**{**sizes, **OPTIONS[options]}), expert_map)
    torch.nn.init.normal_(block.gate.weight)
    if block.experts.e_score_correction_bias is not None:
        torch.nn.init.normal_(block.experts.e_score_correction_bias, std=0.3)
    return block


@pytest.mark.parametrize("options", OPTIONS)
def test_asking_changes_no_bit(options):
    block, hidden = make_block(options), torch.randn(3, 5, H)
    output, routing = block.forward_with_routing(hidden)
    assert torch.equal(output, block(hidden))
    top_k = block.config.top_k
    assert routing.router_logits.shape == (15, E)
    assert routing.topk_weights.shape == routing.topk_ids.shape == (15, top_k)
    assert routing.topk_weights.dtype == torch.float32
    assert routing.topk_ids.dtype == torch.int32
    torch.testing.assert_close(routing.router_logits, hidden.reshape(15, H) @ block.gate.weight.T)


@pytest.mark.parametrize(
    "expert_map", [None, torch.tensor([0, -1, 1, -1, 2, -1, 3, -1])], ids=["whole", "half"]
)
def test_tokens_per_expert_counts_every_slot(expert_map):
    block = make_block("deepseek", expert_map)
    _, routing = block.forward_with_routing(torch.randn(33, H))
    expected = [sum(expert in ids for ids in routing.topk_ids.tolist()) for expert in range(E)]
    assert routing.tokens_per_expert().tolist() == expected
    assert sum(expected) == 33 * K
    assert routing.tokens_per_expert().dtype == torch.int64


def test_no_token_no_count():
    output, routing = make_block().forward_with_routing(torch.randn(0, H))
    assert output.shape == (0, H)
    assert routing.tokens_per_expert().tolist() == [0] * E


def test_logits_and_weights_have_gradients():
    block = make_block()
    _, routing = block.forward_with_routing(torch.randn(33, H))
    load = routing.tokens_per_expert() / routing.topk_ids.numel()
    auxiliary_loss = (routing.router_logits.softmax(-1).mean(0) * load).sum() + routing.topk_weights[
        :, 0
    ].sum()
    (gradient,) = torch.autograd.grad(auxiliary_loss, block.gate.weight, retain_graph=True)
    probabilities = (hidden_logits := routing.router_logits.detach().requires_grad_()).softmax(-1)
    chosen = probabilities.gather(1, routing.topk_ids.long())
    by_hand = (probabilities.mean(0) * load).sum() + (chosen[:, 0] / chosen.sum(-1)).sum()
    (to_logits,) = torch.autograd.grad(by_hand, hidden_logits)
    (expected,) = torch.autograd.grad(routing.router_logits, block.gate.weight, to_logits)
    torch.testing.assert_close(gradient, expected)


def test_a_changed_routing_is_what_the_experts_run():
    experts = FusedMoE(MoEConfig(E, K, H, I))
    hidden, logits = torch.randn(5, H), torch.randn(5, E)
    routing = experts.route(logits)
    halved = experts(hidden, routing._replace(topk_weights=routing.topk_weights / 2))
    torch.testing.assert_close(halved, experts(hidden, logits) / 2)
    elsewhere = experts(hidden, routing._replace(topk_ids=torch.full_like(routing.topk_ids, -1)))
    assert not elsewhere.any()


def test_a_half_of_the_experts_runs_a_given_routing():
    experts = FusedMoE(MoEConfig(E, K, H, I), torch.tensor([0, -1, 1, -1, 2, -1, 3, -1]))
    hidden, logits = torch.randn(5, H), torch.randn(5, E)
    output = experts(hidden, experts.route(logits))
    assert oracle.relative_error(output, oracle.experts(experts, hidden, logits)) < 1e-5


@torch.no_grad()
def test_one_graph_with_the_routing_beside_the_output():
    block, hidden = make_block("deepseek"), torch.randn(9, H)

    def balanced(hidden):
        output, routing = block.forward_with_routing(hidden)
        return output, routing, routing.tokens_per_expert()

    capture = Capture()
    output, routing, load = torch.compile(balanced, backend=aot(capture), fullgraph=True)(hidden)
    expected, expected_routing = block.forward_with_routing(hidden)
    torch.testing.assert_close(output, expected)
    assert isinstance(routing, RouterOutput)
    assert torch.equal(routing.topk_ids, expected_routing.topk_ids)
    assert torch.equal(load, expected_routing.tokens_per_expert())
    shared_activation = 1
    assert len(capture.operators[0]) == len(STAGES) + shared_activation


@pytest.mark.parametrize("options", ["plain", "deepseek"])
@torch.no_grad()
def test_the_graph_of_those_who_do_not_ask_has_nothing_more(options):
    block, hidden = make_block(options), torch.randn(2, 9, H)
    graphs = []

    def by_hand(hidden):
        tokens = hidden.reshape(-1, H)
        logits = block.gate(tokens)
        shared = None if block.shared_experts is None else block.shared_experts(tokens)
        return block.experts(tokens, logits, shared).reshape(hidden.shape)

    def keep(graph_module, example_inputs):
        graphs.append([str(n.target) for n in graph_module.graph.nodes if n.op == "call_function"])
        return graph_module

    for function in (block, by_hand, block.forward_with_routing):
        torch.compile(function, backend=aot(keep), fullgraph=True)(hidden)
    assert graphs[0] == graphs[1]
    assert sorted(graphs[0]) == sorted(graphs[2])  # the same operators: asking returns more of them


@pytest.mark.parametrize("nested", [False, True])
def test_sharded_blocks_tell_too(mesh, nested):  # noqa: F811
    block, hidden = make_block("deepseek"), torch.randn(9, H)
    expected, expected_routing = block.forward_with_routing(hidden)
    if nested:
        fully_shard(block.experts, mesh=mesh)
    fully_shard(block, mesh=mesh)
    register_fsdp_forward_method(block, "forward_with_routing")
    output, routing = block.forward_with_routing(hidden)
    torch.testing.assert_close(output, expected)
    assert torch.equal(routing.topk_ids, expected_routing.topk_ids)
    output.sum().backward()
    assert block.gate.weight.grad.full_tensor().abs().sum() > 0
