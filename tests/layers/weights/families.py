"""Tiny models of every family that has a mixture of experts in the installed transformers."""

import copy
import dataclasses
import importlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

LAYERS, EXPERTS, TOP_K, HIDDEN, INTER = 2, 8, 2, 64, 24

# Values for whichever of these fields a config has. Small odd widths, so that no two dimensions are equal.
POOL = {
    "vocab_size": 97, "hidden_size": HIDDEN, "d_model": HIDDEN, "intermediate_size": 40, "moe_intermediate_size": INTER,
    "shared_expert_intermediate_size": 56, "shared_intermediate_size": 48, "share_expert_dim": 56,
    "moe_shared_expert_intermediate_size": 56, "num_hidden_layers": LAYERS, "num_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": EXPERTS,
    "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
    "moe_topk": TOP_K, "moe_k": TOP_K, "top_k_experts": TOP_K, "n_shared_experts": 1, "num_shared_experts": 1,
    "moe_num_shared_experts": 1, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
    "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "num_dense_layers": 0, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "sliding_window": 64, "mlp_layer_types": ["sparse"] * LAYERS, "index_topk": 16,
    "index_head_dim": 16, "index_n_heads": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_head_dim": 16, "linear_num_heads": 4, "num_mtp_layers": 0, "num_nextn_predict_layers": 0,
    "use_cache": False,
}  # fmt: skip
MLA = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3],
                              "partial_rotary_factor": 1.0}}  # fmt: skip
FULL = {"layer_types": ["full_attention"] * LAYERS}


@dataclass(frozen=True)
class Case:
    """Where a family's classes are, and what its config needs beside the pool."""

    folder: str
    config: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    code: str = ""  # the folder of the model's class, where it is another family's

    def made_class(self) -> Any:
        """The class of the model."""
        folder = self.code or self.folder
        return getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), self.model)


def causal(folder: str, stem: str, **options: Any) -> Case:
    """A causal language model."""
    return Case(folder, f"{stem}Config", f"{stem}ForCausalLM", options)


def text(folder: str, stem: str, model: str = "TextModel", **options: Any) -> Case:
    """The text model of one of several parts."""
    return Case(folder, f"{stem}TextConfig", stem + model, options)


