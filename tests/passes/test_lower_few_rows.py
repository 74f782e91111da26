"""Products of few rows in training graphs on a CPU become loops, with the same values and gradients."""

import itertools
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import inductor_passes
import moe_ops
from inductor_passes.graph_tools import find, is_training
from inductor_passes.lowerings.few_rows import has_few_rows
from inductor_passes.pipeline import PIPELINE, run_passes
from tests.cases import Case, make
from tests.helpers import assert_same, grads_of, usually
from tests.passes.capture import rewrite

CALLS = r"torch\.ops\.moe\.([\w.]+)\("
FEW, MORE = Case(2, 8, 4, 16, 8), Case(40, 8, 2, 16, 8)


def layer_of(problem, **named):
    """A layer that trains, and what it trains on."""
    weights, ids = moe_ops.topk_routing(problem.router_logits.detach(), problem.routing)
    tensors = [problem.hidden_states, problem.w13, problem.w2, weights]
    tensors += [each for each in (problem.w13_bias, problem.w2_bias) if each is not None]
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]

    def layer(hidden, w13, w2, weights, w13_bias=None, w2_bias=None):
        return moe_ops.fused_experts(
            hidden, w13, w2, weights, ids, w13_bias=w13_bias, w2_bias=w2_bias, **named
        )

    return layer, leaves


def trained(layer, leaves):
    """Gradients of a compiled layer, those of the same called eagerly, and the operators compiled code calls."""
    compiled = torch.compile(layer, fullgraph=True, options=inductor_passes.options())
    actual, code = run_and_get_code(lambda: grads_of(lambda: compiled(*leaves), leaves))
    return actual, grads_of(lambda: layer(*leaves), leaves), set(re.findall(CALLS, "".join(code)))


@pytest.mark.parametrize(
    ("tokens", "bias", "dtype", "transposed"),
    usually(
        itertools.product(
            (1, 2, 5), (False, True), (torch.float64, torch.float32, torch.bfloat16), (False, True)
        ),
        [(1, False, torch.float64, False), (5, True, torch.bfloat16, True)],
    ),
    ids=str,
)
def test_gradients(tokens, bias, dtype, transposed):
    problem = make(Case(tokens, 8, 4, 16, 8, bias=bias), dtype)
    if transposed:
        problem.w13, problem.w2 = (each.mT.contiguous().mT for each in (problem.w13, problem.w2))
    actual, expected, left = trained(*layer_of(problem))
    assert_same(actual, expected, {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype])
    assert left <= {"grouped_gemm_weight_backward.compiled"} and bool(left) == (tokens * 4 > 8)


def test_many_rows_are_calls():
    actual, expected, left = trained(*layer_of(make(Case(400, 8, 2, 16, 8))))
    assert_same(actual, expected, 1e-10)
    assert left == {"grouped_gemm.compiled", "grouped_gemm_weight_backward.compiled"}


IDS = {
    "one expert for all rows but one": torch.tensor([[3, 3], [3, -1], [3, 3], [5, 3]]),
    "rows of none": torch.tensor([[0, 3], [0, -1], [2, 9], [5, 0]]),
    "two experts for each": torch.tensor([[0, 1], [2, 3], [0, 1], [0, 1]]),
}


@pytest.fixture(scope="module")
def trained_on():
    """Gradients of one compiled layer, and of the same called eagerly, for each of IDS; the weights of the first hold
    what no row has, and the last has a row that is not finite. Compiled code calls no operator.
    """
    torch.manual_seed(0)
    problem, weights = make(Case(4, 8, 2, 16, 8), torch.float64), torch.rand(4, 2, dtype=torch.float64)
    given = [each.detach() for each in (problem.hidden_states, problem.w13, problem.w2)]
    leaves = {name: [each.clone() for each in given] for name in IDS}
    for weight in leaves["one expert for all rows but one"][1:]:
        weight[0] = float("nan")
    leaves["two experts for each"][0][1] = float("inf")

    def layer(hidden, w13, w2, ids):
        return moe_ops.fused_experts(hidden, w13, w2, weights, ids)

    def gradients(run, name):
        tensors = [each.requires_grad_() for each in leaves[name]]
        return grads_of(lambda: run(*tensors, IDS[name]), tensors)

    compiled = torch.compile(layer, fullgraph=True, options=inductor_passes.options())
    actual, code = run_and_get_code(lambda: {name: gradients(compiled, name) for name in IDS})
    assert len(code) == 2 and not re.findall(CALLS, "".join(code))
    return {name: (actual[name], gradients(layer, name)) for name in IDS}


def test_experts_that_several_rows_have_and_rows_of_none(trained_on):
    """What a weight holds that no row has is not read."""
    actual, expected = trained_on["one expert for all rows but one"]
    assert_same(actual, expected)
    assert all(each.isfinite().all() for each in actual)


def test_rows_of_none_leave_the_gradient_of_the_first_expert(trained_on):
    actual, expected = trained_on["rows of none"]
    assert_same(actual, expected)
    assert actual[1][0].any()


def test_a_row_that_is_not_finite_stays_its_experts(trained_on):
    (_, to_w13, to_w2), _ = trained_on["two experts for each"]
    for gradient in (to_w13, to_w2):
        assert gradient[:2].isfinite().all() and (gradient[4:] == 0).all() and gradient[:2].any()
        assert not gradient[2:4].isfinite().all()


def test_what_is_few():
    """By rows, and for more of them by what is multiplied."""

    def graph_of(rows, size):
        offsets = torch.tensor([0, rows, rows], dtype=torch.int32)
        given = torch.randn(rows, size), torch.randn(2, size, size), offsets
        return find(rewrite(moe_ops.grouped_gemm, *given, passes=()).graph, "grouped_gemm")[0]

    with torch.no_grad():
        few = {
            given: has_few_rows(graph_of(*given))
            for given in ((0, 8), (64, 8), (65, 8), (16, 512), (17, 512))
        }
    assert few == {(0, 8): False, (64, 8): True, (65, 8): False, (16, 512): True, (17, 512): False}


@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "experts", "dtype", "few"),
    [
        (8, 4, torch.float32, True),
        (9, 4, torch.float32, False),
        (8, 1 << 10, torch.float32, False),
        (8, (1 << 10) - 1, torch.float32, True),
        (8, 1 << 10, torch.bfloat16, True),
        (8, 1 << 10, torch.float64, True),
    ],
)
def test_weight_gradients_of_few_rows(rows, experts, dtype, few):
    """Large ones in float32 are calls: loops write zeros first."""
    offsets = torch.zeros(experts + 1, dtype=torch.int32)
    given = torch.randn(rows, 64, dtype=dtype), torch.randn(rows, 64, dtype=dtype), offsets
    name = "grouped_gemm_weight_backward"
    (node,) = find(rewrite(getattr(torch.ops.moe, name).default, *given, passes=()).graph, name)
    assert has_few_rows(node) == few


@torch.no_grad()
def test_graphs_without_a_backward_call_their_products():
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    result = rewrite(moe_ops.grouped_gemm, torch.randn(5, 8), torch.randn(2, 6, 8), offsets, passes=PIPELINE)
    assert not is_training(result.graph) and "grouped_gemm" in result.ops()
    assert not run_passes(result.graph, PIPELINE).lowered
