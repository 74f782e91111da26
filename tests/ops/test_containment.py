"""NaN and infinity in tokens, logits or one expert's weights change no bit of other rows: values and gradients."""

import pytest
import torch

import moe_ops
from tests import containment
from tests.containment import STRANGE, assert_contained, made

# (tokens, experts, top_k, hidden, intermediate): few slots, many, more experts than slots, and what GPUs take TMA for.
SIZES = [(7, 9, 2, 12, 10), (41, 16, 3, 16, 8), (41, 16, 2, 17, 9), (7, 64, 2, 24, 20)]
LARGER = [(7, 64, 4, 256, 128), (300, 16, 2, 256, 192), (1500, 32, 2, 128, 64), (300, 16, 2, 77, 51)]
DTYPES = [torch.float32, torch.bfloat16]
ON = [
    *(pytest.param("cpu", sizes, id=f"cpu-{sizes}") for sizes in SIZES),
    *(pytest.param("cuda", sizes, id=f"cuda-{sizes}", marks=pytest.mark.gpu) for sizes in SIZES + LARGER),
]
everywhere = pytest.mark.parametrize(("device", "sizes"), ON)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_way = pytest.mark.parametrize("emit", ["fused", "stages", "halves", "batch_invariant"])


@everywhere
@every_dtype
@every_way
@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize("what", [containment.spoilt_tokens, containment.spoilt_expert])
def test_tokens_and_the_weights_of_an_expert(device, sizes, dtype, emit, value, what):
    layer = made(sizes, dtype, device)
    spoilt, tokens, experts = what(layer, value)
    outputs = layer.run(emit), spoilt.run(emit)
    assert_contained(*outputs, tokens, experts)
    assert not outputs[1]["output"][~tokens].isfinite().all(1).any()


@everywhere
@every_dtype
@every_way
@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
def test_logits(device, sizes, dtype, emit, score_fn):
    layer = made(sizes, dtype, device, score_fn)
    for value in STRANGE:
        clean, spoilt, tokens, experts = containment.spoilt_logits(layer, value)
        assert torch.equal(clean.ids(), spoilt.ids())
        assert_contained(clean.run(emit), spoilt.run(emit), tokens, experts)


EXTREMES = (-1, -7, 2**31 - 1, -(2**31), 5, 6, 99)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 33, 300])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@every_way
def test_ids_that_are_none_never_crash(emit, device, mapped, tokens, dtype):
    """Extreme ids, and a map to experts that are not here: zero, no gradient, and nothing of them in other rows."""
    wide = (2**40 + 1, 2**63 - 1, -(2**63), 2**32 + 1) if dtype == torch.int64 else ()
    ids = torch.tensor([*EXTREMES, *wide], dtype=dtype).repeat(tokens)[: 2 * tokens].view(tokens, 2)
    real = torch.arange(tokens) % 3 == 0
    ids[real] = torch.tensor([3, 1], dtype=dtype)
    places = torch.tensor([0, 1, -5, 2, 2**31 - 1, 77, -(2**31)], dtype=torch.int32) if mapped else None
    x, w13, w2 = torch.randn(tokens, 8), torch.randn(5, 12, 8), torch.randn(5, 8, 6)
    given = [each.to(device) for each in (x, w13, w2, torch.rand(tokens, 2), ids)]
    for each in given[:4]:
        each.requires_grad_()
    there = None if places is None else places.to(device)
    out = moe_ops.fused_experts(*given, expert_map=there, emit=emit)
    grads = torch.autograd.grad(out.sum(), given[:4])
    named = torch.isin(ids, torch.tensor([3, 1, *([0] if mapped else [0, 2, 4])], dtype=dtype)).any(1)
    assert torch.equal(named, real)
    for rows in (out, grads[0], grads[3]):
        assert (rows.cpu()[~real] == 0).all() and rows.cpu()[real].any()
    assert all(grad.isfinite().all() for grad in grads)
    alone = moe_ops.fused_experts(
        *(t[real.to(device)] if len(t) == tokens else t for t in given), expert_map=there
    )
    torch.testing.assert_close(out[real.to(device)], alone, rtol=1e-4, atol=1e-4)
