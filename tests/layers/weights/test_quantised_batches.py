"""Quantised experts that find their tokens in batches of their own."""

import copy

import pytest
import torch

from layers import (
    BatchedExperts,
    BatchedPrepareAndFinalize,
    FusedMoE,
    ModularKernel,
    MoEConfig,
    Prepared,
    WeightScale,
    quantise_experts,
)
from tests.helpers import relative_error
from tests.layers.modular import EXPERT_MAP

E, K, H, I = 8, 2, 32, 64
FORMATS = {
    "float8": (WeightScale.BLOCK, torch.float8_e4m3fn, "quantised", False),
    "int8": (WeightScale.CHANNEL, torch.int8, "quantised", False),
    "int8, exact": (WeightScale.CHANNEL, torch.int8, "exact", False),
    "MXFP4": (WeightScale.GROUP, torch.uint8, "exact", False),
    "int4": (WeightScale.GROUP, torch.uint4, "exact", True),
}


def make_layer(form, expert_map=None) -> FusedMoE:
    torch.manual_seed(5)
    layer = FusedMoE(MoEConfig(E, K, H, I, has_bias=True), expert_map)
    with torch.no_grad():
        layer.w13_bias.normal_(), layer.w2_bias.normal_()
    kind, dtype, rows, zero_points = FORMATS[form]
    quantise_experts(layer, kind, (16, 32), dtype=dtype, rows=rows, zero_points=zero_points)
    return layer


def batched(layer, max_tokens=None) -> ModularKernel:
    return ModularKernel(BatchedPrepareAndFinalize(max_tokens), BatchedExperts(layer))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("is_part", [False, True], ids=["all", "some"])
def test_values(is_part, tokens, form):
    layer = make_layer(form, EXPERT_MAP if is_part else None)
    hidden, logits = torch.randn(tokens, H), torch.randn(tokens, E)
    with torch.no_grad():
        torch.testing.assert_close(batched(layer)(hidden, logits), layer(hidden, logits))


def test_rows_of_no_token_are_not_read_and_zero():
    layer = make_layer("int8")
    x, counts = torch.randn(E, 3, H), torch.tensor([3, 0, 1, 2, 0, 3, 1, 0], dtype=torch.int32)
    is_token = torch.arange(3) < counts.unsqueeze(1)
    given = (x, torch.ones(1, K), torch.zeros(1, K, dtype=torch.int32), counts)
    with torch.no_grad():
        expected = BatchedExperts(layer)(Prepared(*given)).rows[is_token]
        x[~is_token] = torch.nan
        found = BatchedExperts(layer)(Prepared(*given)).rows
    assert torch.equal(found[is_token], expected) and not found[~is_token].any()
    assert expected.isfinite().all() and expected.norm(dim=1).min() > 0


def test_slots_that_find_their_expert_full_are_dropped():
    layer, hidden = make_layer("MXFP4"), torch.randn(3, H)
    logits = torch.zeros(3, E)
    logits[:, 2], logits[:, 5] = 9, 8
    with torch.no_grad():
        output = batched(layer, max_tokens=2)(hidden, logits)
        torch.testing.assert_close(output[:2], layer(hidden, logits)[:2])
    assert not output[2].any()


def test_gradients_of_exact_rows():
    layer = make_layer("int4")
    gradients = []
    for run in (layer, batched(copy.deepcopy(layer))):
        hidden, logits = (torch.randn(5, size, generator=torch.Generator().manual_seed(1)) for size in (H, E))
        hidden.requires_grad_(), logits.requires_grad_()
        run(hidden, logits).square().sum().backward()
        gradients.append((hidden.grad, logits.grad))
    for expected, actual in zip(*gradients, strict=True):
        assert relative_error(actual, expected) < 1e-5


def test_compiled_whole():
    layer = make_layer("float8")
    function = torch.compile(batched(layer, max_tokens=4), fullgraph=True)
    hidden, logits = torch.randn(4, H), torch.randn(4, E)
    with torch.no_grad():
        torch.testing.assert_close(function(hidden, logits), layer(hidden, logits))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("form", FORMATS)
def test_on_a_gpu(form, tokens):
    layer = make_layer(form)
    hidden, logits = torch.randn(tokens, H), torch.randn(tokens, E)
    with torch.no_grad():
        expected, on_gpu = layer(hidden, logits), layer.to("cuda", torch.bfloat16)
        found = batched(on_gpu)(hidden.cuda().bfloat16(), logits.cuda())
        assert relative_error(found.cpu(), expected) < 2e-2
        assert relative_error(found, on_gpu(hidden.cuda().bfloat16(), logits.cuda())) < 2e-2
