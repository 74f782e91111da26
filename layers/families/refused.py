"""Families whose blocks `MoEConfig` cannot express, each by the field that says so."""

from typing import NamedTuple


class Refusal(NamedTuple):
    """A field of the family's config, and what it asks for."""

    field: str
    reason: str


_CAPACITY = Refusal("expert_capacity", "experts that drop tokens over their capacity are not expressible")
_POOLS = Refusal(
    "moe_intermediate_size", "two pools of experts, for text and vision tokens, are not expressible"
)
_NORM = Refusal("top_k_experts", "a norm of what only the router sees is not expressible")
_CAPS = Refusal("mlp_gate_softcap", "caps inside the activation are not expressible")

REFUSED = {
    "axk1": Refusal("rms_norm_eps", "a norm of the block's output (post_mlp_layernorm) is not expressible"),
    "deepseek_v4": Refusal("scoring_func", "routing by token id in its first layers is not expressible"),
    "diffusion_gemma_text": _NORM,
    "doge": Refusal("is_moe", "product-key retrieval of single rows is no mixture of feed-forward experts"),
    "dots3_note_vision_encoder": Refusal(
        "per_layer_config", "experts that differ by layer are not expressible"
    ),
    "ernie4_5_vl_moe_text": _POOLS,
    "gemma4_text": _NORM,
    "inkling2_loop_text": _CAPS,
    "inkling2_text": _CAPS,
    "inkling_text": Refusal(
        "shared_expert_sink", "weights shared with the shared experts are not expressible"
    ),
    "jetmoe": Refusal(
        "kv_channels", "experts in attention, and one bias for the output of all, are not expressible"
    ),
    "longcat_flash": Refusal(
        "zero_expert_num",
        "weights of experts that only return their input, as its block has, are not expressible",
    ),
    "muse_spark_text": Refusal(
        "output_multiplier", "a factor of the logits, and a norm of the experts' input, are not expressible"
    ),
    "nllb-moe": _CAPACITY,
    "phimoe": Refusal("router_jitter_noise", "sparsemixer routing is not expressible"),
    "switch_transformers": _CAPACITY,
    "vitpose_backbone": Refusal("num_experts", "experts chosen by dataset are not expressible"),
    "zaya": Refusal("router_hidden_size", "a router with layers and state of its own is not expressible"),
}
"""By `model_type`."""
