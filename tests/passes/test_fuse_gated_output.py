"""FuseResidual: shared experts behind a sigmoid gate, and a residual beside them, join the sum over experts."""

import expecttest
import pytest
import torch

import moe_ops
from inductor_passes import _compat
from inductor_passes.base import PassLog
from inductor_passes.fuse_residual import FuseResidual
from inductor_passes.pipeline import FUSIONS, run_passes
from tests.helpers import assert_matches_oracle
from tests.passes.capture import computed, rewrite
from tests.passes.moe import HIDDEN, ROUTING, TOKENS, inputs, layer, routed

PASS = (FuseResidual("cpu"),)
GATED, RESIDUAL = "combine with gated output", "combine with residual"


def _tensors(*shapes):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


SHARED, GATE, OTHER = _tensors((TOKENS, HIDDEN), (TOKENS, 1), (TOKENS, HIDDEN))


class TestGolden(expecttest.TestCase):
    def test_before_and_after(self):
        (rows,) = _tensors((TOKENS * ROUTING.top_k, HIDDEN))

        def model(rows, logits, shared, gate, residual):
            weights, _, plan = routed(logits)
            return residual + (moe_ops.combine(rows, weights, plan.inverse) + torch.sigmoid(gate) * shared)

        result = rewrite(model, rows, inputs().router_logits, SHARED, GATE, OTHER, passes=PASS)
        self.assertExpectedInline(
            result.before,
            """\
%0 = input() : float32[9, 4]
%1 = moe.topk_routing.default(%0, None, 'top_k=2') : 2 tensors
%2 = getitem(%1, 0) : float32[9, 2]
%3 = getitem(%1, 1) : int32[9, 2]
%4 = moe.build_dispatch.default(%3, None, 4) : 3 tensors
%5 = getitem(%4, 1) : int32[18]
%6 = input() : float32[18, 16]
%7 = moe.combine.default(%6, %2, %5, None, None, None) : float32[9, 16]
%8 = input() : float32[9, 1]
%9 = aten.sigmoid.default(%8) : float32[9, 1]
%10 = input() : float32[9, 16]
%11 = aten.mul.Tensor(%9, %10) : float32[9, 16]
%12 = aten.add.Tensor(%7, %11) : float32[9, 16]
%13 = input() : float32[9, 16]
%14 = aten.add.Tensor(%13, %12) : float32[9, 16]
return [%14]""",
        )
        self.assertExpectedInline(
            result.after,
            """\
%0 = input() : float32[9, 4]
%1 = moe.topk_routing.default(%0, None, 'top_k=2') : 2 tensors
%2 = getitem(%1, 0) : float32[9, 2]
%3 = getitem(%1, 1) : int32[9, 2]
%4 = moe.build_dispatch.default(%3, None, 4) : 3 tensors
%5 = getitem(%4, 1) : int32[18]
%6 = input() : float32[18, 16]
%7 = input() : float32[9, 16]
%8 = input() : float32[9, 1]
%9 = input() : float32[9, 16]
%10 = moe.combine.default(%6, %2, %5, %7, %8, %9) : float32[9, 16]
return [%10]""",
        )
        assert result.log.counts() == {GATED: 1, RESIDUAL: 1}


def _with(join):
    """A layer and what joins its sum."""

    def model(shared, gate, residual, *given):
        return join(lambda **more: _experts(*given, **more), shared, torch.sigmoid(gate), residual)

    return model


def _experts(hidden, logits, w13, w2, **more):
    weights, ids = moe_ops.topk_routing(logits, ROUTING)
    return moe_ops.fused_experts(hidden, w13, w2, weights, ids, **more)


