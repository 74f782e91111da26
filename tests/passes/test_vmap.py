"""Layers in `torch.vmap`, compiled: a batch of tokens is one layer, a batch of weights one layer each."""

import pytest
import torch
import torch._dynamo.testing

import inductor_passes
import moe_ops
from tests.compile.fake_cuda import body, compile_for_h200
from tests.helpers import assert_matches_oracle, mixed
from tests.passes.capture import computed, rewrite
from tests.passes.moe import EXPERTS, HIDDEN, INTERMEDIATE, ROUTING, inputs, layer

BATCH = 3


def _batched(given, dims):
    """Every batched argument differs from element to element."""
    return [
        torch.stack([tensor.roll(i, -1) * (1 + i / 4) for i in range(BATCH)], dim)
        if dim is not None
        else tensor
        for tensor, dim in zip(given, dims, strict=True)
    ]


def _one_by_one(function, given, dims):
    """What `torch.vmap` is to compute, in float64 and without it."""
    elements = [
        [
            tensor.double() if dim is None else tensor.select(dim, index).double()
            for tensor, dim in zip(given, dims, strict=True)
        ]
        for index in range(BATCH)
    ]
    return torch.stack([function(*element) for element in elements])


def _compiled(function, given, dims):
    torch._dynamo.reset()
    return torch.compile(torch.vmap(function, dims), options=inductor_passes.options(), fullgraph=True)(
        *given
    )


DIMS = {
    "tokens": ((0, 0, None, None), 1),
    "tokens, not in front": ((1, 2, None, None), 1),
    "logits": ((None, 0, None, None), 1),
    "weights": ((None, None, 0, 0), BATCH),
    "one weight": ((None, None, None, 1), BATCH),
    "everything": ((0, 0, 0, 0), BATCH),
}


@pytest.mark.parametrize(("name", "dtype"), mixed(DIMS, (torch.float32, torch.bfloat16)), ids=str)
def test_layers(name, dtype):
    dims, layers = DIMS[name]
    given = _batched(inputs(dtype=dtype), dims)
    result, out = computed(torch.vmap(layer, dims), *given)
    assert result.ops() == ["fused_moe"] * layers and not result.reasons
    assert_matches_oracle(out, _one_by_one(layer, given, dims))


def test_a_batch_of_batches():
    dims = (0, 0, None, None)
    given = [torch.stack([tensor, tensor.flip(1)]) for tensor in _batched(inputs(), dims)[:2]]
    twice = torch.vmap(torch.vmap(layer, dims), dims)
    result, out = computed(twice, *given, *inputs()[2:])
    assert result.ops() == ["fused_moe"]
    expected = [_one_by_one(layer, [*pair, *inputs()[2:]], dims) for pair in zip(*given, strict=True)]
    assert_matches_oracle(out, torch.stack(expected))


def test_any_number_of_tokens():
    dims = (0, 0, None, None)
    given = _batched(inputs(), dims)
    for tensor in given[:2]:
        torch._dynamo.mark_dynamic(tensor, 1)
    assert rewrite(torch.vmap(layer, dims), *given).ops() == ["fused_moe"]
    with torch.no_grad():
        assert_matches_oracle(_compiled(layer, given, dims), _one_by_one(layer, given, dims))


def _shared(hidden, logits, w13, w2):
    weights, ids = moe_ops.topk_routing(logits, ROUTING)
    return moe_ops.fused_experts(hidden, w13, w2, weights, ids, shared=hidden * logits[:, :1].sigmoid())


def _gate_of_ones_own(hidden, logits, w13, w2):
    weights, ids = moe_ops.topk_routing(logits, ROUTING)
    return moe_ops.fused_experts(hidden, w13, w2, weights, ids, lambda gate, up: torch.tanh(gate) * up)


@pytest.mark.parametrize("function", [_shared, _gate_of_ones_own])
@pytest.mark.parametrize("name", ["tokens", "everything"])
def test_other_layers(name, function):
    dims, _ = DIMS[name]
    given = _batched(inputs(), dims)
    _, out = computed(torch.vmap(function, dims), *given)
    assert_matches_oracle(out, _one_by_one(function, given, dims))


def test_gradients():
    """One sample's gradient each, to tokens, logits and weights."""
    dims, _ = DIMS["everything"]
    given = _batched(inputs(), dims)
    pull = torch.linspace(0.5, 1.5, HIDDEN)

    def loss(*args):
        return (layer(*args) * pull.to(args[0].dtype)).sum()

    recorded = torch._dynamo.testing.EagerAndRecordGraphs()
    torch._dynamo.reset()
    torch.compile(torch.vmap(torch.func.grad(loss), dims), backend=recorded, fullgraph=True)(*given)
    assert "fused_moe" in recorded.graphs[0].code and "build_dispatch" not in recorded.graphs[0].code
    grads = _compiled(torch.func.grad(loss, argnums=(0, 1, 2, 3)), given, dims)
    for index, grad in enumerate(grads):

        def expected(*args, index=index):
            return torch.func.grad(loss, argnums=index)(*args)

        assert_matches_oracle(grad, _one_by_one(expected, given, dims))


def test_what_is_one_for_all_tokens_cannot_be_batched():
    def biased(hidden, logits, w13, w2, bias):
        routing = moe_ops.RoutingConfig(2, "sigmoid")
        return moe_ops.fused_moe(hidden, logits, w13, w2, routing, correction_bias=bias)

    dims = (None, None, None, None, 0)
    with pytest.raises(Exception, match=r"vmap over correction_bias of .*: expected it unbatched"):
        _compiled(biased, (*inputs(), torch.zeros(BATCH, EXPERTS)), dims)


def _on_gpu(tokens):
    shapes = (tokens, HIDDEN * 4), (tokens, EXPERTS), (EXPERTS, 8 * INTERMEDIATE, 4 * HIDDEN)
    shapes = (*shapes, (EXPERTS, 4 * HIDDEN, 4 * INTERMEDIATE))
    return [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def test_a_batch_of_tokens_launches_what_as_many_tokens_do():
    def batched(hidden, logits, w13, w2):
        folded = hidden.view(4, -1, hidden.shape[1]), logits.view(4, -1, logits.shape[1])
        out = torch.vmap(layer, (0, 0, None, None))(*folded, w13, w2)
        return out.view(hidden.shape)

    one, many = (compile_for_h200(function, _on_gpu, tokens=64) for function in (layer, batched))
    assert many.launches == one.launches and "torch.ops.moe" not in body(many.code)
