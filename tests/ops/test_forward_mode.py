"""Forward-mode derivatives: right, never silently zero. Public functions and operators, eager and compiled, nested."""

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev, jvp, vmap

import moe_ops
from moe_ops import Activation, RoutingConfig
from moe_ops.arguments import LoadRecord, Replicas, Router
from moe_ops.pull_sums import pull_sums
from moe_ops.push_rows import push_rows
from moe_ops.route_and_record import route_and_record
from moe_ops.values import ExchangePlan
from tests.cases import MORE_ACTIVATIONS, ROUTINGS
from tests.helpers import assert_same, mixed
from tests.ops.samples import ROW_SLOTS, ROW_TOKENS, SENT, whole

OPS = torch.ops.moe
SLOTS = torch.tensor([3, 0, 1, 2, 5, 4], dtype=torch.int32)
INVERSE = torch.tensor([1, 2, -1, 0, 4, 3], dtype=torch.int32)
OFFSETS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
COUNTS = torch.tensor([2, 0, 1], dtype=torch.int32)
IDS = torch.tensor([[0, 2], [1, -1], [2, 0]], dtype=torch.int32)
TOP2 = RoutingConfig(top_k=2)
REPLICAS = Replicas(torch.tensor([[0, 3], [1, -1], [2, 4]], dtype=torch.int32), torch.tensor([2, 1, 2]).int())
ALONE = ExchangePlan(ROW_SLOTS, ROW_TOKENS, SENT)  # of a single rank
LOAD = LoadRecord(torch.zeros(5, dtype=torch.int32))