CASES = {
    "afmoe": causal("afmoe", "Afmoe", route_scale=1.5),
    "aria_text": text("aria", "Aria", "TextForCausalLM"),
    "axk2": causal("axk2", "AXK2", **MLA),
    "bailing_hybrid": causal("bailing_hybrid", "BailingHybrid", **MLA, **FULL),
    "beam": causal("beam", "Beam"),
    "cohere2_moe": causal("cohere2_moe", "Cohere2Moe", shared_expert_combination_strategy="average"),
    "dbrx": causal(
        "dbrx",
        "Dbrx",
        n_heads=4,
        n_layers=LAYERS,
        max_seq_len=128,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        ffn_config={
            "hidden_size": HIDDEN,
            "ffn_hidden_size": INTER,
            "moe_num_experts": EXPERTS,
            "moe_top_k": TOP_K,
        },
    ),
    "deepseek_ocr2_text": text(
        "deepseek_ocr2", "DeepseekOcr2", n_group=None, topk_group=None, head_dim=None, num_key_value_heads=4
    ),
    "deepseek_v2": causal(
        "deepseek_v2", "DeepseekV2", topk_method="group_limited_greedy", **{**MLA, "head_dim": None}
    ),
    "deepseek_v3": causal("deepseek_v3", "DeepseekV3", **MLA),
    "deepseek_v32": causal("deepseek_v32", "DeepseekV32", **MLA),
    "dots1": causal("dots1", "Dots1"),
    "dots3_note_text": Case(
        "dots3_note",
        "Dots3NoteTextConfig",
        "Dots3NoteForCausalLM",
        {**MLA, "shared_experts_intermediate_size": 40},
    ),
    "ernie4_5_moe": causal("ernie4_5_moe", "Ernie4_5_Moe", moe_layer_start_index=0),
    "exaone_moe": causal("exaone_moe", "ExaoneMoe"),
    "flex_olmo": causal("flex_olmo", "FlexOlmo"),
    "flint": causal("flint", "Flint"),
    "glm4_moe": causal("glm4_moe", "Glm4Moe"),
    "glm4_moe_lite": causal("glm4_moe_lite", "Glm4MoeLite", **MLA),
    "glm4v_moe_text": text("glm4v_moe", "Glm4vMoe", **MROPE),
    "glm5_next_text": text(
        "glm5_next",
        "Glm5Next",
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        head_dim=0,
        layer_types=["indexed_attention"] * LAYERS,
        indexer_types=["full"] * LAYERS,
    ),
    "glm_moe_dsa": causal("glm_moe_dsa", "GlmMoeDsa", **MLA),
    "gpt_oss": causal("gpt_oss", "GptOss"),
    "granitemoe": causal("granitemoe", "GraniteMoe"),
    "granitemoe_swa": causal("granitemoe_swa", "GraniteMoeSWA"),
    "granitemoehybrid": causal("granitemoehybrid", "GraniteMoeHybrid", layer_types=["attention"] * LAYERS),
    "granitemoeshared": causal("granitemoeshared", "GraniteMoeShared"),
    "hunyuan_v1_moe": causal("hunyuan_v1_moe", "HunYuanMoEV1"),
    "hy_v3": causal("hy_v3", "HYV3"),
    "hy_v4": causal("hy_v4", "HYV4", **MLA),
    "hy_v4_vl_text": text(
        "hy_v4_vl",
        "HYV4VL",
        **MLA,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    ),
    "jamba": causal(
        "jamba",
        "Jamba",
        expert_layer_period=1,
        expert_layer_offset=0,
        attn_layer_period=1,
        attn_layer_offset=0,
    ),
    "kimi_linear": causal("kimi_linear", "KimiLinear", **MLA, **FULL),
    "kolibri1": causal("kolibri1", "Kolibri1"),
    "laguna": causal("laguna", "Laguna"),
    "lara_mini": causal("lara_mini", "LaraMini", **FULL),
    "lfm2_moe": causal("lfm2_moe", "Lfm2Moe", **FULL),
    "llama4_text": Case("llama4", "Llama4TextConfig", "Llama4ForCausalLM", {"num_experts_per_tok": 1}),
    "mellum": causal("mellum", "Mellum"),
    "mimo_v2_flash": causal("mimo_v2_flash", "MiMoV2Flash", v_head_dim=16),
    "minimax": causal("minimax", "MiniMax", **FULL),
    "minimax_m2": causal("minimax_m2", "MiniMaxM2"),
    "minimax_m3_vl_text": Case("minimax_m3_vl", "MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM"),
    "mistral4": causal("mistral4", "Mistral4", **MLA),
    "mistral_large4_text": text("mistral_large4", "MistralLarge4", **MLA),
    "mixtral": causal("mixtral", "Mixtral"),
    "nemotron_h": causal(
        "nemotron_h", "NemotronH", layers_block_type=["moe", "attention", "moe"], moe_latent_size=24
    ),
    "olmoe": causal("olmoe", "Olmoe", norm_topk_prob=False),
    "openai_privacy_filter": Case(
        "openai_privacy_filter", "OpenAIPrivacyFilterConfig", "OpenAIPrivacyFilterForTokenClassification"
    ),
    "qwen2_moe": causal("qwen2_moe", "Qwen2Moe", norm_topk_prob=False),
    "qwen3_5_moe_text": Case("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", FULL),
    "qwen3_moe": causal("qwen3_moe", "Qwen3Moe"),
    "qwen3_next": causal("qwen3_next", "Qwen3Next", **FULL),
    "qwen3_omni_moe_text": Case("qwen3_omni_moe", "Qwen3OmniMoeTextConfig", "Qwen3OmniMoeThinkerTextModel"),
    "qwen3_omni_moe_talker_text": Case(
        "qwen3_omni_moe",
        "Qwen3OmniMoeTalkerTextConfig",
        "Qwen3OmniMoeTalkerModel",
        {"shared_expert_intermediate_size": 56},
    ),
    "qwen3_vl_moe_text": text("qwen3_vl_moe", "Qwen3VLMoe"),
    "qwen4_exp_text": Case("qwen4_exp", "Qwen4ExpTextConfig", "Qwen4ExpForCausalLM"),
    "sarvam_mla": Case("sarvam_mla", "SarvamMLAConfig", "DeepseekV3ForCausalLM", MLA, code="deepseek_v3"),
    "sarvam_moe": Case("sarvam_moe", "SarvamMoEConfig", "Glm4MoeForCausalLM", code="glm4_moe"),
    "solar_open": causal("solar_open", "SolarOpen"),
    "step3p5": text("step3p7", "Step3p7"),
    "unlimited_ocr_text": text("unlimited_ocr", "UnlimitedOcr", head_dim=None, num_key_value_heads=4),
}


def is_installed(folder: str) -> bool:
    """Whether this transformers has the family."""
    return (Path(transformers.__file__).parent / "models" / folder).is_dir()


def _runs(case: Case) -> bool:
    if case.folder == "glm5_next":  # its attention has other names in the oldest transformers with it
        return is_installed("flint")
    return is_installed(case.folder)


FAMILIES = tuple(name for name, case in CASES.items() if _runs(case))


def tiny_config(family: str, **options: Any) -> Any:
    return made_config(CASES[family], **options)


def made_config(case: Case, **options: Any) -> Any:
    module = importlib.import_module(f"transformers.models.{case.folder}.configuration_{case.folder}")
    config_class = getattr(module, case.config)
    known = {each.name for each in dataclasses.fields(config_class)}
    values = {name: value for name, value in POOL.items() if name in known}
    return config_class(**copy.deepcopy({**values, **case.options, **options}))


def tiny_model(family: str, **options: Any) -> nn.Module:
    """In eval mode, with routers drawn so wide that no two experts are close."""
    case = CASES[family]
    config = tiny_config(family, **options)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = case.made_class()(config).eval().float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for block in moe_blocks(model).values():
            for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
                std = 0.3 if re.search(r"(gate|router|wg|layer)\.weight$", name) else 0.15
                tensor.normal_(0, std, generator=generator)
    return model


def moe_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that own a router and experts."""
    found = {}
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if "experts" in children and ("gate" in children or "router" in children):
            found[name] = module
    return found


def run(block: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """The block's output: some return their routing as well."""
    with torch.no_grad():
        output = block(hidden_states)
    return (output[0] if isinstance(output, tuple) else output).view_as(hidden_states)
