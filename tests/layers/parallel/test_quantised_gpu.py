"""Quantised experts on two GPUs, whole and in parts, against the layer of one: values, adapters, captured."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import inductor_passes
from layers import FusedMoE, MoEConfig, RouterOutput, WeightScale, quantise_experts
from layers.parallel import (
    ExpertParallel,
    ExpertRebalancer,
    ExpertTensorParallel,
    SymmetricPrepareAndFinalize,
)
from tests.helpers import RELATIVE_NORM, relative_error
from tests.layers.lora import attach, draw_ids, make_adapters
from tests.layers.parallel.world import captured, on_gpu_ranks

E, K, H, I, MOST = 14, 3, 512, 256, 33
SIZES = (7, 0), (0, 5), (33, 16), (1, 1)
FORMATS = {
    "float8 blocks": {"kind": WeightScale.BLOCK, "rows": "quantised"},
    "int8 channels": {"kind": WeightScale.CHANNEL, "dtype": torch.int8, "rows": "exact"},
    "MXFP4": {"kind": WeightScale.GROUP, "block": (1, 32), "dtype": torch.uint8},
    "int4": {"kind": WeightScale.GROUP, "dtype": torch.uint4, "zero_points": True},
}
WHOLE = {
    "symmetric": ExpertParallel("symmetric", max_tokens=MOST),
    "auto": ExpertParallel(max_tokens=MOST),
    "two batches": ExpertParallel("symmetric", max_tokens=MOST, batches=2),
    "allgather": ExpertParallel("allgather"),
    "alltoall": ExpertParallel("alltoall"),
    "padded": ExpertParallel("alltoall", max_tokens=MOST),
}
PARTS = {"in parts": ExpertTensorParallel("allgather"), "shared": ExpertTensorParallel()}
of_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
of_formats = pytest.mark.parametrize("form", FORMATS)


def make_layer(form, dtype, **options) -> FusedMoE:
    """The same on every rank."""
    torch.manual_seed(2)
    layer = FusedMoE(MoEConfig(E, K, H, I, has_bias=True), dtype=dtype).cuda()
    quantise_experts(layer, **FORMATS[form] | options)
    return layer


def share(layer, style) -> FusedMoE:
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))
    return parallelize_module(copy.deepcopy(layer), mesh["ep"], style, src_data_rank=None)


def given_of(rank, tokens, dtype, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    hidden = torch.randn(tokens, H, generator=generator).to(dtype)
    weights, ids = torch.rand(tokens, E, generator=generator).topk(K, dim=1)
    if step % 3 == 1:
        ids = torch.arange(K).repeat(tokens, 1)  # all on the first rank
    elif step % 3 == 2:
        ids[::2] = -1
    return hidden.cuda(), RouterOutput(hidden.cuda(), weights.cuda(), ids.to(torch.int32).cuda())


def expect_same(actual, expected):
    """As two ways that round alike, but sum in another order."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert not len(actual) or relative_error(actual, expected) < RELATIVE_NORM[actual.dtype]


@on_gpu_ranks(2)
@of_dtypes
@of_formats
def test_values(form, dtype):
    """Quantised rows in bfloat16 only: in float32 what sums differ by may bring some to the next of 8 bits."""
    rows = {} if dtype == torch.bfloat16 else {"rows": "exact"}
    layer, rank = make_layer(form, dtype, **rows), dist.get_rank()
    shared = {name: share(layer, style) for name, style in (WHOLE | PARTS).items()}
    for name in ("symmetric", "auto", "two batches"):
        assert isinstance(shared[name].parallel.exchange, SymmetricPrepareAndFinalize)
    with torch.no_grad():
        for step, sizes in enumerate(SIZES):
            for name, each in shared.items():
                own = 0 if name == "shared" else rank
                given = given_of(own, sizes[own], dtype, step)
                expect_same(each(*given), layer(*given))


@on_gpu_ranks(2)
@of_formats
def test_captured_and_replayed_with_another_routing(form):
    layer, rank = make_layer(form, torch.bfloat16), dist.get_rank()
    for name in ("symmetric", "in parts"):
        shared = share(layer, {**WHOLE, "in parts": ExpertTensorParallel("allgather", max_tokens=MOST)}[name])
        hidden, routed = given_of(rank, 20, torch.bfloat16)
        with torch.no_grad():
            graph, out = captured(partial(shared, hidden, routed))
            for step in range(1, 10):
                fresh, chosen = given_of(rank, 20, torch.bfloat16, step)
                hidden.copy_(fresh)
                routed.topk_weights.copy_(chosen.topk_weights)
                routed.topk_ids.copy_(chosen.topk_ids)
                graph.replay()
                expect_same(out, layer(fresh, chosen))


@on_gpu_ranks(2)
@of_formats
def test_compiled(form):
    layer, rank = make_layer(form, torch.bfloat16), dist.get_rank()
    given = given_of(rank, 9, torch.bfloat16)
    with torch.no_grad():
        for name in ("symmetric", "allgather", "in parts"):
            shared = share(layer, (WHOLE | PARTS)[name])
            function = torch.compile(shared, fullgraph=True, options=inductor_passes.options())
            expect_same(function(*given), layer(*given))


@on_gpu_ranks(2)
@of_formats
def test_gradients_of_tokens(form):
    layer, rank = make_layer(form, torch.float32, rows="exact"), dist.get_rank()
    for name in ("symmetric", "in parts"):
        gradients = []
        for each in (layer, share(layer, (WHOLE | PARTS)[name])):
            hidden, routed = given_of(rank, 9, torch.float32)
            hidden.requires_grad_()
            each(hidden, routed).square().sum().backward()
            gradients.append(hidden.grad)
        expect_same(*gradients)


@on_gpu_ranks(2)
@of_formats
def test_adapters(form):
    layer, rank = make_layer(form, torch.bfloat16, rows="exact"), dist.get_rank()
    plain = FusedMoE(layer.config, dtype=torch.bfloat16)
    for name in ("symmetric", "shared"):
        own, outputs = 0 if name == "shared" else rank, []
        for each in (copy.deepcopy(layer), share(layer, (WHOLE | PARTS)[name])):
            attach(each, make_adapters(plain), draw_ids(9, seed=own).cuda())
            with torch.no_grad():
                outputs.append(each(*given_of(own, 9, torch.bfloat16)))
        expect_same(*outputs)


@on_gpu_ranks(2)
@of_formats
def test_experts_change_places(form):
    layer, rank = make_layer(form, torch.bfloat16), dist.get_rank()
    shared = share(layer, WHOLE["symmetric"])
    rebalancer = ExpertRebalancer(shared)
    given = given_of(rank, 9, torch.bfloat16)
    with torch.no_grad():
        rebalancer.place("round_robin")
        assert not shared.balancing.is_initial()
        expect_same(shared(*given), layer(*given))
