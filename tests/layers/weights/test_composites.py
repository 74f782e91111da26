"""Models of several parts, whose experts are those of a text model: transformers itself says what their files hold."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from layers import MoEBlock, MoEConfig, checkpoint_state_dict, load_checkpoint
from layers.families import family_config
from tests.layers.weights.families import FAMILIES, moe_blocks, tiny_model

COMPOSITES = {
    "aria": "aria_text",
    "deepseek_ocr2": "deepseek_ocr2_text",
    "dots3_note": "dots3_note_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm5_next": "glm5_next_text",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral_large4": "mistral_large4_text",
    "nemo_speechlm": "nemotron_h",
    "nemotron_h_omni": "nemotron_h",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe": "qwen3_omni_moe_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen4_exp": "qwen4_exp_text",
    "step3p7": "step3p5",
    "unlimited_ocr": "unlimited_ocr_text",
}
INSTALLED = [name for name, family in COMPOSITES.items() if name in CONFIG_MAPPING and family in FAMILIES]


class Composite(PreTrainedModel):
    """A model with the text model inside and nothing else."""

    base_model_prefix = "model"

    def __init__(self, config: Any, text: nn.Module) -> None:
        super().__init__(config)
        self.model = nn.Module()
        self.model.language_model = getattr(text, "model", text)

    def is_custom_code(self) -> bool:
        return False


@pytest.mark.parametrize("model_type", INSTALLED)
def test_checkpoints_of_composites_come_and_go(model_type):
    config = CONFIG_MAPPING[model_type]()
    assert family_config(config).model_type == COMPOSITES[model_type]
    config._experts_implementation = "eager"
    text = tiny_model(COMPOSITES[model_type])
    model = Composite(config, text)
    stored = revert_weight_conversion(model, model.state_dict())
    blocks = moe_blocks(model)
    ours = nn.ModuleList(MoEBlock(MoEConfig.from_hf(text.config)) for _ in blocks)
    load_checkpoint(ours, stored, progress=False)
    expected = [MoEBlock.from_hf(block, text.config).state_dict() for block in blocks.values()]
    for block, tensors in zip(ours, expected, strict=True):
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in block.state_dict().items())

    number = re.findall(r"\d+", list(blocks)[-1])[0]
    layer = next(m[1] for name in stored if (m := re.match(rf"(.*(?:layers|blocks)\.{number})\.", name)))
    saved = checkpoint_state_dict(ours[-1], config, prefix=layer)
    assert len(saved) == len([name for name in stored if _is_of_block(name.removeprefix(layer))])
    for name, tensor in saved.items():
        assert torch.equal(tensor.view(torch.uint8), stored[name].contiguous().view(torch.uint8)), name


def _is_of_block(name: str) -> bool:
    """Whether a name that begins after its decoder layer's is of a MoE block."""
    of_block = r"\.(?!.*attn)(?!.*attention).*(expert|router|shared|moe|latent|gate\.w|score_correction)"
    return re.match(of_block, name) is not None
