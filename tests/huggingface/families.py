"""Tiny random models of every supported family: two layers, hidden 64, eight experts, tie-free routers."""

import copy

import torch
import transformers
from torch import nn

HIDDEN, INTER, EXPERTS, TOP_K, VOCAB = 64, 32, 8, 3, 96

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_QWEN = {
    "num_experts": EXPERTS,
    "moe_intermediate_size": INTER,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_GROUPED = {
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": INTER,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
}

CONFIGS = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "qwen2_moe": ("Qwen2Moe", {**_QWEN, "shared_expert_intermediate_size": 48, "norm_topk_prob": False}),
    "qwen3_moe": ("Qwen3Moe", {**_QWEN, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {"num_experts": EXPERTS, "norm_topk_prob": False}),
    "deepseek_v3": ("DeepseekV3", {**_GROUPED, **_MLA}),
    "glm4_moe": ("Glm4Moe", {**_GROUPED, "use_qk_norm": True}),
    "gpt_oss": ("GptOss", {"num_local_experts": EXPERTS, "sliding_window": 64}),
}
FAMILIES = tuple(CONFIGS)
ROUTER_LOGITS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")  # families with an auxiliary loss


def tiny_config(family: str, **overrides):
    name, options = CONFIGS[family]
    return getattr(transformers, f"{name}Config")(**{**_COMMON, **options, **overrides})


def tiny_model(family: str, dtype: torch.dtype = torch.float32, implementation: str = "eager", **overrides):
    """A causal language model in eval mode, its weights drawn wide enough that no two logits are close."""
    torch.manual_seed(0)
    config = tiny_config(family, **overrides)
    config._experts_implementation = implementation
    model_class = getattr(transformers, f"{CONFIGS[family][0]}ForCausalLM")
    model = model_class(config).eval()
    spread(model)
    return model.to(dtype)


def spread(model: nn.Module) -> None:
    """Redraws what decides routing: transformers' own init (std 0.02, zero biases) gives near ties."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if ".gate.weight" in name or ".router.weight" in name:
                tensor.normal_(0, 0.5, generator=generator)
            elif "e_score_correction_bias" in name or ".router.bias" in name:
                tensor.normal_(0, 0.1, generator=generator)
            elif ".experts." in name:
                tensor.normal_(0, 0.1, generator=generator)


def pair(family: str, dtype: torch.dtype = torch.float32, **overrides):
    """Two equal models that share nothing: one to keep stock, one to patch."""
    model = tiny_model(family, dtype, **overrides)
    return model, copy.deepcopy(model)


def tokens(batch: int, length: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
