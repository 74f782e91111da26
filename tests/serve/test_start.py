"""What a server is started with, and what is refused before it listens."""

import gc
import runpy
import signal
import socket
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import uvicorn
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.cli.serving.model_manager import ModelManager

from layers.serve import __main__ as command
from layers.serve.batching import batching_config
from layers.serve.model import (
    PatchedModels,
    expect_backend,
    expect_no_collision,
    load_kernels,
    sampling_of,
    tokenizer_of,
)
from layers.serve.options import ServeOptions


def model_with(**generation):
    return SimpleNamespace(generation_config=GenerationConfig(**generation))


def test_a_command_line():
    given = ["model", "--port", "1", "--backend", "none", "--greedy", "--cuda-graphs", "--page-size", "4"]
    expected = ServeOptions("model", port=1, backend=None, greedy=True, cuda_graphs=True, page_size=4)
    assert command.options_of(given) == expected
    assert command.options_of(["model"]) == ServeOptions("model")


def test_what_is_loaded_is_not_collected_while_requests_are_answered(monkeypatch):
    server = pytest.importorskip("layers.serve.server")
    frozen = []
    for name in ("PatchedModels", "Batches", "_application", "expect_free"):
        monkeypatch.setattr(server, name, mock.Mock())
    monkeypatch.setattr(server, "_run", lambda config, told: frozen.append(gc.get_freeze_count()))
    server.serve(ServeOptions("model"))
    assert len(frozen) == 1 and frozen[0] > 10000 and gc.get_freeze_count() == 0


def test_so_many_requests_are_answered_at_once(monkeypatch):
    server, admitted = pytest.importorskip("layers.serve.server"), mock.Mock()
    for name in ("PatchedModels", "Batches", "expect_free", "_run"):
        monkeypatch.setattr(server, name, mock.Mock())
    monkeypatch.setattr(server, "_application", lambda *_: "application")
    monkeypatch.setattr(server, "Admission", admitted)
    server.serve(ServeOptions("model", max_requests=7))
    admitted.assert_called_once_with("application", 7)


@pytest.mark.parametrize("name", ["port", "max_requests", "max_batch_tokens", "num_blocks", "page_size"])
def test_numbers_are_at_least_one(name, monkeypatch, capsys):
    with pytest.raises(ValueError, match=f"{name}=0"):
        ServeOptions("model", **{name: 0})
    monkeypatch.setattr("sys.argv", ["serve", "model", f"--{name.replace('_', '-')}", "0"])
    assert command.main() == 2
    assert f"{name}=0" in capsys.readouterr().err


def test_a_port_is_one():
    with pytest.raises(ValueError, match="port=65536: expected at most 65535"):
        ServeOptions("model", port=65536)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["/no/such/folder"],
            "model='/no/such/folder': expected a folder that save_pretrained wrote, or a name",
        ),
        ([__file__], "expected a folder that save_pretrained wrote"),
        (["no/such/folder"], "model='no/such/folder': expected a folder"),
        (["./folder"], "model='./folder': expected a folder"),
        (["model", "--device", "toaster"], "device='toaster': expected a torch.device"),
        (["model", "--device", "meta"], "device='meta': expected one that computes here, such as 'cpu': "),
        (["model", "--device", "vulkan"], "device='vulkan': expected one that computes here"),
        (["./folder", "--backend", "nonsense"], "backend='nonsense': expected a backend of torch.compile"),
        (["./folder", "--backend", "cudagraphs"], "no graph holds another"),
        (
            ["./folder", "--num-blocks", "2", "--page-size", "16"],
            "num_blocks=2 of page_size=16 hold 32 tokens",
        ),
        (["model", "--host", "256.0.0.1"], "host='256.0.0.1', port=8000: no server can listen there"),
        pytest.param(
            ["/no/such/folder", "--device", "cuda:0"],
            "device='cuda:0': PyTorch finds no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there"),
        ),
        pytest.param(
            ["/no/such/folder", "--cuda-graphs"],
            "cuda_graphs=True: PyTorch finds no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there"),
        ),
    ],
)
def test_what_is_not_there_is_told_in_one_line(arguments, told, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["serve", *arguments])
    assert command.main() == 2
    assert told in capsys.readouterr().err


