"""`python -m inductor_passes explain`: what a shell sees."""

import json
from pathlib import Path

import pytest
import torch
import transformers

import inductor_passes
from inductor_passes import __main__ as command
from tests.forked import run_python
from tests.helpers import usually
from tests.huggingface.families import CONFIGS, tiny_config, tiny_model

ROOT = Path(inductor_passes.__file__).parents[1]
AS_MAIN = "import runpy; runpy.run_module('inductor_passes', run_name='__main__', alter_sys=True)"
ALL_FUSED = "1 inference graph, 2 MoE layers, all fused"


@pytest.fixture
def configured(tmp_path):
    """A directory with a config and no weights."""

    def make(family="mixtral", **options):
        config = tiny_config(family, **options)
        config.architectures = [f"{CONFIGS[family][0]}ForCausalLM"]
        config.save_pretrained(tmp_path / family)
        return tmp_path / family

    return make


def told(capsys, *arguments):
    """Exit status and what was printed."""
    status = command.main(["explain", *map(str, arguments)])
    return status, capsys.readouterr().out


def test_from_the_shell(configured, tmp_path):
    page = tmp_path / "page.html"
    arguments = ["explain", "--model", str(configured()), "--patch", "--html", str(page), "--tokens", "24"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "HF_HUB_OFFLINE": "1"}
    done = run_python(AS_MAIN, *arguments, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ALL_FUSED in done.stdout and "moe_ops: 2 experts and 2 routers patched" in done.stdout
    assert done.stdout.endswith(f"page: {page}\n") and "All 2 MoE layers are fused." in page.read_text()


@pytest.mark.parametrize("family", usually(["qwen3_moe", "gpt_oss", "deepseek_v3"], ["deepseek_v3"]))
def test_families_without_weights(configured, capsys, family):
    status, out = told(capsys, "--model", configured(family), "--patch", "--tokens", 24, "--check")
    assert status == 0 and ALL_FUSED in out


def test_weights_that_are_there_are_loaded(tmp_path, capsys, monkeypatch):
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    seen = []
    monkeypatch.setattr(
        command, "explain", lambda model, input_ids: seen.append((model, input_ids)) or "told"
    )
    told(capsys, "--model", tmp_path, "--batch", 2, "--tokens", 5, "--dtype", "bfloat16")
    ((loaded, ids),) = seen
    assert ids.shape == (2, 5) and not loaded.training and loaded.dtype == torch.bfloat16
    for (name, ours), (_, theirs) in zip(
        model.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        assert torch.equal(ours.bfloat16(), theirs), name


def test_options_reach_the_model(configured, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(command, "explain", lambda model, input_ids: seen.append(model) or "told")
    folder = configured(num_hidden_layers=6)
    told(capsys, "--model", folder, "--layers", 3, "--experts", "batched_mm", "--train")
    (model,) = seen
    assert len(model.model.layers) == 3 and model.training and not model.config.use_cache
    assert model.config._experts_implementation == "batched_mm"


def test_training_and_dynamic_graphs(configured, capsys):
    _, out = told(capsys, "--model", configured(), "--patch", "--train", "--layers", 1)
    assert out.splitlines()[3].startswith("1 training graph, 1 MoE layer, all fused")
    _, out = told(capsys, "--model", configured(), "--patch", "--dynamic", "--layers", 1)
    assert "1 MoE layer, all fused" in out


def test_check_fails_where_something_is_not_fused(configured, capsys, monkeypatch):
    explain, reports = command.explain, []

    def once(model, **inputs):
        reports.extend([] if reports else [explain(model, **inputs)])
        return reports[0]

    monkeypatch.setattr(command, "explain", once)
    arguments = ("--model", configured(), "--experts", "eager", "--layers", 1)
    assert told(capsys, *arguments)[0] == 0
    assert told(capsys, *arguments, "--check")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--model", "nowhere"], "--model nowhere: expected a directory with a config.json"),
        (["--model", ".", "--tokens", "0"], "'0': expected a whole number from 1 on"),
        (["--model", ".", "--batch", "two"], "'two': expected a whole number from 1 on"),
        (["--model", ".", "--dtype", "int4"], "invalid choice: 'int4'"),
        (
            ["--model", ".", "--html", "no/folder/page.html"],
            "'no/folder/page.html': expected a file in a folder",
        ),
        (["--model", ".", "--html", "."], "'.': expected a file in a folder that is there"),
        (
            ["--model", ".", "--device", "cuda:99"],
            "'cuda:99': expected one that PyTorch finds here, such as cpu",
        ),
        (["--model", ".", "--device", "gpu"], "'gpu': expected one that PyTorch finds here, such as cpu"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments, error, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["explain", *arguments])
    assert stopped.value.code == 2 and error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "weights", "error"),
    [
        (
            {"model_type": "mixtral", "dtype": "floaty"},
            None,
            "AttributeError: module 'torch' has no attribute",
        ),
        ({"model_type": "mixtral"}, b"cut off", "SafetensorError: Error while deserializing header"),
        (
            {"model_type": "vit", "architectures": ["ViTModel"]},
            None,
            "has no vocab_size: expected a model of text",
        ),
    ],
    ids=["dtype", "weights", "images"],
)
def test_a_folder_that_is_no_model_of_text_is_said_in_a_line(config, weights, error, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    if weights:
        (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(SystemExit) as stopped:
        command.main(["explain", "--model", str(tmp_path)])
    last = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and f"--model {tmp_path}" in last and error in last


def test_a_page_that_cannot_be_written_is_said_in_a_line(configured, capsys, monkeypatch, tmp_path):
    page, report = tmp_path / "page.html", inductor_passes.explain(torch.sin, torch.ones(1))
    monkeypatch.setattr(command, "explain", lambda model, input_ids: page.mkdir() or report)
    with pytest.raises(SystemExit) as stopped:
        command.main(["explain", "--model", str(configured()), "--html", str(page)])
    assert stopped.value.code == 2 and f"--html {page}: Is a directory" in capsys.readouterr().err


def test_a_decoder_behind_an_encoder_has_tokens_too(tmp_path, capsys):
    sizes = {"num_layers": 1, "d_model": 32, "d_ff": 32, "num_heads": 2, "d_kv": 16, "vocab_size": 50}
    config = transformers.T5Config(**sizes, architectures=["T5ForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    status, out = told(capsys, "--model", tmp_path, "--tokens", 3)
    assert status == 0 and "nothing to do for us" in out


def test_a_model_that_does_not_fit_names_the_way_out(configured, capsys, monkeypatch):
    monkeypatch.setattr(command.os, "sysconf", lambda name: 100)
    with pytest.raises(SystemExit):
        command.main(["explain", "--model", str(configured())])
    error = capsys.readouterr().err
    assert "of weights, more than the 10 kB of cpu: expected fewer, as with --layers 2" in error


def test_an_unknown_architecture_is_a_causal_language_model(configured, capsys):
    config = transformers.AutoConfig.from_pretrained(configured())
    config.architectures = None
    config.save_pretrained(folder := configured())
    assert ALL_FUSED in told(capsys, "--model", folder, "--patch", "--tokens", 24)[1]
