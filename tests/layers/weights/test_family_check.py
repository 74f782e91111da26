"""The config.json of a folder: it must describe the layers that are filled, and is data only."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from layers import MoEBlock, MoEConfig, load_checkpoint
from tests.layers.weights.families import tiny_config, tiny_model


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek")
    tiny_model("deepseek_v3").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(stored, tmp_path):
    """A checkpoint with a config.json that a test may change."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    for file in stored.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def _blocks(config):
    return nn.ModuleList(MoEBlock(config) for _ in range(2))


def _refused(path, message, config=None):
    blocks = _blocks(config or MoEConfig.from_hf(tiny_config("deepseek_v3")))
    before = [tensor.clone() for tensor in blocks.state_dict().values()]
    with pytest.raises(ValueError, match=message):
        load_checkpoint(blocks, path, progress=False)
    assert all(map(torch.equal, blocks.state_dict().values(), before))


def _write(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("option", "there", "here"),
    [
        ("score_fn", "sigmoid", "softmax"),
        ("group_score", "top2_sum", "max"),
        ("group_fill", float("-inf"), 0.0),
        ("topk_groups", 2, 1),
        ("scale", 2.5, 1.0),
        ("renormalize", True, False),
    ],
)
def test_routing_of_another_family(folder, option, there, here):
    config = MoEConfig.from_hf(tiny_config("deepseek_v3"))
    other = replace(config, routing=replace(config.routing, **{option: here}))
    _refused(
        folder,
        f"describes another layer than the module's '0': {option} is {there!r} there and {here!r}",
        other,
    )


def test_sizes_and_activations_of_another_family(folder):
    config = MoEConfig.from_hf(tiny_config("deepseek_v3"))
    _refused(folder, "intermediate_size is 24 there and 32 here", replace(config, intermediate_size=32))
    _refused(folder, "activation is .*'silu'.* there and .*'gelu'", replace(config, activation="gelu"))
    shared = replace(config.shared_experts, activation="gelu")
    _refused(folder, "shared activation is .*'silu'.* there and", replace(config, shared_experts=shared))
    averaged = replace(config.shared_experts, combination="average")
    _refused(
        folder, "shared combination is 'sum' there and 'average'", replace(config, shared_experts=averaged)
    )
    load_checkpoint(
        _blocks(replace(config, shared_experts=replace(shared, activation="silu"))), folder, progress=False
    )
    load_checkpoint(
        _blocks(replace(config, routing=replace(config.routing, renorm_eps=0.0))), folder, progress=False
    )


def test_weights_applied_to_the_input(tmp_path):
    tiny_model("mixtral", num_experts_per_tok=1).save_pretrained(tmp_path)
    config = MoEConfig.from_hf(tiny_config("mixtral", num_experts_per_tok=1))
    on_input = replace(config, router=replace(config.router, weight_on="input"))
    _refused(tmp_path, "weight_on is 'output' there and 'input' here", on_input)


def test_names_tell_where_no_config_does(stored):
    config = MoEConfig.from_hf(tiny_config("qwen3_moe"))
    _refused(stored, "score_fn is 'sigmoid' there and 'softmax' here", config)
    _refused(
        stored / "model.safetensors", r"unexpected \(8\):(.|\n)*score_correction_bias(.|\n)*shared", config
    )


def test_configs_that_are_refused(folder):
    _write(folder, model_type="phimoe")
    _refused(folder, "no family that a MoE layer can be made of: phimoe: router_jitter_noise=.*: sparsemixer")
    _write(folder, model_type="unheard_of")
    _refused(folder, "no family that a MoE layer can be made of")


@pytest.mark.parametrize("text", ["{", "[]", "3", "{}", '{"model_type": 3}', '{"model_type": []}'])
def test_configs_that_are_none(folder, text):
    (folder / "config.json").write_text(text)
    _refused(folder, r"config\.json: no family that a MoE layer can be made of")


@pytest.mark.parametrize("field", ["hidden_size", "n_routed_experts", "num_experts_per_tok"])
def test_fields_of_another_type(folder, field):
    _write(folder, **{field: "many"})
    _refused(folder, r"config\.json: no family that a MoE layer can be made of")


def test_code_of_a_checkpoint_is_not_run(folder):
    (folder / "code.py").write_text("raise SystemExit\n")
    _write(folder, model_type="unheard_of", auto_map={"AutoConfig": "code.Config"})
    _refused(folder, "no family that a MoE layer can be made of.*custom code")


def test_a_config_elsewhere_is_not_read(folder, tmp_path):
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    _refused(folder, r"config\.json: leads to .*, out of the checkpoint's folder")