def _cube(tensor):
    return tensor.view(3, TOKENS // 3, -1)


JOINED = {
    "gate first": (lambda out, s, g, r: out() + g * s, {GATED: 1}),
    "gate last": (lambda out, s, g, r: s * g + out(), {GATED: 1}),
    "scaled sum": (lambda out, s, g, r: out() * 2.5 + g * s, {GATED: 1}),
    "residual behind": (lambda out, s, g, r: r + (out() + g * s), {GATED: 1, RESIDUAL: 1}),
    "residual in front": (lambda out, s, g, r: (out() + r) + g * s, {GATED: 1, RESIDUAL: 1}),
    "without a gate": (lambda out, s, g, r: r + (out() + s), {RESIDUAL: 2}),
    "given as shared": (lambda out, s, g, r: out(shared=g * s), {GATED: 1}),
    "given as shared, residual": (lambda out, s, g, r: out(shared=g * s) + r, {GATED: 1, RESIDUAL: 1}),
    "three dimensions": (
        lambda out, s, g, r: _cube(r) + (_cube(out()) + _cube(g) * _cube(s)),
        {GATED: 1, RESIDUAL: 1},
    ),
    "gate read elsewhere": (lambda out, s, g, r: (out() + g * s) * g.sum(), {GATED: 1}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", JOINED)
def test_what_joins(name, dtype):
    join, counts = JOINED[name]
    given = [tensor.to(dtype) for tensor in (SHARED, GATE, OTHER, *inputs())]
    result, out = computed(_with(join), *given, passes=(*PASS, *FUSIONS))
    found = result.log.counts()
    assert {kind: found[kind] for kind in (GATED, RESIDUAL) if found[kind]} == counts and not result.reasons
    assert result.ops() == ["topk_routing", "fused_experts"]
    assert_matches_oracle(out, _with(join)(*(tensor.double() for tensor in given)))


def test_a_second_run_finds_nothing():
    model = _with(JOINED["residual behind"][0])
    result = rewrite(model, SHARED, GATE, OTHER, *inputs(), passes=PASS + PASS)
    assert result.log.counts() == {GATED: 1, RESIDUAL: 1} and not result.reasons


IN_ONE_KERNEL, ADDS = (
    "aten.mul.Tensor is computed in one kernel with the addition",
    "the sum over experts already adds",
)


@pytest.mark.parametrize(
    "join, reason",
    [
        (lambda out, s, g, r: out() + torch.tanh(g) * s, IN_ONE_KERNEL),
        (lambda out, s, g, r: out() + torch.sigmoid(r) * s, IN_ONE_KERNEL),
        (lambda out, s, g, r: out() + s * torch.sigmoid(r), IN_ONE_KERNEL),
        (lambda out, s, g, r: out() + g * s.sin(), IN_ONE_KERNEL),
        (lambda out, s, g, r: out() + torch.sigmoid(r[:, :1] * 2) * s, IN_ONE_KERNEL),
        (lambda out, s, g, r: out() + g * 2, "float32 [9, 1]"),
        (lambda out, s, g, r: out() + g * s[0], IN_ONE_KERNEL),
        (lambda out, s, g, r: out() + g.relu() * s, IN_ONE_KERNEL),
        (lambda out, s, g, r: _cube(out()) + _cube(s) * _cube(g).transpose(0, 1), IN_ONE_KERNEL),
        (lambda out, s, g, r: _cube(out()) + (_cube(g) * _cube(s)).transpose(0, 1), "strides"),
    ],
)
def test_gates_that_are_none(join, reason):
    result = rewrite(_with(join), SHARED, GATE, OTHER, *inputs(), passes=PASS)
    assert not result.log.fused and len(result.reasons) == 1 and reason in result.reasons[0]


@pytest.mark.parametrize(
    "join, counts",
    [
        (lambda out, s, g, r: (out() + g * s) + g * r, {GATED: 1}),
        (lambda out, s, g, r: out(shared=s) * 2.5 + r, {}),
        (lambda out, s, g, r: (out(shared=s) + r) + r.sum(0).expand(TOKENS, -1).clone(), {RESIDUAL: 1}),
    ],
)
def test_sums_without_room(join, counts):
    result = rewrite(_with(join), SHARED, GATE, OTHER, *inputs(), passes=PASS)
    assert result.log.counts() == counts and len(result.reasons) == 1 and ADDS in result.reasons[0]


def test_a_gated_output_that_others_read_is_written_and_added():
    def model(shared, gate, *given):
        gated = torch.sigmoid(gate) * shared
        return _experts(*given, shared=gated), gated

    result = rewrite(model, SHARED, GATE, *inputs(), passes=PASS)
    assert not result.log.fused and not result.reasons


@pytest.mark.parametrize("function", [lambda gate: gate, torch.tanh, torch.relu, torch.Tensor.neg])
def test_weights_that_are_no_sigmoid(function):
    def model(shared, gate, *given):
        return _experts(*given) + function(gate) * shared

    result = rewrite(model, SHARED, GATE, *inputs(), passes=PASS)
    assert not result.log.fused and result.reasons == [IN_ONE_KERNEL]


def test_any_number_of_tokens():
    def model(shared, gate, residual, *given):
        return residual + _experts(*given, shared=torch.sigmoid(gate) * shared)

    given = [SHARED.clone(), GATE.clone(), OTHER.clone(), *inputs()]
    for tensor in given[:5]:
        torch._dynamo.mark_dynamic(tensor, 0)
    result = rewrite(model, *given, passes=(*PASS, *FUSIONS))
    assert result.log.counts()[GATED] == result.log.counts()[RESIDUAL] == 1 and not result.reasons
    assert result.ops() == ["topk_routing", "fused_experts"]

    result = rewrite(_with(JOINED["gate first"][0]), *given, passes=PASS)
    assert result.reasons == ["with a symbolic number of tokens the router would be a call of its own"]


def test_in_training_graphs_with_the_same_gradients():
    log = PassLog()

    def run(module, _):
        run_passes(module.graph, PASS, log)
        module.recompile()

    def model(shared, gate, residual, *given):
        return residual + _experts(*given, shared=torch.sigmoid(gate) * shared)

    given = [tensor.clone().requires_grad_() for tensor in (SHARED, GATE, OTHER, *inputs())]
    torch._dynamo.reset()
    out = torch.compile(model, backend=_compat.post_grad_backend(run), fullgraph=True)(*given)
    assert log.counts()[GATED] == log.counts()[RESIDUAL] == 1
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    expected = model(*exact)
    assert_matches_oracle(out, expected)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).view(out.shape)
    grads = torch.autograd.grad((out * weights.float()).sum(), given)
    for grad, oracle in zip(grads, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        assert_matches_oracle(grad, oracle)


def test_the_end_of_a_layer_is_no_refusal():
    """What the next layers add to a sum that took everything in is theirs."""

    def model(shared, gate, residual, *given):
        out = residual + _experts(*given, shared=torch.sigmoid(gate) * shared)
        return out + torch.relu(out)

    result = rewrite(model, SHARED, GATE, OTHER, *inputs(), passes=PASS)
    assert result.log.counts() == {GATED: 1, RESIDUAL: 1} and not result.reasons


def test_a_layer_alone_is_left_alone():
    result = rewrite(layer, *inputs(), passes=PASS)
    assert not result.log.fused and not result.reasons
