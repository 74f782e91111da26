"""fused_experts_with_shared: routed experts and a shared one, against the float64 oracle of both."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from moe_ops.reference import reference_experts
from tests.cases import CASES, make
from tests.counting import Calls
from tests.helpers import assert_matches_oracle, assert_same, grads_of
from tests.ops.test_values import oracle

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
J = 11


def shared_tensors(case, dtype, gated, weighed):
    """w13, w2 and weights of a shared expert, wider than a routed one or narrower."""
    scale = case.hidden**-0.5
    rows = 2 * J if gated else J
    w13, w2 = torch.randn(rows, case.hidden) * scale, torch.randn(case.hidden, J) * J**-0.5
    weights = torch.rand(case.tokens, 1) if weighed else None
    return [t if t is None else t.to(dtype) for t in (w13, w2, weights)]


def expected_of(problem, weights, ids, shared, activation):
    """Both oracles, added: the shared expert is one expert that every token has chosen."""
    w13, w2, shared_weights = [t if t is None else t.detach().double() for t in shared]
    tokens = problem.hidden_states.shape[0]
    alone = reference_experts(
        problem.hidden_states.detach().double(), w13.unsqueeze(0), w2.unsqueeze(0),
        torch.ones(tokens, 1, dtype=torch.float64) if shared_weights is None else shared_weights,
        torch.zeros(tokens, 1, dtype=torch.int32), activation,
    )  # fmt: skip
    return oracle(problem, weights, ids) + alone


@cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighed", [False, True], ids=["plain", "weighed"])
def test_values(case, dtype, weighed, poisoned_empty):
    problem = make(case, dtype)
    weights, ids = moe_ops.topk_routing(problem.router_logits, problem.routing)
    w13, w2, shared_weights = shared = shared_tensors(case, dtype, problem.activation.is_gated, weighed)
    out = moe_ops.fused_experts_with_shared(
        problem.hidden_states, problem.w13, problem.w2, weights, ids, w13, w2, problem.activation,
        shared_weights=shared_weights, **problem.biases(),
    )  # fmt: skip
    assert out.dtype == dtype
    assert_matches_oracle(out, expected_of(problem, weights, ids, shared, problem.activation))


@pytest.mark.parametrize(("routed", "shared"), [("silu", "relu2"), ("relu2", "gelu")])
def test_two_activations(routed, shared):
    case = CASES[2]
    problem = make(case)
    problem.activation = moe_ops.Activation.from_spec(routed)
    if not problem.activation.is_gated:
        problem.w13, problem.w13_bias = (
            problem.w13[:, : case.intermediate],
            problem.w13_bias[:, : case.intermediate],
        )
    other = moe_ops.Activation.from_spec(shared)
    weights, ids = moe_ops.topk_routing(problem.router_logits, problem.routing)
    tensors = shared_tensors(case, torch.float64, other.is_gated, True)
    out = moe_ops.fused_experts_with_shared(
        problem.hidden_states, problem.w13, problem.w2, weights, ids, *tensors[:2], routed,
        shared_weights=tensors[2], shared_activation=shared, **problem.biases(),
    )  # fmt: skip
    assert_matches_oracle(out, expected_of(problem, weights, ids, tensors, other))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_gate_and_up_in_tensors_of_their_own(dtype):
    case = CASES[2]
    problem = make(case, dtype)
    weights, ids = moe_ops.topk_routing(problem.router_logits, problem.routing)
    w13, w2, scale = shared = shared_tensors(case, dtype, problem.activation.is_gated, True)
    out = moe_ops.fused_experts_with_shared(
        problem.hidden_states, problem.w13, problem.w2, weights, ids, tuple(w13.chunk(2)), w2, problem.activation,
        shared_weights=scale, **problem.biases(),
    )  # fmt: skip
    assert_matches_oracle(out, expected_of(problem, weights, ids, shared, problem.activation))


def test_remote_experts_count_nothing_and_the_shared_one_counts():
    case = CASES[1]
    problem = make(case)
    weights, ids = moe_ops.topk_routing(problem.router_logits, problem.routing)
    expert_map = torch.full((case.experts,), -1, dtype=torch.int32)
    w13, w2, _ = shared = shared_tensors(case, torch.float64, True, False)
    out = moe_ops.fused_experts_with_shared(
        problem.hidden_states, problem.w13, problem.w2, weights, ids, w13, w2, expert_map=expert_map
    )
    alone = expected_of(problem, torch.zeros_like(weights), ids, shared, problem.activation)
    assert_matches_oracle(out, alone)


@pytest.mark.parametrize("weighed", [False, True], ids=["plain", "weighed"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients(weighed, create_graph):
    case = CASES[2]
    problem = make(case, torch.float64, requires_grad=True)
    weights, ids = moe_ops.topk_routing(problem.router_logits.detach(), problem.routing)
    shared = [t for t in shared_tensors(case, torch.float64, True, weighed) if t is not None]
    biases = {name: bias for name, bias in problem.biases().items() if bias is not None}
    leaves = [problem.hidden_states, problem.w13, problem.w2, weights.requires_grad_(), *biases.values()]
    leaves += [tensor.requires_grad_() for tensor in shared]

    def run():
        x, rest = problem.hidden_states, shared[2] if weighed else None
        return moe_ops.fused_experts_with_shared(
            x, problem.w13, problem.w2, weights, ids, shared[0], shared[1], shared_weights=rest, **biases
        )

    def composed():
        x, rest = problem.hidden_states, shared[2] if weighed else 1.0
        gate, up = (x @ shared[0].t()).chunk(2, 1)
        alone = rest * ((torch.nn.functional.silu(gate) * up) @ shared[1].t())
        return moe_ops.fused_experts(
            x, problem.w13, problem.w2, weights, ids, shared=alone, emit="stages", **biases
        )

    def penalty(function):
        (to_hidden,) = torch.autograd.grad(
            function().square().sum(), problem.hidden_states, create_graph=True
        )
        return to_hidden.square()

    ours, theirs = ((lambda: penalty(run)), (lambda: penalty(composed))) if create_graph else (run, composed)
    assert_same(grads_of(ours, leaves), grads_of(theirs, leaves), 1e-10)


def test_weights_may_have_a_dtype_of_their_own():
    x, w13, w2 = (torch.randn(shape).bfloat16() for shape in ((3, 4), (2, 6, 4), (2, 4, 3)))
    shared13, shared2 = torch.randn(8, 4).bfloat16(), torch.randn(4, 4).bfloat16().requires_grad_()
    ids, scale = torch.zeros(3, 1, dtype=torch.int32), torch.rand(3, 1, requires_grad=True)
    out = moe_ops.fused_experts_with_shared(
        x, w13, w2, torch.ones(3, 1), ids, shared13, shared2, shared_weights=scale
    )
    out.sum().backward()
    gradients = out.dtype, shared2.grad.dtype, scale.grad.dtype
    assert gradients == (torch.bfloat16, torch.bfloat16, torch.float32)
    gate, up = torch.nn.functional.linear(x, shared13).float().chunk(2, 1)
    activated = (torch.nn.functional.silu(gate) * up).bfloat16()
    alone = (torch.nn.functional.linear(activated, shared2) * scale).bfloat16()  # rounded before it is added
    assert torch.equal(out, moe_ops.fused_experts(x, w13, w2, torch.ones(3, 1), ids, shared=alone))


def test_a_gradient_that_nobody_asks_for_is_none():
    x, w13, w2 = torch.randn(3, 4), torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    shared13, shared2 = torch.randn(8, 4, requires_grad=True), torch.randn(4, 4)
    ids = torch.zeros(3, 1, dtype=torch.int32)
    moe_ops.fused_experts_with_shared(x, w13, w2, torch.ones(3, 1), ids, shared13, shared2).sum().backward()
    assert shared13.grad is not None and x.grad is None and shared2.grad is None
    w2.requires_grad_()
    moe_ops.fused_experts_with_shared(
        x, w13, w2, torch.ones(3, 1), ids, shared13.detach(), shared2
    ).sum().backward()
    assert w2.grad is not None and x.grad is None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"shared_w13": torch.randn(8, 5)},
            ValueError,
            r"shared_w13 has shape \[8, 5\]: expected \[2J, 4\]",
        ),
        (
            {"shared_w13": torch.randn(7, 4)},
            ValueError,
            "shared_w13 has 7 gate and up features: expected an even",
        ),
        ({"shared_w2": torch.randn(4, 8)}, ValueError, r"shared_w2 has shape \[4, 8\]: expected \[4, 4\]"),
        ({"shared_w2": torch.randn(4, 4).double()}, TypeError, "shared_w2 has dtype torch.float64: expected"),
        (
            {"shared_w2": torch.randn(8, 8)[::2, ::2]},
            ValueError,
            r"shared_w2 has strides \[16, 2\]: expected",
        ),
        ({"shared_weights": torch.ones(3)}, ValueError, r"shared_weights has shape \[3\]: expected \[3, 1\]"),
        ({"shared_weights": torch.ones(3, 1).int()}, TypeError, "shared_weights has dtype torch.int32"),
        (
            {"shared_weights": torch.ones(3, 1, device="meta")},
            ValueError,
            "shared_weights is on meta: expected cpu",
        ),
        ({"shared_w13": torch.randn(8, 4, device="meta")}, ValueError, "shared_w13 is on meta: expected cpu"),
        ({"shared_activation": "sile"}, ValueError, "sile"),
        (
            {"shared_w13": (torch.randn(4, 4), torch.randn(3, 4))},
            ValueError,
            r"shared_up has shape \[3, 4\]: expected \[4, 4\]",
        ),
        (
            {"shared_w13": (torch.randn(4, 4), torch.randn(4, 4)), "shared_activation": "relu2"},
            ValueError,
            "shared_w13 is a pair with an ungated activation",
        ),
        ({"shared_w13": (torch.randn(4, 4),)}, ValueError, "shared_w13 has 1 tensors: expected 2"),
        ({"topk_ids": torch.zeros(4, 1).int()}, ValueError, "topk_ids has shape"),
    ],
)
def test_errors(change, error, message):
    tensors = {
        "hidden_states": torch.randn(3, 4),
        "w13": torch.randn(2, 6, 4),
        "w2": torch.randn(2, 4, 3),
        "topk_weights": torch.ones(3, 1),
        "topk_ids": torch.zeros(3, 1, dtype=torch.int32),
        "shared_w13": torch.randn(8, 4),
        "shared_w2": torch.randn(4, 4),
    }
    moe_ops.fused_experts_with_shared(**tensors)
    with pytest.raises(error, match=message):
        moe_ops.fused_experts_with_shared(**{**tensors, **change})


def test_autocast():
    x, w13, w2 = torch.randn(3, 4), torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    shared13, shared2, ids = torch.randn(8, 4), torch.randn(4, 4), torch.zeros(3, 1, dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        out = moe_ops.fused_experts_with_shared(x, w13, w2, torch.ones(3, 1), ids, shared13, shared2)
    assert out.dtype == torch.bfloat16


def test_it_counts_both_kinds_of_experts():
    x, w13, w2 = torch.randn(3, 4), torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    shared13, shared2, ids = torch.randn(10, 4), torch.randn(4, 5), torch.zeros(3, 2, dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        moe_ops.fused_experts_with_shared(x, w13, w2, torch.ones(3, 2), ids, shared13, shared2)
    assert counter.get_total_flops() == 2 * 3 * 2 * (6 * 4 + 4 * 3) + 2 * 3 * (10 * 4 + 4 * 5)
    with FlopCounterMode(display=False) as of_halves:
        halves = tuple(shared13.chunk(2))
        moe_ops.fused_experts_with_shared(x, w13, w2, torch.ones(3, 2), ids, halves, shared2)
    assert of_halves.get_total_flops() == counter.get_total_flops()


@pytest.mark.parametrize("weighed", [False, True])
def test_vmap(weighed):
    """Tokens of a batch join the tokens: the operator runs once."""
    x, w13, w2 = torch.randn(5, 3, 4), torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    shared13, shared2, weights = torch.randn(10, 4), torch.randn(4, 5), torch.rand(5, 3, 2)
    ids, scale = torch.randint(2, (5, 3, 2)), torch.rand(5, 3, 1) if weighed else None

    def run(x, weights, ids, scale):
        return moe_ops.fused_experts_with_shared(
            x, w13, w2, weights, ids, shared13, shared2, shared_weights=scale
        )

    with Calls() as calls:
        out = torch.vmap(run, in_dims=(0, 0, 0, 0 if weighed else None))(x, weights, ids, scale)
    assert calls.names == ["moe.fused_experts_with_shared"]
    expected = [run(x[i], weights[i], ids[i], scale[i] if weighed else None) for i in range(5)]
    torch.testing.assert_close(out, torch.stack(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 256, 257])
@pytest.mark.parametrize("weighed", [False, True], ids=["plain", "weighed"])
def test_on_a_gpu_in_a_graph_and_out_of_it(tokens, dtype, weighed):
    """Replays with other inputs, NaN in every buffer that is not written yet, and another stream at work."""
    torch.manual_seed(tokens)
    E, K, H, I, silu = 13, 3, 264, 104, moe_ops.Activation()
    names = {
        "x": (tokens, H), "w13": (E, 2 * I, H), "w2": (E, H, I), "s13": (2 * J * 8, H), "s2": (H, J * 8),
    }  # fmt: skip
    cpu = {
        name: torch.randn(shape) * (shape[-1] ** -0.5 if name != "x" else 1) for name, shape in names.items()
    }
    there = {name: tensor.to("cuda", dtype) for name, tensor in cpu.items()}
    weights = torch.rand(tokens, K, device="cuda")
    ids = torch.randint(-1, E, (tokens, K), device="cuda", dtype=torch.int32)
    scale = torch.rand(tokens, 1, device="cuda") if weighed else None

    def run():
        return moe_ops.fused_experts_with_shared(
            there["x"],
            there["w13"],
            there["w2"],
            weights,
            ids,
            there["s13"],
            there["s2"],
            shared_weights=scale,
        )

    def expected():
        tensors = [there[name].double().cpu() for name in ("x", "w13", "w2", "s13", "s2")]
        x, w13, w2, s13, s2 = tensors
        one = torch.ones(tokens, 1) if scale is None else scale.cpu()
        routed = reference_experts(x, w13, w2, weights.double().cpu(), ids.cpu(), silu)
        none = torch.zeros(tokens, 1, dtype=torch.int32)
        return routed + reference_experts(x, s13.unsqueeze(0), s2.unsqueeze(0), one.double(), none, silu)

    with torch.no_grad():
        assert_matches_oracle(run().cpu(), expected())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for _ in range(3):
            there["x"].normal_(), weights.uniform_(), ids.random_(-1, E)
            captured.fill_(float("nan"))
            graph.replay()
            assert_matches_oracle(captured.cpu(), expected())
        wanted, streams = run(), [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        for _ in range(20):
            outputs = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    torch.full((tokens, 4 * H), float("nan"), device="cuda", dtype=dtype)
                    outputs.append(run())
            torch.cuda.synchronize()
            assert all(torch.equal(output, wanted) for output in outputs)
