"""MoE blocks of families that have no tiny model in `families`: small and random."""

import importlib

import torch
from torch import nn

HIDDEN, EXPERTS = 64, 8
_SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 32, "moe_intermediate_size": 32, "ffn_hidden_size": 32,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS,
    "num_experts_per_tok": 3, "moe_k": 3, "moe_topk": 3, "n_shared_experts": 1, "num_shared_experts": 1,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "shared_expert_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48,
}  # fmt: skip
BLOCKS = {
    "afmoe": ("AfmoeConfig", "AfmoeSparseMoeBlock"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2Moe"),
    "dots1": ("Dots1Config", "Dots1MoE"),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeSparseMoeBlock"),
    "flex_olmo": ("FlexOlmoConfig", "FlexOlmoSparseMoeBlock"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeMoE"),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", "HunYuanMoEV1Moe"),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeSparseMoeBlock"),
    "minimax": ("MiniMaxConfig", "MiniMaxSparseMoeBlock"),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2SparseMoeBlock"),
    "nemotron_h": ("NemotronHConfig", "NemotronHMoE"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextSparseMoeBlock"),
}


def block(family: str, implementation: str) -> nn.Module:
    """A block in float32 whose router has no near ties."""
    config_class, block_class = BLOCKS[family]
    root = f"transformers.models.{family}"
    config = getattr(importlib.import_module(f"{root}.configuration_{family}"), config_class)()
    for name, value in _SIZES.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config._experts_implementation = implementation
    made_of = getattr(importlib.import_module(f"{root}.modeling_{family}"), block_class)
    made = _made(made_of, config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in (*made.named_parameters(), *made.named_buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(0, 0.5 if "gate.w" in name or "router" in name else 0.1, generator=generator)
    return made


def _made(block_class: type[nn.Module], config: object) -> nn.Module:
    try:
        return block_class(config)
    except TypeError:  # it wants to know which layer it is in
        return block_class(config, 1)
