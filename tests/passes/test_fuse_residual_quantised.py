"""FuseResidual at a quantised layer, one operator that sums over experts itself."""

import pytest
import torch

import moe_ops
from inductor_passes import _compat
from inductor_passes.base import PassLog
from inductor_passes.fuse_residual import FuseResidual
from inductor_passes.pipeline import PIPELINE, run_passes
from moe_ops.weight_formats import quantised_weight
from tests.helpers import relative_error
from tests.passes.capture import computed, rewrite

T, E, K, H, I = 9, 5, 2, 32, 24
PASS = (FuseResidual("cpu"),)
GATED, RESIDUAL = "combine with gated output", "combine with residual"
ROUTING = moe_ops.RoutingConfig(K)


def _weight(seed, *sizes):
    generator = torch.Generator().manual_seed(seed)
    return quantised_weight(torch.randn(E, *sizes, generator=generator) / 5, (1, sizes[1]), torch.int8)


W13, W2 = _weight(4, 2 * I, H), _weight(6, H, I)


def _layer(x, logits, rows="quantised"):
    weights, ids = moe_ops.topk_routing(logits, ROUTING)
    return moe_ops.scaled_fused_experts(x, W13, W2, weights, ids, rows=rows)


def _given(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    shapes = (T, H), (T, E), (T, H), (T, 1), (T, H)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


JOINED = {
    "residual": (lambda x, logits, a, gate, b: _layer(x, logits) + a, {RESIDUAL: 1}),
    "scaled": (lambda x, logits, a, gate, b: a + 2.5 * _layer(x, logits), {RESIDUAL: 1}),
    "given scales": (
        lambda x, logits, a, gate, b: _layer(x, logits, moe_ops.InputScales(x.amax()[None] / 127)) + a,
        {RESIDUAL: 1},
    ),
    "exact": (lambda x, logits, a, gate, b: _layer(x, logits, "exact") + a, {RESIDUAL: 1}),
    "shared, gated, and a residual": (
        lambda x, logits, a, gate, b: _layer(x, logits) + gate.sigmoid() * a + b,
        {GATED: 1, RESIDUAL: 1},
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", JOINED)
def test_what_joins_its_sum(name, dtype):
    (model, counts), given = JOINED[name], _given(dtype)
    result, out = computed(model, *given, passes=PASS)
    assert result.log.counts() == counts and not result.reasons
    assert result.ops() == ["topk_routing", "scaled_fused_experts"] and "aten.add" not in result.after
    assert relative_error(out, model(*given)) < (1e-6 if dtype == torch.float32 else 8e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda out, x: (out + x, out.amax()), "the sum over experts has another user: aten.amax"),
        (lambda out, x: out + x.double(), "gives torch.float32"),
        (lambda out, x: out + x.sigmoid() * x, "aten.mul.Tensor is computed in one kernel with the addition"),
    ],
)
def test_what_does_not(model, reason):
    x, logits, a, *_ = _given()
    result = rewrite(lambda x, logits, a: model(_layer(x, logits), a), x, logits, a, passes=PASS)
    assert not result.log.counts() and reason in result.reasons[0]


@torch.no_grad()
def test_on_a_cpu_it_stays():
    x, logits, a, *_ = _given()
    result = rewrite(lambda x, logits, a: _layer(x, logits) + a, x, logits, a, passes=PIPELINE)
    assert RESIDUAL not in result.log.counts()


def test_weights_of_choices_keep_their_gradients():
    """The only gradient that comes through quantised rows, beside those of what joins the sum."""
    log = PassLog()

    def run(module, _):
        run_passes(module.graph, PASS, log)
        module.recompile()

    def model(x, logits, a, gate, b):
        return 2.5 * _layer(x, logits) + gate.sigmoid() * a + b

    x, *given = _given()
    given = [each.requires_grad_() for each in given]
    torch._dynamo.reset()
    out = torch.compile(model, backend=_compat.post_grad_backend(run), fullgraph=True)(x, *given)
    assert log.counts() == {GATED: 1, RESIDUAL: 1}
    expected, weights = model(x, *given), torch.linspace(0.5, 1.5, T * H).view(T, H)
    assert relative_error(out, expected) < 1e-6
    for found, wanted in zip(*(torch.autograd.grad(each, given, weights) for each in (out, expected))):
        assert wanted.any() and relative_error(found, wanted) < 1e-5
