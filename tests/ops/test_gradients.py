"""Backward formulas: against finite differences, against each other, through torch.func, eager and compiled."""

import itertools

import pytest
import torch
from torch.func import functional_call, grad, vmap

import moe_ops
from moe_ops import Activation, RoutingConfig
from moe_ops.reference import reference_experts
from tests.cases import CASES, MORE_ACTIVATIONS, Case, make
from tests.helpers import RELATIVE_NORM, assert_same, grads_of, relative_error, usually

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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
OFFSETS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)


def double(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activation_gradcheck(activation):
    assert torch.autograd.gradcheck(lambda x: moe_ops.gated_activation(x, activation), (double(5, 8),))


@pytest.mark.parametrize("name", ["silu", "swiglu_oai", "swiglustep"])
def test_activation_gradient_at_its_limit_is_what_clamp_has_there(name):
    """1 before torch 2.14, and 0 from there on. Of 40 silu is 40, too."""
    activation = Activation(name, limit=40.0)
    values = torch.tensor([40.0, -40.0, 39.0, 41.0, 0.5], dtype=torch.float64)
    gate_up = torch.cartesian_prod(values, values).requires_grad_()
    function = lambda x: moe_ops.gated_activation(x, activation)  # noqa: E731
    plain = lambda x: plain_activation(*x.split(1, dim=1), activation)  # noqa: E731
    (ours,), (torchs,) = (torch.autograd.grad(f(gate_up).sum(), gate_up) for f in (function, plain))
    torch.testing.assert_close(ours, torchs)
    along = torch.randn_like(gate_up)
    ours, torchs = (torch.func.jvp(f, (gate_up.detach(),), (along,)) for f in (function, plain))
    torch.testing.assert_close(ours, torchs)


def plain_activation(gate, up, activation):
    up = up.clamp(-activation.limit, activation.limit) + (activation.beta or 0.0)
    if activation.name == "swiglustep":
        return torch.nn.functional.silu(gate).clamp(max=activation.limit) * up
    gate = gate.clamp(max=activation.limit)
    return gate * torch.sigmoid(gate * (activation.alpha or 1.0)) * up


def test_stage_gradchecks():
    slots, inverse = (
        torch.tensor([3, 0, 1, 2, 5, 4], dtype=torch.int32),
        torch.tensor([1, 2, -1, 0, 4, 3]).int(),
    )
    gradcheck = torch.autograd.gradcheck
    assert gradcheck(lambda x: moe_ops.permute(x, slots), (double(3, 4),))
    gemm = lambda x, w, b: moe_ops.grouped_gemm(x, w, OFFSETS, b)  # noqa: E731
    assert gradcheck(gemm, (double(6, 4), double(3, 5, 4), double(3, 5)))
    assert gradcheck(
        lambda y, w, s: moe_ops.combine(y, w, inverse, s), (double(6, 4), double(3, 2), double(3, 4))
    )


def test_second_derivatives():
    slots, inverse = (
        torch.tensor([3, 0, 1, 2, 5, 4], dtype=torch.int32),
        torch.tensor([1, 2, -1, 0, 4, 3]).int(),
    )
    check = torch.autograd.gradgradcheck
    assert check(lambda x: moe_ops.permute(x, slots).sin(), (double(3, 3),))
    assert check(lambda x, w: moe_ops.grouped_gemm(x, w, OFFSETS).sin(), (double(6, 4), double(3, 5, 4)))
    assert check(lambda y, w: moe_ops.combine(y, w, inverse).sin(), (double(6, 4), double(3, 2)))
    for activation in ACTIVATIONS:
        assert check(lambda x, a=activation: moe_ops.gated_activation(x, a).sin(), (double(2, 4),))


def test_second_derivatives_of_the_fused_layer():
    tensors = make(Case(3, 3, 2, 4, 3), requires_grad=True).tensors()[:4]
    layer = lambda *tensors: moe_ops.fused_moe(*tensors, RoutingConfig(top_k=2)).sin()  # noqa: E731
    assert torch.autograd.gradgradcheck(layer, tuple(tensors))


@cases
def test_fused_gradients_equal_the_stages(case):
    problem = make(case, requires_grad=True)
    run = {
        emit: grads_of(
            lambda emit=emit: moe_ops.fused_moe(*problem.args(), **problem.biases(), emit=emit),
            problem.tensors(),
        )
        for emit in ("fused", "stages")
    }
    assert_same(run["fused"], run["stages"])


def test_fused_gradcheck():
    problem = make(Case(5, 4, 2, 5, 3, bias=True), requires_grad=True)
    shared = double(*problem.hidden_states.shape)

    def layer(x, logits, w13, w2, w13_bias, w2_bias, shared):
        return moe_ops.fused_moe(
            x, logits, w13, w2, problem.routing, w13_bias=w13_bias, w2_bias=w2_bias, shared=shared
        )

    assert torch.autograd.gradcheck(layer, (*problem.tensors(), shared))


@cases
def test_fusion_target_gradients_equal_the_stages(case):
    problem = make(case, requires_grad=True)
    activation = problem.activation

    def targets():
        weights, _, plan = moe_ops.routing_dispatch(problem.router_logits, problem.routing)
        up = moe_ops.gather_gemm_act(problem.hidden_states, problem.w13, plan, activation, problem.w13_bias)
        return moe_ops.gemm_combine(up, problem.w2, weights, plan, problem.w2_bias)

    def halves():
        weights, _, plan = moe_ops.routing_dispatch(problem.router_logits, problem.routing)
        gate_up = moe_ops.gather_gemm(problem.hidden_states, problem.w13, plan, problem.w13_bias)
        return moe_ops.act_gemm_combine(gate_up, problem.w2, weights, plan, activation, problem.w2_bias)

    stages = lambda: moe_ops.fused_moe(*problem.args(), **problem.biases(), emit="stages")  # noqa: E731
    expected = grads_of(stages, problem.tensors())
    assert_same(grads_of(targets, problem.tensors()), expected)
    assert_same(grads_of(halves, problem.tensors()), expected)


# A clamp has no derivative at its limit, where rounding decides on which side a value lies.
SMOOTH = [case for case in CASES if case.tokens and case.top_k > 1 and case.activation.limit is None]


@pytest.mark.parametrize("case", SMOOTH, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
def test_gradients_in_every_dtype(case, dtype, emit):
    """Against float64 of the same rounded inputs; a gradient passes through twice as many roundings as a value."""
    problem = make(case, dtype, requires_grad=True)
    doubles = [tensor.detach().double().requires_grad_() for tensor in problem.tensors()]
    weights, ids = moe_ops.topk_routing(doubles[1], problem.routing)
    biases = dict(zip(("w13_bias", "w2_bias"), doubles[4:], strict=False))
    x, _, w13, w2, *_ = doubles
    expected = grads_of(
        lambda: reference_experts(x, w13, w2, weights, ids, problem.activation, **biases), doubles
    )
    run = lambda: moe_ops.fused_moe(*problem.args(), **problem.biases(), emit=emit)  # noqa: E731
    for actual, oracle in zip(grads_of(run, problem.tensors()), expected, strict=True):
        assert actual.dtype == dtype
        assert relative_error(actual, oracle) <= 2 * RELATIVE_NORM[dtype]


def test_gradients_skip_rows_of_dropped_slots():
    x, w13, w2, weights = double(4, 6), double(3, 10, 6), double(3, 6, 5), double(4, 2)
    ids = torch.tensor([[0, -1], [2, 9], [-1, -1], [1, 0]])
    for emit in ("fused", "stages"):
        run = lambda emit=emit: moe_ops.fused_experts(x, w13, w2, weights, ids, emit=emit)  # noqa: E731
        to_x, to_weights = grads_of(run, (x, weights))
        assert (to_x[2] == 0).all()
        assert (to_weights[(ids < 0) | (ids > 2)] == 0).all()
        assert (to_weights[(ids >= 0) & (ids < 3)] != 0).all()


@pytest.fixture
def layer_and_inputs():
    problem = make(CASES[2], torch.float64)
    params = {"w13": problem.w13, "w2": problem.w2, "w13_bias": problem.w13_bias, "w2_bias": problem.w2_bias}

    def loss(params, x, logits):
        out = moe_ops.fused_moe(
            x, logits, params["w13"], params["w2"], problem.routing, problem.activation,
            w13_bias=params["w13_bias"], w2_bias=params["w2_bias"],
        )  # fmt: skip
        return out.sin().sum()

    return loss, params, problem.hidden_states, problem.router_logits


def autograd_of(loss, params, x, logits):
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    inputs = [x.clone().requires_grad_(), logits.clone().requires_grad_()]
    grads = torch.autograd.grad(loss(leaves, *inputs), [*leaves.values(), *inputs])
    return dict(zip(params, grads[:4], strict=True)), grads[4], grads[5]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_func_grad_agrees_with_autograd(layer_and_inputs, compiled):
    loss, params, x, logits = layer_and_inputs
    expected = autograd_of(loss, params, x, logits)
    transform = grad(loss, argnums=(0, 1, 2))
    if compiled:
        transform = torch.compile(transform, fullgraph=True)
    ours = transform(params, x, logits)
    assert_same([*ours[0].values(), *ours[1:]], [*expected[0].values(), *expected[1:]])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_vmap_of_grad_gives_per_sample_gradients(layer_and_inputs, compiled):
    loss, params, x, logits = layer_and_inputs
    xs, batch = torch.stack([x, x + 1, -x]), torch.stack([logits, -logits, logits.flip(1)])
    expected = [autograd_of(loss, params, *sample) for sample in zip(xs, batch, strict=True)]
    transform = vmap(grad(loss, argnums=(0, 1, 2)), in_dims=(None, 0, 0))
    if compiled:  # as far as operators are asked; Inductor's code for calls of them is in the tests around
        transform = torch.compile(transform, fullgraph=True, backend="aot_eager")
    ours = transform(params, xs, batch)
    for name, value in ours[0].items():
        assert_same([value], [torch.stack([sample[0][name] for sample in expected])])
    assert_same(ours[1:], [torch.stack([sample[i] for sample in expected]) for i in (1, 2)])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_grad_of_vmap(layer_and_inputs, compiled):
    loss, params, x, logits = layer_and_inputs
    xs, batch = torch.stack([x, x + 1]), torch.stack([logits, -logits])
    total = lambda p: vmap(lambda a, b: loss(p, a, b))(xs, batch).sum()  # noqa: E731
    expected = [autograd_of(loss, params, *sample)[0] for sample in zip(xs, batch, strict=True)]
    transform = torch.compile(grad(total), fullgraph=True) if compiled else grad(total)
    ours = transform(params)
    assert_same(ours.values(), [sum(sample[name] for sample in expected) for name in ours])


@pytest.mark.parametrize("in_dims", [(0, 0, None), (0, 0, 0), (None, None, 0), (1, 0, None)], ids=str)
def test_vmap_values(in_dims):
    x, logits, w13 = torch.randn(3, 3, 6), torch.randn(3, 3, 4), torch.randn(3, 4, 10, 6)
    w2, routing = torch.randn(4, 6, 5), RoutingConfig(top_k=2)
    args = [t if dim is not None else t[0] for t, dim in zip((x, logits, w13), in_dims, strict=True)]
    run = lambda x, logits, w13: moe_ops.fused_moe(x, logits, w13, w2, routing)  # noqa: E731
    picked = [
        [t if dim is None else t.select(dim, i) for t, dim in zip(args, in_dims, strict=True)]
        for i in range(3)
    ]
    expected = torch.stack([run(*sample) for sample in picked])
    with torch.no_grad():
        torch.testing.assert_close(vmap(run, in_dims=in_dims)(*args), expected)
    torch.testing.assert_close(vmap(run, in_dims=in_dims)(*args), expected)


VMAPPED = {  # each by one call of all tokens, by one for each element, and with several outputs
    "fused_moe": lambda x, logits, w13, w2: moe_ops.fused_moe(x, logits, w13, w2, RoutingConfig(2)),
    "stages": lambda x, logits, w13, w2: moe_ops.fused_moe(
        x, logits, w13, w2, RoutingConfig(2), emit="stages"
    ),
    "topk_routing": lambda x, logits, w13, w2: moe_ops.topk_routing(logits, RoutingConfig(2)),
    "build_dispatch": lambda x, logits, w13, w2: tuple(
        moe_ops.build_dispatch(logits.argsort(1)[:, :2].int(), 4)
    ),
}


EAGER = [*itertools.product(VMAPPED, (0, 5), ("eager",))]
COMPILED = [*itertools.product(VMAPPED, (0, 5), ("compiled",))]


@pytest.mark.parametrize(
    ("name", "tokens", "how"), usually(EAGER + COMPILED, EAGER + [COMPILED[i] for i in (1, 2, 5, 6)])
)
def test_vmap_of_an_empty_batch_is_empty(name, tokens, how):
    """As of torch's own operators: the shapes of an element, and gradients of zero."""
    layer = [double(4, 10, 6), double(4, 6, 5)]
    inputs = [double(2, tokens, 6), double(2, tokens, 4)]
    run = vmap(VMAPPED[name], in_dims=(0, 0, None, None))
    run = torch.compile(run, backend="aot_eager", fullgraph=True) if how == "compiled" else run
    expected, actual = run(*inputs, *layer), run(*(each[:0] for each in inputs), *layer)
    pairs = zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (expected, actual)), strict=True)
    for wanted, got in pairs:
        assert (got.shape, got.dtype) == ((0, *wanted.shape[1:]), wanted.dtype)
    if name in ("fused_moe", "stages"):
        assert not any(grad.any() for grad in torch.autograd.grad(actual.sum(), [*inputs, *layer]))


