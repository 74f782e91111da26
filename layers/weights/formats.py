"""How model families name and lay out the weights of a MoE block on disk, as data.

Names are relative to the block, "^" leads to the decoder layer around it, "{e}" the number of an expert. One `Format`
serves both ways: it says where to look when a checkpoint is loaded, and how to write one. A loader needs no family:
it takes from each field the alternative whose names are in the file.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class MatrixNames:
    """Names of the matrices of experts, or of a shared expert.

    Attributes:
        gate_up: one name for both (or for the only one of ungated experts), or two: gate, up.
        down: the other projection.
        transposed: [..., H, 2I] and [..., I, H] on disk.
        flat: the experts are stacked along rows, [E*I, H] each, down transposed (DBRX).
        gated: False when there is no gate, and `gate_up` is up alone.
        biases: experts may have biases, which have the matrices' names with "_bias" added.
    """

    gate_up: tuple[str, ...]
    down: str
    transposed: bool = False
    flat: bool = False
    gated: bool = True
    biases: bool = False

    @property
    def is_per_expert(self) -> bool:
        """Whether every expert has tensors of its own."""
        return "{e}" in self.down

    def all(self) -> tuple[str, ...]:
        """Every name."""
        return (*self.gate_up, self.down)


def _linear(
    prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> MatrixNames:
    return MatrixNames((f"{prefix}.{gate}.weight", f"{prefix}.{up}.weight"), f"{prefix}.{down}.weight")


PROJECTIONS = _linear("experts.{e}")
W123 = _linear("experts.{e}", "w1", "w3", "w2")
UNGATED = MatrixNames(("experts.{e}.up_proj.weight",), "experts.{e}.down_proj.weight", gated=False)
STACKED = MatrixNames(("experts.gate_up_proj",), "experts.down_proj", biases=True)
STACKED_TRANSPOSED = replace(STACKED, transposed=True)
STACKED_UNGATED = MatrixNames(("experts.up_proj",), "experts.down_proj", gated=False, biases=True)
NEMO = MatrixNames(("experts.gate_and_up_projs",), "experts.down_projs", transposed=True, gated=False)
GRANITE = MatrixNames(("input_linear.weight",), "output_linear.weight")
ARIA = MatrixNames(("experts.fc1.weight",), "experts.fc2.weight", transposed=True)
STEP = MatrixNames(("gate_proj.weight", "up_proj.weight"), "down_proj.weight")
DBRX = MatrixNames(("experts.mlp.w1", "experts.mlp.v1"), "experts.mlp.w2", flat=True)

LATENT = ("fc1_latent_proj.weight", "fc2_latent_proj.weight")
_SHARED = _linear("shared_experts")
_SHARED_UNGATED = MatrixNames(
    ("shared_experts.up_proj.weight",), "shared_experts.down_proj.weight", gated=False
)
_SHARED_FUSED = MatrixNames(("shared_experts.gate_up_proj.weight",), "shared_experts.down_proj.weight")
_SHARED_BESIDE = MatrixNames(("^shared_mlp.input_linear.weight",), "^shared_mlp.output_linear.weight")


@dataclass(frozen=True, slots=True)
class Format:
    """The names of one family.

    Attributes:
        block: the block's own name in a decoder layer, "" when its parts lie in the layer itself.
        experts: matrices of the routed experts.
        gate: weight of the router, which has its bias beside it.
        correction: selection bias.
        shared: matrices of the shared expert.
        shared_gate: what decides its share of the output.
        latent: projections into the experts' space and back, None for a family that has none.
    """

    block: str = "mlp"
    experts: MatrixNames = PROJECTIONS
    gate: str = "gate.weight"
    correction: str = "gate.e_score_correction_bias"
    shared: MatrixNames = _SHARED
    shared_gate: str = "shared_expert_gate.weight"
    latent: tuple[str, str] | None = None

    @property
    def gate_bias(self) -> str:
        """Bias of the router."""
        return self.gate.removesuffix("weight") + "bias"

    @property
    def correction_is_row(self) -> bool:
        """Whether the selection bias is [1, E] on disk."""
        return "moe_statics" in self.correction


_DEFAULT = Format()
_IN_MEMORY = Format(experts=STACKED)
_MIXTRAL = Format(block="block_sparse_moe", experts=W123)
_QWEN = Format(shared=_linear("shared_expert"))
_GRANITE = Format(
    block="block_sparse_moe", experts=GRANITE, gate="router.layer.weight", shared=_SHARED_BESIDE
)
_GPT_OSS = Format(experts=STACKED_TRANSPOSED, gate="router.weight")
_HY_V4 = Format(experts=STACKED, shared=_linear("shared_experts", gate="linear_gate"))

FORMATS = {
    "afmoe": Format(gate="router.gate.weight", correction="expert_bias"),
    "aria_text": Format(experts=ARIA, gate="router.weight"),
    "bailing_hybrid": Format(correction="gate.expert_bias"),
    "dbrx": Format(block="ffn", experts=DBRX, gate="router.layer.weight"),
    "deepseek_ocr2": _DEFAULT,
    "deepseek_ocr2_text": _IN_MEMORY,
    "ernie4_5_moe": Format(correction="moe_statics.e_score_correction_bias"),
    "exaone_moe": Format(correction="e_score_correction_bias"),
    "flint": _QWEN,
    "glm4v_moe": _DEFAULT,
    "glm4v_moe_text": _IN_MEMORY,
    "gpt_oss": _GPT_OSS,
    "granitemoe": _GRANITE,
    "granitemoe_swa": Format(
        block="block_sparse_moe", experts=STACKED, gate="router.weight", shared=_SHARED_BESIDE
    ),
    "granitemoehybrid": _GRANITE,
    "granitemoeshared": _GRANITE,
    "hunyuan_v1_moe": Format(gate="gate.wg.weight", shared=_linear("shared_mlp")),
    "hy_v3": Format(gate="router.gate.weight", correction="expert_bias", shared=_linear("shared_mlp")),
    "hy_v4": _HY_V4,
    "hy_v4_vl_text": _HY_V4,
    "jamba": Format(block="feed_forward", gate="router.weight"),
    "kimi_linear": Format(block="block_sparse_moe", experts=W123),
    "kolibri1": Format(correction="^moe.router.expert_bias"),
    "laguna": Format(correction="experts.e_score_correction_bias", shared=_linear("shared_expert")),
    "lara_mini": Format(experts=STACKED, shared=_linear("shared_expert")),
    "lfm2_moe": Format(block="feed_forward", experts=W123, correction="expert_bias"),
    "llama4_text": Format(
        block="feed_forward",
        experts=STACKED_TRANSPOSED,
        gate="router.weight",
        shared=_linear("shared_expert"),
    ),
    "minimax": _MIXTRAL,
    "minimax_m2": Format(block="block_sparse_moe", experts=W123, correction="e_score_correction_bias"),
    "minimax_m3_vl": Format(block="block_sparse_moe", experts=W123, correction="e_score_correction_bias"),
    "minimax_m3_vl_text": Format(experts=STACKED, shared=_SHARED_FUSED),
    "mistral4": _IN_MEMORY,
    "mistral_large4": Format(block="", experts=W123, shared=_linear("shared_experts", "w1", "w3", "w2")),
    "mistral_large4_text": Format(block="", experts=W123),
    "mixtral": _MIXTRAL,
    "nemotron_h": Format(block="mixer", experts=UNGATED, shared=_SHARED_UNGATED, latent=LATENT),
    "openai_privacy_filter": _GPT_OSS,
    "qwen2_moe": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "qwen3_next": _QWEN,
    "qwen3_omni_moe_talker_text": Format(experts=STACKED, shared=_linear("shared_expert")),
    "qwen3_vl_moe_text": _IN_MEMORY,  # as transformers writes it; published transposed, which loads as well
    "qwen4_exp_text": _QWEN,
    "sarvam_moe": Format(correction="gate.expert_bias"),
    "step3p5": _IN_MEMORY,
    "step3p7": Format(block="moe", experts=STEP, correction="router_bias", shared=_linear("^share_expert")),
}
"""By `model_type`; a family that is not here has the names of `Format()`."""

_ONLY_READ = (
    Format(experts=STACKED_UNGATED, correction="gate.moe_statics.e_score_correction_bias"),  # in memory
    Format(gate="gate.layer.weight"),  # in memory
    Format(experts=NEMO),  # nemo_speechlm, as published; transformers writes what nemotron_h has
)


def format_of(*model_types: str) -> Format:
    """The names that a family's checkpoints have: of the first type that has its own."""
    return next((FORMATS[each] for each in model_types if each in FORMATS), _DEFAULT)


def alternatives(field: str) -> list:
    """Every value that a field of `Format` has in some family, the most usual first."""
    formats = (_DEFAULT, *FORMATS.values(), *_ONLY_READ)
    return list(dict.fromkeys(getattr(each, field) for each in formats))
