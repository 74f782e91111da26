"""torch.func over FusedMoE agrees with autograd by value, eager and compiled."""

import pytest
import torch
from torch.func import functional_call, grad, vmap

from layers import FusedMoE, MoEBlock, MoEConfig, RouterConfig, SharedExpertConfig
from moe_ops import RoutingConfig

H, I, E, K, B, T = 12, 8, 6, 2, 3, 5
VARIANTS = {
    "plain": {},
    "options": {
        "has_bias": True,
        "routing": RoutingConfig(K, "sigmoid", scale=2.5),
        "router": RouterConfig(has_correction_bias=True),
    },
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def module(request) -> FusedMoE:
    torch.manual_seed(0)
    return FusedMoE(MoEConfig(E, K, H, I, **request.param), dtype=torch.float64)


@pytest.fixture(params=["eager", "compiled"])
def run(request):
    """Runs a function as it is, or compiled as one graph."""
    if request.param == "eager":
        return lambda function: function
    return lambda function: torch.compile(function, backend="aot_eager", fullgraph=True)


def batch():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(B, T, H, generator=generator, dtype=torch.float64)
    return hidden, torch.randn(B, T, E, generator=generator, dtype=torch.float64)


def loss_of(module):
    def loss(parameters, hidden, logits):
        return functional_call(module, parameters, (hidden, logits)).square().sum()

    return loss


def by_autograd(module, hidden, logits):
    """Gradients of the loss to (parameters, hidden, logits), the ordinary way."""
    leaves = {
        name: parameter.detach().clone().requires_grad_() for name, parameter in module.named_parameters()
    }
    hidden, logits = hidden.clone().requires_grad_(), logits.clone().requires_grad_()
    loss_of(module)(leaves, hidden, logits).backward()
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    assert all(value.abs().sum() > 0 for value in [*grads.values(), hidden.grad, logits.grad])
    return grads, hidden.grad, logits.grad


def detached(module):
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_functional_call(module, run):
    hidden, logits = batch()
    doubled = {name: 2 * parameter for name, parameter in detached(module).items()}
    actual = run(lambda parameters, *args: functional_call(module, parameters, args))(
        doubled, hidden[0], logits[0]
    )
    expected = FusedMoE(module.config, dtype=torch.float64)
    expected.load_state_dict({**module.state_dict(), **doubled})
    torch.testing.assert_close(actual, expected(hidden[0], logits[0]))


def test_grad(module, run):
    hidden, logits = batch()
    expected = by_autograd(module, hidden[0], logits[0])
    gradient = run(grad(loss_of(module), argnums=(0, 1, 2)))
    torch.testing.assert_close(gradient(detached(module), hidden[0], logits[0]), expected)


def test_vmap(module, run):
    hidden, logits = batch()
    parameters = detached(module)
    mapped = run(vmap(lambda *args: functional_call(module, parameters, args)))
    expected = torch.stack([module(*pair).detach() for pair in zip(hidden, logits, strict=True)])
    torch.testing.assert_close(mapped(hidden, logits), expected)


def test_vmap_of_grad(module, run):
    hidden, logits = batch()
    per_sample = run(vmap(grad(loss_of(module), argnums=(0, 1, 2)), in_dims=(None, 0, 0)))
    actual = per_sample(detached(module), hidden, logits)
    for sample in range(B):
        expected = by_autograd(module, hidden[sample], logits[sample])
        got = (
            {name: value[sample] for name, value in actual[0].items()},
            actual[1][sample],
            actual[2][sample],
        )
        torch.testing.assert_close(got, expected)


def test_batched_weights(module, run):
    hidden, logits = batch()
    stacked = {name: torch.stack([value, 2 * value, -value]) for name, value in detached(module).items()}
    ensemble = run(
        vmap(lambda parameters, *args: functional_call(module, parameters, args), in_dims=(0, None, None))
    )
    actual = ensemble(stacked, hidden[0], logits[0])
    for member in range(3):
        parameters = {name: value[member] for name, value in stacked.items()}
        expected = functional_call(module, parameters, (hidden[0], logits[0]))
        torch.testing.assert_close(actual[member], expected)


def test_operators_below_what_no_graph_holds_are_not_traced():
    """`vmap` asks a module of modules for its name, which Dynamo cannot follow: it goes on with what that calls."""
    torch.manual_seed(0)
    config = MoEConfig(E, K, 64, 32, shared_experts=SharedExpertConfig(16))
    block, hidden = MoEBlock(config), torch.randn(B, 7, 64)
    expected = torch.stack([block(tokens) for tokens in hidden])
    mapped = torch.compile(vmap(block), backend="aot_eager")
    torch.testing.assert_close(mapped(hidden), expected)
