"""What a forward keeps for backward, and how often the experts run: a choice by value that changes no result."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from layers import FusedMoE, MoEBlock, MoEConfig, SharedExpertConfig
from tests.counting import Calls, saved_bytes
from tests.layers.test_compile import STAGES, Capture, aot

H, I, E, K, T = 16, 48, 8, 2, 64

ONCE_A_RUN = ("moe.gated_activation", "moe.fused_moe", "moe.weighted_activation_backward")
HALVES = ["topk_routing", "build_dispatch", "gather_gemm", "act_gemm_combine"]


def make(save_for_backward, emit="auto", **options) -> MoEBlock:
    torch.manual_seed(0)
    return MoEBlock(MoEConfig(E, K, H, I, emit=emit, save_for_backward=save_for_backward, **options))


def activations(hidden_size=H) -> int:
    """Bytes of what the stages return: rows, gate and up, activated, expert outputs."""
    return T * K * (2 * hidden_size + 3 * I) * 4


@pytest.mark.parametrize("options", [{}, {"shared_experts": SharedExpertConfig(8)}], ids=["plain", "shared"])
def test_activations_are_saved_on_demand_only(options):
    hidden = torch.randn(T, H, requires_grad=True)
    saved = {
        choice: saved_bytes(make(choice, **options), hidden) for choice in ("auto", "inputs", "activations")
    }
    assert saved["auto"] == saved["inputs"]
    more = saved["activations"] - saved["inputs"]
    assert 0.9 * activations() <= more <= 1.1 * activations()


@pytest.mark.parametrize("options", [{}, {"shared_experts": SharedExpertConfig(8)}], ids=["plain", "shared"])
def test_projections_are_all_that_is_saved_beside_inputs(options):
    hidden = torch.randn(T, H, requires_grad=True)
    of_inputs, of_projections = (
        saved_bytes(make(choice, **options), hidden) for choice in ("inputs", "projections")
    )
    assert of_projections - of_inputs == T * K * 2 * I * hidden.element_size()


@pytest.mark.parametrize(("choice", "products"), [("auto", 3), ("inputs", 3), ("projections", 2)])
def test_products_of_a_backward(choice, products):
    """Two are gradients, to activated and to hidden states; the third is a product run again."""
    output = make(choice)(torch.randn(T, H, requires_grad=True))
    with Calls("moe.grouped_gemm") as calls:
        output.sum().backward()
    assert calls.total == products


@pytest.mark.parametrize("emit", ["auto", "stages", "fused"])
@pytest.mark.parametrize("choice", ["inputs", "projections", "activations"])
def test_the_choice_wins_over_emit_while_gradients_are_recorded(emit, choice):
    hidden = torch.randn(T, H, requires_grad=True)
    assert saved_bytes(make(choice, emit), hidden) == saved_bytes(make(choice), hidden)


@pytest.mark.parametrize("choice", ["auto", "inputs", "projections", "activations"])
def test_gradients_are_the_same(choice):
    hidden = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    blocks = make("auto").double(), make(choice).double()
    expected, actual = (
        torch.autograd.grad(block(hidden).square().sum(), [hidden, *block.parameters()]) for block in blocks
    )
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("choice", "expected"), [("inputs", 3), ("auto", 3), ("activations", 2)])
def test_runs_of_the_experts_under_checkpointing(choice, expected):
    """Forward, the checkpoint's own second forward, and a third time only where inputs were saved."""
    block, hidden = make(choice), torch.randn(T, H, requires_grad=True)
    with Calls(*ONCE_A_RUN) as calls:
        checkpoint(block, hidden, use_reentrant=False).sum().backward()
    assert calls.total == expected


@pytest.mark.parametrize(("choice", "expected"), [("inputs", 2), ("auto", 2), ("activations", 1)])
def test_runs_of_the_experts_without_checkpointing(choice, expected):
    block, hidden = make(choice), torch.randn(T, H, requires_grad=True)
    with Calls(*ONCE_A_RUN) as calls:
        block(hidden).sum().backward()
    assert calls.total == expected


@pytest.mark.parametrize("emit", ["auto", "stages", "fused"])
@pytest.mark.parametrize("choice", ["inputs", "projections", "activations"])
def test_inference_runs_what_it_ran(emit, choice):
    hidden = torch.randn(T, H)
    ran = []
    for block in (make("auto", emit), make(choice, emit)):
        with torch.no_grad(), Calls() as calls:
            block(hidden)
        ran.append(calls.names)
    assert ran[0] == ran[1]
    traced = []
    for block in (make("auto", emit), make(choice, emit)):
        capture = Capture()
        with torch.no_grad():
            torch.compile(block, backend=aot(capture), fullgraph=True)(hidden)
        traced.append(capture.operators)
    assert traced[0] == traced[1]


@pytest.mark.parametrize(
    ("choice", "forward", "runs_again"),
    [
        ("auto", HALVES, False),
        ("projections", HALVES, False),
        ("activations", STAGES, False),
        ("inputs", ["fused_moe", "routing_dispatch"], True),
    ],
    ids=["auto", "projections", "activations", "inputs"],
)
def test_compiled_training(choice, forward, runs_again):
    module = FusedMoE(MoEConfig(E, K, H, I, save_for_backward=choice))
    hidden, logits = torch.randn(T, H, requires_grad=True), torch.randn(T, E)
    capture = Capture()
    compiled = torch.compile(module, backend=aot(capture), fullgraph=True)
    expected, actual = (torch.autograd.grad(fn(hidden, logits).sum(), hidden)[0] for fn in (module, compiled))
    torch.testing.assert_close(actual, expected)
    assert capture.operators[0] == forward
    assert (capture.operators[1].count("grouped_gemm") > 2) is runs_again, "two are those of the gradients"


def test_experts_of_a_given_routing_follow_the_choice():
    hidden, logits = torch.randn(T, H, requires_grad=True), torch.randn(T, E)

    def saved_with(choice):
        module = FusedMoE(MoEConfig(E, K, H, I, save_for_backward=choice))
        return saved_bytes(lambda tokens: module(tokens, module.route(logits)), hidden)

    saved = {choice: saved_with(choice) for choice in ("inputs", "projections", "activations")}
    assert saved["activations"] - saved["inputs"] >= 0.9 * activations()
    assert saved["projections"] - saved["inputs"] == T * K * 2 * I * 4
