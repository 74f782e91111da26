"""The exchange over symmetric memory on two GPUs, beside the others: values, gradients, compiled, captured."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._inductor.compile_fx import compile_fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from layers import ExpertOutput, FusedMoE, ModularKernel, MoEConfig, RouterOutput, StandardExperts
from layers.parallel import (
    AllGatherPrepareAndFinalize,
    AllToAllPrepareAndFinalize,
    ExpertParallel,
    ExpertRanks,
    PaddedAllToAllPrepareAndFinalize,
    SymmetricPrepareAndFinalize,
)
from moe_ops.peers import aligned
from tests.helpers import assert_matches_oracle, assert_same
from tests.layers.parallel.test_exchanges import differentiable, oracle
from tests.layers.parallel.world import captured, on_gpu_ranks

E, K, H, I, MOST = 13, 3, 64, 48, 33
SIZES = {"uneven": (7, 33), "empty": (0, 5), "none": (0, 0), "one": (1, 33)}
ROUTINGS = ("random", "one rank", "padding")
of_sizes = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
of_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def make_layer(dtype: torch.dtype, **options) -> FusedMoE:
    """The layer of one device, the same on every rank."""
    torch.manual_seed(2)
    moe = MoEConfig(**{"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I, **options})
    return FusedMoE(moe, dtype=dtype).cuda()


def symmetric(group, owners, **options) -> SymmetricPrepareAndFinalize:
    sizes = {"max_tokens": MOST, "hidden_size": H, "top_k": K, "timeout": 20.0}
    return SymmetricPrepareAndFinalize(group, owners, **{**sizes, **options})


EXCHANGES = {
    "symmetric": symmetric,
    "all_gather": lambda group, owners, dtype: AllGatherPrepareAndFinalize(group, max_tokens=MOST),
    "padded": lambda group, owners, dtype: PaddedAllToAllPrepareAndFinalize(group, owners, max_tokens=MOST),
    "variable": lambda group, owners, dtype: AllToAllPrepareAndFinalize(group, owners),
}


def kernel_of(name: str, layer: FusedMoE) -> ModularKernel:
    """This rank's experts behind an exchange; uneven ones, 13 on 2 ranks."""
    owners = ExpertRanks(layer.config.num_experts, dist.get_world_size())
    expert_map = owners.expert_map(dist.get_rank())
    dtype = layer.w13_weight.dtype
    part = FusedMoE(layer.config, expert_map, dtype=dtype).cuda()
    held = (expert_map >= 0).nonzero().flatten()
    with torch.no_grad():
        for each, parameter in part.named_parameters():
            parameter.copy_(layer.get_parameter(each)[held.cuda()])
    return ModularKernel(EXCHANGES[name](dist.group.WORLD, owners, dtype=dtype), StandardExperts(part))


def loss(out):
    return (out * torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype, device="cuda").view(out.shape)).sum()


