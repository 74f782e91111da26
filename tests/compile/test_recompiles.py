"""How often a layer is compiled anew: once for any number of tokens from 2 on, never for who was routed where."""

import pytest
import torch
from torch._dynamo.utils import counters

from inductor_passes import _compat
from inductor_passes.pipeline import PIPELINE, run_passes
from layers import MoEBlock, MoEConfig, huggingface
from tests.huggingface.families import HIDDEN, pair

COUNTS = (2, 3, 16, 17, 255, 256, 4095, 4096)


def _backend(graph_module, example_inputs):
    """The passes, without code: what Inductor could guard, they could."""

    def rewritten(module, _):
        run_passes(module.graph, PIPELINE)
        module.recompile()

    return _compat.post_grad_backend(rewritten)(graph_module, example_inputs)


def _ours():
    block = MoEBlock(MoEConfig(8, 2, HIDDEN, 32)).eval()
    return block, lambda count: torch.randn(count, HIDDEN)


def _stock():
    stock, _ = pair("qwen3_moe", num_hidden_layers=1, use_cache=False)
    stock.set_experts_implementation("grouped_mm")
    return stock.model.layers[0].mlp, lambda count: torch.randn(1, count, HIDDEN)


def _patched():
    _, model = pair("qwen3_moe", num_hidden_layers=1, use_cache=False)
    huggingface.patch(model)
    return model.model.layers[0].mlp, lambda count: torch.randn(1, count, HIDDEN)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("make", [_ours, _patched, _stock], ids=["ours", "patched", "backend only"])
@torch.no_grad()
def test_one_graph_for_every_number_of_tokens(make):
    module, tokens_of = make()
    compiled = torch.compile(module, backend=_backend, fullgraph=True, dynamic=True)
    for count in COUNTS:
        compiled(tokens_of(count))
    assert counters["stats"]["unique_graphs"] == 1
    compiled(tokens_of(1))  # the one number that Dynamo never takes for any
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("make", [_ours, _patched, _stock], ids=["ours", "patched", "backend only"])
@torch.no_grad()
def test_two_graphs_where_the_number_changes_unannounced(make):
    module, tokens_of = make()
    compiled = torch.compile(module, backend=_backend, fullgraph=True)
    for count in COUNTS:
        compiled(tokens_of(count))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("make", [_ours, _patched, _stock], ids=["ours", "patched", "backend only"])
@torch.no_grad()
def test_who_is_routed_where_compiles_nothing(make):
    module, tokens_of = make()
    compiled = torch.compile(module, backend=_backend, fullgraph=True)
    compiled(tokens_of(33))
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(torch.ones_like(tokens_of(33)))  # all at the same experts
        compiled(torch.zeros_like(tokens_of(33)))
        compiled(tokens_of(33).mul(1e4))