def test_a_model_that_nobody_has_is_told_after_one_question(monkeypatch, capsys):
    asked = mock.Mock(side_effect=OSError("404 Client Error.\n\nRepository Not Found"))
    load = mock.Mock()
    monkeypatch.setattr("layers.serve.model.model_info", asked)
    monkeypatch.setattr(ModelManager, "__init__", load)
    monkeypatch.setattr("sys.argv", ["serve", "no-such/model@dev"])
    assert command.main() == 2
    told = "there is no such folder, and the hub gives no such model: 404 Client Error. Repository Not Found"
    assert f"model='no-such/model@dev': {told}\n" in capsys.readouterr().err
    asked.assert_called_once_with("no-such/model", revision="dev", timeout=10)
    load.assert_not_called()


def test_the_hub_is_not_asked_for_what_is_here(monkeypatch, tmp_path):
    asked, load = mock.Mock(), mock.Mock()
    monkeypatch.setattr("layers.serve.model.model_info", asked)
    monkeypatch.setattr(
        "layers.serve.model.try_to_load_from_cache", lambda name, *_, **__: name if "cached" in name else None
    )
    monkeypatch.setattr(ModelManager, "__init__", load)
    for model in ("cached/model", str(tmp_path)):
        PatchedModels(ServeOptions(model))
    assert load.call_count == 2 and not asked.called


def test_a_file_is_no_folder(tmp_path, monkeypatch):
    (tmp_path / "weights").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="model='weights': expected a folder that save_pretrained wrote"):
        PatchedModels(ServeOptions("weights"))


def test_weights_that_are_cut_off_are_told(monkeypatch):
    cut_off = mock.Mock(side_effect=SafetensorError("header too large"))
    monkeypatch.setattr(ModelManager, "_load_model", cut_off)
    models = object.__new__(PatchedModels)
    models._options = ServeOptions("model")
    with pytest.raises(ValueError, match="the weights of 'model' cannot be read: header too large"):
        models._load_model("model")


def test_an_address_that_is_taken_is_told_before_the_model_is_loaded():
    from layers.serve.server import expect_free

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"host='127.0.0.1', port={port}: no server can listen there: "):
            expect_free("127.0.0.1", port)
    expect_free("127.0.0.1", port)
    with pytest.raises(ValueError, match=r"host='a\.\.b', port=1: no server can listen there"):
        expect_free("a..b", 1)


def test_what_transformers_cannot_read_is_told(monkeypatch, capsys):
    from layers.serve import server

    monkeypatch.setattr("sys.argv", ["serve", "model"])
    monkeypatch.setattr(server, "serve", mock.Mock(side_effect=OSError("no config.json")))
    assert command.main() == 2
    assert "layers.serve: no config.json" in capsys.readouterr().err


def test_a_start_that_is_interrupted_ends_at_once(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("sys.argv", ["serve", "model", "--port", "0"])
    try:
        with pytest.raises(SystemExit):
            runpy.run_path(command.__file__, run_name="__main__")
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("free", [True, False])
def test_it_says_that_it_is_ready_once_it_listens(free, capsys):
    from layers.serve import server

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = 0 if free else taken.getsockname()[1]
        each = server._Server(
            uvicorn.Config(lambda *_: None, host="127.0.0.1", port=port, lifespan="off"), "ready"
        )
        each.should_exit = True
        try:
            each.run()
        except SystemExit:
            assert not free
    assert ("ready" in capsys.readouterr().out) == free


def without_files():
    """What transformers makes of a checkpoint that has no file of its tokenizer's."""
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))


