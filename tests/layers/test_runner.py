"""The runner: what it decides when it is built, against the block that decides nothing and a float64 oracle."""

import pytest
import torch

from layers import (
    ExpertsConfig,
    FusedMoE,
    ModularKernel,
    MoEBlock,
    MoERunner,
    Reduction,
    RouterConfig,
    SharedExpertConfig,
    SharedExperts,
    StandardExperts,
)
from tests.counting import Calls
from tests.helpers import assert_matches_oracle, mixed
from tests.layers import oracle
from tests.layers.modular import FORMATS, H, Recorded, batched, config, standard


@pytest.fixture
def block() -> MoEBlock:
    torch.manual_seed(3)
    return MoEBlock(config(shared_experts=SharedExpertConfig(40, "sigmoid")))


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(2, 5, H)


@pytest.mark.parametrize(
    ("order", "name", "compiled"), mixed(("before", "beside", "after"), FORMATS, (False, True), rounds=2)
)
def test_every_order(block, hidden, name, order, compiled):
    runner = MoERunner(
        FORMATS[name](block.experts), block.gate, shared_experts=block.shared_experts, shared_order=order
    )
    run = torch.compile(runner, fullgraph=True, backend="aot_eager") if compiled else runner
    assert_matches_oracle(run(hidden), oracle.block(block, hidden))


