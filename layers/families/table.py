"""The families whose blocks `MoEConfig` expresses, as data."""

import torch

from layers.config import RouterConfig
from layers.families.family import (
    Family,
    clamped_silu,
    cohere,
    deepseek_v2,
    field,
    grouped,
    kolibri,
    llama4,
    named,
    relu2,
    sigmoid,
    silu,
    softmax,
    step_silu,
    swiglu_oai,
    times,
    topk_softmax,
)
from moe_ops import RoutingConfig

_FLOAT32 = RouterConfig(gate_dtype=torch.float32)
_FLOAT32_BIASED = RouterConfig(has_correction_bias=True, gate_dtype=torch.float32)
_BIASED = RouterConfig(has_correction_bias=True)
_NO_JITTER = ("router_jitter_noise", (None, 0, 0.0), "noise on the router's input is not expressible")
_NO_SHARED_BIAS = ("mlp_bias", (None, False), "biases of a shared expert are not expressible")
_PLAIN_SHARED = times("moe_intermediate_size", "n_shared_experts")
_WIDTH = "intermediate_size"

_DEEPSEEK_V3 = Family(grouped(), router=_FLOAT32_BIASED, shared=_PLAIN_SHARED)
_GROUPED_SOFTMAX = Family(grouped("softmax", 0.0), shared=_PLAIN_SHARED)
_DEEPSEEK_V2 = Family(deepseek_v2, router=_FLOAT32, shared=_PLAIN_SHARED, needs=(_NO_SHARED_BIAS,))
_MIXTRAL = Family(softmax(True), width=_WIDTH, needs=(_NO_JITTER,))
_QWEN = Family(softmax("norm_topk_prob"))
_QWEN_SHARED = Family(
    softmax("norm_topk_prob"), shared=field("shared_expert_intermediate_size"), shared_gate="sigmoid"
)
_GRANITE = Family(topk_softmax, width=_WIDTH)
_GRANITE_SHARED = Family(topk_softmax, width=_WIDTH, shared=field("shared_intermediate_size"))
_HY_V4 = Family(
    grouped(),
    router=_FLOAT32_BIASED,
    activation=clamped_silu,
    shared=_PLAIN_SHARED,
    shared_activation=named("hidden_act"),
)

