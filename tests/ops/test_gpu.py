"""The operators on a GPU: values, gradients, opcheck, bad ids, repeatability. The same cases as on the CPU."""

import pytest
import torch

import moe_ops
from moe_ops import RoutingConfig
from tests.cases import CASES, ROUTINGS, Case, make
from tests.helpers import assert_matches_oracle, assert_same, grads_of
from tests.ops.samples import LAYOUTS, laid_out, samples
from tests.ops.test_registration import all_operators
from tests.ops.test_values import oracle

pytestmark = pytest.mark.gpu
LARGER = [
    Case(1, 64, 8, 512, 256),
    Case(5, 64, 8, 2048, 768),
    Case(64, 16, 4, 512, 320, bias=True),
    Case(120, 2, 2, 256, 192, hot=1),
    Case(17, 8, 2, 511, 250),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
cases = pytest.mark.parametrize("case", CASES + LARGER, ids=lambda case: f"{case.name}-H{case.hidden}")


def converted(problem, **to):
    tensors = [
        tensor for tensor in vars(problem).values() if tensor is None or isinstance(tensor, torch.Tensor)
    ]
    moved = [t if t is None else t.detach().to(**to).requires_grad_(t.requires_grad) for t in tensors]
    return type(problem)(*moved, problem.routing, problem.activation)


def on_gpu(problem):
    return converted(problem, device="cuda")


@cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
def test_values(case, dtype, emit):
    problem = make(case, dtype)
    there = on_gpu(problem)
    weights, ids = moe_ops.topk_routing(there.router_logits, there.routing)
    expected = oracle(problem, weights.cpu(), ids.cpu())
    out = moe_ops.fused_moe(*there.args(), **there.biases(), emit=emit)
    assert out.is_cuda
    assert_matches_oracle(out.cpu(), expected)


@cases
@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
def test_gradients(case, emit):
    problem = make(case, torch.float64, requires_grad=True)
    there = on_gpu(problem)
    expected = grads_of(lambda: moe_ops.fused_moe(*problem.args(), **problem.biases()), problem.tensors())
    actual = grads_of(lambda: moe_ops.fused_moe(*there.args(), **there.biases(), emit=emit), there.tensors())
    assert_same([gradient.cpu() for gradient in actual], expected, 1e-11)


def test_bfloat16_gradients():
    problem = make(LARGER[2], torch.bfloat16, requires_grad=True)
    there, double = on_gpu(problem), converted(problem, dtype=torch.float64)
    expected = grads_of(lambda: moe_ops.fused_moe(*double.args(), **double.biases()), double.tensors())
    actual = grads_of(lambda: moe_ops.fused_moe(*there.args(), **there.biases()), there.tensors())
    assert_same([gradient.cpu() for gradient in actual], expected, 2e-2)


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.spec)
def test_routing_equals_the_cpu(routing):
    logits, bias = torch.randn(33, 16, dtype=torch.float64), torch.randn(16)
    logits[3, 5], logits[7], logits[9, ::2] = float("inf"), float("nan"), float("-inf")
    weights, ids = moe_ops.topk_routing(logits, routing, bias)
    weights_there, ids_there = moe_ops.topk_routing(logits.cuda(), routing, bias.cuda())
    assert torch.equal(ids_there.cpu(), ids)
    torch.testing.assert_close(weights_there.cpu(), weights, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", all_operators())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(name, layout, dtype):
    for args in samples()[name]:
        given = laid_out(args, layout, dtype, "cuda")
        result = torch.library.opcheck(getattr(torch.ops.moe, name).default, given)
        assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("tokens", [1, 4, 33])
def test_bad_ids_contribute_zero_and_read_nothing(tokens):
    x, w13, w2 = torch.randn(tokens, 64), torch.randn(8, 96, 64), torch.randn(8, 64, 48)
    ids = torch.randint(-(2**40), 2**40, (tokens, 4))
    ids[::2, 0] = 3
    weights = torch.rand(tokens, 4)
    expected = moe_ops.fused_experts(x, w13, w2, weights, ids)
    for emit in ("fused", "stages"):
        there = [t.cuda() for t in (x, w13, w2, weights, ids)]
        out = moe_ops.fused_experts(*there, emit=emit)
        torch.cuda.synchronize()
        torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-3)
        assert (out[1::2] == 0).all()


@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
def test_a_nan_token_changes_no_other_bits_and_runs_repeat(emit):
    problem = on_gpu(make(LARGER[2], torch.bfloat16))
    clean = moe_ops.fused_moe(*problem.args(), **problem.biases(), emit=emit)
    again = moe_ops.fused_moe(*problem.args(), **problem.biases(), emit=emit)
    assert torch.equal(clean, again)
    problem.hidden_states[5] = float("nan")
    dirty = moe_ops.fused_moe(*problem.args(), **problem.biases(), emit=emit)
    others = torch.arange(problem.hidden_states.shape[0], device="cuda") != 5
    assert torch.equal(clean[others], dirty[others])


def test_func_grad_on_the_gpu():
    problem = on_gpu(make(CASES[2], torch.float64))
    routing = RoutingConfig(top_k=3)

    def loss(x, w13):
        return moe_ops.fused_moe(x, problem.router_logits, w13, problem.w2, routing).sin().sum()

    ours = torch.func.grad(loss, argnums=(0, 1))(problem.hidden_states, problem.w13)
    leaves = [t.clone().requires_grad_() for t in (problem.hidden_states, problem.w13)]
    assert_same(ours, torch.autograd.grad(loss(*leaves), leaves))
    compiled = torch.compile(torch.func.grad(loss, argnums=(0, 1)), fullgraph=True)
    assert_same(compiled(problem.hidden_states, problem.w13), ours)
