"""A function as activation: eager and through a compiler, its gradients, what it may be given and may give."""

import re

import pytest
import torch

import moe_ops
from inductor_passes.pipeline import PIPELINE, run_passes
from tests.gates import CASES, EXPERTS, HIDDEN, INTERMEDIATE, oracle, tensors
from tests.helpers import assert_matches_oracle
from tests.passes.capture import post_grad

LEAVES = ("hidden_states", "w13", "w2", "topk_weights")


def run(case, given, **options):
    return moe_ops.fused_experts(**given, activation=case.function, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_values(name, dtype):
    given = tensors(CASES[name], 9, dtype)
    out = run(CASES[name], given)
    assert out.dtype == dtype
    assert_matches_oracle(out, oracle(CASES[name], given))


def test_values_with_everything_else_that_a_layer_has():
    case, given = CASES["learned_scale"], tensors(CASES["learned_scale"], 9)
    given["topk_ids"][0, 0] = 3
    expected = oracle(case, given)
    shared, w2_bias = torch.randn(9, HIDDEN), torch.randn(EXPERTS, HIDDEN)
    scale = (given["topk_weights"] * (given["topk_ids"] >= 0)).double()
    weighed = torch.zeros(9, EXPERTS).double().scatter_add(1, given["topk_ids"].clamp(min=0).long(), scale)
    expected = expected + shared.double() + weighed @ w2_bias.double()
    given["topk_ids"] = torch.where(given["topk_ids"] >= 0, given["topk_ids"] + 2, -1)
    expert_map = torch.tensor([-1, -1, 0, 1, 2, 3], dtype=torch.int32)
    out = run(case, given, shared=shared, w2_bias=w2_bias, expert_map=expert_map)
    assert_matches_oracle(out, expected)


def test_a_whole_layer_from_logits():
    case, given = CASES["situ"], tensors(CASES["situ"], 9)
    logits = torch.randn(9, EXPERTS)
    weights, ids = moe_ops.topk_routing(logits, moe_ops.RoutingConfig(2))
    given |= {"topk_weights": weights, "topk_ids": ids}
    layer = [given[name] for name in ("hidden_states", "w13", "w2")]
    out = moe_ops.fused_moe(layer[0], logits, *layer[1:], moe_ops.RoutingConfig(2), case.function)
    assert_matches_oracle(out, oracle(case, given))


def gradients(case, given, layer):
    leaves = [given[name].requires_grad_() for name in LEAVES] + [
        each.requires_grad_() for each in given["per_expert"]
    ]
    out = layer(case, given)
    weighs = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((out * weighs).sum(), leaves)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, compiled):
    """Also of gates whose slope at zero, which is what rows of dropped slots hold, is infinite."""
    case = CASES[name]
    expected = gradients(case, tensors(case, 9, torch.float64), oracle)
    torch._dynamo.reset()
    layer = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    for ours, theirs in zip(gradients(case, tensors(case, 9), layer), expected, strict=True):
        assert_matches_oracle(ours, theirs)


def test_a_training_graph_holds_stages_and_plain_pytorch():
    case, given = CASES["gpt_oss"], tensors(CASES["gpt_oss"], 65)  # products of few rows are written out
    given["w13"].requires_grad_()
    graph = post_grad(lambda: run(case, given))[0].graph
    result = run_passes(graph, PIPELINE)
    names = {str(node.target) for node in graph.nodes}
    assert "moe.grouped_gemm.compiled" in names and "aten.sigmoid.default" in names and not result.fused


