"""Results of nested compile regions that are their inputs: read from where they came."""

import operator

import pytest
import torch
from torch.fx import Graph, GraphModule

import inductor_passes
from inductor_passes.returned_inputs import read_inputs_themselves
from tests.helpers import assert_same, fresh_graphs


@torch.compiler.nested_compile_region
def region(x, w):
    return torch.sin(x) @ w


@torch.compiler.nested_compile_region
def region_of_a_view(x, w):
    return torch.sin(x @ w) @ x.t() @ x


def twice(x, w, region=region):
    """What follows the calls takes the memory of the first one's result, which the second one's backward reads."""
    y = region(region(x, w), w)
    sorted_x = torch.ops.aten.sort.stable(x, stable=True, dim=0)[0]
    return y + (sorted_x.cos() @ w).sin() @ w


def views_twice(x, w):
    return twice(x, w, region_of_a_view)


def gradients(function):
    torch.manual_seed(0)
    x, w = (torch.randn(n, 16, dtype=torch.float64, requires_grad=True) for n in (9, 16))
    function(x, w).square().sum().backward()
    return [x.grad, w.grad]


@pytest.mark.parametrize("model", [twice, views_twice])
def test_gradients_of_a_region_called_twice(model):
    torch._dynamo.reset()
    with fresh_graphs():
        compiled = torch.compile(model, fullgraph=True, options=inductor_passes.options())
        assert_same(gradients(compiled), gradients(model))


def test_stock_has_the_fault():
    """When this fails, `returned_inputs` can go for the torch version it fails on."""
    torch._dynamo.reset()
    with fresh_graphs():
        ours, theirs = gradients(torch.compile(twice, fullgraph=True)), gradients(twice)
    assert (ours[1] - theirs[1]).abs().max() > 0.1 * theirs[1].abs().max()


def test_what_is_computed_stays_a_result():
    body = Graph()
    x, w = body.placeholder("x"), body.placeholder("w")
    computed = body.call_function(torch.ops.aten.sin.default, (x,))
    seen = body.call_function(torch.ops.aten.permute.default, (w, [1, 0]))
    flat = body.call_function(torch.ops.aten.view.default, (seen, [-1]))
    of_computed = body.call_function(torch.ops.aten.view.default, (computed, [-1]))
    body.output((computed, w, flat, of_computed))
    module = GraphModule({}, Graph())
    module.add_submodule("region", GraphModule({}, body))
    graph = module.graph
    a, b = graph.placeholder("a"), graph.placeholder("b")
    function = graph.get_attr("region")
    call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (function, "region", a, b))
    picked = [graph.call_function(operator.getitem, (call, index)) for index in range(4)]
    graph.output(tuple(graph.call_function(torch.ops.aten.alias.default, (each,)) for each in picked))
    read_inputs_themselves(graph)
    graph.lint()
    results = [alias.args[0] for alias in graph.output_node().args[0]]
    assert results[1] is b
    assert results[2].target is torch.ops.aten.view.default and results[2].args[0].args[0] is b
    assert [results[0], results[3]] == [picked[0], picked[3]]
