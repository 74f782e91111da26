"""`python -m benchmarks soak`: wrong values are counted, growth is seen, and all of it once."""

import argparse
import json

import pytest
import torch

from benchmarks import soak_bench
from benchmarks.soak_bench import Soak
from benchmarks.workloads import Workload
from tests.layers.test_cuda_graphs import OnCpu


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small = Workload("small", num_experts=5, top_k=2, hidden_size=32, intermediate_size=24)
    monkeypatch.setattr(soak_bench, "LAYER", small)
    monkeypatch.setattr(soak_bench, "MOST_TOKENS", 64)


@pytest.fixture
def soak():
    with torch.inference_mode():
        yield Soak("cpu")


def test_right_values_are_compared(soak):
    for found in (soak.replays(20, OnCpu()), soak.calls(20)):
        assert (found.runs, found.compared, found.wrong) == (20, 20, 0)
        assert found.grown.allocated == found.grown.reserved == 0


def test_some_of_many_are_compared(soak, monkeypatch):
    monkeypatch.setattr(soak_bench, "SAMPLES", 4)
    monkeypatch.setattr(Soak, "_is_near", lambda *_: False)
    found = soak.calls(20)
    assert (found.compared, found.wrong) == (4, 4)


def test_wrong_values_are_counted(soak, monkeypatch):
    right, count = soak.layer, iter(range(1000))
    monkeypatch.setattr(soak, "layer", lambda *rows: right(*rows) * (1 + (next(count) % 5 == 0)))
    assert soak.calls(20).wrong == 4
    monkeypatch.setattr(soak, "layer", right)

    class Stale(OnCpu):
        """Replays compute nothing anew."""

        def capture(self, step, device):
            captured = super().capture(step, device)
            return type(captured)(captured.outputs, lambda: None, captured.num_bytes)

    assert soak.replays(20, Stale()).wrong >= 19


def test_growth_is_what_came_after_a_tenth(soak, monkeypatch):
    right, calls = soak.layer, []
    monkeypatch.setattr(soak, "layer", lambda *rows: calls.append(rows) or right(*rows))
    monkeypatch.setattr(soak, "_held", lambda: soak_bench.Held(len(calls), 2 * len(calls), 3 * len(calls)))
    assert soak.calls(20).grown == soak_bench.Held(17, 34, 51)  # three of the twenty came first


def test_the_whole_of_it(tmp_path, monkeypatch, capsys):
    parser = argparse.ArgumentParser()
    soak_bench.add_arguments(parser)
    out = tmp_path / "deep" / "soak.json"
    given = parser.parse_args(["--device", "cpu", "--calls", "12", "--out", str(out)])
    assert soak_bench.main(given) == 0
    told = json.loads(out.read_text())
    assert told["calls"]["runs"] == 12 and "replays" not in told
    assert "calls: Soaked(runs=12" in capsys.readouterr().out
    monkeypatch.setattr(Soak, "_is_near", lambda *_: False)
    assert soak_bench.main(given) == 1