def double(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def topk_gradient(grad, logits):
    weights, ids = moe_ops.topk_routing(logits.detach(), TOP2)
    return OPS.topk_routing_backward(grad, logits, weights, ids, TOP2.spec)


def dispatched_weights(logits):
    return moe_ops.routing_dispatch(logits, TOP2)[0]


PLAN = moe_ops.DispatchPlan(SLOTS, INVERSE, OFFSETS)
WHOLE, SCALE = whole(3, 5, 4), torch.rand(3, 3, 2)
WHOLE13, SCALE13, TOKENS = whole(3, 8, 5), torch.rand(3, 8, 2) / 100, torch.randn(3, 5, dtype=torch.float64)
W13, W2, B13, B2 = (3, 10, 4), (3, 4, 5), (3, 10), (3, 4)
FORMULA = (
    "a0=expert*5+0+column*1|a1=expert*1+0+column*0|t0=tanh(gate)|t1=mul(t0,a0)|t2=add(up,a1)|t3=mul(t1,t2)|t3"
)
# Every operator that has a derivative, called with its differentiable arguments.
CALLS = {
    "topk_routing": (lambda x: moe_ops.topk_routing(x, TOP2)[0], [(3, 6)]),
    "topk_routing_backward": (topk_gradient, [(3, 2), (3, 6)]),
    "routing_dispatch": (dispatched_weights, [(3, 6)]),
    "push_rows": (lambda x, w: push_rows(x, w, None, None, ALONE, "")[:2], [(3, 4), (3, 2)]),
    "pull_sums": (lambda y, s: pull_sums(y, ALONE, SENT, s, ""), [(4, 4), (3, 4)]),
    "permute": (lambda x: moe_ops.permute(x, SLOTS), [(3, 4)]),
    "permute_backward": (lambda g: OPS.permute_backward(g, SLOTS, 3), [(6, 4)]),
    "grouped_gemm": (lambda x, w, b: moe_ops.grouped_gemm(x, w, OFFSETS, b), [(6, 4), (3, 5, 4), (3, 5)]),
    "grouped_gemm_weight_backward": (
        lambda g, x: OPS.grouped_gemm_weight_backward(g, x, OFFSETS),
        [(6, 5), (6, 4)],
    ),
    "batched_gemm": (lambda x, w, b: moe_ops.batched_gemm(x, w, COUNTS, b), [(3, 2, 4), (3, 5, 4), (3, 5)]),
    "scaled_grouped_gemm": (
        lambda x, b: OPS.scaled_grouped_gemm(
            x, WHOLE, SCALE, OFFSETS, None, b, None, None, None, 2, 3, x.dtype
        ),
        [(6, 4), (3, 5)],
    ),
    "scaled_fused_experts": (
        lambda w, b, shared, gate, residual: OPS.scaled_fused_experts(
            TOKENS,
            WHOLE13,
            SCALE13,
            WHOLE,
            SCALE,
            w,
            IDS,
            *(None, None, None, b, None, None, None),
            shared,
            gate,
            residual,
            *(None, None, 1, 4, 2, 3),
            "silu",
            "quantised",
        ),
        [(3, 2), (3, 5), (3, 5), (3, 1), (3, 5)],
    ),
    "dense_gemm": (moe_ops.dense_gemm, [(3, 4), (5, 4), (5,)]),
    "batch_invariant_gemm": (
        lambda x, w, b: OPS.batch_invariant_gemm(x, w, OFFSETS, b, None, None),
        [(6, 4), (3, 5, 4), (3, 5)],
    ),
    "batch_invariant_routing": (lambda l: OPS.batch_invariant_routing(l, None, "top_k=2")[0], [(3, 4)]),
    "batch_invariant_experts": (
        lambda x, w13, w2, t, s: moe_ops.fused_experts(x, w13, w2, t, IDS, shared=s, emit="batch_invariant"),
        [(3, 4), (3, 6, 4), (3, 4, 3), (3, 2), (3, 4)],
    ),
    "gated_activation": (lambda x: moe_ops.gated_activation(x, "silu"), [(2, 6)]),
    "gated_activation_backward": (
        lambda g, x: OPS.gated_activation_backward(g, x, "gelu_tanh"),
        [(2, 3), (2, 6)],
    ),
    "weighted_activation_backward": (
        lambda g, x, s: OPS.weighted_activation_backward(g, x, s, "silu"),
        [(2, 3), (2, 6), (2,)],
    ),
    "combine": (
        lambda y, w, s, g, r: moe_ops.combine(y, w, INVERSE, s, g, r),
        [(6, 4), (3, 2), (3, 4), (3, 1), (3, 4)],
    ),
    "combine_backward": (
        lambda g, y, w: OPS.combine_backward(g, y, w, INVERSE),
        [(3, 4), (6, 4), (3, 2)],
    ),
    "gather_gemm_act": (lambda x, w, b: moe_ops.gather_gemm_act(x, w, PLAN, "silu", b), [(3, 4), W13, B13]),
    "gather_gemm": (lambda x, w, b: moe_ops.gather_gemm(x, w, PLAN, b), [(3, 4), W13, B13]),
    "act_gemm_combine": (
        lambda x, w, t, b, s, g: moe_ops.act_gemm_combine(
            x, w, t, moe_ops.build_dispatch(IDS, 3), "silu", b, s, shared_gate=g
        ),
        [(6, W13[1]), W2, (3, 2), B2, (3, 4), (3, 1)],
    ),
    "gemm_combine": (
        lambda x, w, t, b, s, g, r: moe_ops.gemm_combine(x, w, t, PLAN, b, s, shared_gate=g, residual=r),
        [(6, 5), W2, (3, 2), B2, (3, 4), (3, 1), (3, 4)],
    ),
    "route_and_record": (lambda x: route_and_record(Router(x, None, TOP2.spec), REPLICAS, LOAD)[0], [(3, 3)]),
    "fused_experts": (
        lambda x, w13, w2, t, b13, b2, s, g: OPS.fused_experts(
            *(x, w13, w2, t, IDS, b13, None, None, b2, None, s, g, None), "silu"
        ),
        [(3, 4), W13, W2, (3, 2), B13, B2, (3, 4), (3, 1)],
    ),
    "fused_experts_with_shared": (
        lambda x, w13, w2, t, gate, up, s2, s: moe_ops.fused_experts_with_shared(
            x, w13, w2, t, IDS, (gate, up), s2, shared_weights=s
        ),
        [(3, 4), W13, W2, (3, 2), (3, 4), (3, 4), (4, 3), (3, 1)],
    ),
    "gather_gemm_formula": (
        lambda x, w, b, a, c: OPS.gather_gemm_formula(
            x,
            w,
            PLAN.sorted_slots,
            PLAN.expert_offsets,
            b,
            None,
            None,
            a,
            c,
            None,
            None,
            f"interleaved|{FORMULA}",
        ),
        [(3, 4), W13, B13, (3, 5), (3,)],
    ),
    "fused_experts_formula": (
        lambda x, w13, w2, t, b13, s, a, c: OPS.fused_experts_formula(
            x, w13, w2, t, IDS, b13, *(None,) * 4, s, a, c, None, None, None, None, f"halves|{FORMULA}"
        ),
        [(3, 4), W13, W2, (3, 2), B13, (3, 4), (3, 5), (3,)],
    ),
    "fused_moe_formula": (
        lambda x, logits, w13, w2, a, c: OPS.fused_moe_formula(
            x, logits, w13, w2, *(None,) * 6, a, c, None, None, TOP2.spec, f"halves|{FORMULA}"
        ),
        [(3, 4), (3, 3), W13, W2, (3, 5), (3,)],
    ),
    "fused_moe": (
        lambda x, logits, w13, w2, b13, b2: moe_ops.fused_moe(
            x, logits, w13, w2, TOP2, w13_bias=b13, w2_bias=b2
        ),
        [(3, 4), (3, 3), W13, W2, B13, B2],
    ),
}


def test_every_operator_with_a_derivative_is_listed():
    names = {name[5:] for name in torch._C._dispatch_get_all_op_names() if name.startswith("moe::")}
    names = {name for name in names if not name.endswith((".compiled", ".stages", ".halves"))}
    without = {"build_dispatch", "map_replicas", "map_and_record", "plan_exchange"}
    without |= {"quantise_rows", "dequantise_weight"}
    assert names == {*CALLS, *without}


@pytest.mark.parametrize("name", CALLS)
def test_first_and_second_derivatives(name):
    """Both modes against finite differences, and forward over reverse."""
    function, shapes = CALLS[name]
    inputs = tuple(double(*shape) for shape in shapes)
    assert gradcheck(function, inputs, check_forward_ad=True)
    if sum(tensor.numel() for tensor in inputs) < 120:
        assert gradgradcheck(function, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize(("routing", "usable"), mixed(ROUTINGS, (14, 1)), ids=str)
def test_routing_with_a_correction_bias(routing, usable):
    """With fewer usable experts than are chosen some slots are constant."""
    bias = torch.randn(16, dtype=torch.float64)
    bias[torch.randperm(16)[usable:]] = float("-inf")
    bias[5] = float("nan")
    assert gradcheck(
        lambda x: moe_ops.topk_routing(x, routing, bias)[0], (double(5, 16),), check_forward_ad=True
    )


INTERLEAVED = [Activation("silu", interleaved=True), Activation("swiglu_oai", interleaved=True)]
ACTIVATIONS = [
    "silu",
    "gelu",
    "gelu_tanh",
    "relu2",
    "swiglu_oai",
    Activation("silu", limit=0.5),
    *INTERLEAVED,
    *MORE_ACTIVATIONS,
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation):
    function = lambda x: moe_ops.gated_activation(x, activation)  # noqa: E731
    assert gradcheck(function, (double(5, 8),), check_forward_ad=True)
    assert gradgradcheck(function, (double(2, 4),), check_fwd_over_rev=True)


def plain_layer(x, logits, w13, w2):
    """A softmax top-2 layer in plain PyTorch, which torch differentiates by itself."""
    weights, ids = logits.softmax(-1).topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    gate, up = torch.einsum("tki,ti->tk", w13[ids].flatten(1, 2), x).unflatten(1, (2, -1)).chunk(2, -1)
    return torch.einsum("tkhi,tki,tk->th", w2[ids], torch.nn.functional.silu(gate) * up, weights)


def problem(tokens):
    torch.manual_seed(1)
    shapes = [(tokens, 4), (tokens, 3), (3, 6, 4), (3, 4, 3)]
    primals, tangents = ([torch.randn(s, dtype=torch.float64) for s in shapes] for _ in range(2))
    return tuple(primals), tuple(tangents)


def our_layer(emit):
    return lambda x, logits, w13, w2: moe_ops.fused_moe(x, logits, w13, w2, TOP2, emit=emit)


@pytest.mark.parametrize(
    ("compiled", "recorded", "emit", "tokens"),
    mixed((False, True), (True, False), ("auto", "stages", "fused"), (1, 5, 20), rounds=4),
)
def test_jvp_of_a_layer(tokens, emit, recorded, compiled):
    primals, tangents = problem(tokens)
    expected = jvp(plain_layer, primals, tangents)

    def ours(primals, tangents):
        return jvp(our_layer(emit), primals, tangents)

    run = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    with torch.set_grad_enabled(recorded):
        assert_same(run(primals, tangents), expected)


@pytest.mark.parametrize("recorded", [True, False], ids=["grad", "no_grad"])
def test_dual_numbers_through_direct_operator_calls(recorded):
    (x, logits, w13, w2), tangents = problem(5)
    expected = jvp(plain_layer, (x, logits, w13, w2), tangents)[1]
    with torch.set_grad_enabled(recorded), forward_ad.dual_level():
        duals = map(forward_ad.make_dual, (x, logits, w13, w2), tangents)
        x, logits, w13, w2 = duals
        out = OPS.fused_moe(x, logits, w13, w2, *(None,) * 6, TOP2.spec, "silu")
        assert_same([forward_ad.unpack_dual(out).tangent], [expected])


@pytest.mark.parametrize("argnums", [0, 1, 2, 3])
def test_one_tangent_alone(argnums):
    primals, tangents = problem(5)

    def only(layer):
        vary = lambda value: layer(*primals[:argnums], value, *primals[argnums + 1 :])  # noqa: E731
        return jvp(vary, (primals[argnums],), (tangents[argnums],))

    assert_same(only(our_layer("auto")), only(plain_layer))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, args: jacfwd(f, argnums=(0, 1))(*args),
        lambda f, args: hessian(lambda *a: f(*a).sin().sum(), argnums=(0, 1))(*args),
        lambda f, args: jacrev(jacfwd(lambda x, *a: f(x, *a).sin().sum()))(*args),
        lambda f, args: jacfwd(jacfwd(lambda x, *a: f(x, *a).sin().sum()))(*args),
        lambda f, args: vmap(lambda x: jvp(lambda y: f(y, *args[1:]), (x,), (x,))[1])(
            torch.stack([args[0], -args[0]])
        ),
    ],
    ids=["jacfwd", "hessian", "jacrev of jacfwd", "jacfwd of jacfwd", "vmap of jvp"],
)
@pytest.mark.parametrize("emit", ["stages", "fused"])
def test_nested_transforms(transform, emit):
    primals, _ = problem(3)
    leaves = torch.utils._pytree.tree_leaves
    assert_same(leaves(transform(our_layer(emit), primals)), leaves(transform(plain_layer, primals)), 1e-11)


