"""Every exchange, with the layer each rank holds, and tokens that all ranks can tell of each other."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from layers import (
    BatchedExperts,
    FusedMoE,
    ModularKernel,
    MoEConfig,
    RouterOutput,
    StandardExperts,
    TensorShard,
)
from layers.parallel import (
    AllGatherPrepareAndFinalize,
    AllReducePrepareAndFinalize,
    AllToAllPrepareAndFinalize,
    BatchedExchange,
    ExpertRanks,
    PaddedAllToAllPrepareAndFinalize,
)

E, K, H, I = 8, 3, 16, 24
MOST = 9  # tokens that a rank has at most
ROUTINGS = ("random", "one_rank", "padding")


def config(**options) -> MoEConfig:
    return MoEConfig(**{"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I, **options})


def make_layer(moe: MoEConfig, dtype=torch.float32) -> FusedMoE:
    """The layer of one device, the same on every rank."""
    torch.manual_seed(2)
    return FusedMoE(moe, dtype=dtype)


def owners(moe: MoEConfig, strategy="balanced") -> ExpertRanks:
    return ExpertRanks(moe.num_physical_experts, dist.get_world_size(), strategy)


def part_of_experts(layer: FusedMoE, ranks: ExpertRanks) -> FusedMoE:
    """What this rank holds of the experts."""
    expert_map = ranks.expert_map(dist.get_rank())
    part = FusedMoE(layer.config, expert_map, dtype=layer.w13_weight.dtype)
    held = torch.arange(layer.config.num_physical_experts) if expert_map is None else held_by(expert_map)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(layer.get_parameter(name)[held])
    return part


def held_by(expert_map: Tensor) -> Tensor:
    """[E_local]: the experts, in the order in which they are held."""
    return torch.arange(expert_map.shape[0])[expert_map >= 0]


def shard_of_experts(layer: FusedMoE) -> FusedMoE:
    """This rank's shard of every expert; the bias behind the second product counts once."""
    shard = TensorShard(dist.get_rank(), dist.get_world_size())
    part = FusedMoE(layer.config, shard=shard, dtype=layer.w13_weight.dtype)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            parameter.copy_(shard_of(name, layer.get_parameter(name), shard, layer.config))
    return part


def shard_of(name: str, whole: Tensor, shard: TensorShard, moe: MoEConfig) -> Tensor:
    if name == "w2_bias":
        return whole * (shard.rank == 0)
    if name == "w2_weight":
        return shard.of(whole, 2)
    if moe.activation.interleaved or not moe.activation.is_gated:
        return shard.of(whole, 1)
    return torch.cat([shard.of(half, 1) for half in whole.chunk(2, dim=1)], dim=1)


def all_gather(layer: FusedMoE, **options) -> ModularKernel:
    part = part_of_experts(layer, owners(layer.config))
    return ModularKernel(AllGatherPrepareAndFinalize(dist.group.WORLD, **options), StandardExperts(part))


def padded(layer: FusedMoE, max_tokens=MOST, strategy="balanced") -> ModularKernel:
    ranks = owners(layer.config, strategy)
    exchange = PaddedAllToAllPrepareAndFinalize(dist.group.WORLD, ranks, max_tokens=max_tokens)
    return ModularKernel(exchange, StandardExperts(part_of_experts(layer, ranks)))


def variable(layer: FusedMoE, strategy="balanced") -> ModularKernel:
    ranks = owners(layer.config, strategy)
    exchange = AllToAllPrepareAndFinalize(dist.group.WORLD, ranks)
    return ModularKernel(exchange, StandardExperts(part_of_experts(layer, ranks)))


def all_reduce(layer: FusedMoE) -> ModularKernel:
    return ModularKernel(
        AllReducePrepareAndFinalize(dist.group.WORLD),
        StandardExperts(part_of_experts(layer, owners(layer.config))),
    )


def tensor_parallel(layer: FusedMoE) -> ModularKernel:
    return ModularKernel(
        AllReducePrepareAndFinalize(dist.group.WORLD), StandardExperts(shard_of_experts(layer))
    )


def gathered_shards(layer: FusedMoE) -> ModularKernel:
    """Experts sharded over ranks with tokens of their own, as under sequence parallelism."""
    exchange = AllGatherPrepareAndFinalize(dist.group.WORLD, max_tokens=MOST)
    return ModularKernel(exchange, StandardExperts(shard_of_experts(layer)))


def batched(kernel: ModularKernel, max_tokens: int | None = None) -> ModularKernel:
    """The same exchange, in front of batched experts."""
    exchange = BatchedExchange(kernel.prepare_finalize, max_tokens)
    return ModularKernel(exchange, BatchedExperts(kernel.experts.layer))


Make = Callable[[FusedMoE], ModularKernel]
# Of ranks with tokens of their own.
EXCHANGES: dict[str, Make] = {
    "all_gather": all_gather,
    "all_gather_static": lambda layer: all_gather(layer, max_tokens=MOST),
    "all_gather_slots": lambda layer: all_gather(layer, max_tokens=MOST, order="slots"),
    "gathered_shards": gathered_shards,
    "padded": padded,
    "variable": variable,
    "padded_batched": lambda layer: batched(padded(layer)),
    "variable_batched": lambda layer: batched(variable(layer)),
}
# Of ranks with the same tokens.
REPLICATED: dict[str, Make] = {"all_reduce": all_reduce, "tensor_parallel": tensor_parallel}
ALL = {**EXCHANGES, **REPLICATED}


def num_tokens(rank: int, name: str, sizes: str = "uneven") -> int:
    """Of a rank. Uneven: rank 1 has none."""
    if sizes == "most":
        return MOST
    if name in REPLICATED or sizes == "even":
        return 6
    return 0 if rank == 1 else MOST - 4 + rank


def tokens_of(rank: int, name: str, routing="random", dtype=torch.float32, sizes="uneven", step=0):
    """Hidden states [T, H] and what a router made of them, of a rank."""
    seed = step if name in REPLICATED else 1000 * step + rank
    generator = torch.Generator().manual_seed(seed)
    tokens = num_tokens(rank, name, sizes)
    hidden = torch.randn(tokens, H, generator=generator, dtype=torch.float64).to(dtype)
    logits = torch.randn(tokens, E, generator=generator, dtype=torch.float64).to(dtype)
    weights, ids = logits.float().softmax(1).topk(K, dim=1)
    weights = weights.to(torch.promote_types(dtype, torch.float32))
    ids = ids.to(torch.int32)
    if routing == "one_rank":
        ids = torch.arange(K, dtype=torch.int32).repeat(tokens, 1) % 2  # experts 0 and 1, of rank 0
        ids[:, 2] = -1
    elif routing == "padding":
        ids[::2] = -1
        ids[1::3, 0] = E
    return hidden, RouterOutput(logits, weights, ids)