def test_vmap_of_an_empty_batch_records_nothing():
    replicas, count, load = torch.arange(4).int()[:, None], torch.ones(4).int(), torch.zeros(4).long()
    run = vmap(lambda ids: moe_ops.map_replicas(ids, replicas, count, load=load))
    assert run(torch.zeros(0, 5, 2).int()).shape == (0, 5, 2) and not load.any()


def test_vmap_over_an_expert_map_raises():
    ids, maps = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="vmap over expert_map"):
        vmap(lambda m: moe_ops.build_dispatch(ids, 2, m).sorted_slots)(maps)
    logits, biases = torch.randn(3, 4), torch.randn(2, 4)
    with pytest.raises(ValueError, match="vmap over correction_bias"):
        vmap(lambda bias: moe_ops.topk_routing(logits, RoutingConfig(2), bias)[0])(biases)


def test_functional_call():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w13, self.w2 = (
                torch.nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in ((4, 10, 6), (4, 6, 5))
            )

        def forward(self, x, logits):
            return moe_ops.fused_moe(x, logits, self.w13, self.w2, RoutingConfig(top_k=2))

    layer, x, logits = Layer(), torch.randn(3, 6, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    params = {name: p.detach() * 2 for name, p in layer.named_parameters()}
    expected = moe_ops.fused_moe(x, logits, params["w13"], params["w2"], RoutingConfig(top_k=2))
    torch.testing.assert_close(functional_call(layer, params, (x, logits)), expected)
    ours = grad(lambda p: functional_call(layer, p, (x, logits)).sum())(params)
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    out = moe_ops.fused_moe(x, logits, leaves["w13"], leaves["w2"], RoutingConfig(top_k=2))
    assert_same(ours.values(), torch.autograd.grad(out.sum(), leaves.values()))


@pytest.mark.parametrize("emit", ["auto", "fused"])
def test_compiled_backward(emit):
    problem = make(CASES[2], requires_grad=True)
    run = lambda *tensors: moe_ops.fused_moe(*tensors[:4], problem.routing, emit=emit)  # noqa: E731
    tensors = problem.tensors()[:4]
    compiled = torch.compile(run, fullgraph=True)
    assert_same(grads_of(lambda: compiled(*tensors), tensors), grads_of(lambda: run(*tensors), tensors))


def test_nothing_is_recorded_when_nothing_requires_grad():
    problem = make(CASES[2])
    assert moe_ops.fused_moe(*problem.args()).grad_fn is None
