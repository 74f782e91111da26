"""What a user can hand to a config or a module by mistake, as in `bad_inputs`, and the whole table."""

import torch
from torch import nn

import layers
import moe_ops
from layers import FusedMoE, MoEBlock, MoEConfig, RouterOutput
from moe_ops import RoutingConfig
from tests.bad_inputs import (
    BAD_CALLS,
    BAD_LAYERS,
    BAD_VALUES,
    IDS,
    LOGITS,
    ROUTING,
    WEIGHTS,
    E,
    H,
    I,
    K,
    X,
    good,
    index,
    own_gate,
)  # fmt: skip

CONFIG = MoEConfig(E, K, H, I)


def _layer(change):
    return lambda: moe_ops.fused_moe(**{**good(), **change})


BAD_MODULES = {
    # Configs
    "no experts at all": (lambda: MoEConfig(0, K, H, I), ValueError, "num_experts=0: expected at least 1"),
    "float size": (lambda: MoEConfig(E, K, 8.0, I), TypeError, "hidden_size=8.0: expected an int, got float"),
    "negative size": (lambda: MoEConfig(E, K, H, -5), ValueError, "intermediate_size=-5: expected at least 1"),
    "more than all": (lambda: MoEConfig(E, E + 1, H, I), ValueError, "top_k=7: expected at most num_experts=6"),
    "number for a routing": (lambda: MoEConfig(E, K, H, I, routing=2), TypeError,
        "routing=2: expected RoutingConfig, got int"),
    "groups too small": (
        lambda: MoEConfig(E, 4, H, I, routing=RoutingConfig(4, num_groups=3)), ValueError,
        "top_k=4: expected at most 2, the experts in topk_g",
    ),
    "sums of one": (
        lambda: MoEConfig(E, K, H, I, routing=RoutingConfig(K, num_groups=6, topk_groups=3, group_score="top2_sum")),
        ValueError, "group_score='top2_sum' with groups of 1 expert: expected at least 2",
    ),
    "function for a name": (lambda: MoEConfig(E, K, H, I, activation=own_gate), TypeError,
        "activation=<function own_gate .*: expected Act"),
    "unknown emit": (lambda: MoEConfig(E, K, H, I, emit="eager"), ValueError,
        "emit='eager': expected one of 'auto', 'stages'"),
    "dict for a router": (lambda: MoEConfig(E, K, H, I, router={}), TypeError,
        "router={}: expected RouterConfig, got dict"),
    "name for a gate's dtype": (lambda: layers.RouterConfig(gate_dtype="float32"), TypeError,
        "gate_dtype='float32': expected None or a fl"),
    "number for a function": (lambda: layers.RouterConfig(routing_function=3), TypeError,
        "routing_function=3: expected None or a function"),
    "gated by True": (lambda: layers.SharedExpertConfig(4, gated=True), ValueError,
        "gated=True: expected one of 'plain', 'sigmoid'"),
    "chunks of nothing": (lambda: layers.ExpertsConfig(chunk_size=0), ValueError,
        "chunk_size=0: expected at least 1"),
    # Modules
    "integer parameters": (lambda: FusedMoE(CONFIG, dtype=torch.int32), TypeError,
        "dtype=torch.int32: expected None or a floating torch.dty"),
    "name of parameters' dtype": (lambda: MoEBlock(CONFIG, dtype="half"), TypeError,
        "dtype='half': expected None or a floating torch.dtype"),
    "map with a hole": (lambda: FusedMoE(CONFIG, index(0, 2, -1, -1, -1, -1)), ValueError,
        r"expert_map=\[0, 2, -1, .*: expected each of 0"),
    "map of another layer": (lambda: FusedMoE(CONFIG, index(*range(7))), ValueError,
        r"expert_map has shape \(7,\): expected \(6,\)"),
    "shard that does not divide": (lambda: FusedMoE(CONFIG, shard=layers.TensorShard(0, 2)), ValueError,
        "intermediate_size=5: expected a mul"),
    "rank of nobody": (lambda: layers.TensorShard(2, 2), ValueError, "rank=2: expected a rank in"),
    "tokens of another dtype": (lambda: FusedMoE(CONFIG)(X.double(), LOGITS), TypeError,
        "w13 has dtype torch.float32: expected torch.float64"),
    "tuple for a RouterOutput": (lambda: FusedMoE(CONFIG)(X, (LOGITS, WEIGHTS, IDS)), TypeError,
        "router_logits=<tuple>: expected a torch.T"),
    "float ids routed": (
        lambda: FusedMoE(CONFIG)(X, RouterOutput(LOGITS, WEIGHTS, IDS.float())), TypeError,
        "topk_ids has dtype torch.float32: expected to",
    ),
    "buffer of floats": (lambda: layers.RoutedExpertsReplay(WEIGHTS, ROUTING), TypeError,
        "buffer has dtype torch.float32: expected torch.int32"),
    "buffer of nothing": (lambda: layers.RoutedExpertsCapture(None), TypeError,
        "buffer=None: expected Tensor, got NoneType"),
    "adapters of nobody": (lambda: layers.ExpertLora(FusedMoE(CONFIG), 0, 4, index(0)), ValueError,
        "num_adapters=0: expected at least 1"),
    "halves of no adapter": (lambda: layers.join_gate_up(3, 4), TypeError, "gate=3: expected LowRank, got int"),
    "unknown strategy": (lambda: layers.SimulatedRouting("nope", E, K), ValueError,
        "strategy='nope': expected one of 'uniform', 'normal'"),
    "no ranks": (lambda: layers.determine_expert_map(0, 0, E), ValueError, "ep_size=0: expected at least 1"),
    "no such file": (lambda: layers.load_checkpoint(MoEBlock(CONFIG), "/no/such"), ValueError,
        "path='/no/such': expected a folder or a safet"),
    "number for a module": (lambda: layers.weight_decay_groups(3, 0.1), TypeError,
        "model=3: expected Module, got int"),
    "name for a decay": (lambda: layers.weight_decay_groups(nn.Identity(), "0.1"), TypeError,
        "weight_decay='0.1': expected a number, got str"),
    "negative decay": (lambda: layers.weight_decay_groups(nn.Identity(), -0.1), ValueError,
        "weight_decay=-0.1: expected at least 0"),
    "load without values": (lambda: layers.rebalance_experts(torch.ones(E, device="meta"), E, 1, 1, 2), ValueError,
        "load is on the meta device: expected work per expert"),
    "experts of no number": (lambda: layers.ExpertPlacement.of(index(0), "1"), TypeError,
        "num_experts='1': expected an int, got str"),
    "complex places": (lambda: layers.ExpertPlacement.of(torch.ones(E, dtype=torch.complex64), E), TypeError,
        "physical_to_logical=.*: expected a tensor of integers"),
    "place of no number": (lambda: layers.ExpertPlacement.of(torch.tensor(0), E), ValueError,
        r"physical_to_logical has shape \[\]: expected \[P\] or \[L, P\]"),
    "places without values": (lambda: layers.ExpertPlacement.of(torch.zeros(E, dtype=torch.int64, device="meta"), E),
        ValueError, "physical_to_logical is on the meta device: expected experts"),
    "seed in words": (lambda: layers.SimulatedRouting("uniform", K, seed="one"), TypeError,
        "seed='one': expected an int"),
    "seed beyond 64 bits": (lambda: layers.SimulatedRouting("uniform", K, seed=2**63), ValueError,
        "seed=9223372036854775808: expected an int of 64 bits"),
    "nameless strategy": (lambda: layers.register_routing_strategy(3, own_gate), TypeError,
        "name=3: expected str, got int"),
    "popularity of others": (lambda: layers.sample_experts(torch.zeros(E + 1), LOGITS, K, torch.tensor(0)), ValueError,
        r"log_popularity has shape \[7\]: expected \[6\]"),
    "list for a strategy": (lambda: layers.SimulatedRouting(["uniform"], K), TypeError,
        r"strategy=\['uniform'\]: expected str, got list"),
    "draws of nobody": (lambda: layers.sample_experts(torch.zeros(E), LOGITS, -1, torch.tensor(0)), ValueError,
        "top_k=-1: expected at least 1"),
    "number for a seed": (lambda: layers.sample_experts(torch.zeros(E), LOGITS, K, 0), TypeError,
        "seed=0: expected a torch.Tensor"),
    "fraction for a seed": (lambda: layers.sample_experts(torch.zeros(E), LOGITS, K, torch.tensor(0.5)), TypeError,
        "seed has dtype torch.float32: expected torch.int32 or torch.int64"),
    "number for experts": (lambda: layers.MoERunner(3), TypeError,
        "experts=3: expected FusedMoE or ModularKernel, got int"),
    "step that is none": (lambda: layers.CudaGraphRunner(3, [1]), TypeError, "fn=3: expected a function or a module"),
    "no sizes": (lambda: layers.CudaGraphRunner(nn.Identity(), []), ValueError,
        "capture_sizes is empty: expected numbers of rows"),
}  # fmt: skip
BAD_INPUTS = {
    **{f"layer: {name}": (_layer(change), *expected) for name, (change, *expected) in BAD_LAYERS.items()},
    **BAD_CALLS,
    **BAD_VALUES,
    **BAD_MODULES,
}
