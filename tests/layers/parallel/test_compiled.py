"""Exchanges inside compiled code: one graph, whatever the routing, with values and gradients of the oracle."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import inductor_passes
from layers import RouterOutput
from tests.helpers import assert_matches_oracle, assert_same, usually
from tests.layers.parallel.exchanges import ALL, MOST, REPLICATED, ROUTINGS, config, make_layer, tokens_of
from tests.layers.parallel.test_exchanges import differentiable, loss, oracle
from tests.layers.parallel.world import on_ranks


def compiled_for_any_number(kernel, backend="aot_eager"):
    """And how often it was compiled. The number of tokens is symbolic from the start, on every rank alike."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(kernel, fullgraph=True, dynamic=True, backend=counter), counter


@on_ranks(2)
@pytest.mark.parametrize("name", usually(ALL, ("all_gather_static", "variable")))
def test_one_graph_for_every_routing_and_number_of_tokens(name):
    layer = make_layer(config())
    function, counter = compiled_for_any_number(ALL[name](layer))
    behind = 0 if name in REPLICATED else 2 * dist.get_rank()
    for tokens, routing, most_graphs in (
        (8, "random", 1),
        (5, "one_rank", 1),
        (9, "padding", 1),
        (2, "random", 2),
    ):
        hidden, routed = tokens_of(0, name, routing, sizes="most", step=tokens)
        mine = tokens - behind  # 0 in the end, for which torch compiles once more
        hidden, routed = hidden[:mine], RouterOutput(*(each[:mine] for each in routed))
        with torch.no_grad():
            assert_matches_oracle(function(hidden, routed), oracle(layer, hidden, routed))
        assert counter.frame_count <= most_graphs


@on_ranks(2)
@pytest.mark.parametrize(
    "name", usually(("all_gather", "tensor_parallel", "padded", "variable"), ("all_gather", "variable"))
)
def test_gradients(name):
    kernel = ALL[name](make_layer(config(has_bias=True), torch.float64))
    weights = list(kernel.parameters())
    found = []
    for function in (kernel, compiled_for_any_number(kernel)[0]):
        hidden, routed = differentiable(*tokens_of(dist.get_rank(), name, dtype=torch.float64, sizes="even"))
        inputs = [hidden, routed.topk_weights, *weights]
        found.append(torch.autograd.grad(loss(function(hidden, routed)), inputs))
    assert_same(*found)


@on_ranks(2, timeout=300)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", usually(("all_gather_static", "tensor_parallel", "padded"), ("all_gather_static",))
)
def test_with_our_passes(name):
    layer = make_layer(config())
    kernel = ALL[name](layer)
    function = torch.compile(kernel, fullgraph=True, options=inductor_passes.options())
    for step, routing in enumerate(ROUTINGS):
        hidden, routed = tokens_of(dist.get_rank(), name, routing, sizes="even", step=step)
        with torch.no_grad():
            assert_matches_oracle(function(hidden, routed), oracle(layer, hidden, routed))


class _FromLogits(torch.nn.Module):
    """Programs take tensors."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, hidden, logits):
        return self.kernel(hidden, logits)


@on_ranks(2)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", usually(ALL, ("all_gather", "all_gather_static", "variable")))
def test_exported_programs(name, strict):
    """Without max_tokens an all-gather was a program of `strict=True` only."""
    layer = make_layer(config())
    module, (hidden, routed) = _FromLogits(ALL[name](layer)), tokens_of(dist.get_rank(), name, sizes="even")
    open_count = {0: torch.export.Dim("tokens", min=2, max=MOST)}
    with torch.no_grad():
        given = hidden, routed.router_logits
        program = torch.export.export(module, given, dynamic_shapes=(open_count, open_count), strict=strict)
        for step in range(2):
            hidden, routed = tokens_of(dist.get_rank(), name, sizes="most", step=step)
            mine = MOST if name in REPLICATED else MOST - 2 * dist.get_rank()
            hidden, logits = hidden[:mine], routed.router_logits[:mine]
            expected = oracle(layer, hidden, layer.route(logits))
            assert_matches_oracle(program.module()(hidden, logits), expected)
