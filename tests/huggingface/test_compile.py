"""Patched models trace as one graph of stage operators, with nothing between routing and experts."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from layers import huggingface
from tests.helpers import usually
from tests.huggingface.families import EXPERTS, FAMILIES, HIDDEN, INTER, pair, tokens

STAGES = [
    "topk_routing",
    "build_dispatch",
    "permute",
    "grouped_gemm",
    "gated_activation",
    "grouped_gemm",
    "combine",
]


def unique_graphs() -> int:
    # Not a count of backend calls: Dynamo calls the backend twice for float attributes such as a norm's epsilon.
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def stage_nodes(graph_module):
    nodes = [node for node in graph_module.graph.nodes if str(node.target).startswith("moe.")]
    return [node for node in nodes if "backward" not in str(node.target)]


def names(nodes) -> list[str]:
    return [str(node.target).split(".")[1] for node in nodes]


@pytest.mark.parametrize("family", usually(FAMILIES, ("deepseek_v3",)))
@torch.no_grad()
def test_one_graph_for_every_length(family):
    stock, ours = pair(family, num_hidden_layers=1, use_cache=False)
    huggingface.patch(ours)
    compiled = torch.compile(ours, backend="eager", fullgraph=True, dynamic=True)
    for length in (12, 7, 33):
        torch.testing.assert_close(compiled(tokens(2, length)).logits, stock(tokens(2, length)).logits)
    assert unique_graphs() == 1


@pytest.mark.parametrize("family", usually(FAMILIES, ("qwen3_moe", "gpt_oss")))
@torch.no_grad()
def test_registration_alone_traces_too(family):
    huggingface.register()
    stock, ours = pair(family, num_hidden_layers=1, use_cache=False)
    ours.set_experts_implementation("moe_ops")
    compiled = torch.compile(ours, backend="eager", fullgraph=True, dynamic=True)
    for length in (12, 7):
        torch.testing.assert_close(compiled(tokens(2, length)).logits, stock(tokens(2, length)).logits)
    assert unique_graphs() == 1


@pytest.mark.parametrize("family", usually(FAMILIES, ("qwen3_moe", "deepseek_v3", "gpt_oss")))
@torch.no_grad()
def test_nothing_stands_between_routing_and_experts(family):
    _, ours = pair(family, torch.bfloat16)
    huggingface.patch(ours)
    graphs = []

    def capture(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module

    block = ours.model.layers[0].mlp
    hidden = torch.randn(2, 9, HIDDEN, dtype=torch.bfloat16)
    torch.compile(block, backend=aot(capture), fullgraph=True, dynamic=True)(hidden)
    (graph_module,) = graphs
    nodes = stage_nodes(graph_module)
    assert names(nodes) == STAGES
    routing, dispatch, combine = nodes[0], nodes[1], nodes[-1]
    assert dispatch.args[0].target.__name__ == "getitem"
    assert dispatch.args[0].args == (routing, 1)
    assert combine.args[1].args == (routing, 0)


def aot(compiler):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda gm, inputs: make_boxed_func(compiler(gm, inputs).forward))


@torch.no_grad()
def test_a_clamp_of_another_limit_is_one_of_our_activations():
    stock, ours = pair("gpt_oss", num_hidden_layers=1)
    for model in (stock, ours):
        model.model.layers[0].mlp.experts.limit = 0.5  # instead of 7.0, so that it clamps
    huggingface.patch(ours)
    graphs = []

    def capture(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module

    hidden = torch.randn(2, 9, HIDDEN)
    block = torch.compile(ours.model.layers[0].mlp, backend=aot(capture), fullgraph=True)
    torch.testing.assert_close(block(hidden)[0], stock.model.layers[0].mlp(hidden)[0])
    assert names(stage_nodes(graphs[0])) == STAGES


@torch.no_grad()
def test_identical_blocks_share_one_graph():
    _, ours = pair("deepseek_v3", num_hidden_layers=6)
    huggingface.patch(ours)
    for layer in ours.model.layers:
        layer.mlp.compile(backend="eager", fullgraph=True)
        layer.mlp(torch.randn(1, 9, HIDDEN))
    assert unique_graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", usually(("qwen3_moe", "gpt_oss"), ("gpt_oss",)))
@torch.no_grad()
def test_inductor_computes_the_same_and_copies_no_weight(family):
    stock, ours = pair(family, num_hidden_layers=1, use_cache=False)
    huggingface.patch(ours)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True)
    _, (code, *_) = run_and_get_code(compiled, tokens(2, 12))
    for length in (12, 20):
        torch.testing.assert_close(compiled(tokens(2, length)).logits, stock(tokens(2, length)).logits)
    # Every buffer a graph allocates has its sizes in the code; a copied weight would start with (E, .
    allocations = re.findall(r"empty_strided\w*\(\(([^)]*)\)", code)
    assert allocations
    assert not [sizes for sizes in allocations if is_weight(sizes)]


def is_weight(sizes: str) -> bool:
    shape = [int(size) for size in sizes.replace(" ", "").split(",") if size.isdigit()]
    elements = 1
    for size in shape:
        elements *= size
    return shape[:1] == [EXPERTS] and elements >= EXPERTS * INTER * HIDDEN


def test_training_compiles_to_the_same_gradients():
    stock, ours = pair("mixtral", num_hidden_layers=1, use_cache=False)
    huggingface.patch(ours)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    ids = tokens(2, 12)
    for model in (stock, compiled):
        model(ids, labels=ids).loss.backward()
    for (name, expected), actual in zip(stock.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-6, msg=name)
