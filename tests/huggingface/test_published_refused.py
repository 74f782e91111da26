"""Checkpoints in 4 bits that lack a tensor, or have one that stands for something else, are refused by its name."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import relative_error
from tests.huggingface.families import tokens
from tests.huggingface.publishing import KINDS, change, publish, read

EXPERTS = "model.layers.1.mlp.experts"


def _changed(folder, into, change_state):
    """A copy of a checkpoint of one file, with other tensors."""
    shutil.copytree(folder, into, dirs_exist_ok=True)
    state = load_file(into / "model.safetensors")
    change_state(state)
    save_file(state, into / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("gptq", f"{EXPERTS}.7.down_proj.qweight"),
        ("gptq", f"{EXPERTS}.3.up_proj.qzeros"),
        ("gptq", f"{EXPERTS}.3.up_proj.g_idx"),
        ("gptq", "model.layers.0.self_attn.o_proj.scales"),
        ("awq", f"{EXPERTS}.0.gate_proj"),
        ("awq", f"{EXPERTS}.7"),
        ("pack-quantized, asymmetric", f"{EXPERTS}.2.gate_proj.weight_zero_point"),
        ("modelopt", f"{EXPERTS}.2.gate_proj.weight_scale_2"),
        ("nvfp4-pack-quantized", f"{EXPERTS}.2.gate_proj.weight_global_scale"),
    ],
)
def test_tensors_that_are_missing_are_refused(published, kind, missing, tmp_path):
    def drop(state):
        for name in [each for each in state if f"{each}.".startswith(f"{missing}.")]:
            del state[name]

    _changed(published("qwen3_moe", kind)[0], tmp_path, drop)
    with pytest.raises(ValueError, match=missing.replace(".", r"\.") + r"[\w.]* is not in the checkpoint"):
        read(tmp_path)


@pytest.mark.parametrize("missing", ["down_proj", "gate_proj"])
def test_projections_that_are_missing_are_refused(published, missing, tmp_path):
    def drop(state):
        for name in [each for each in state if each.startswith(EXPERTS) and f".{missing}." in each]:
            del state[name]

    _changed(published("qwen3_moe", "awq")[0], tmp_path, drop)
    with pytest.raises(
        ValueError, match=rf"layers\.1\.mlp\.experts\.\S*{missing}\S* is not in the checkpoint"
    ):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["awq", "modelopt"])
def test_a_layer_of_both_is_refused(kind, tmp_path):
    publish(tmp_path, "qwen3_moe", kind, keep=("layers.1.mlp.experts.3.",))
    part = "qweight" if kind == "awq" else "weight_scale"
    with pytest.raises(ValueError, match=rf"1\.mlp\.experts\.3\.gate_proj\.{part} is not in the checkpoint"):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["gptq", "modelopt"])
def test_checkpoints_without_experts_in_4_bits_are_refused(kind, tmp_path):
    publish(tmp_path, "qwen3_moe", kind, keep=(".experts.",))
    with pytest.raises(
        ValueError, match=r"the checkpoint has no experts in 4 bits: expected q?weight of experts"
    ):
        read(tmp_path)


PERMUTED = torch.arange(64, dtype=torch.int32).flip(0) // 32


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "told"),
    [
        ("gptq", "7.up_proj.g_idx", PERMUTED, "gate_up_proj: g_idx has columns in another order"),
        (
            "gptq",
            "7.up_proj.qzeros",
            torch.full((2, 4), -1, dtype=torch.int32),
            "qzeros has 15 with is_v2=False",
        ),
        (
            "awq",
            "7.up_proj.qzeros",
            torch.zeros(4, 4, dtype=torch.int32),
            r"scales has shape \[2, 32\]: expected",
        ),
        (
            "gptq",
            "7.up_proj.scales",
            torch.ones(2, 32),
            r"gate_up_proj_scale_inv of an expert is \[32, 2\] in torch.fl",
        ),
        (
            "gptq, symmetric",
            "7.up_proj.qzeros",
            torch.zeros(1, 4, dtype=torch.int32),
            "other than 8 with sym=True",
        ),
        (
            "awq",
            "0.up_proj.qweight",
            torch.zeros(64, 4),
            r"up_proj\.qweight in the checkpoint has dtype torch.float32",
        ),
        (
            "pack-quantized",
            "0.up_proj.weight_g_idx",
            PERMUTED,
            r"up_proj\.weight_g_idx in the checkpoint: expected",
        ),
        (
            "pack-quantized",
            "7.up_proj.weight_packed",
            torch.zeros(32, 4, dtype=torch.int32),
            "weight_scale has 2 gr",
        ),
        (
            "modelopt",
            "0.up_proj.weight",
            torch.ones(32, 64).to(torch.float8_e4m3fn),
            "weight in the checkpoint has d",
        ),
        (
            "modelopt",
            "0.up_proj.pre_quant_scale",
            torch.ones(64),
            r"up_proj\.pre_quant_scale in the checkpoint",
        ),
    ],
)
def test_tensors_that_stand_for_something_else_are_refused(published, kind, name, tensor, told, tmp_path):
    folder, _ = published("qwen3_moe", kind)
    _changed(folder, tmp_path, lambda state: state.update({f"{EXPERTS}.{name}": tensor}))
    with pytest.raises(ValueError, match=told):
        read(tmp_path)


def test_experts_have_biases_of_zeros_at_most(published, tmp_path):
    """As some that write GPTQ give each module one."""
    folder, stock = published("mixtral", "gptq")

    def add(state, number=0.0):
        for name in [each for each in state if ".experts." in each and each.endswith("qweight")]:
            state[name.replace("qweight", "bias")] = torch.full((32,), number)

    _changed(folder, tmp_path, add)
    with torch.no_grad():
        assert relative_error(read(tmp_path)(tokens(2, 7)).logits, stock(tokens(2, 7)).logits) < 2e-6
    _changed(folder, tmp_path, lambda state: add(state, 0.5))
    with pytest.raises(ValueError, match=r"gate_up_proj: .*w1.bias.* has other numbers than zeros"):
        read(tmp_path)


def test_groups_of_another_size_than_the_config_says_are_refused(published, tmp_path):
    folder, _ = published("qwen3_moe", "gptq")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    change(tmp_path, KINDS["gptq"][1] | {"group_size": 64})
    with pytest.raises(ValueError, match="scales has 2 groups of 64 columns: expected 1"):
        read(tmp_path)


def test_groups_that_do_not_fill_a_row_are_refused(tmp_path):
    publish(tmp_path, "qwen3_moe", "gptq", hidden_size=96)
    change(tmp_path, KINDS["gptq"][1] | {"group_size": 64})
    with pytest.raises(ValueError, match="group_size=64 of rows of 96 columns: expected a divisor"):
        read(tmp_path)


def test_pickles_are_refused(published, tmp_path):
    folder, _ = published("qwen3_moe", "gptq")
    shutil.copy(folder / "config.json", tmp_path)
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin in the checkpoint: expected safetensors"):
        read(tmp_path)


def test_experts_on_a_disk_are_refused(published, tmp_path):
    devices = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"], "cpu")
    devices |= {"lm_head": "cpu", "model.layers.1": "disk"}
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.gate_up_proj is offloaded: expected"):
        read(published("qwen3_moe", "awq")[0], device_map=devices, offload_folder=tmp_path)


def test_experts_whose_rows_are_in_turns_are_refused(published, monkeypatch):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    made = Qwen3MoeExperts.__init__

    def in_turns(self, *args, **named):
        made(self, *args, **named)
        self.is_concatenated = False

    monkeypatch.setattr(Qwen3MoeExperts, "__init__", in_turns)
    with pytest.raises(
        ValueError, match="gate_up_proj in 4 bits: expected experts of which each has its own"
    ):
        read(published("qwen3_moe", "awq")[0])


def test_scales_of_caches_are_left_out(published, tmp_path):
    folder, stock = published("qwen3_moe", "pack-quantized")

    def add(state):
        for name in ("k_proj.k_scale", "v_proj.v_scale"):
            state[f"model.layers.0.self_attn.{name}"] = torch.ones(1)

    _changed(folder, tmp_path, add)
    with torch.no_grad():
        assert relative_error(read(tmp_path)(tokens(1, 5)).logits, stock(tokens(1, 5)).logits) < 2e-6
