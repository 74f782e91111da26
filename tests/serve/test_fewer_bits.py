"""A server's experts, read into fewer bits."""

import json
from unittest import mock

import pytest
import torch
from transformers.cli.serving.model_manager import ModelManager

from layers.serve import quantised
from layers.serve.model import PatchedModels
from layers.serve.options import ServeOptions
from tests.helpers import relative_error


def _saved(folder, **config):
    from tests.huggingface.families import tiny_model

    tiny_model("qwen3_moe", torch.bfloat16).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(written))
    return folder


@pytest.mark.parametrize(
    ("experts", "stored", "groups", "rows"),
    [
        ("float8", torch.float8_e4m3fn, 1, "quantised"),
        ("int8", torch.int8, 1, "quantised"),
        ("mxfp4", torch.uint8, 2, "exact"),
        ("nvfp4", torch.uint8, 4, "exact"),
        ("int4", torch.uint8, 1, "exact"),
    ],
)
def test_experts_are_read_into_fewer_bits(experts, stored, groups, rows, tmp_path):
    models = object.__new__(PatchedModels)
    models._options = ServeOptions(str(_saved(tmp_path)), experts=experts)
    models.attn_implementation, models.dtype, models.device = "eager", torch.bfloat16, "cpu"
    model = models._load_model(f"{tmp_path}@main")
    found = model.model.layers[0].mlp.experts
    assert (found.down_proj.dtype, found.moe_ops_format.rows) == (stored, rows)
    assert found.gate_up_proj_scale_inv.shape == (8, 64, groups)
    assert model.config._attn_implementation == "eager" and model.dtype == torch.bfloat16


@pytest.mark.parametrize(("experts", "method"), [("mxfp4", "fp8"), ("int8", "mxfp4")])
def test_experts_that_are_quantised_otherwise_are_told(experts, method, tmp_path):
    folder = _saved(tmp_path, quantization_config={"quant_method": method})
    told = f"experts='{experts}': the checkpoint is quantised by '{method}', expected one in 16"
    with pytest.raises(ValueError, match=told):
        quantised.read(str(folder), experts)


def test_a_revision_of_a_name_on_the_hub(monkeypatch):
    asked = mock.Mock(side_effect=OSError("no hub"))
    monkeypatch.setattr(quantised.AutoConfig, "from_pretrained", asked)
    for model, revision in (("org/model@dev", "dev"), ("org/model", "main")):
        with pytest.raises(OSError, match="no hub"):
            quantised.read(model, "int8")
        asked.assert_called_with("org/model", revision=revision)


def test_a_published_revision_of_a_name_on_the_hub(monkeypatch):
    written = {"quantization_config": {"quant_method": "awq"}}, {}
    told, read = mock.Mock(return_value=written), mock.Mock(side_effect=ValueError("no config"))
    monkeypatch.setattr(quantised.PreTrainedConfig, "get_config_dict", told)
    monkeypatch.setattr(quantised.AutoConfig, "from_pretrained", read)
    assert quantised.published_config("org/model@dev") is None
    for each in (told, read):
        each.assert_called_once_with("org/model", revision="dev")


def test_a_model_without_a_config_is_left_to_who_reads_it(monkeypatch):
    monkeypatch.setattr(quantised.PreTrainedConfig, "get_config_dict", mock.Mock(side_effect=OSError("none")))
    assert quantised.published_config("org/model") is None


def test_experts_have_a_format():
    with pytest.raises(ValueError, match=r"experts='fp8': expected one of 'float8', 'int8'"):
        ServeOptions("model", experts="fp8")


def _served(folder):
    models = object.__new__(PatchedModels)
    models._options = ServeOptions(str(folder), backend="eager")
    models.attn_implementation, models.dtype, models.device = "eager", torch.float32, "cpu"
    return models


@pytest.mark.parametrize("kind", ["gptq", "nvfp4-pack-quantized"])
def test_checkpoints_in_4_bits_keep_their_experts(kind, tmp_path):
    from tests.huggingface.families import tokens
    from tests.huggingface.publishing import publish

    stock = publish(tmp_path, "mixtral", kind)
    model = _served(tmp_path)._load_model(f"{tmp_path}@main")
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.uint8
    with torch.no_grad():
        assert relative_error(model(tokens(2, 5)).logits, stock(tokens(2, 5)).logits) < 2e-6


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"quant_method": "gptq", "bits": 8},
            "is read as transformers reads it: bits=8 of quantization_config",
        ),
        ({"quant_method": "fp8"}, ""),
        (None, ""),
    ],
)
def test_other_checkpoints_are_read_as_transformers_reads_them(settings, told, tmp_path, monkeypatch, capsys):
    folder = _saved(tmp_path, quantization_config=settings)
    monkeypatch.setattr(ModelManager, "_load_model", mock.Mock(side_effect=KeyError("by transformers")))
    with pytest.raises(KeyError, match="by transformers"):
        _served(folder)._load_model(f"{folder}@main")
    assert told in (printed := capsys.readouterr().out) and bool(printed) == bool(told)