BAD = {
    "rows of w13": (
        {"w13": torch.randn(EXPERTS, 9, HIDDEN)},
        ValueError,
        "w13 has 9 rows for the 8 columns of w2",
    ),
    "shape of w2": ({"w2": torch.randn(EXPERTS, 5, 8)}, ValueError, r"w2 has shape \[4, 5, 8\]: expected"),
    "per_expert shape": (
        {"per_expert": [torch.ones(EXPERTS + 1)]},
        ValueError,
        r"per_expert\[0\] has shape \[5\]",
    ),
    "per_expert columns": (
        {"per_expert": [torch.ones(EXPERTS, 2)]},
        ValueError,
        r"per_expert\[0\] has shape",
    ),
    "per_expert rank": ({"per_expert": [torch.tensor(1.0)]}, ValueError, r"per_expert\[0\] has shape \[\]"),
    "per_expert dtype": (
        {"per_expert": [torch.ones(EXPERTS).long()]},
        TypeError,
        "expected a floating point",
    ),
    "per_expert type": ({"per_expert": [1.0]}, TypeError, r"per_expert\[0\]=1.0: expected a torch.Tensor"),
    "per_expert device": (
        {"per_expert": [torch.ones(EXPERTS, device="meta")]},
        ValueError,
        r"per_expert\[0\] is on meta: expected cpu",
    ),
    "fused": ({"emit": "fused"}, ValueError, "emit='fused' with a function as activation"),
    "halves": ({"emit": "halves"}, ValueError, "emit='halves' with a function as activation"),
    "emit": ({"emit": "both"}, ValueError, "emit='both': expected 'auto', 'stages', 'halves', 'fused' or"),
    "a name with tensors": (
        {"activation": "silu", "per_expert": [torch.ones(EXPERTS)]},
        ValueError,
        "has 1 tensors",
    ),
    "no activation": ({"activation": 3}, TypeError, "activation=3: expected a string or an Activation"),
    "another shape": (
        {"activation": lambda g, u: g[:, :1]},
        ValueError,
        "what activation returned has shape",
    ),
    "nothing": (
        {"activation": lambda g, u: None},
        TypeError,
        "activation returned None: expected a torch.Tensor",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    change, error, message = BAD[name]
    given = tensors(CASES["gpt_oss"], 9) | {"activation": CASES["gpt_oss"].function} | change
    with pytest.raises(error, match=message):
        moe_ops.fused_experts(**given)


BAD_FORMULAS = {
    "halves|t0=tanh(gate)|t1": "result 't1'",
    "halves|t0=tanh(up)|t1=sub(t0,t2)|t1": r"step sub\(t0,t2\)",
    "ungated|t0=tanh(up)|t0": r"step tanh\(up\)",
    "halves|t0=tanh(gate,up)|t0": r"step tanh\(gate,up\)",
    "halves|t0=system(gate)|t0": r"step system\(gate\)",
    "halves|t0=tanh(__import__)|t0": "not an operation on known values",
    "thirds|gate": "layout 'thirds'",
    "halves|gate; up|gate": "item 'gate; up'",
    "silu": "layout 'silu'",
    "|".join(
        ("halves", *(f"a{i}=expert*1+0+column*0" for i in range(5)), "gate")
    ): "reads 5 tensors: expected at most 4",
}


@pytest.mark.parametrize("spec", BAD_FORMULAS)
def test_bad_formulas(spec):
    given = tensors(CASES["gpt_oss"], 9)
    with pytest.raises(ValueError, match=BAD_FORMULAS[spec]):
        torch.ops.moe.fused_experts_formula(
            *(given[name] for name in (*LEAVES, "topk_ids")), *(None,) * 12, spec
        )


@pytest.mark.parametrize(
    ("layout", "tensor"),
    [
        (f"expert*{INTERMEDIATE}+1+column*1", torch.ones(EXPERTS, INTERMEDIATE)),
        (f"expert*{INTERMEDIATE}+0+column*1", torch.ones(EXPERTS - 1, INTERMEDIATE)),
        ("expert*0+0+column*1", torch.ones(INTERMEDIATE - 1)),
        ("expert*0+1+column*0", torch.tensor(1.0)),
    ],
)
def test_what_a_formula_reads_is_within_its_tensor(layout, tensor):
    given = [tensors(CASES["gpt_oss"], 9)[name] for name in (*LEAVES, "topk_ids")]
    spec = f"halves|a0={layout}|t0=mul(gate,a0)|t0"
    with pytest.raises(
        ValueError, match=re.escape(f"operand0 has shape {list(tensor.shape)}: expected one that")
    ):
        torch.ops.moe.fused_experts_formula(*given, *(None,) * 6, tensor, *(None,) * 5, spec)
    with pytest.raises(ValueError, match="reads 1 tensors: got 0"):
        torch.ops.moe.fused_experts_formula(*given, *(None,) * 12, spec)
