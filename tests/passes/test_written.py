"""Stages that are alike are traced once, and written out for each as if it had been traced for itself."""

import torch

from inductor_passes import _compat
from inductor_passes.lowerings import ExpandOnCpu, written
from inductor_passes.pipeline import run_passes
from moe_ops import RoutingConfig, topk_routing
from tests.passes.capture import post_grad, show

OPTIONS = [
    RoutingConfig(2),
    RoutingConfig(2),
    RoutingConfig(3),
    RoutingConfig(2, renormalize=False),
    RoutingConfig(2),
]


def _routers(logits):
    return [out for index, each in enumerate(OPTIONS) for out in topk_routing(logits + index, each)]


def _written_out(monkeypatch):
    """The graph of the routers after the pass, and how often something was traced for it."""
    (module,) = post_grad(_routers, torch.randn(9, 8))
    traced, trace = [], _compat.trace
    with monkeypatch.context() as patches:
        patches.setattr(_compat, "trace", lambda *given: traced.append(given) or trace(*given))
        run_passes(module.graph, (ExpandOnCpu(),))
    module.recompile()
    return module, len(traced)


def _memory(graph):
    """Of each tensor its layout and which memory it is in, as numbers in the order of the graph."""
    numbers, found = {}, []
    for node in graph.find_nodes(op="placeholder") + [
        node for node in graph.nodes if node.op == "call_function"
    ]:
        value = node.meta["val"]
        number = numbers.setdefault(value.untyped_storage()._cdata, len(numbers))
        found.append((value.dtype, value.shape, value.stride(), value.storage_offset(), number))
    return found


def test_each_kind_is_traced_once_and_is_its_own(monkeypatch):
    module, traces = _written_out(monkeypatch)
    assert traces == 3
    monkeypatch.setattr(written, "form", lambda *_: object())
    monkeypatch.setattr(written, "_anew", lambda node: node.meta["val"])
    alone, as_many = _written_out(monkeypatch)
    assert as_many == len(OPTIONS)
    assert show(module.graph) == show(alone.graph)
    assert _memory(module.graph) == _memory(alone.graph)
    logits = torch.randn(9, 8)
    for one, other in zip(module(logits), _routers(logits), strict=True):
        torch.testing.assert_close(one, other)
