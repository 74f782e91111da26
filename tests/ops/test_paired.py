"""Layers whose gate and up weights are two tensors: what the one with both in one tensor computes."""

import dataclasses

import pytest
import torch

import moe_ops
from moe_ops import Activation, RoutingConfig
from moe_ops.reference import reference_experts
from tests.cases import CASES, make
from tests.helpers import assert_matches_oracle, assert_same, mixed

ACTIVATIONS = (
    Activation("silu"),
    Activation("gelu_tanh"),
    Activation("silu", limit=0.5),
    Activation("swiglu_oai", alpha=1.2, limit=0.7),
    Activation("situ", beta=1.5, linear_beta=2.0),
)
LAYOUTS = {
    "apart": lambda half: half.clone(),
    "halves of one": lambda half: half,
    "columns": lambda half: (
        half.transpose(1, 2).contiguous().transpose(1, 2) if half.dim() == 3 else half.clone()
    ),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def pair(weight, layout="apart"):
    return None if weight is None else tuple(map(LAYOUTS[layout], weight.chunk(2, dim=1)))


def problem(case, activation, dtype=torch.float64):
    return make(dataclasses.replace(case, activation=activation), dtype)


def call(given, w13, w13_bias, emit="fused"):
    x, logits, _, w2, routing, activation = given.args()
    biases = {"w13_bias": w13_bias, "w2_bias": given.w2_bias}
    return moe_ops.fused_moe(x, logits, w13, w2, routing, activation, **biases, emit=emit)


@pytest.mark.parametrize(
    ("case", "activation", "layout", "dtype", "emit"),
    mixed(CASES, ACTIVATIONS, LAYOUTS, DTYPES, ("fused", "stages", "batch_invariant"), rounds=2),
    ids=str,
)
def test_values(case, activation, layout, dtype, emit, poisoned_empty):
    given = problem(case, activation, dtype)
    weights, ids = moe_ops.topk_routing(given.router_logits, given.routing)
    double = (t.double() for t in (given.hidden_states, given.w13, given.w2))
    biases = {name: None if t is None else t.double() for name, t in given.biases().items()}
    expected = reference_experts(*double, weights.double(), ids, activation, **biases)
    out = call(given, pair(given.w13, layout), pair(given.w13_bias), emit)
    assert_matches_oracle(out, expected)


WITH_BIAS = next(case for case in CASES if make(case).w13_bias is not None and case.tokens > 4)
PLAIN = next(case for case in CASES if make(case).w13_bias is None and case.tokens > 4)


@pytest.mark.parametrize("emit", ["auto", "stages"])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_one_tensor(emit, compiled):
    given = problem(WITH_BIAS, Activation("swiglu_oai"))
    tensors = [given.hidden_states, given.router_logits, *pair(given.w13), given.w2, *pair(given.w13_bias)]
    tensors = [tensor.detach().requires_grad_() for tensor in tensors]

    def layer(x, logits, w1, w3, w2, b1, b3, apart):
        given13 = ((w1, w3), (b1, b3)) if apart else (torch.cat((w1, w3), 1), torch.cat((b1, b3), 1))
        w13, bias = given13
        return moe_ops.fused_moe(
            x,
            logits,
            w13,
            w2,
            given.routing,
            given.activation,
            w13_bias=bias,
            w2_bias=given.w2_bias,
            emit=emit,
        )

    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    ours = torch.autograd.grad(run(*tensors, apart=True).sin().sum(), tensors)
    theirs = torch.autograd.grad(layer(*tensors, apart=False).sin().sum(), tensors)
    assert_same(ours, theirs)


PLAN = moe_ops.build_dispatch(torch.tensor([[1, 0], [0, 2], [2, -1]]), 3)


def double(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_gradchecks_to_the_second_derivative():
    gemm = lambda x, w, u, b, c: moe_ops.grouped_gemm(x, (w, u), PLAN.expert_offsets, (b, c))  # noqa: E731
    halves = double(3, 5, 4), double(3, 5, 4), double(3, 5), double(3, 5)
    inputs = double(6, 4), *halves
    assert torch.autograd.gradcheck(gemm, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(gemm, inputs)
    up = lambda x, w, u, b, c: moe_ops.gather_gemm_act(x, (w, u), PLAN, "silu", (b, c))  # noqa: E731
    inputs = double(3, 4), *halves
    assert torch.autograd.gradcheck(up, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(up, inputs)


@pytest.mark.parametrize("learns", [0, 1])
def test_only_one_half_learns(learns):
    x, halves = double(6, 4), [double(3, 5, 4), double(3, 5, 4)]
    halves[1 - learns].requires_grad_(False)
    wanted, offsets = (x, halves[learns]), PLAN.expert_offsets
    apart, whole = (moe_ops.grouped_gemm(x, w, offsets) for w in (tuple(halves), torch.cat(halves, 1)))
    ours, theirs = (torch.autograd.grad(out.sin().sum(), wanted) for out in (apart, whole))
    assert_same(ours, theirs)


def test_a_function_between_the_products_gets_both():
    given = problem(PLAIN, Activation())
    weights, ids = moe_ops.topk_routing(given.router_logits, given.routing)
    function = lambda gate, up: torch.tanh(gate) * (up + 1)  # noqa: E731
    rest = given.w2, weights, ids, function
    out = moe_ops.fused_experts(given.hidden_states, pair(given.w13), *rest)
    assert_same([out], [moe_ops.fused_experts(given.hidden_states, given.w13, *rest)])


def test_beside_a_shared_expert():
    given = problem(PLAIN, Activation())
    weights, ids = moe_ops.topk_routing(given.router_logits, given.routing)
    hidden = given.hidden_states.shape[1]
    shared = torch.randn(10, hidden).double(), torch.randn(hidden, 5).double()
    rest = given.w2, weights, ids, *shared
    out = moe_ops.fused_experts_with_shared(given.hidden_states, pair(given.w13), *rest)
    assert_same([out], [moe_ops.fused_experts_with_shared(given.hidden_states, given.w13, *rest)])


def test_autocast_casts_both():
    given = problem(PLAIN, Activation(), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(given, pair(given.w13), None, "auto")
        whole = call(given, given.w13, None, "auto")
    assert out.dtype == torch.bfloat16 == whole.dtype
    torch.testing.assert_close(out, whole, rtol=0.02, atol=0.02)


def test_a_batch_of_weights():
    x, weights = torch.randn(6, 4).double(), torch.randn(2, 2, 3, 5, 4).double()
    run = lambda w, u: moe_ops.grouped_gemm(x, (w, u), PLAN.expert_offsets)  # noqa: E731
    expected = torch.stack([run(weights[0, i], weights[1, i]) for i in range(2)])
    assert_same([torch.func.vmap(run)(*weights)], [expected])
    assert_same([torch.func.vmap(run, (0, None))(weights[0], weights[1, 0])[0]], [expected[0]])


def test_flops_are_those_of_both():
    from torch.utils.flop_counter import FlopCounterMode

    given = problem(PLAIN, Activation())
    counted = []
    for w13 in (given.w13, pair(given.w13)):
        with FlopCounterMode(display=False) as counter:
            call(given, w13, None)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


_W = torch.randn(3, 6, 4)
_ROUTED = torch.rand(2, 2), torch.tensor([[0, 1], [2, 0]])
BAD = {
    "one": ({"w13": (_W,)}, "w13 has 1 tensors: expected 2, of gate and of up"),
    "three": ({"w13": (_W, _W, _W)}, "w13 has 3 tensors: expected 2"),
    "a pair of biases": (
        {"w13": _W, "w13_bias": (_W[..., 0], _W[..., 0])},
        "w13_bias is a pair: expected one tensor",
    ),
    "one bias": ({"w13_bias": torch.randn(3, 12)}, "w13_bias has 1 tensors: expected 2"),
    "half a bias": ({"w13_bias": (None, _W[..., 0])}, "w13 has one bias, bias or up_bias: expected both"),
    "rows": ({"w13": (_W, _W[:, :5])}, r"w13_up has shape \[3, 5, 4\]: expected \[3, 6, 4\]"),
    "bias rows": (
        {"w13_bias": (_W[..., 0], _W[:2, :, 0])},
        r"w13_up_bias has shape \[2, 6\]: expected \[3, 6\]",
    ),
    "strides": (
        {"w13": (_W, _W.mT.contiguous().mT)},
        r"w13_up has strides \[24, 1, 6\]: expected \[24, 4, 1\], those of the gate",
    ),
    "bias strides": (
        {"w13_bias": (_W[..., 0], _W[..., 0].contiguous())},
        r"w13_up_bias has strides \[6, 1\]: expected \[24, 4\]",
    ),
    "dtype": ({"w13": (_W, _W.double())}, "w13_up has dtype torch.float64: expected torch.float32"),
    "device": ({"w13": (_W, _W.to("meta"))}, "w13_up is on meta: expected cpu, the device of hidden_states"),
    "interleaved": (
        {"activation": Activation(interleaved=True)},
        "w13 is a pair with an interleaved activation: expected one of gate columns, then up columns",
    ),
    "ungated": ({"activation": "relu2"}, "w13 is a pair with an ungated activation"),
}


@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
@pytest.mark.parametrize("what", BAD)
def test_bad_pairs(what, emit):
    change, message = BAD[what]
    given = {"w13": (_W, _W.clone()), "w2": torch.randn(3, 4, 6), "emit": emit, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        moe_ops.fused_experts(torch.randn(2, 4), given.pop("w13"), given.pop("w2"), *_ROUTED, **given)


def test_an_up_bias_alone():
    x, offsets = torch.randn(6, 4), PLAN.expert_offsets
    with pytest.raises(ValueError, match="up_bias of weight is given without up"):
        torch.ops.moe.grouped_gemm(x, _W, offsets, None, None, _W[..., 0])


def test_strides_of_what_has_one_row_do_not_count():
    x, weight = torch.randn(6, 4), torch.randn(3, 1, 4)
    odd = weight.as_strided((3, 1, 4), (4, 9, 1))
    both = torch.cat((weight, weight), 1)
    out = moe_ops.grouped_gemm(x, (weight, odd), PLAN.expert_offsets)
    # Products of one column and of two may round differently: on some CPUs they do.
    assert_matches_oracle(out, moe_ops.grouped_gemm(x.double(), both.double(), PLAN.expert_offsets))


def test_nothing_is_copied_eagerly():
    """What is allocated for a pair of weights is no more than twice the rows that they make."""
    experts, hidden, inner = 8, 64, 64
    halves = torch.randn(experts, inner, hidden), torch.randn(experts, inner, hidden)
    x, w2 = torch.randn(2, hidden), torch.randn(experts, hidden, inner)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        moe_ops.fused_moe(x, torch.randn(2, experts), halves, w2, RoutingConfig(2))
    largest = max((event.self_cpu_memory_usage for event in told.events()), default=0)
    assert 0 < largest < halves[0].nbytes // experts
