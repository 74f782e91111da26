"""What a server is started with, and what is refused before it listens."""

import gc
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from layers.serve import __main__ as command
from layers.serve.batching import batching_config
from layers.serve.model import expect_no_collision, load_kernels, sampling_of
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
    for name in ("PatchedModels", "Batches", "_application"):
        monkeypatch.setattr(server, name, mock.Mock())
    monkeypatch.setattr(server, "_run", lambda config: frozen.append(gc.get_freeze_count()))
    server.serve(ServeOptions("model"))
    assert len(frozen) == 1 and frozen[0] > 10000 and gc.get_freeze_count() == 0


@pytest.mark.parametrize("name", ["max_requests", "max_batch_tokens", "num_blocks", "page_size"])
def test_numbers_are_at_least_one(name, monkeypatch, capsys):
    with pytest.raises(ValueError, match=f"{name}=0"):
        ServeOptions("model", **{name: 0})
    monkeypatch.setattr("sys.argv", ["serve", "model", f"--{name.replace('_', '-')}", "0"])
    assert command.main() == 2
    assert f"{name}=0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("generation", "options", "told"),
    [
        ({"cache_implementation": "static"}, {}, "cache_implementation='static'"),
        ({"compile_config": SimpleNamespace()}, {}, "has a compile_config"),
        ({}, {"backend": "nonsense"}, "backend='nonsense': expected a backend of torch.compile"),
        ({}, {"backend": "cudagraphs"}, "no graph holds another"),
    ],
    ids=["cache", "compile", "unknown", "graphs"],
)
def test_collisions_are_told(generation, options, told):
    model = model_with()
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ValueError) as error:
        expect_no_collision(model, ServeOptions("model", **options))
    assert told in str(error.value)


def test_what_collides_with_nothing():
    for backend in ("moe_inductor", "inductor", None):
        expect_no_collision(model_with(), ServeOptions("model", backend=backend))


def test_both_paths_are_compiled_for_any_number_of_tokens():
    config = batching_config(ServeOptions("model", num_blocks=7, page_size=16))
    for each in (config.varlen_compile_config, config.decode_compile_config):
        assert (each.backend, each.mode, each.dynamic) == ("moe_inductor", "default", True)
    assert (config.num_blocks, config.use_cuda_graph) == (7, None)
    assert 16 in (getattr(config, "page_size", None), getattr(config, "block_size", None))
    assert batching_config(ServeOptions("model", backend=None)).varlen_compile_config is None


def test_greedy_wins_over_the_checkpoint():
    model = model_with(do_sample=True, temperature=0.6, top_k=20)
    sampling = sampling_of(model, ServeOptions("model", greedy=True))
    assert (sampling.do_sample, sampling.temperature) == (False, None)
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
