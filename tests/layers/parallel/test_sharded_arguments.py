"""A sharded layer refuses what the layer of one device refuses, in the same words, before it exchanges anything."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import parallelize_module

from layers import FusedMoE, MoEConfig, RouterOutput
from layers.parallel import AllGatherMonolithic, ExpertParallel, ExpertTensorParallel, clip_grad_norm_
from tests.layers.parallel.test_styles import mesh_of_all
from tests.layers.parallel.world import on_ranks

E, K, H, I, T = 8, 2, 16, 12, 4
STYLES = {
    "allgather": ExpertParallel("allgather"),
    "allgather_static": ExpertParallel("allgather", max_tokens=6),
    "alltoall": ExpertParallel("alltoall"),
    "alltoall_static": ExpertParallel("alltoall", max_tokens=6),
    "allreduce": ExpertParallel("allreduce"),
    "chunks": ExpertParallel("allgather", max_tokens=6, chunk_tokens=2, batches=2),
    "tensor": ExpertTensorParallel("allgather"),
}


def routed(tokens, weights, ids, dtype=torch.int32):
    return RouterOutput(torch.randn(tokens, E), torch.rand(weights, K), torch.zeros(ids, K, dtype=dtype))


GIVEN = {
    "fewer logits": (lambda: (torch.randn(2, E),), "topk_ids has shape [2, 2]: expected [4, K]"),
    "more logits": (lambda: (torch.randn(5, E),), "topk_ids has shape [5, 2]: expected [4, K]"),
    "fewer ids": (lambda: (routed(2, 2, 2),), "topk_ids has shape [2, 2]: expected [4, K]"),
    "fewer weights": (lambda: (routed(4, 3, 4),), "topk_weights has shape [3, 2]: expected [4, 2]"),
    "floating ids": (
        lambda: (routed(4, 4, 4, torch.float32),),
        "topk_ids has dtype torch.float32: expected torch.int32 or torch.int64",
    ),
    "shared of another dtype": (
        lambda: (torch.randn(T, E), torch.randn(T, H, dtype=torch.float64)),
        "shared has dtype torch.float64: expected torch.float32, the dtype of hidden_states",
    ),
    "shared of another length": (
        lambda: (torch.randn(T, E), torch.randn(1, H)),
        "shared has shape [1, 16]: expected [4, 16]",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", GIVEN)
def test_the_errors_of_one_device(style, name):
    make, message = GIVEN[name]
    layer = FusedMoE(MoEConfig(E, K, H, I))
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), STYLES[style])
    hidden, given = torch.randn(T, H), make()
    told = []
    for each in (layer, sharded):
        with pytest.raises((TypeError, ValueError)) as caught:
            each(hidden, *given)
        told.append((caught.type, str(caught.value)))
    if "logits" not in name:  # of these the operator that routes as well speaks
        assert told[0] == told[1]
    assert told[1][1] == message


@on_ranks(2)
@pytest.mark.parametrize("style", ["allgather", "allreduce"])
def test_shared_that_is_computed_on_the_way_has_the_tokens_dtype(style):
    sharded = parallelize_module(FusedMoE(MoEConfig(E, K, H, I)), mesh_of_all(), STYLES[style])
    message = "shared has dtype torch.float64: expected torch.float32, the dtype of hidden_states"
    with pytest.raises(TypeError, match=message):
        sharded(torch.randn(T, H), torch.randn(T, E), lambda: torch.randn(T, H, dtype=torch.float64))


@on_ranks(2)
@pytest.mark.parametrize("style", ["allgather", "alltoall", "allreduce"])
def test_autocast_casts_shared_as_on_one_device(style):
    layer = FusedMoE(MoEConfig(E, K, H, I))
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), STYLES[style])
    hidden, logits = torch.randn(T, H), torch.randn(T, E)
    for shared in (torch.randn(T, H), torch.randn(T, H, dtype=torch.bfloat16)):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            out, expected = sharded(hidden, logits, shared), layer(hidden, logits, shared)
        assert out.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@on_ranks(2)
def test_logits_of_other_tokens_for_experts_that_route_themselves():
    layer = AllGatherMonolithic(dist.group.WORLD, FusedMoE(MoEConfig(E, K, H, I)), max_tokens=6)
    for tokens in (2, 5):
        with pytest.raises(ValueError) as caught:
            layer(torch.randn(T, H), torch.randn(tokens, E))
        assert str(caught.value) == f"router_logits has shape [{tokens}, 8]: expected [4, 8]"


@on_ranks(2)
@pytest.mark.parametrize("style", [ExpertParallel("allreduce", batches=2), ExpertTensorParallel()])
def test_sums_of_other_numbers_of_tokens(style):
    sharded = parallelize_module(FusedMoE(MoEConfig(E, K, H, I)), mesh_of_all(), style)
    tokens = 3 + dist.get_rank()
    with pytest.raises(
        ValueError, match=r"number of tokens differs between ranks: . on rank 0; . on rank 1; ex"
    ):
        sharded(torch.randn(tokens, H), torch.randn(tokens, E))
    dist.barrier()  # nothing is left on its way
    assert sharded(torch.randn(3, H), torch.randn(3, E)).shape == (3, H)


@pytest.mark.parametrize(("max_norm", "error"), [(-1.0, ValueError), ("1", TypeError)])
def test_norms_that_are_none(max_norm, error):
    with pytest.raises(error, match=f"max_norm={max_norm!r}: expected"):
        clip_grad_norm_(torch.ones(3), max_norm)