def test_reverse_mode_of_direct_operator_calls_under_torch_func():
    (x, logits, w13, w2), _ = problem(5)

    def ours(x, w13):
        return OPS.fused_moe(x, logits, w13, w2, *(None,) * 6, TOP2.spec, "silu").sin().sum()

    plain = lambda x, w13: plain_layer(x, logits, w13, w2).sin().sum()  # noqa: E731
    assert_same(torch.func.grad(ours, (0, 1))(x, w13), torch.func.grad(plain, (0, 1))(x, w13))


def test_a_compiled_hessian():
    primals, _ = problem(2)
    scalar = lambda layer: lambda x: layer(x, *primals[1:]).sin().sum()  # noqa: E731
    compiled = torch.compile(hessian(scalar(our_layer("auto"))), fullgraph=True, backend="aot_eager")
    assert_same([compiled(primals[0])], [hessian(scalar(plain_layer))(primals[0])], 1e-11)


def test_a_layer_with_a_correction_bias():
    """It picks other experts than the logits would: every derivative has to pick them, too."""
    primals = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 2), (2, 3), (3, 4, 2), (3, 2, 2))]
    primals[1] = torch.tensor([[2.0, 1.0, 0.5], [1.0, 2.0, 0.3]], dtype=torch.float64)
    bias = torch.tensor([-4.0, 0.0, 4.0], dtype=torch.float64)
    layer = lambda *args: moe_ops.fused_moe(*args, TOP2, correction_bias=bias, emit="fused")  # noqa: E731
    leaves = tuple(tensor.requires_grad_() for tensor in primals)
    assert gradcheck(layer, leaves, check_forward_ad=True)
    assert gradgradcheck(lambda *args: layer(*args).sin(), leaves, check_fwd_over_rev=True)
    # gradgradcheck finds the derivative of a recorded gradient right, not that gradient itself.
    plain, recorded = (
        torch.autograd.grad(layer(*leaves).sin().sum(), leaves, create_graph=create)
        for create in (False, True)
    )
    assert_same(recorded, plain)


@pytest.mark.parametrize("layout", ["expanded", "column major"])
def test_tangents_of_any_layout(layout):
    primals, tangents = problem(5)
    laid_out = {"expanded": lambda t: t[:1].expand_as(t), "column major": lambda t: t.mT.contiguous().mT}
    tangents = tuple(map(laid_out[layout], tangents))
    for emit in ("stages", "fused"):
        assert_same(jvp(our_layer(emit), primals, tangents), jvp(plain_layer, primals, tangents))
