"""A tiny random model of every MoE family of transformers, in each configuration that routes in its own way."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from tests.layers.weights import families
from tests.layers.weights.families import EXPERTS, FULL, HIDDEN, LAYERS, MLA, MROPE, TOP_K, Case, causal, text

_V4 = {
    "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
_VL = {**MROPE, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]},
       "moe_intermediate_size": [32, 32]}  # fmt: skip
_SEQ2SEQ = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_sparse_step": 1,
            "decoder_sparse_step": 1, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "dropout": 0.0,
            "attention_dropout": 0.0, "expert_capacity": 64}  # fmt: skip
_MORE = {
    "axk1": causal("axk1", "AXK1", **MLA),
    "deepseek_v4": causal("deepseek_v4", "DeepseekV4", mlp_layer_types=["moe"] * LAYERS, **_V4),
    "deepseek_v4.hash": causal("deepseek_v4", "DeepseekV4", mlp_layer_types=["hash_moe"] * LAYERS, **_V4),
    "diffusion_gemma": text("diffusion_gemma", "DiffusionGemma", model="EncoderTextModel", **FULL),
    "doge": causal("doge", "Doge", is_moe=True, num_experts=64, num_experts_per_tok=4, norm_topk_prob=False),
    "dots3_note.vision": Case("dots3_note", "Dots3NoteVisionConfig", "Dots3NoteVisionModel", {
        "adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN, "patch_size": 4,
        "per_layer_config": {i: {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K} for i in range(LAYERS)},
    }),
    "ernie4_5_vl_moe": text("ernie4_5_vl_moe", "Ernie4_5_VLMoe", **_VL),
    "ernie4_5_vl_moe.mixed": text("ernie4_5_vl_moe", "Ernie4_5_VLMoe", **_VL),
    "gemma4": Case("gemma4", "Gemma4TextConfig", "Gemma4ForCausalLM", {
        "enable_moe_block": True, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16, **FULL,
    }),
    "inkling": Case("inkling", "InklingTextConfig", "InklingForCausalLM"),
    "inkling2": Case("inkling2", "Inkling2TextConfig", "Inkling2ForCausalLM"),
    "inkling2_loop": Case("inkling2_loop", "Inkling2LoopTextConfig", "Inkling2LoopForCausalLM", {
        "num_hidden_layers": 3, "loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 2,
        "n_layers_per_attn_res_block": 1, "loop_gate_rank": 8,
    }),
    "jetmoe": causal("jetmoe", "JetMoe", kv_channels=16),
    "llama4": Case("llama4", "Llama4TextConfig", "Llama4ForCausalLM"),
    "longcat_flash": causal("longcat_flash", "LongcatFlash", **MLA, ffn_hidden_size=96, expert_ffn_hidden_size=32,
                            zero_expert_num=2),
    "muse_spark": text("muse_spark", "MuseSpark"),
    "nllb_moe": Case("nllb_moe", "NllbMoeConfig", "NllbMoeForConditionalGeneration", _SEQ2SEQ),
    "phimoe": causal("phimoe", "Phimoe"),
    "switch_transformers": Case(
        "switch_transformers", "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration",
        {"num_decoder_layers": 2, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "num_heads": 4,
         "d_kv": 16, "d_ff": 32, "dropout_rate": 0.0, "expert_capacity": 64},
    ),
    "zaya": causal("zaya", "Zaya", num_experts_per_tok=1, router_hidden_size=32),
}  # fmt: skip


def _named() -> dict[str, Case]:
    """By family, and by "family.variant" where it has several."""
    found = {}
    for model_type, case in families.CASES.items():
        is_second = model_type.endswith("talker_text")
        found[f"{case.folder}.talker" if is_second else case.folder] = case
    return {**found, **_MORE}


CASES = dict(sorted(_named().items()))


def is_installed(name: str) -> bool:
    """Whether this transformers has the family."""
    return families.is_installed(CASES[name].folder)


def stock_model(name: str, **options: Any) -> nn.Module:
    """In eval mode and float32, its experts large and its routers drawn so wide that no two experts are close."""
    case = CASES[name]
    config = families.made_config(case, **options)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = case.made_class()(config).eval().float()
    _spread(model)
    return model


def _spread(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        std = next((std for pattern, std in _STDS if re.search(pattern, name)), None)
        if "tid2eid" in name:
            chosen = torch.rand(tensor.shape[0], EXPERTS, generator=generator).argsort(-1)
            tensor.data.copy_(chosen[:, : tensor.shape[1]])
        elif std is not None and tensor.is_floating_point():
            tensor.data.normal_(0 if tensor.dim() > 1 or "bias" in name else 1, std, generator=generator)


_STDS = (
    (r"correction_bias|expert_bias|balancing_biases", 0.1),
    (r"\.(gate|router|shared_expert_gate)\.[\w.]*", 0.3),
    (r"shared|norm", None),
    (r"\.(experts|input_linear|output_linear)\.", 0.2),
    (r"(up|down)_embed", 0.2),
)


def inputs(name: str, length: int = 11) -> dict[str, Any]:
    """What the model is called with."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 97, (2, length), generator=generator)
    plain = {"input_ids": ids, "use_cache": False}
    if name in ("nllb_moe", "switch_transformers"):
        return {**plain, "decoder_input_ids": ids.flip(1)[:, :7].contiguous()}
    if name == "qwen3_omni_moe.talker":
        return {"use_cache": False, "inputs_embeds": torch.randn(*ids.shape, HIDDEN, generator=generator)}
    if name == "dots3_note.vision":
        return {
            "pixel_values": torch.randn(16, 48, generator=generator),
            "grid_thw": torch.tensor([[1, 4, 4]]),
        }
    if name == "ernie4_5_vl_moe.mixed":
        return {**plain, "moe_mm_token_type_ids": (ids % 2).int()}
    return plain


def outputs(model: Any, name: str, **more: Any) -> tuple[Tensor, Any]:
    """Logits, or hidden states of a model without a head; and all that was returned."""
    returned = model(**inputs(name), **more)
    logits = getattr(returned, "logits", None)
    return (returned.last_hidden_state if logits is None else logits), returned
