"""`checkpoint_state_dict`: what a family writes, to the byte, or an error. `test_families.py` has every family."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from layers import (
    ExpertsConfig,
    FusedMoE,
    MoEBlock,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
    TensorShard,
    checkpoint_state_dict,
    determine_expert_map,
    load_checkpoint,
)
from tests.layers.weights.families import moe_blocks, tiny_config, tiny_model

CONFIG = MoEConfig(4, 2, 8, 6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_whole_models_come_and_go(family, tied, tmp_path):
    model = tiny_model(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "stock")
    stored = load_file(tmp_path / "stock" / "model.safetensors")
    for name in moe_blocks(model):
        model.set_submodule(name, MoEBlock(MoEConfig.from_hf(model.config)))
    load_checkpoint(model, tmp_path / "stock", progress=False)
    save_file(checkpoint_state_dict(model, model.config), tmp_path / "ours.safetensors")
    saved = load_file(tmp_path / "ours.safetensors")
    assert saved.keys() == stored.keys()
    assert all(
        torch.equal(tensor.view(torch.uint8), stored[name].view(torch.uint8))
        for name, tensor in saved.items()
    )


def test_layers_have_the_names_of_their_decoder_layers():
    config = tiny_config("qwen3_moe")
    blocks = nn.ModuleDict({"3": nn.ModuleDict({"feed_forward": MoEBlock(CONFIG)}), "4": MoEBlock(CONFIG)})
    gates = [name for name in checkpoint_state_dict(blocks, config, prefix="layers") if "gate.weight" in name]
    assert gates == ["layers.3.mlp.gate.weight", "layers.4.mlp.gate.weight"]
    experts = nn.ModuleDict({"0": nn.ModuleDict({"mlp": nn.ModuleDict({"experts": FusedMoE(CONFIG)})})})
    assert "0.mlp.experts.3.up_proj.weight" in checkpoint_state_dict(experts, config)
    with pytest.raises(
        ValueError, match=r"right: another layer is saved as mlp\.experts\.0\.down_proj\.weight too"
    ):
        checkpoint_state_dict(nn.ModuleDict({"left": MoEBlock(CONFIG), "right": MoEBlock(CONFIG)}), config)


@pytest.mark.parametrize(
    ("module", "family", "message"),
    [
        (
            FusedMoE(CONFIG, determine_expert_map(2, 0, 4)[1]),
            "qwen3_moe",
            "module holds a part of the experts",
        ),
        (FusedMoE(CONFIG, shard=TensorShard(0, 2)), "qwen3_moe", "module holds a part of the experts"),
        (
            FusedMoE(MoEConfig(4, 2, 8, 6, activation="relu2")),
            "qwen3_moe",
            "activation 'relu2': .* have a gate",
        ),
        (FusedMoE(CONFIG), "nemotron_h", "activation 'silu': experts of 'nemotron_h' have none"),
        (
            MoEBlock(MoEConfig(4, 2, 8, 6, shared_experts=SharedExpertConfig(4, activation="relu2"))),
            "deepseek_v3",
            "module has activation 'relu2': experts of 'deepseek_v3' have a gate",
        ),
        (
            FusedMoE(MoEConfig(4, 2, 8, 6, has_bias=True)),
            "qwen3_moe",
            "has_bias=True: experts of 'qwen3_moe'",
        ),
        (
            MoEBlock(MoEConfig(4, 2, 8, 6, experts=ExpertsConfig(latent_size=4))),
            "qwen3_moe",
            "routed_input_transform.weight, routed_output_transform.weight: not part of a checkpoint's format",
        ),
        (
            FusedMoE(MoEConfig(4, 2, 8, 6, router=RouterConfig(has_expert_scale=True))),
            "qwen3_moe",
            "expert_scale: not part of a checkpoint's format",
        ),
        (
            FusedMoE(MoEConfig(4, 2, 8, 6, experts=ExpertsConfig(padded_size=16))),
            "qwen3_moe",
            "experts.padded_size=16: expected None; `FusedMoE.weight_loader` fills padded experts",
        ),
        (nn.Linear(2, 2), "qwen3_moe", "module=Linear: expected a MoEBlock or FusedMoE in it"),
    ],
)
def test_what_the_family_has_no_names_for(module, family, message):
    with pytest.raises(ValueError, match=message):
        checkpoint_state_dict(module, tiny_config(family))


def test_what_is_no_config_of_a_family():
    with pytest.raises(ValueError, match="phimoe: router_jitter_noise="):
        checkpoint_state_dict(MoEBlock(CONFIG), type("Config", (), {"model_type": "phimoe"}))
    with pytest.raises(TypeError, match="config is a MoEConfig: expected a config of transformers"):
        checkpoint_state_dict(MoEBlock(CONFIG), CONFIG)
    with pytest.raises(TypeError, match="prefix=3: expected str"):
        checkpoint_state_dict(MoEBlock(CONFIG), tiny_config("qwen3_moe"), prefix=3)