class Wrapped(torch.nn.Module):
    """A module that does not say how its output is combined."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, tokens):
        return self.module(tokens)


@pytest.mark.parametrize("order", ["before", "beside", "after"])
@pytest.mark.parametrize("name", ["layer", *FORMATS])
def test_an_average_is_one(hidden, name, order):
    block = MoEBlock(config(shared_experts=SharedExpertConfig(40, "sigmoid", combination="average")))
    experts = block.experts if name == "layer" else FORMATS[name](block.experts)
    runner = MoERunner(experts, block.gate, shared_experts=block.shared_experts, shared_order=order)
    expected = oracle.block(block, hidden)
    assert_matches_oracle(runner(hidden), expected)
    twice = Reduction(lambda tensor: 2 * tensor)
    if not (name == "layer" and order == "beside"):
        runner = MoERunner(
            experts, block.gate, shared_experts=Wrapped(block.shared_experts), shared_order=order,
            reduction=twice,
        )  # fmt: skip
        assert_matches_oracle(runner(hidden), 2 * expected)
    routed = oracle.experts(block.experts, hidden, block.gate(hidden)).reshape(hidden.shape)
    assert_matches_oracle(MoERunner(experts, block.gate)(hidden), routed)


def test_shared_experts_of_their_own_config_say_how_they_are_combined(block, hidden):
    shared = SharedExperts(block.config, SharedExpertConfig(40, combination="average"))
    expected = (
        block.experts(hidden, block.gate(hidden)) + shared(hidden.flatten(0, 1)).view(hidden.shape)
    ) / 2
    runner = MoERunner(block.experts, block.gate, shared_experts=shared)
    torch.testing.assert_close(runner(hidden), expected)


@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_it_can_be_the_block(block, tokens):
    runner = MoERunner(block.experts, block.gate, shared_experts=block.shared_experts)
    hidden = torch.randn(tokens, H)
    assert torch.equal(runner(hidden), block(hidden))
    with Calls() as ours, torch.no_grad():
        runner(hidden)
    with Calls() as theirs, torch.no_grad():
        block(hidden)
    assert ours.names == theirs.names


def test_logits_in_or_ids_in(block, hidden):
    """Monolithic: the experts get logits. Decomposed: ids."""
    runners = {
        "moe.fused_moe": MoERunner(block.experts, block.gate),
        "moe.fused_experts": MoERunner(block.experts, block.gate, block.experts.route),
    }
    expected = oracle.experts(block.experts, hidden, block.gate(hidden)).reshape(hidden.shape)
    for operator, runner in runners.items():
        with Calls("moe.fused_moe", "moe.fused_experts") as calls, torch.no_grad():
            out = runner(hidden)
        assert calls.names == [operator]
        assert_matches_oracle(out, expected)


def test_shared_experts_beside_a_layer_are_one_operator(block, hidden):
    runner = MoERunner(
        block.experts, block.gate, shared_experts=block.shared_experts, shared_order="beside",
        reduction=Reduction(lambda tensor: 3 * tensor),
    )  # fmt: skip
    expected = 3 * oracle.block(block, hidden)
    names = ["moe.fused_experts_with_shared", "moe.topk_routing"]
    with Calls(*names, "moe.gated_activation") as calls, torch.no_grad():
        out = runner(hidden)
    assert sorted(calls.names) == names
    assert_matches_oracle(out, expected)
    assert_matches_oracle(torch.compile(runner, fullgraph=True, backend="aot_eager")(hidden), expected)


def test_gate_outside(block, hidden):
    runner, logits = MoERunner(block.experts), block.gate(hidden)
    expected = oracle.experts(block.experts, hidden, logits).reshape(hidden.shape)
    assert_matches_oracle(runner(hidden, logits), expected)
    assert_matches_oracle(runner(hidden, block.experts.route(logits)), expected)
    routed = MoERunner(block.experts, router=block.experts.route)
    assert_matches_oracle(routed(hidden, logits), expected)
    assert_matches_oracle(routed(hidden, block.experts.route(logits)), expected)
    with pytest.raises(ValueError, match="router_logits=None: expected logits, for gate=None"):
        runner(hidden)
    with pytest.raises(ValueError, match="router_logits is given: expected None"):
        MoERunner(block.experts, block.gate)(hidden, logits)


def test_shared_experts_run_while_tokens_are_under_way(block, hidden):
    exchange = Recorded()
    kernel = ModularKernel(exchange, StandardExperts(block.experts))

    def shared(tokens):
        exchange.events.append("shared")
        return block.shared_experts(tokens)

    module = torch.nn.Identity()
    module.forward = shared
    runner = MoERunner(kernel, block.gate, shared_experts=module, shared_order="beside")
    assert_matches_oracle(runner(hidden), oracle.block(block, hidden))
    assert exchange.events[:4] == ["sent", "shared", "arrived", "received"]
    for order, place in (("before", 0), ("after", -1)):
        exchange.events.clear()
        MoERunner(kernel, block.gate, shared_experts=module, shared_order=order)(hidden)
        assert exchange.events[place] == "shared"


@pytest.mark.parametrize("order", ["before", "beside", "after"])
def test_reduction(block, hidden, order):
    """One device stands for two that have the same: the reduction doubles."""
    routed = oracle.experts(block.experts, hidden, block.gate(hidden)).reshape(hidden.shape)
    shared = oracle.block(block, hidden) - routed
    for of, expected in (("sum", 2 * routed + 2 * shared), ("shared", routed + 2 * shared)):
        runner = MoERunner(
            standard(block.experts), block.gate, shared_experts=block.shared_experts,
            shared_order=order, reduction=Reduction(lambda tensor: 2 * tensor, of),
        )  # fmt: skip
        assert_matches_oracle(runner(hidden), expected)


def _latent_runner(name, order, **options):
    """A runner of latent experts, and the block that it stands for."""
    torch.manual_seed(4)
    latent = MoEBlock(
        config(experts=ExpertsConfig(latent_size=12), shared_experts=SharedExpertConfig(40), **options)
    )
    experts = latent.experts if name == "layer" else FORMATS[name](latent.experts)
    runner = MoERunner(
        experts, latent.gate, shared_experts=latent.shared_experts, shared_order=order,
        routed_input_transform=latent.routed_input_transform,
        routed_output_transform=latent.routed_output_transform,
    )  # fmt: skip
    return runner, latent


@pytest.mark.parametrize(
    ("name", "order"),
    [("layer", "before"), ("layer", "after"), ("standard", "before"), ("standard", "beside"), ("batched", "after")],
)  # fmt: skip
def test_latent_experts(hidden, name, order):
    runner, latent = _latent_runner(name, order)
    expected = oracle.block(latent, hidden)
    assert_matches_oracle(runner(hidden), expected)
    assert_matches_oracle(torch.compile(runner, fullgraph=True, backend="aot_eager")(hidden), expected)
    logits = runner.gate(hidden)
    runner.gate = None
    assert_matches_oracle(runner(hidden, latent.experts.route(logits)), expected)
    runner.reduction = Reduction(lambda tensor: 2 * tensor)
    assert_matches_oracle(runner(hidden, logits), 2 * expected)
    assert not runner(torch.randn(0, H), torch.randn(0, 8)).numel()


@pytest.mark.parametrize("name", ["layer", "standard"])
def test_a_routing_function_sees_the_tokens_in_front_of_the_transform(hidden, name):
    seen = []

    def spy(hidden_states, router_logits, top_k, renormalize):
        seen.append(hidden_states)
        return router_logits.topk(top_k)

    runner, _ = _latent_runner(name, "before", router=RouterConfig(routing_function=spy))
    expected = runner(hidden)
    runner.router = runner.experts.route
    assert torch.equal(runner(hidden), expected)
    assert len(seen) == 2 and all(torch.equal(each, hidden.flatten(0, 1)) for each in seen)


def test_shared_experts_run_while_latent_tokens_are_under_way(hidden):
    runner, latent = _latent_runner("standard", "beside")
    exchange = Recorded()
    runner.experts = ModularKernel(exchange, StandardExperts(latent.experts))
    runner.shared_experts.register_forward_hook(lambda *args: exchange.events.append("shared"))
    for order, place in (("beside", 1), ("before", 0), ("after", -1)):
        runner.shared_order = order
        exchange.events.clear()
        assert_matches_oracle(runner(hidden), oracle.block(latent, hidden))
        assert exchange.events.index("shared") == place % len(exchange.events)


def test_without_shared_experts_the_order_means_nothing(block, hidden):
    expected = block.experts(hidden, block.gate(hidden))
    for order in ("before", "beside", "after"):
        torch.testing.assert_close(
            MoERunner(batched(block.experts), block.gate, shared_order=order)(hidden), expected
        )


def test_what_a_runner_is_given(block, hidden):
    runner = MoERunner(block.experts, router=block.experts.route)
    for value, error, message in (
        ([1.0], TypeError, "=<list>: expected a torch.Tensor"),
        (torch.tensor(1.0), ValueError, r" has shape \[\]: expected \[..., H\]"),
    ):
        with pytest.raises(error, match=f"hidden_states{message}"):
            runner(value, block.gate(hidden))
        with pytest.raises(error, match=f"router_logits{message.replace('H', 'E')}"):
            runner(hidden, value)
    assert runner(torch.randn(0, H), torch.randn(0, 8)).shape == (0, H)


class _Pair(torch.nn.Linear):
    def forward(self, tokens):
        return super().forward(tokens), None


@pytest.mark.parametrize("order", ["before", "beside", "after"])
def test_parts_that_return_something_else(block, hidden, order):
    """A sum would broadcast them, or end in an error about no argument."""
    runner = MoERunner(standard(block.experts), block.gate, shared_order=order)
    into, back = torch.nn.Identity(), torch.nn.Linear(H, H - 1)
    wrong = r"has shape \[.*, {}\]: expected \[.*, {}\]"
    for runner.routed_input_transform, runner.routed_output_transform in ((None, None), (into, into)):
        runner.shared_experts = torch.nn.Linear(H, 1)
        with pytest.raises(ValueError, match="output of shared_experts " + wrong.format(1, H)):
            runner(hidden)
        runner.shared_experts = _Pair(H, H)
        with pytest.raises(TypeError, match=r"output of shared_experts=<tuple>: expected a torch\.Tensor"):
            runner(hidden)
    runner.shared_experts, runner.routed_output_transform = None, back
    with pytest.raises(ValueError, match="output of routed_output_transform " + wrong.format(H - 1, H)):
        runner(hidden)
    runner.routed_output_transform, runner.reduction = into, Reduction(lambda x: x[:, 1:])
    with pytest.raises(ValueError, match="output of reduction.reduce " + wrong.format(H - 1, H)):
        runner(hidden)


def test_what_makes_no_sense(block):
    layer = block.experts
    with pytest.raises(TypeError, match="router=3: expected None or a function"):
        MoERunner(layer, router=3)
    with pytest.raises(TypeError, match=r"experts=.*: expected FusedMoE or ModularKernel"):
        MoERunner(torch.nn.Identity())
    with pytest.raises(ValueError, match="shared_order='aside': expected one of 'before', 'beside', 'after'"):
        MoERunner(layer, shared_order="aside")
    with pytest.raises(ValueError, match="shared_experts=Identity with shared_order='beside' a FusedMoE"):
        MoERunner(layer, shared_experts=torch.nn.Identity(), shared_order="beside")
    with pytest.raises(ValueError, match=r"reduction.of='shared' with shared_order='beside' a FusedMoE"):
        MoERunner(
            layer, shared_experts=block.shared_experts, shared_order="beside",
            reduction=Reduction(torch.neg, "shared"),
        )  # fmt: skip
    chunked = FusedMoE(config(experts=ExpertsConfig(chunk_size=2)))
    with pytest.raises(ValueError, match=r"experts.chunk_size=2 with an overlapped shared expert"):
        MoERunner(chunked, shared_experts=block.shared_experts, shared_order="beside")
    with pytest.raises(ValueError, match=r"reduction.of='shared': expected 'sum' with shared_experts=None"):
        MoERunner(layer, reduction=Reduction(torch.neg, "shared"))
    with pytest.raises(ValueError, match="of='routed': expected one of 'sum', 'shared'"):
        Reduction(torch.neg, "routed")
    with pytest.raises(TypeError, match=r"reduction=<built-in .*: expected Reduction"):
        MoERunner(layer, reduction=torch.neg)
    with pytest.raises(TypeError, match="reduce=None: expected a function of a tensor"):
        Reduction(None)
    for name in ("gate", "shared_experts", "routed_input_transform", "routed_output_transform"):
        with pytest.raises(TypeError, match=f"{name}=3: expected Module, got int"):
            MoERunner(layer, **{name: 3})
    transforms = dict.fromkeys(("routed_input_transform", "routed_output_transform"), torch.nn.Identity())
    for name in transforms:
        with pytest.raises(
            ValueError, match="routed_input_transform, routed_output_transform: expected both"
        ):
            MoERunner(layer, **{name: torch.nn.Identity()})
    with pytest.raises(ValueError, match="routed_input_transform with shared_order='beside' a FusedMoE"):
        MoERunner(layer, shared_experts=block.shared_experts, shared_order="beside", **transforms)
    assert isinstance(MoERunner(layer).experts, FusedMoE)
