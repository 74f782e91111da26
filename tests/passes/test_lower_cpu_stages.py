"""ExpandOnCpu: what is on a CPU becomes ATen around two products, with the same values, for any number of tokens."""

import itertools
import re
from functools import partial

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import inductor_passes
import moe_ops
from inductor_passes import _compat
from inductor_passes.lowerings import ExpandOnCpu
from inductor_passes.lowerings.cpu_routing import largest_in_turns
from inductor_passes.pipeline import FUSIONS, PIPELINE, run_passes
from layers import FusedMoE, MoEConfig
from moe_ops import RoutingConfig
from moe_ops.routing import largest_by_sorting
from tests.cases import ROUTINGS, Case, make
from tests.generated import codes_of
from tests.helpers import assert_matches_oracle, assert_same, grads_of, mixed, usually
from tests.ops.test_values import oracle
from tests.passes.capture import rewrite
from tests.passes.moe import MANY_TOKENS
from tests.passes.test_lower_few_slots import experts_given, layer_of

PASS = (ExpandOnCpu(),)
HALVES = FUSIONS[:-1]
PRODUCTS = ["grouped_gemm", "grouped_gemm"]


@torch.no_grad()
def compute(function, *tensors, passes=PASS):
    """What the rewritten graph of `function` computes, and the operators that are left in it."""
    left = []

    def rewrite_in_place(module, _):
        run_passes(module.graph, passes)
        module.recompile()
        names = (str(node.target) for node in module.graph.nodes)
        left.extend(name.split(".")[1] for name in names if name.startswith("moe."))

    torch._dynamo.reset()
    backend = _compat.post_grad_backend(rewrite_in_place)
    return torch.compile(function, backend=backend, fullgraph=True)(*tensors), left


@pytest.mark.parametrize(
    ("sizes", "bias", "dtype", "whole"),
    mixed(
        [(40, 8, 2), (5, 4, 3), (33, 6, 6), (0, 4, 2)],
        (False, True),
        (torch.float64, torch.float32, torch.bfloat16),
        (True, False),
        rounds=3,
    ),
    ids=str,
)
def test_values(sizes, bias, dtype, whole):
    passes = PASS if whole else (*HALVES, *PASS)
    problem = make(Case(*sizes, 9, 5, bias=bias), dtype)
    layer, tensors = layer_of(problem, "fused" if whole else "stages")
    weights, ids = moe_ops.topk_routing(problem.router_logits, problem.routing)
    out, left = compute(layer, *tensors, passes=passes)
    assert left == PRODUCTS
    assert_matches_oracle(out, oracle(problem, weights, ids))


@pytest.mark.parametrize(
    ("routing", "dtype", "tokens"),
    mixed(ROUTINGS, (torch.float32, torch.bfloat16), (4, 1), rounds=2),
    ids=str,
)
def test_routers(routing, dtype, tokens):
    """With ties, and logits and biases that are not finite."""
    logits, bias = torch.randn(4, 16).to(dtype).round(decimals=1), torch.randn(16)
    logits[1], logits[0, 3], logits[2, ::2], bias[5] = 0.25, float("inf"), float("nan"), float("-inf")
    logits = logits[:tokens]

    def route(logits, bias):
        return moe_ops.topk_routing(logits, routing, bias)

    (weights, ids), left = compute(route, logits, bias)
    expected = route(logits, bias)
    assert not left and torch.equal(ids, expected[1]) and ids.is_contiguous()
    torch.testing.assert_close(weights, expected[0])