FAMILIES = {
    "afmoe": Family(
        sigmoid(1e-20, "route_scale"),
        router=_BIASED,
        shared=times("moe_intermediate_size", "num_shared_experts"),
    ),
    "aria_text": Family(
        topk_softmax,
        width=_WIDTH,
        activation=silu,
        shared=times(_WIDTH, "moe_num_shared_experts"),
        shared_activation=named("hidden_act"),
        needs=(_NO_SHARED_BIAS,),
    ),
    "axk2": Family(grouped(fill=0.0), router=_FLOAT32_BIASED, shared=_PLAIN_SHARED),
    "bailing_hybrid": _DEEPSEEK_V3,
    "beam": Family(grouped(), router=_FLOAT32_BIASED),
    "cohere2_moe": Family(
        cohere,
        width=_WIDTH,
        shared=times(_WIDTH, "num_shared_experts"),
        combination="shared_expert_combination_strategy",
        needs=(
            ("shared_expert_combination_strategy", ("sum", "average"), "expected 'sum' or 'average'"),
            ("expert_selection_fn", ("softmax", "sigmoid"), "expected 'softmax' or 'sigmoid'"),
        ),
    ),
    "dbrx": Family(
        lambda config, top_k: RoutingConfig(
            top_k, renormalize=config.ffn_config.moe_normalize_expert_weights is not None
        ),
        width="ffn_config.ffn_hidden_size",
        activation=named("ffn_config.ffn_act_fn.name"),
        needs=(
            (
                "ffn_config.moe_normalize_expert_weights",
                (None, 1),
                "expected 1: weights are divided by their sum",
            ),
            ("ffn_config.moe_jitter_eps", (None, 0), "noise on the router's input is not expressible"),
        ),
    ),
    "deepseek_ocr2_text": _DEEPSEEK_V2,
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "dots1": _DEEPSEEK_V3,
    "dots3_note_text": Family(
        grouped(),
        router=_FLOAT32_BIASED,
        shared=times("shared_experts_intermediate_size", "n_shared_experts"),
    ),
    "ernie4_5_moe": Family(
        softmax(True),
        router=_FLOAT32_BIASED,
        shared=times("moe_intermediate_size", "moe_num_shared_experts"),
        needs=(
            ("use_bias", (None, False), "biases of a shared expert are not expressible"),
            ("moe_norm_min", (None, 0, 1e-12), "a smallest sum of weights is not expressible"),
        ),
    ),
    "exaone_moe": Family(
        grouped(), router=_FLOAT32_BIASED, shared=times("moe_intermediate_size", "num_shared_experts")
    ),
    "flex_olmo": Family(softmax("norm_topk_prob"), width=_WIDTH),
    "flint": Family(
        sigmoid(norm="norm_topk_prob"), router=_FLOAT32, shared=field("shared_expert_intermediate_size")
    ),
    "glm4_moe": _DEEPSEEK_V3,
    "glm4_moe_lite": _DEEPSEEK_V3,
    "glm4v_moe_text": _DEEPSEEK_V3,
    "glm5_next_text": Family(
        grouped(),
        router=_FLOAT32_BIASED,
        activation=clamped_silu,
        shared=_PLAIN_SHARED,
        needs=(("hidden_act", ("silu", "swish"), "clamps are expressible with 'silu' only"),),
    ),
    "glm_moe_dsa": _DEEPSEEK_V3,
    "gpt_oss": Family(
        topk_softmax,
        width=_WIDTH,
        router=RouterConfig(has_bias=True),
        activation=swiglu_oai(interleaved=True),
        has_bias=True,
    ),
    "granitemoe": _GRANITE,
    "granitemoe_swa": _GRANITE_SHARED,
    "granitemoehybrid": _GRANITE_SHARED,
    "granitemoeshared": _GRANITE_SHARED,
    "hunyuan_v1_moe": Family(softmax(True), width=_WIDTH, router=_FLOAT32, shared=field(_WIDTH)),
    "hy_v3": Family(
        sigmoid(1e-20, "router_scaling_factor"),
        router=_FLOAT32_BIASED,
        shared=times("moe_intermediate_size", "num_shared_experts"),
        needs=(_NO_SHARED_BIAS,),
    ),
    "hy_v4": _HY_V4,
    "hy_v4_vl_text": _HY_V4,
    "jamba": Family(softmax(False), width=_WIDTH),
    "kimi_linear": _DEEPSEEK_V3,
    "kolibri1": Family(kolibri, router=_FLOAT32_BIASED, shared=field("shared_expert_intermediate_size")),
    "laguna": Family(
        sigmoid(scale="moe_routed_scaling_factor"),
        router=_BIASED,
        shared=field("shared_expert_intermediate_size"),
        needs=(("moe_router_logit_softcapping", (None, 0, 0.0), "a cap on logits is not expressible"),),
    ),
    "lara_mini": Family(
        softmax("norm_topk_prob"), router=_FLOAT32, shared=field("shared_expert_intermediate_size")
    ),
    "lfm2_moe": Family(
        sigmoid(1e-6, "routed_scaling_factor", "norm_topk_prob"),
        router=_BIASED,
        correction_switch="use_expert_bias",
        activation=silu,
    ),
    "llama4_text": Family(llama4, width=_WIDTH, router=RouterConfig(weight_on="input"), shared=field(_WIDTH)),
    "mellum": _QWEN,
    "mimo_v2_flash": Family(grouped(), router=_FLOAT32_BIASED),
    "minimax": _MIXTRAL,
    "minimax_m2": Family(sigmoid(), width=_WIDTH, router=_BIASED, needs=(_NO_JITTER,)),
    "minimax_m3_vl_text": Family(
        sigmoid(scale="routed_scaling_factor"),
        width=_WIDTH,
        router=_BIASED,
        activation=swiglu_oai(interleaved=False),
        shared=field("shared_intermediate_size"),
    ),
    "mistral4": _GROUPED_SOFTMAX,
    "mistral_large4_text": _GROUPED_SOFTMAX,
    "mixtral": _MIXTRAL,
    "nemotron_h": Family(
        grouped(),
        router=_FLOAT32_BIASED,
        activation=relu2,
        shared=field("moe_shared_expert_intermediate_size"),
        latent="moe_latent_size",
        needs=(_NO_SHARED_BIAS,),
    ),
    "olmoe": Family(softmax("norm_topk_prob"), width=_WIDTH),
    "openai_privacy_filter": Family(
        topk_softmax,
        width=_WIDTH,
        router=RouterConfig(has_bias=True, gate_dtype=torch.float32),
        activation=swiglu_oai(interleaved=False),
        has_bias=True,
    ),
    "qwen2_moe": _QWEN_SHARED,
    "qwen3_5_moe_text": Family(
        softmax(True), shared=field("shared_expert_intermediate_size"), shared_gate="sigmoid"
    ),
    "qwen3_moe": _QWEN,
    "qwen3_next": _QWEN_SHARED,
    "qwen3_omni_moe_talker_text": _QWEN_SHARED,
    "qwen3_omni_moe_text": _QWEN,
    "qwen3_vl_moe_text": Family(softmax(True)),
    "qwen4_exp_text": _QWEN_SHARED,
    "sarvam_mla": _DEEPSEEK_V3,
    "sarvam_moe": _DEEPSEEK_V3,
    "solar_open": _DEEPSEEK_V3,
    "step3p5": Family(
        sigmoid(scale="moe_router_scaling_factor"),
        router=_BIASED,
        activation=step_silu("swiglu_limits"),
        shared=field("share_expert_dim"),
        shared_activation=step_silu("swiglu_limits_shared"),
        needs=(_NO_SHARED_BIAS,),
    ),
    "unlimited_ocr_text": _DEEPSEEK_V2,
}
"""By `model_type` of the config that has the experts' fields; what they compute was compared, not only read."""