def tokens_of(rank, tokens, routing="random", dtype=torch.float32, step=0):
    """Hidden states and what a router made of them, of a rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    hidden = torch.randn(tokens, H, generator=generator, dtype=torch.float64).to(dtype)
    weights, ids = torch.rand(tokens, E, generator=generator).topk(K, dim=1)
    weights, ids = weights.to(torch.promote_types(dtype, torch.float32)), ids.to(torch.int32)
    if routing == "one rank":
        ids = torch.arange(K, dtype=torch.int32).repeat(tokens, 1)
    elif routing == "padding":
        ids[::2] = -1
        ids[1::3, 0] = E
    return hidden.cuda(), RouterOutput(hidden.cuda(), weights.cuda(), ids.cuda())


@on_gpu_ranks(2)
@of_sizes
@of_dtypes
@pytest.mark.parametrize("routing", ROUTINGS)
def test_values(sizes, dtype, routing):
    layer = make_layer(dtype)
    hidden, routed = tokens_of(dist.get_rank(), sizes[dist.get_rank()], routing, dtype)
    shared = torch.randn_like(hidden)
    for name in EXCHANGES:
        with torch.no_grad():
            out = kernel_of(name, layer)(hidden, routed, shared)
        assert_matches_oracle(out, oracle(layer, hidden, routed) + shared.double())


@on_gpu_ranks(2)
@pytest.mark.parametrize("sizes", [SIZES["uneven"], SIZES["empty"]], ids=["uneven", "empty"])
def test_gradients(sizes):
    layer = make_layer(torch.float64)
    given = [tokens_of(rank, tokens, dtype=torch.float64) for rank, tokens in enumerate(sizes)]
    expected = [differentiable(*each) for each in given]
    for each in expected:
        loss(layer(*each)).backward()
    own, rank = expected[dist.get_rank()], dist.get_rank()
    for name in EXCHANGES:
        kernel = kernel_of(name, layer)
        hidden, routed = differentiable(*given[rank])
        out = kernel(hidden, routed)
        loss(out).backward()
        assert_same([hidden.grad, routed.topk_weights.grad], [own[0].grad, own[1].topk_weights.grad])
        part = kernel.experts.layer
        held = (part.expert_map >= 0).nonzero().flatten()
        for each, parameter in part.named_parameters():
            assert_same([parameter.grad], [layer.get_parameter(each).grad[held]])


@on_gpu_ranks(2)
def test_many_rows():
    """More than there are CTAs; a rank without any, and then the other."""
    sizes = {"max_tokens": 4096, "hidden_size": 4096, "dtype": torch.bfloat16}
    exchange = symmetric(dist.group.WORLD, ExpertRanks(E, 2), **sizes)
    rank = dist.get_rank()
    for step, tokens in enumerate((4096, 1000, 0, 4001)):
        generator = torch.Generator("cuda").manual_seed(10 * step + rank)
        count = tokens if rank == 0 else 4096 - tokens
        hidden = torch.randint(-8, 9, (count, 4096), generator=generator, device="cuda").bfloat16()
        weights, ids = torch.rand(count, E, generator=generator, device="cuda").topk(K, dim=1)
        prepared = exchange.prepare(hidden, weights, ids.to(torch.int32), E, None)
        received = prepared.way_back.received.tolist()
        for sender in range(2):
            rows = prepared.topk_ids[sender * 4096 :][:4096]
            assert (rows[: received[sender]] >= 0).all() and (rows[received[sender] :] == -1).all()
        sums = exchange.finalize(ExpertOutput(prepared.hidden_states), prepared, Summed(), None)
        copies = (ids < 7).any(1).int() + (ids >= 7).any(1).int()
        assert torch.equal(sums, hidden * copies.unsqueeze(1))


class Summed:
    """Rows are sums already."""

    def apply(self, output, topk_weights, shared):
        return output.rows


@on_gpu_ranks(2)
@of_dtypes
def test_captured_and_replayed_with_another_routing(dtype):
    layer, rank = make_layer(dtype), dist.get_rank()
    with torch.no_grad():
        for name in ("symmetric", "all_gather", "padded"):
            kernel = kernel_of(name, layer)
            hidden, routed = tokens_of(rank, 20, dtype=dtype)
            graph, out = captured(partial(kernel, hidden, routed))
            for step in range(1, 21):
                fresh, chosen = tokens_of(rank, 20, ROUTINGS[step % 3], dtype, step)
                hidden.copy_(fresh)
                routed.topk_weights.copy_(chosen.topk_weights)
                routed.topk_ids.copy_(chosen.topk_ids)
                graph.replay()
                if step % 4 == 0:
                    kernel(fresh, chosen)  # an eager one between replays
                assert_matches_oracle(out, oracle(layer, hidden, routed))


@on_gpu_ranks(2)
def test_compiled_in_one_graph():
    layer, rank = make_layer(torch.float32), dist.get_rank()
    kernel, graphs = kernel_of("symmetric", layer), []

    def backend(graph, inputs):
        graphs.append(graph)
        return compile_fx(graph, inputs)

    compiled = torch.compile(kernel, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for step in range(4):
            hidden, routed = tokens_of(rank, 20, ROUTINGS[step % 3], step=step)
            assert_matches_oracle(compiled(hidden, routed), oracle(layer, hidden, routed))
    assert len(graphs) == 1


@on_gpu_ranks(2)
def test_compiled_gradients():
    layer, rank = make_layer(torch.float64), dist.get_rank()
    kernel = kernel_of("symmetric", layer)
    hidden, routed = differentiable(*tokens_of(rank, 9, dtype=torch.float64))
    again, chosen = differentiable(hidden.detach(), routed)
    kernel(hidden, routed).square().sum().backward()
    torch.compile(kernel, fullgraph=True)(again, chosen).square().sum().backward()
    assert_same([again.grad], [hidden.grad])


@on_gpu_ranks(2)
def test_extra_tensors_arrive_with_their_tokens():
    layer, rank = make_layer(torch.float32), dist.get_rank()
    hidden, routed = tokens_of(rank, 9)
    numbers = torch.arange(9, device="cuda") + 100 * rank
    extras = numbers.float().unsqueeze(1), numbers.to(torch.int16), numbers.view(-1, 1, 1).to(torch.int32)
    hidden[:, 0] = numbers
    prepared = kernel_of("symmetric", layer).start(hidden, routed, extras).wait()
    there = (prepared.topk_ids >= 0).any(1)
    for extra, given in zip(prepared.extra_tensors, extras, strict=True):
        assert extra.dtype == given.dtype and extra.shape[1:] == given.shape[1:]
        assert torch.equal(extra.flatten()[there].float(), prepared.hidden_states[there, 0])


@on_gpu_ranks(2)
def test_styles():
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))
    layer = make_layer(torch.float32, num_experts=14)
    hidden, routed = tokens_of(dist.get_rank(), 20)
    for options in ({"dispatcher": "symmetric"}, {}, {"batches": 2}, {"chunk_tokens": 8}):
        shared = make_layer(torch.float32, num_experts=14)
        parallelize_module(shared, mesh["ep"], ExpertParallel(max_tokens=20, **options))
        assert isinstance(shared.parallel.exchange, SymmetricPrepareAndFinalize)
        assert_matches_oracle(shared(hidden, routed), oracle(layer, hidden, routed))
    many = make_layer(torch.float32, num_experts=14)
    parallelize_module(many, mesh["ep"], ExpertParallel(max_tokens=8192))
    assert isinstance(many.parallel.exchange, AllGatherPrepareAndFinalize)


@on_gpu_ranks(2)
def test_what_does_not_fit_is_refused():
    kernel, rank = kernel_of("symmetric", make_layer(torch.float32)), dist.get_rank()
    message = rf"hidden_states has {MOST + 1} tokens on rank {rank}: expected at most max_tokens={MOST}"
    with pytest.raises(ValueError, match=message):
        kernel(*tokens_of(rank, MOST + 1))
    hidden, routed = tokens_of(rank, 3)
    wide = hidden.double().repeat(1, 2), routed.topk_weights, routed.topk_ids, E, None
    with pytest.raises(ValueError, match=r"expected at most \d+, for which the exchange was made"):
        kernel.prepare_finalize.prepare(*wide)


@on_gpu_ranks(2)
def test_layers_of_a_size_share_buffers():
    first, second = (kernel_of("symmetric", make_layer(torch.float32)).prepare_finalize for _ in range(2))
    assert first.peers is second.peers
    other = symmetric(dist.group.WORLD, ExpertRanks(E, 2), max_tokens=MOST + 1)
    assert other.peers is not first.peers
    assert other.peers.layout.sum_bytes == aligned(2 * H)