@pytest.mark.parametrize(("is_transposed", "dynamic"), mixed((False, True), (False, True)))
def test_a_router_is_computed_once_whatever_reads_it(is_transposed, dynamic):
    """Not for each of K experts again, nor in the loop over a token's columns; logits may lie in any order."""
    written = []
    for top_k in (2, 4):
        torch._dynamo.reset()
        problem = make(Case(MANY_TOKENS, 8, top_k, 32, 16), torch.float32)
        layer, (hidden, logits, *weights) = layer_of(problem, "fused")
        logits = logits.T.contiguous().T if is_transposed else logits
        compiled = torch.compile(layer, options=inductor_passes.options(), dynamic=dynamic)
        with torch.no_grad():
            (code,) = codes_of(partial(compiled, hidden, logits, *weights))
        out, _ = compute(layer, hidden, logits, *weights)
        assert_matches_oracle(out, oracle(problem, *moe_ops.topk_routing(logits, problem.routing)))
        written.append([len(re.findall(each, code)) for each in (r"abs\(", r" = \S+ / \S+;")])
    assert written[0] == written[1] and all(written[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_largest_in_turns_are_those_of_a_stable_sort(dtype):
    scores = torch.randn(50, 7, dtype=dtype).round(decimals=0)
    scores[torch.rand(50, 7) < 0.4] = -torch.inf
    scores[0] = -torch.inf
    for count in (1, 3, 7):
        assert torch.equal(largest_in_turns(scores, count), largest_by_sorting(scores, count))


@pytest.mark.parametrize("with_map", [False, True])
@pytest.mark.parametrize("with_shared", [False, True])
def test_ids_out_of_range_read_nothing(with_map, with_shared):
    """Neither a weight that is NaN nor a token's own."""
    ids = torch.tensor([[0, 7, -1], [2, 1, 1 << 40], [-5, 3, 9], [1, 2, 4]])
    hidden, w13, w2, weights = experts_given(ids)
    w13[0], w2[0] = float("nan"), float("nan")  # an index that is clamped would read these
    ids = ids if with_map else ids.where(ids != 0, -3)
    extras = {"expert_map": torch.tensor([1, 2, 1, -1, 2], dtype=torch.int32)} if with_map else {}
    if with_shared:
        extras["shared"] = torch.randn(4, 8, dtype=torch.float64)

    def run(hidden, w13, w2, weights, ids, *given):
        named = dict(zip(extras, given, strict=True))
        return moe_ops.fused_experts(hidden, w13, w2, weights, ids, emit="fused", **named)

    tensors = (hidden, w13, w2, weights, ids, *extras.values())
    expected = run(*tensors)
    assert expected.isfinite().all() and expected[2].any() == with_shared
    out, left = compute(run, *tensors)
    assert left == PRODUCTS
    torch.testing.assert_close(out, expected)


def test_a_nan_token_stays_its_own():
    problem = make(Case(40, 4, 2, 8, 6))
    layer, tensors = layer_of(problem)
    clean, _ = compute(layer, *tensors)
    problem.hidden_states[2] = float("nan")
    out, _ = compute(layer, *tensors)
    others = torch.arange(40) != 2
    assert out[2].isnan().all() and torch.equal(out[others], clean[others])


@pytest.mark.parametrize("tokens", [40, 11, 1, 0])
def test_the_plan_is_that_of_build_dispatch(tokens):
    ids = torch.tensor([[4, 0, 2], [7, -1, 1], [3, 3, 3]])[torch.arange(tokens) % 3]

    def plan(ids):
        return tuple(moe_ops.build_dispatch(ids, 5))

    outputs, left = compute(plan, ids)
    assert not left
    for ours, theirs in zip(outputs, plan(ids), strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype


def test_too_many_experts_per_token_stay_an_operator_with_a_reason():
    layer, tensors = layer_of(make(Case(20, 20, 17, 8, 6)))
    result = rewrite(layer, *tensors, passes=PASS)
    assert result.ops() == ["fused_moe"]
    (kept,) = result.log.kept
    assert kept.reason == "17 experts per token are too many to write out; it stays an operator call"


@pytest.mark.parametrize(
    ("emit", "dynamic"), usually(itertools.product(("stages", "fused"), (False, True)), [("fused", True)])
)
def test_training_graphs(emit, dynamic):
    layer, tensors = layer_of(make(Case(20, 4, 2, 8, 6), torch.float64, requires_grad=True), emit)
    options = inductor_passes.options()
    compiled = torch.compile(layer, fullgraph=True, options=options, dynamic=dynamic)
    torch.testing.assert_close(compiled(*tensors), layer(*tensors))
    expected = grads_of(lambda: layer(*tensors), tensors)
    assert_same(grads_of(lambda: compiled(*tensors), tensors), expected, 1e-12)


def test_products_pin_the_strides_of_their_weights():
    """Inductor drops needs_exact_strides for nodes without this entry."""
    problem = make(Case(40, 4, 2, 8, 6))
    problem.w13 = problem.w13.mT.contiguous().mT
    layer, tensors = layer_of(problem)
    result = rewrite(layer, *tensors, passes=PASS)
    products = [node for node in result.graph.nodes if "grouped_gemm" in str(node.target)]
    for node, weight in zip(products, (problem.w13, problem.w2), strict=True):
        args, kwargs = node.meta["eager_input_vals"]
        assert args[1].stride() == weight.stride() and not kwargs


@torch.no_grad()
def test_a_product_alone_becomes_the_call_that_does_nothing_besides():
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    given = torch.randn(5, 8), torch.randn(2, 6, 8), offsets
    result = rewrite(moe_ops.grouped_gemm, *given, passes=PIPELINE)
    (product,) = (node for node in result.graph.nodes if "grouped_gemm" in str(node.target))
    assert product.target is torch.ops.moe.grouped_gemm.compiled and not result.log.lowered


def test_a_second_run_finds_nothing():
    layer, tensors = layer_of(make(Case(40, 4, 2, 8, 6)), "stages")
    result = rewrite(layer, *tensors, passes=PIPELINE)
    assert [fusion.kind for fusion in result.log.lowered] == ["ATen"] and result.ops() == PRODUCTS
    before = result.after
    assert not run_passes(result.graph, PIPELINE).lowered and result.after == before


@torch.no_grad()
def test_one_compile_serves_any_number_of_tokens():
    module = FusedMoE(MoEConfig(8, 2, 16, 24, RoutingConfig(2)))
    compiled = torch.compile(module, fullgraph=True, dynamic=True, options=inductor_passes.options())
    hidden, logits = torch.randn(200, 16), torch.randn(200, 8)
    _, (code,) = run_and_get_code(compiled, hidden[:50], logits[:50])
    assert set(re.findall(r"torch\.ops\.moe\.(\w+)", code)) == {"grouped_gemm"}
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (2, 7, 48, 200):
            out = compiled(hidden[:tokens], logits[:tokens])
            torch.testing.assert_close(out, module(hidden[:tokens], logits[:tokens]))


@torch.no_grad()
def test_transposed_weights_are_handed_over_as_they_are():
    problem = make(Case(40, 4, 2, 8, 6))
    problem.w13 = problem.w13.mT.contiguous().mT
    layer, tensors = layer_of(problem)
    compiled = torch.compile(layer, fullgraph=True, options=inductor_passes.options())
    weights, ids = moe_ops.topk_routing(problem.router_logits, problem.routing)
    out, (code,) = run_and_get_code(compiled, *tensors)
    assert_matches_oracle(out, oracle(problem, weights, ids))
    assert f"empty_strided_cpu({tuple(problem.w13.shape)}" not in code