def tokenizer(template):
    from tokenizers import Tokenizer, models

    of_letters = Tokenizer(models.WordLevel({"a": 0}, "a"))
    return PreTrainedTokenizerFast(tokenizer_object=of_letters, chat_template=template)


PLAIN = "{{ messages[0]['content'] }}"
PARTS = "{% for part in messages[0]['content'] %}{{ part['text'] }}{% endfor %}"


def test_of_a_processor_the_tokenizer_is_served(monkeypatch):
    own = tokenizer(None)
    processor = SimpleNamespace(tokenizer=own, chat_template=PLAIN)
    monkeypatch.setattr(ModelManager, "_load_processor", lambda self, name: processor)
    assert object.__new__(PatchedModels)._load_processor("model") is own
    assert own.chat_template == PLAIN
    for template in (None, PLAIN, "{{ raise_exception('wants more') }}"):
        own = tokenizer(template)
        assert tokenizer_of(own) is own


@pytest.mark.parametrize(
    ("processor", "told"),
    [
        (SimpleNamespace(), "the checkpoint has a SimpleNamespace: expected a tokenizer"),
        (without_files(), "makes no tokens of a text: expected its files beside the weights"),
        (SimpleNamespace(tokenizer=tokenizer(PARTS)), "passes over messages whose content is a text"),
    ],
)
def test_processors_that_read_no_text(processor, told):
    with pytest.raises(ValueError, match=told):
        tokenizer_of(processor)


@pytest.mark.parametrize(
    ("generation", "told"),
    [
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"num_beams": 4}, "num_beams=4, which continuous batching passes over: expected 1, or --greedy"),
        ({"stop_strings": ["x"]}, "stop_strings=['x'], which"),
        ({"compile_config": SimpleNamespace()}, "has a compile_config"),
    ],
    ids=["cache", "beams", "stop", "compile"],
)
def test_collisions_are_told(generation, told):
    model = model_with()
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ValueError) as error:
        expect_no_collision(model, ServeOptions("model"))
    assert told in str(error.value)


def test_what_collides_with_nothing():
    for backend in ("moe_inductor", "inductor", None):
        expect_backend(backend)
    expect_no_collision(model_with(), ServeOptions("model"))
    expect_no_collision(model_with(num_beams=4), ServeOptions("model", greedy=True))


def test_both_paths_are_compiled_for_any_number_of_tokens():
    config = batching_config(ServeOptions("model", num_blocks=7, page_size=16))
    for each in (config.varlen_compile_config, config.decode_compile_config):
        assert (each.backend, each.mode, each.dynamic) == ("moe_inductor", "default", True)
    assert (config.num_blocks, config.use_cuda_graph) == (7, None)
    assert 16 in (getattr(config, "page_size", None), getattr(config, "block_size", None))
    assert batching_config(ServeOptions("model", backend=None)).varlen_compile_config is None


def test_a_cache_without_room_is_told():
    told = "num_blocks=2 of page_size=16 hold 32 tokens: expected at least 43, for what is answered before"
    with pytest.raises(ValueError, match=told):
        batching_config(ServeOptions("model", num_blocks=2, page_size=16))
    assert batching_config(ServeOptions("model", num_blocks=3, page_size=16)).num_blocks == 3


def test_greedy_wins_over_the_checkpoint():
    model = model_with(do_sample=True, temperature=0.6, top_k=20, repetition_penalty=1.1, eos_token_id=[1, 2])
    sampling = sampling_of(model, ServeOptions("model", greedy=True))
    assert (sampling.do_sample, sampling.temperature, sampling.repetition_penalty) == (False, None, None)
    assert sampling.eos_token_id == [1, 2]
    assert sampling_of(model, ServeOptions("model")).temperature == 0.6
    assert model.generation_config.do_sample  # a copy


def test_on_a_cpu_there_is_nothing_to_load():
    class Never(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, *args, **kwargs):
            raise AssertionError("ran")

    load_kernels(Never(), 8)
