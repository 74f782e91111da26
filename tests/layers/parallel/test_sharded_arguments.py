"""A sharded layer refuses what the layer of one device refuses, in the same words, before it exchanges anything."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import parallelize_module

from layers import BatchedExperts, FusedMoE, ModularKernel, MoEConfig, RouterOutput, StandardExperts
from layers.parallel import (
    AllGatherMonolithic,
    AllGatherPrepareAndFinalize,
    BatchedExchange,
    ExpertParallel,
    ExpertRanks,
    ExpertTensorParallel,
    clip_grad_norm_,
)
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
@pytest.mark.parametrize("style", STYLES)
def test_tokens_of_another_dtype_on_one_rank(style):
    """Others would get rows of other sizes than they expect, which ends them."""
    layer, hidden, logits = FusedMoE(MoEConfig(E, K, H, I)), torch.randn(T, H), torch.randn(T, E)
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), STYLES[style])
    if dist.get_rank() == 1:
        for each in (layer, sharded):
            with pytest.raises(
                TypeError, match=r"w13 has dtype torch.float32: expected torch.float64, the dtype of hid"
            ):
                each(hidden.double(), logits)
    assert sharded(hidden, logits).shape == (T, H)


KERNELS = {
    "gathered": lambda exchange, experts: ModularKernel(exchange, StandardExperts(experts)),
    "in batches": lambda exchange, experts: ModularKernel(BatchedExchange(exchange), BatchedExperts(experts)),
}
NOT_SENT = {
    "w13 has dtype torch.float32: expected torch.float64": lambda x, routed: (x.double(), routed),
    "hidden_states has last dimension 17: expected 16": lambda x, routed: (torch.randn(T, H + 1), routed),
    "topk_ids has dtype torch.int16: expected torch.int32 or": lambda x, routed: (
        x,
        routed._replace(topk_ids=routed.topk_ids.short()),
    ),
    "topk_weights has dtype torch.int32: expected a floating point": lambda x, routed: (
        x,
        routed._replace(topk_weights=routed.topk_ids),
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("message", NOT_SENT)
def test_what_a_kernel_does_not_send(kernel, message):
    layer = FusedMoE(MoEConfig(E, K, H, I), ExpertRanks(E, 2).expert_map(dist.get_rank()))
    behind = KERNELS[kernel](AllGatherPrepareAndFinalize(dist.group.WORLD, max_tokens=6), layer)
    given = torch.randn(T, H), routed(T, T, T)
    if dist.get_rank() == 1:
        with pytest.raises((TypeError, ValueError), match=message):
            behind(*NOT_SENT[message](*given))
    assert behind(*given).shape == (T, H)


@on_ranks(2)
@pytest.mark.parametrize("style", ["allgather", "allreduce"])
def test_shared_that_is_computed_on_the_way_has_the_tokens_dtype(style):
    sharded = parallelize_module(FusedMoE(MoEConfig(E, K, H, I)), mesh_of_all(), STYLES[style])
    message = "shared has dtype torch.float64: expected torch.float32, the dtype of hidden_states"
    with pytest.raises(TypeError, match=message):
        sharded(torch.randn(T, H), torch.randn(T, E), lambda: torch.randn(T, H, dtype=torch.float64))


@on_ranks(2)
@pytest.mark.parametrize(
    "style", [STYLES["alltoall"], STYLES["chunks"], ExpertParallel("alltoall", max_tokens=6, batches=2)]
)
@pytest.mark.parametrize("rows", [1, T - 1, T + 1])
def test_shared_that_is_computed_on_the_way_has_a_row_for_each_token(style, rows):
    """Portions of it would be cut of any rows, and chunks filled up."""
    sharded = parallelize_module(FusedMoE(MoEConfig(E, K, H, I)), mesh_of_all(), style)
    with pytest.raises(ValueError, match=rf"shared has shape \[{rows}, {H}\]: expected \[{T}, {H}\]"):
        sharded(torch.randn(T, H), torch.randn(T, E), lambda: torch.randn(rows, H))


@on_ranks(2)
@pytest.mark.parametrize("style", ["alltoall", "chunks"])
def test_shared_that_is_computed_on_the_way_is_a_tensor(style):
    sharded = parallelize_module(FusedMoE(MoEConfig(E, K, H, I)), mesh_of_all(), STYLES[style])
    with pytest.raises(TypeError, match=r"shared=None: expected a torch\.Tensor"):
        sharded(torch.randn(T, H), torch.randn(T, E), lambda: None)


@on_ranks(2)
@pytest.mark.parametrize("style", ["alltoall_static", "chunks", "allreduce"])
def test_shared_that_is_computed_on_the_way_is_cast_by_autocast(style):
    layer = FusedMoE(MoEConfig(E, K, H, I))
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), STYLES[style])
    hidden, logits, shared = torch.randn(T, H), torch.randn(T, E), torch.randn(T, H)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = sharded(hidden, logits, lambda: shared), layer(hidden, logits, shared)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@on_ranks(2)
@pytest.mark.parametrize("style", ["allgather", "alltoall", "allreduce"])
def test_autocast_casts_as_on_one_device(style):
    layer = FusedMoE(MoEConfig(E, K, H, I))
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), STYLES[style])
    hidden, logits = torch.randn(T, H), torch.randn(T, E)
    for shared in (torch.randn(T, H), torch.randn(T, H, dtype=torch.bfloat16)):
        given = hidden.to(shared.dtype), logits, shared
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            out, expected = sharded(*given), layer(*given)
        assert out.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@on_ranks(2)
def test_logits_of_other_tokens_for_experts_that_route_themselves():
    layer = AllGatherMonolithic(dist.group.WORLD, FusedMoE(MoEConfig(E, K, H, I)), max_tokens=6)
    if dist.get_rank() == 1:
        with pytest.raises(TypeError, match=r"w13 has dtype torch.float32: expected torch.float64"):
            layer(torch.randn(T, H).double(), torch.randn(T, E))
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


@on_ranks(2)
@pytest.mark.parametrize("style", ["allreduce", "tensor"])
def test_whole_parameters_in_the_place_of_parts(style):
    """Every rank would have run the first of them for its own."""
    layer = FusedMoE(MoEConfig(E, K, H, I, activation="relu2"))
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), STYLES[style])
    state = {name: each.clone() for name, each in layer.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"w13_weight=.*: expected a DTensor, for ranks share it"):
        sharded.load_state_dict(state, assign=True)
    with pytest.raises(TypeError, match=r"w2_weight=.*: expected a DTensor"):
        sharded.w2_weight = layer.w2_weight
    own = {name: each.detach().clone() for name, each in sharded.state_dict().items()}
    sharded.load_state_dict(own, assign=True)
    assert sharded(torch.randn(3, H), torch.randn(3, E)).shape == (3, H)


@pytest.mark.parametrize(
    ("max_norm", "error"),
    [(-1.0, ValueError), (float("nan"), ValueError), ("1", TypeError), (True, TypeError), (None, TypeError)],
)
def test_norms_that_are_none(max_norm, error):
    with pytest.raises(error, match=f"max_norm={max_norm!r}: expected"):
        clip_grad_norm_(torch.ones(3), max_norm)


def test_norms_in_tensors():
    with pytest.raises(ValueError, match=r"max_norm=-1.0: expected at least 0"):
        clip_grad_norm_(torch.ones(3), torch.tensor(-1.0))
    with pytest.raises(ValueError, match=r"max_norm has shape \[3\]: expected one number"):
        clip_grad_norm_(torch.ones(3), torch.ones(3))


@pytest.mark.parametrize("max_norm", [float("inf"), 100, torch.tensor(50.0), torch.tensor([50.0])], ids=str)
def test_norms_that_clip_nothing(max_norm):
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 3.0)
    assert clip_grad_norm_(parameter, max_norm) == 6 and torch.equal(parameter.grad, torch.full((4,), 3.0))


@pytest.mark.parametrize(
    ("norm_type", "error"),
    [
        (-1.0, ValueError),
        (0, ValueError),
        (float("nan"), ValueError),
        ("2", TypeError),
        (True, TypeError),
        (None, TypeError),
    ],
)
def test_kinds_of_norms_that_are_none(norm_type, error):
    with pytest.raises(error, match=f"norm_type={norm_type!r}: expected a number"):
        clip_grad_norm_(torch.ones(3), 1.0, norm_type)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (None, "parameters=None: expected Tensor or Iterable"),
        (["a"], r"parameters\[0\]='a': expected Tensor"),
    ],
)
def test_what_has_no_gradients(parameters, message):
    with pytest.raises(TypeError, match=message):
        clip_grad_norm_(parameters, 1.0)
