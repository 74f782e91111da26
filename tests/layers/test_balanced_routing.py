"""A layer with replicas routes, maps and records in one operator, and does between them what other layers do."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from layers import RoutedExpertsCapture, RouterConfig
from tests.layers.test_balancing import CONFIG, E, balanced, inputs, place


@torch.no_grad()
def test_a_balanced_layer_routes_and_records_in_one_operator():
    """Eager and traced, and with what looks at ids or weights in between; routing of others is recorded apart."""
    _, (module,), _ = balanced()
    module.capture = RoutedExpertsCapture(torch.zeros(7, 2, dtype=torch.int32))
    inside = ["moe::topk_routing", "moe::map_and_record", "moe::route_and_record", "moe::fused_experts"]

    def called():
        with torch.profiler.profile() as profile:
            module(*inputs(7))
        return [event.name for event in profile.events() if event.name in inside]

    assert called() == ["moe::route_and_record", "moe::fused_experts"]
    seen = []

    def backend(graph, example_inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if "moe." in str(node.target))
        return graph

    torch.compile(module, backend=backend, fullgraph=True)(*inputs(7))
    assert seen == ["moe.route_and_record.default", "moe.fused_experts.stages"]
    module.routing_override = lambda hidden, logits: (torch.ones(7, 2), torch.zeros(7, 2, dtype=torch.int32))
    assert called() == ["moe::map_and_record", "moe::fused_experts"]


@torch.no_grad()
def test_a_balanced_layer_scales_and_captures_as_others_do():
    config = replace(CONFIG, router=RouterConfig(has_expert_scale=True))
    _, (module,), _ = balanced(config=config)
    place(module)
    module.expert_scale.copy_(torch.rand(E))
    module.capture = RoutedExpertsCapture(torch.zeros(7, 2, dtype=torch.int32))
    hidden, logits = inputs(7)
    output = module(hidden, logits)
    routed = module.route(logits)
    assert torch.equal(module.capture.buffer, routed.topk_ids)
    assert torch.equal(output, module(hidden, routed))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_inside_a_checkpoint_eager_layers_count_again(is_compiled):
    """As docs/balancing.md says: a forward that runs again records again."""
    state, (module,), _ = balanced()
    function = lambda *args: checkpoint(module, *args, use_reentrant=False)  # noqa: E731
    function = torch.compile(function, backend="aot_eager", fullgraph=True) if is_compiled else function
    hidden, logits = inputs(7)
    function(hidden.requires_grad_(), logits).sum().backward()
    assert state.expert_load_view.sum() == 7 * 2 * (1 if is_compiled else 2)
