"""LayerNames: what layers are called in a compile, where nothing but the graph is known."""

import pytest
import torch

from inductor_passes.base import LAYER_KEY
from inductor_passes.naming import LayerNames, _readable
from tests.passes.capture import post_grad
from tests.passes.moe import inputs, layer
from tests.passes.test_explain import Block, Model


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['model']._modules['layers']._modules['0'].mlp", "model.layers.0.mlp"),
        ("L['self'].model.layers[0].mlp", "model.layers.0.mlp"),
        ("L['fn'].__closure__[1].cell_contents.model.layers.0", "model.layers.0"),
        ("L['fn'].__self__.layers[3]", "layers.3"),
        ("L['self'].__dict__['_modules']['base_model'].model", "base_model.model"),
        ("L['self']._orig_mod.layers[0]._orig_mod.mlp", "layers.0.mlp"),
        ("G['__import___main__'].model.layers[0].mlp", "layers.0.mlp"),
        ('G["model"].layers[0]', "layers.0"),
        ("L['self']", ""),
    ],
)
def test_paths_out_of_source(source, name):
    assert _readable(source) == name


def _layers(function, *args):
    with torch.no_grad():
        (module,) = post_grad(function, *args)
    LayerNames().write(module.graph)
    return list(dict.fromkeys(node.meta[LAYER_KEY] for node in module.graph.nodes if LAYER_KEY in node.meta))


def test_modules_and_closures_over_them():
    model, hidden = Model(), inputs().hidden_states
    assert _layers(model, hidden) == _layers(lambda x: model(x) * 1, hidden) == ["layers.0", "layers.1"]


def test_functions_and_repeated_modules_are_numbered():
    block, hidden = Block(), inputs().hidden_states
    assert _layers(lambda *given: layer(layer(*given), *given[1:]), *inputs()) == ["moe_0", "moe_1"]
    assert _layers(lambda x: block(block(x)), hidden) == ["moe_0", "moe_1"]
    model = Model()
    del model.layers[1]
    assert _layers(lambda x: model(model(x)), hidden) == ["layers.0", "layers.0#2"]


class Split(torch.nn.Module):
    """The router in one module, the experts in another."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = Gate(), Experts()

    def forward(self, hidden):
        return self.experts(hidden, *self.gate(hidden))


class Gate(torch.nn.Linear):
    def __init__(self):
        super().__init__(16, 4, bias=False)

    def forward(self, hidden):
        import moe_ops
        from tests.passes.moe import ROUTING

        return moe_ops.topk_routing(super().forward(hidden), ROUTING)


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w13, self.w2 = (torch.nn.Parameter(weight) for weight in inputs()[2:])

    def forward(self, hidden, weights, ids):
        import moe_ops

        return moe_ops.fused_experts(hidden, self.w13, self.w2, weights, ids)


class Apart(torch.nn.Module):
    """Routers and experts in lists of their own."""

    def __init__(self):
        super().__init__()
        self.gates = torch.nn.ModuleList(Gate() for _ in range(2))
        self.experts = torch.nn.ModuleList(Experts() for _ in range(2))

    def forward(self, hidden):
        for gate, experts in zip(self.gates, self.experts, strict=True):
            hidden = experts(hidden, *gate(hidden))
        return hidden


def test_a_layer_is_the_module_around_router_and_experts():
    hidden = inputs().hidden_states
    assert _layers(torch.nn.Sequential(Split(), Split()), hidden) == ["0", "1"]
    assert _layers(Split(), hidden) == ["experts"]
    assert _layers(Apart(), hidden) == ["experts.0", "experts.1"]
