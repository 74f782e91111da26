"""What changes in a model after `patch` counts: options, activations, hooks and wrappers."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import EagerAndRecordGraphs

from layers import WeightScale, huggingface
from layers.huggingface import settled
from tests.counting import Calls
from tests.coverage.cases import outputs, stock_model
from tests.helpers import relative_error
from tests.huggingface import loops
from tests.huggingface.families import FAMILIES, pair, tokens
from tests.huggingface.test_outside import BLOCKS, part


def routers(model):
    return [each for name, each in model.named_modules() if name.endswith((".gate", ".router"))]


def experts(model):
    return [each for name, each in model.named_modules() if name.endswith(".experts")]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_an_option_of_a_router(family):
    stock, ours = pair(family)
    huggingface.patch(ours)
    before = stock(tokens(2, 6)).logits
    for router in (*routers(stock), *routers(ours)):
        router.top_k = 2
    expected = stock(tokens(2, 6)).logits
    assert relative_error(before, expected) > 1e-2
    torch.testing.assert_close(ours(tokens(2, 6)).logits, expected)
    for router in routers(ours):
        router.top_k = 3
    with Calls("moe.topk_routing", "moe.fused_moe") as calls:
        torch.testing.assert_close(ours(tokens(2, 6)).logits, before)
    assert calls.total == 2
    for router in routers(ours):
        router.top_k = 2
    huggingface.patch(ours)
    with Calls("moe.topk_routing", "moe.fused_moe") as calls:
        torch.testing.assert_close(ours(tokens(2, 6)).logits, expected)
    assert calls.total == 2


@torch.no_grad()
def test_an_option_of_a_router_in_compiled_code():
    stock, ours = pair("mixtral")
    huggingface.patch(ours)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for top_k in (3, 2):
        for router in (*routers(stock), *routers(ours)):
            router.top_k = top_k
        torch.testing.assert_close(compiled(tokens(2, 6)).logits, stock(tokens(2, 6)).logits)


def halve(module, args, output):
    return output / 2


def hook(act):
    act.register_forward_hook(halve)
    return act


def replace_forward(act):
    own = act.forward
    act.forward = lambda hidden_states: own(hidden_states) / 2
    return act


ACTIVATIONS = {"another": lambda act: nn.ReLU(), "hook": hook, "forward": replace_forward}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", ACTIVATIONS)
@torch.no_grad()
def test_an_activation(change, compiled):
    stock, ours = pair("mixtral")
    huggingface.patch(ours)
    for each in (*experts(stock), *experts(ours)):
        each.act_fn = ACTIVATIONS[change](each.act_fn)
    run = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    torch.testing.assert_close(run(tokens(2, 6)).logits, stock(tokens(2, 6)).logits)


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize(
    "set_ours", [huggingface.patch, lambda model: model.set_experts_implementation("moe_ops")]
)
@torch.no_grad()
def test_hooks_on_an_activation(set_ours, before):
    """Whenever they come, and without `patch`."""
    stock, ours = pair("mixtral")
    for step in (hook_all, set_ours) if before else (set_ours, hook_all):
        step(ours)
    hook_all(stock)
    torch.testing.assert_close(ours(tokens(2, 6)).logits, stock(tokens(2, 6)).logits)


def hook_all(model):
    for each in experts(model):
        hook(each.act_fn)


def test_hooks_on_an_activation_beside_adapters():
    _, ours = pair("mixtral")
    huggingface.patch(ours)
    huggingface.add_adapters(ours, 2, 2, torch.zeros(12, dtype=torch.int32))
    hook_all(ours)
    with pytest.raises(ValueError, match="act_fn has changed since patch, or has hooks: expected none"):
        ours(tokens(2, 6))


@pytest.mark.parametrize("compiled", [False, True])
def test_what_another_implementation_would_pass_over(compiled):
    """Adapters, or what quantised numbers stand for."""
    (_, adapted), (_, quantised) = pair("qwen3_moe"), pair("qwen3_moe")
    for ours in (adapted, quantised):
        huggingface.patch(ours)
    huggingface.add_adapters(adapted, 1, 2, torch.zeros(12, dtype=torch.int32))
    huggingface.quantise_experts(quantised, WeightScale.CHANNEL, dtype=torch.int8)
    for ours, what in ((adapted, "with adapters"), (quantised, "that are quantised")):
        ours.set_experts_implementation("eager")
        run = torch.compile(ours, backend="eager") if compiled else ours
        with pytest.raises(
            (ValueError, RuntimeError),
            match=f"experts_implementation='eager': expected 'moe_ops', for experts {what}",
        ):
            run(tokens(2, 6))


@torch.no_grad()
def test_another_implementation_is_noticed_by_compiled_code():
    stock, ours = pair("mixtral")
    huggingface.patch(ours)
    traced = EagerAndRecordGraphs()
    compiled = torch.compile(ours, backend=traced, fullgraph=True)
    calls = []
    for implementation in ("moe_ops", "grouped_mm", "moe_ops"):
        ours.set_experts_implementation(implementation)
        torch.testing.assert_close(compiled(tokens(2, 6)).logits, stock(tokens(2, 6)).logits)
        calls.append(sum("moe.fused_experts" in graph.code for graph in traced.graphs))
    assert calls == [1, 1, 1] and len(traced.graphs) == 2


@torch.no_grad()
def test_an_option_in_a_config_that_a_router_reads():
    stock = stock_model("gemma4")
    ours = copy.deepcopy(stock)
    huggingface.patch(ours)
    for router in (*routers(stock), *routers(ours)):
        router.config.top_k_experts = 1
    torch.testing.assert_close(outputs(ours, "gemma4")[0], outputs(stock, "gemma4")[0])


def test_an_activation_of_stacked_experts():
    stock = loops.block(loops.Loop)
    ours = copy.deepcopy(stock)
    huggingface.patch(ours, stack_experts=True)
    ours.experts.act_fn = nn.ReLU()
    for expert in stock.experts:
        expert.act_fn = nn.ReLU()
    hidden_states = torch.randn(2, 5, loops.HIDDEN)
    torch.testing.assert_close(ours(hidden_states)[0], stock(hidden_states)[0])


def test_an_option_of_a_block_around_stacked_experts():
    """Its own code is for modules."""
    ours = loops.block(loops.Loop)
    huggingface.patch(ours, stack_experts=True)
    ours.top_k = 1
    with pytest.raises(
        ValueError, match="top_k=1 was 2 when experts were stacked: expected unpatch, then patch"
    ):
        ours(torch.zeros(1, 3, loops.HIDDEN))
    huggingface.unpatch(ours)
    huggingface.patch(ours, stack_experts=True)
    stock = loops.block(loops.Loop)
    stock.top_k = 1
    hidden_states = torch.randn(2, 5, loops.HIDDEN)
    torch.testing.assert_close(ours(hidden_states)[0], stock(hidden_states)[0])


INSIDE = {
    "llama4": ("experts", "experts.act_fn"),
    "jetmoe": ("input_linear", "output_linear", "activation"),
    "dbrx": ("experts", "experts.mlp", "experts.mlp.activation_fn"),
}


def both(name):
    """A block of a family, and the same patched."""
    _, stock = part(stock_model(name), name)
    ours = copy.deepcopy(stock)
    assert huggingface.patch(ours).experts
    return stock, ours


def expect_same(stock, ours):
    """The same output and gradients."""
    hidden_states = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(3))
    results = []
    for block in (stock, ours):
        output = block(hidden_states)
        output = output[0] if isinstance(output, tuple) else output
        output.square().sum().backward()
        results.append(output)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    for (name, expected), actual in zip(stock.named_parameters(), ours.parameters(), strict=True):
        assert relative_error(actual.grad, expected.grad) < 1e-4, name


@pytest.mark.parametrize(("name", "path"), [(name, path) for name in INSIDE for path in INSIDE[name]])
def test_hooks_inside_a_block(name, path):
    stock, ours = both(name)
    for block in (stock, ours):
        block.get_submodule(path).register_forward_hook(halve)
    expect_same(stock, ours)


def halves(values):
    return tuple(None if each is None else each / 2 for each in values)


HOOKS = {
    "forward_pre": lambda module, args: halves(args),
    "full_backward": lambda module, grads, grad_outputs: halves(grads),
    "full_backward_pre": lambda module, grad_outputs: halves(grad_outputs),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_every_kind_of_hook(kind):
    stock, ours = both("jetmoe")
    for block in (stock, ours):
        getattr(block.activation, f"register_{kind}_hook")(HOOKS[kind])
    expect_same(stock, ours)


class Wrapper(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inside, name)

    def forward(self, *args):
        return self.inside(*args) / 2


@pytest.mark.parametrize("name", BLOCKS)
def test_a_wrapper_inside_a_block(name):
    stock, ours = both(name)
    for block in (stock, ours):
        setattr(block, INSIDE[name][0], Wrapper(getattr(block, INSIDE[name][0])))
    expect_same(stock, ours)


@pytest.mark.parametrize("name", BLOCKS)
def test_an_option_of_a_block(name):
    stock, ours = both(name)
    for block in (stock, ours):
        block.router.top_k = block.top_k = 1
    expect_same(stock, ours)


def halve_scores(module, args, output):
    return output[0] / 2, output[1]


def test_hooks_on_a_router_that_scores():
    stock, ours = both("llama4")
    for block in (stock, ours):
        block.router.register_forward_hook(halve_scores)
    with Calls("moe.fused_experts") as calls:
        expect_same(stock, ours)
    assert calls.total == 1


def halve_of(*kinds):
    """A hook of all modules, which halves what modules of some classes return."""

    def halve_some(module, args, output):
        if not type(module).__name__.endswith(kinds):
            return output
        if isinstance(output, tuple):
            return tuple(halve_some(module, args, each) for each in output)
        is_floating = isinstance(output, torch.Tensor) and output.is_floating_point()
        return output / 2 if is_floating else output

    return halve_some


@pytest.mark.parametrize("name", ["qwen2_moe", "ernie4_5_moe", "llama4", "jetmoe", "dbrx"])
@pytest.mark.parametrize("kinds", [("Router", "TopKGating"), ("Experts",)])
@torch.no_grad()
def test_hooks_of_all_modules(name, kinds):
    stock = stock_model(name)
    ours = copy.deepcopy(stock)
    huggingface.patch(ours)
    usual, hook = outputs(stock, name)[0], halve_of(*kinds)
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        actual, expected = outputs(ours, name)[0], outputs(stock, name)[0]
    finally:
        handle.remove()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(outputs(ours, name)[0], usual)


def test_what_is_recorded_changes_nothing():
    """transformers hangs hooks on routers when it is first asked for hidden states."""
    stock = stock_model("llama4")
    ours = copy.deepcopy(stock)
    huggingface.patch(ours)
    with torch.no_grad():
        ours(tokens(1, 3), output_hidden_states=True)
        torch.testing.assert_close(outputs(ours, "llama4")[0], outputs(stock, "llama4")[0])


@pytest.mark.parametrize("name", BLOCKS)
def test_no_token(name):
    stock, ours = both(name)
    for block in (stock, ours):
        output = block(torch.zeros(1, 0, 64))
        output = output[0] if isinstance(output, tuple) else output
        assert output.numel() == 0


@pytest.mark.parametrize(
    "name", ["training", "layer_idx", "num_experts", "_is_hf_initialized", "top_k", "_scale"]
)
def test_what_says_where_a_module_is_no_option(name):
    module = nn.Linear(2, 2)
    setattr(module, name, True)
    settings = settled.settings_of(module)
    setattr(module, name, False)
    assert settled.has_changed(module, settings) == (name in ("top_k", "_scale"))
