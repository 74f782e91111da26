"""torch.compile on CPU end to end: values, gradients, modes, chained passes, recompiles, plain compile."""

import itertools
import re

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import inductor_passes
import moe_ops
from inductor_passes.backend import moe_inductor
from moe_ops.reference import reference_experts, reference_routing
from tests.cases import Case, make
from tests.helpers import assert_matches_oracle, mixed, usually
from tests.passes.moe import EXPERTS, HIDDEN, INTERMEDIATE, MANY_TOKENS, ROUTING, inputs, layer

SLOT = "post_grad_custom_pre_pass"


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()


class Spy:
    """A user's pass: what it saw, in order. Without a uuid, so compiles it is in are never cached."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.append(
            [str(n.target).split(".")[1] for n in graph.nodes if str(n.target).startswith("moe.")]
        )


def called(code):
    """Our operators that generated code calls, in order."""
    return re.findall(r"= torch\.ops\.moe\.(\w+)\.\w+\(", code)


@pytest.mark.parametrize("dtype", usually([torch.float32, torch.bfloat16], [torch.bfloat16]))
@torch.no_grad()
def test_values_of_a_layer_with_two_calls(dtype):
    given = inputs(MANY_TOKENS, dtype)
    compiled = torch.compile(layer, fullgraph=True, options=inductor_passes.options())
    actual, (code,) = run_and_get_code(compiled, *given)
    assert called(code) == ["grouped_gemm", "grouped_gemm"]
    hidden, logits, w13, w2 = (tensor.double() for tensor in given)
    routed = reference_routing(logits, ROUTING)
    assert_matches_oracle(actual, reference_experts(hidden, w13, w2, *routed, moe_ops.Activation()))


@torch.no_grad()
def test_values_with_a_gate_between_the_stages():
    def custom(hidden, logits, w13, w2):
        weights, ids = moe_ops.topk_routing(logits, ROUTING)
        plan = moe_ops.build_dispatch(ids, EXPERTS)
        gate_up = moe_ops.grouped_gemm(
            moe_ops.permute(hidden * 2, plan.sorted_slots), w13, plan.expert_offsets
        )
        out = moe_ops.grouped_gemm(moe_ops.gated_activation(gate_up) + 1, w2, plan.expert_offsets).sin()
        return moe_ops.combine(out, weights, plan.inverse)

    compiled = torch.compile(custom, fullgraph=True, options=inductor_passes.options())
    actual, (code,) = run_and_get_code(compiled, *inputs())
    # Routing, dispatch, gather, gate and sum are C++ now, the two GEMMs are calls that do nothing besides.
    assert called(code) == ["grouped_gemm", "grouped_gemm"] and "grouped_gemm.default" not in code
    torch.testing.assert_close(actual, custom(*inputs()))


SITU = moe_ops.Activation("situ", beta=1.5, linear_beta=2.0, interleaved=True)
UNGATED = moe_ops.Activation("gelu_tanh_no_mul")


FORMULAS = NONE, MANY, PLAIN = [
    *(Case(tokens, 8, 2, 9, 5, SITU, bias=True) for tokens in (0, 33)),
    Case(7, 8, 2, 9, 5, UNGATED, bias=True),
]
OFTEN = [(NONE, "fused"), (MANY, "fused"), (PLAIN, "written out")]


@pytest.mark.parametrize(
    ("case", "form"), usually(itertools.product(FORMULAS, ("fused", "written out")), OFTEN), ids=str
)
@torch.no_grad()
def test_values_of_other_formulas(case, form):
    """Fused into one call, and with the gate written out in C++, against float64."""
    problem = make(case, torch.float32)
    x, logits, w13, w2, w13_bias, w2_bias = problem.tensors()
    routing = moe_ops.RoutingConfig(2, "sqrtsoftplus", scale=1.5)

    def fused():
        biases = {"w13_bias": w13_bias, "w2_bias": w2_bias}
        return moe_ops.fused_moe(x, logits, w13, w2, routing, case.activation, **biases)

    def written_out():
        weights, ids = moe_ops.topk_routing(logits, routing)
        plan = moe_ops.build_dispatch(ids, case.experts)
        rows = moe_ops.permute(x, plan.sorted_slots)
        gate_up = moe_ops.grouped_gemm(rows, w13, plan.expert_offsets, w13_bias)
        activated = moe_ops.gated_activation(gate_up * 1.0, case.activation)
        expert_out = moe_ops.grouped_gemm(activated * 1.0, w2, plan.expert_offsets, w2_bias)
        return moe_ops.combine(expert_out, weights, plan.inverse)

    doubles = [tensor.double() for tensor in problem.tensors()]
    routed = reference_routing(doubles[1], routing)
    biases = {"w13_bias": doubles[4], "w2_bias": doubles[5]}
    expected = reference_experts(doubles[0], *doubles[2:4], *routed, case.activation, **biases)
    function = fused if form == "fused" else written_out
    compiled = torch.compile(function, fullgraph=True, options=inductor_passes.options())
    assert_matches_oracle(compiled(), expected)


def test_gradients_through_the_stages():
    def loss(*args):
        return layer(*args).square().sum()

    eager, compiled = inputs(), inputs()
    for given, run in (
        (eager, loss),
        (compiled, torch.compile(loss, fullgraph=True, options=inductor_passes.options())),
    ):
        for tensor in given:
            tensor.requires_grad_()
        run(*given).backward()
    for ours, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    ("mode", "form"), mixed(["default", "reduce-overhead", "max-autotune"], ["options", "backend"])
)
@torch.no_grad()
def test_modes(mode, form):
    if form == "options":
        compiled = torch.compile(layer, fullgraph=True, options=inductor_passes.options(mode))
    else:
        compiled = torch.compile(layer, fullgraph=True, backend=moe_inductor, mode=mode)
    given = inputs(MANY_TOKENS)
    actual, (code,) = run_and_get_code(compiled, *given)
    assert code.count("torch.ops.moe.grouped_gemm.compiled(") == 2
    torch.testing.assert_close(actual, layer(*given))


@torch.no_grad()
def test_unknown_mode_is_named_by_the_backend():
    with pytest.raises(Exception, match="mode='fastest': expected one of"):
        torch.compile(layer, backend=moe_inductor, mode="fastest")(*inputs())


@pytest.mark.parametrize("place", ["options", "backend options", "global config", "both forms"])
@torch.no_grad()
def test_a_users_pass_runs_once_after_ours(place):
    spy = Spy()
    with inductor_config.patch({SLOT: spy} if place == "global config" else {}):
        made = inductor_passes.options(
            **({} if place in ("global config", "backend options") else {SLOT: spy})
        )
        form = {
            "options": {"options": made},
            "global config": {"options": made},
            "backend options": {"backend": moe_inductor, "options": {SLOT: spy}},
            "both forms": {"backend": moe_inductor, "options": made},
        }[place]
        given = inputs(MANY_TOKENS)
        torch.testing.assert_close(torch.compile(layer, **form)(*given), layer(*given))
    assert spy.seen == [["grouped_gemm", "grouped_gemm"]]


@pytest.mark.exhaustive  # the same graph as of marked tokens; `test_recompiles.py` counts more of them
@torch.no_grad()
def test_dynamic_true_is_one_graph_for_every_token_count():
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, options=inductor_passes.options())
    for tokens in (5, 3, 17, 40):
        torch.testing.assert_close(compiled(*inputs(tokens)), layer(*inputs(tokens)))
    assert counters["stats"]["unique_graphs"] == 1


@torch.no_grad()
def test_marked_tokens_are_one_graph():
    compiled = torch.compile(layer, fullgraph=True, options=inductor_passes.options())
    for tokens in (5, 3, 17):
        torch.testing.assert_close(compiled(*inputs(tokens, dynamic=True)), layer(*inputs(tokens)))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.exhaustive  # `test_recompiles.py` counts those of three layers
@torch.no_grad()
def test_unmarked_tokens_are_two_graphs():
    compiled = torch.compile(layer, fullgraph=True, options=inductor_passes.options())
    for tokens in (5, 3, 17, 40):
        compiled(*inputs(tokens))
    assert counters["stats"]["unique_graphs"] == 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.w13 = nn.Parameter(torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 4)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / 4)

    def forward(self, hidden):
        return layer(hidden, self.gate(hidden), self.w13, self.w2)


@torch.no_grad()
def test_layers_compiled_one_by_one_with_fresh_options_share_a_graph():
    hidden = inputs().hidden_states
    for block in [Layer() for _ in range(4)]:
        compiled = torch.compile(block, fullgraph=True, options=inductor_passes.options())
        torch.testing.assert_close(compiled(hidden), block(hidden))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("emit", ["auto", "fused"])
@torch.no_grad()
def test_plain_compile_without_our_passes(emit):
    def plain(hidden, logits, w13, w2):
        return moe_ops.fused_moe(hidden, logits, w13, w2, ROUTING, emit=emit)

    actual, (code,) = run_and_get_code(torch.compile(plain, fullgraph=True), *inputs())
    assert ("torch.ops.moe.fused_moe.default(" in code) == (emit == "fused")
    torch.testing.assert_close(actual, layer(*inputs()))


@torch.no_grad()
def test_passes_of_one_compile_do_not_leak_into_another():
    torch.compile(layer, options=inductor_passes.options())(*inputs())
    torch._dynamo.reset()
    _, (code,) = run_and_get_code(torch.compile(layer), *inputs())
    assert "torch.ops.moe.permute.default(" in code and "torch.ops.moe.gated_activation.default(" in code


@torch.no_grad()
def test_gpt_oss_layout_copies_no_weight():
    def gpt_oss(hidden, logits, gate_up_proj, down_proj):
        views = gate_up_proj.transpose(1, 2), down_proj.transpose(1, 2)
        return moe_ops.fused_moe(
            hidden, logits, *views, ROUTING, moe_ops.Activation("swiglu_oai", interleaved=True)
        )

    given = inputs()
    stored = given.w13.transpose(1, 2).contiguous(), given.w2.transpose(1, 2).contiguous()
    compiled = torch.compile(gpt_oss, fullgraph=True, options=inductor_passes.options())
    actual, (code,) = run_and_get_code(compiled, *given[:2], *stored)
    sizes = (eval(size) for size in re.findall(r"empty_strided_cpu\((\([^)]*\))", code))
    assert "grouped_gemm.compiled(" in code
    assert all(torch.Size(size).numel() < given.w2.numel() for size in sizes)
    torch.testing.assert_close(actual, gpt_oss(*given[:2], *stored))
