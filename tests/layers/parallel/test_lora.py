"""Adapters of experts on ranks: ids go with their tokens, each rank has the adapters of the experts it holds."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from layers import ExpertLora, MoEBlock, RouterOutput, SharedExpertConfig
from layers.parallel import AllGatherMonolithic, ExpertParallel, ExpertTensorParallel
from moe_ops import Activation
from tests.helpers import assert_matches_oracle, assert_same, usually
from tests.layers.lora import attach, draw_ids, make_adapters, oracle
from tests.layers.parallel.exchanges import (
    ALL,
    MOST,
    REPLICATED,
    config,
    make_layer,
    num_tokens,
    tokens_of,
)
from tests.layers.parallel.test_exchanges import loss
from tests.layers.parallel.world import on_ranks

STYLES = {
    "allgather": lambda: ExpertParallel("allgather"),
    "alltoall": lambda: ExpertParallel("alltoall"),
    "alltoall_static": lambda: ExpertParallel("alltoall", max_tokens=MOST),
    "tensor": lambda: ExpertTensorParallel("allgather"),
}
PORTIONS = {
    "batches": lambda: ExpertParallel("allgather", batches=2),
    "chunks": lambda: ExpertParallel("alltoall", chunk_tokens=2),
    "batches_of_chunks": lambda: ExpertTensorParallel(
        "allgather", max_tokens=MOST, chunk_tokens=4, batches=2
    ),
}
styles = pytest.mark.parametrize("style", STYLES)
INTERLEAVED = Activation("swiglu_oai", interleaved=True)


def ids_of(rank, name="padded"):
    return draw_ids(num_tokens(rank, name), seed=0 if name in REPLICATED else rank)


@on_ranks(2)
@pytest.mark.parametrize("name", ALL)
def test_values(name):
    layer, rank = make_layer(config(has_bias=True)), dist.get_rank()
    adapters, ids = make_adapters(layer), ids_of(rank, name)
    kernel = ALL[name](layer)
    attach(kernel.experts.layer, adapters, ids)
    for step, routing in enumerate(("random", "padding")):
        hidden, routed = tokens_of(rank, name, routing, step=step)
        with torch.no_grad():
            assert_matches_oracle(kernel(hidden, routed), oracle(layer, adapters, hidden, routed, ids))


def parallel(layer, style):
    """A layer as a style shards it, with the adapters of what is here, and these."""
    adapters = make_adapters(layer)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part = parallelize_module(
        make_layer(layer.config, layer.w13_weight.dtype), mesh, {**STYLES, **PORTIONS}[style]()
    )
    attach(part, adapters, ids_of(dist.get_rank()))
    return part, adapters


@on_ranks(2, 4)
@pytest.mark.parametrize(
    ("style", "activation"),
    [*((style, "silu") for style in (*STYLES, *PORTIONS)), ("tensor", "relu2"), ("tensor", INTERLEAVED)],
    ids=str,
)
def test_sharded_layers(style, activation):
    layer, rank = make_layer(config(has_bias=True, activation=activation)), dist.get_rank()
    part, adapters = parallel(layer, style)
    hidden, routed = tokens_of(rank, "padded")
    shared = torch.randn(hidden.shape)
    with torch.no_grad():
        out = part(hidden, routed, shared)
    expected = oracle(layer, adapters, hidden, routed, ids_of(rank)) + shared.double()
    assert_matches_oracle(out, expected)


@on_ranks(2)
@styles
def test_gradients(style):
    layer, rank = make_layer(config(), torch.float64), dist.get_rank()
    part, adapters = parallel(layer, style)
    whole = attach(layer, adapters, ids_of(0))
    for each in range(2):
        whole.adapter_ids = ids_of(each)
        loss(layer(*tokens_of(each, "padded", dtype=torch.float64))).backward()
    loss(part(*tokens_of(rank, "padded", dtype=torch.float64))).backward()
    for name, parameter in part.lora.named_parameters():
        expected = whole.get_parameter(name).grad
        assert_same([parameter.grad.full_tensor().view(expected.shape)], [expected])


@on_ranks(2)
@pytest.mark.parametrize("style", usually(["allgather", "alltoall_static"], ["alltoall_static"]))
def test_compiled(style):
    layer, rank = make_layer(config()), dist.get_rank()
    part, adapters = parallel(layer, style)
    part.lora.adapter_ids = ids = draw_ids(MOST)
    function = torch.compile(part, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for step, keep in enumerate((6, 5, 4)):
            hidden, routed = tokens_of(rank, "padded", sizes="even", step=step)
            hidden, routed = hidden[:keep].clone(), RouterOutput(*(each[:keep].clone() for each in routed))
            ids.copy_(draw_ids(MOST, seed=2 * step + rank))
            assert_matches_oracle(function(hidden, routed), oracle(layer, adapters, hidden, routed, ids))


@on_ranks(2)
def test_a_block():
    moe = config(shared_experts=SharedExpertConfig(9))
    torch.manual_seed(3)
    block, mesh = MoEBlock(moe), init_device_mesh("cpu", (2,))
    adapters, ids = make_adapters(block.experts), draw_ids(6, seed=dist.get_rank())
    hidden = torch.randn(6, moe.hidden_size, generator=torch.Generator().manual_seed(dist.get_rank()))
    routed = block.experts.route(block.gate(hidden))
    with torch.no_grad():
        expected = (
            oracle(block.experts, adapters, hidden, routed, ids) + block.shared_experts(hidden).double()
        )
    parallelize_module(block, mesh, {"experts": ExpertParallel("alltoall")})
    attach(block.experts, adapters, ids)
    assert_matches_oracle(block(hidden), expected)


@on_ranks(2)
def test_adapters_come_after_the_style():
    layer, mesh = make_layer(config()), init_device_mesh("cpu", (2,))
    attach(layer, make_adapters(layer), ids_of(0))
    with pytest.raises(ValueError, match="module has lora: expected None, adapters are made for what a rank"):
        parallelize_module(layer, mesh, ExpertParallel())


@on_ranks(2)
def test_adapters_of_shared_experts_are_loaded_before_these_are_sharded_again():
    layer, mesh = make_layer(config()), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))
    adapters = make_adapters(layer)
    parallelize_module(layer, mesh["ep"], ExpertParallel("allgather"))
    lora = attach(layer, adapters, ids_of(0))
    expected = lora.b13.full_tensor().clone()
    fully_shard(layer, mesh=mesh["dp"])
    with pytest.raises(TypeError, match="a13 is a DTensor as fully_shard makes"):
        lora.load_adapter(1, *adapters[0])
    assert torch.equal(lora.b13.full_tensor(), expected)


@on_ranks(2)
@pytest.mark.parametrize("style", ["allgather", "tensor"])
def test_adapters_of_other_sizes_on_other_ranks(style):
    """The first rank's were sent to ranks that had room for others."""
    layer = parallelize_module(make_layer(config()), init_device_mesh("cpu", (2,)), STYLES[style]())
    own, usual = dist.get_rank() + 1, (2, 3)
    for sizes, options, name in (
        ((own, 3), {}, "num_adapters"),
        ((2, own), {"gate_up_rank": 3}, "rank of adapters"),
        (usual, {"gate_up_rank": own}, "gate_up_rank"),
    ):
        with pytest.raises(ValueError, match=f"^{name} differs between ranks: 1 on rank 0; 2 on rank 1; exp"):
            ExpertLora(layer, *sizes, ids_of(0), **options)
    dtype = (torch.float32, torch.bfloat16)[dist.get_rank()]
    with pytest.raises(ValueError, match=r"dtype of adapters differs between ranks: torch.float32 on rank 0"):
        ExpertLora(layer, *usual, ids_of(0), dtype=dtype)
    assert ExpertLora(layer, *usual, ids_of(0)).num_adapters == 2


@on_ranks(1)
def test_logits_bring_no_adapter_ids():
    layer = make_layer(config())
    attach(layer, make_adapters(layer), ids_of(0))
    hidden, routed = tokens_of(0, "padded")
    with pytest.raises(ValueError, match="layer has lora: expected None, adapter ids go along in AllGather"):
        AllGatherMonolithic(dist.group.WORLD, layer)(hidden, routed.router_logits)
