"""Options of `python -m benchmarks`: what is wrong with them is said in a line, before anything runs."""

import json

import pytest
import torch

from benchmarks import __main__ as command, cpu_bench

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("demo --steps 0", "--steps: '0': expected a whole number from 1 on"),
        ("loading --layers -1", "--layers: '-1': expected a whole number from 1 on"),
        ("parallel --ranks two", "--ranks: 'two': expected a whole number from 1 on"),
        ("cpu --ts 1,,2", "--ts: '': expected a whole number from 1 on"),
        ("cpu --seconds nan", "--seconds: 'nan': expected a number above 0"),
        ("serving --loads 0.5,x", "--loads: 'x': expected a number above 0"),
        ("cpu --loads busy", "--loads: 'busy': expected names from idle, loaded"),
        ("training --workloads W9", "--workloads: 'W9': expected names from W1, "),
        ("kernels --draw missing.csv", "--draw: 'missing.csv': expected a file that is there"),
        ("cpu --json /dev/null/x.json", "--json: '/dev/null/x.json': no folder can be made there"),
        ("soak --out .", "--out: '.': expected a file, it is a folder"),
        ("compile-time --device gpu", "--device: 'gpu': expected names from cpu, cuda"),
        pytest.param("soak --device cuda", "--device: 'cuda': PyTorch finds no GPU here", marks=NO_GPU),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_runs(arguments, told, monkeypatch, capsys) -> None:
    for module in command.COMMANDS.values():
        monkeypatch.setattr(module, "main", lambda arguments: pytest.fail("it ran"))
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments.split()])
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 2 and told in capsys.readouterr().err


def test_a_folder_for_figures_is_made(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cpu_bench, "measure", lambda *_: [])
    monkeypatch.setattr(cpu_bench, "tables", lambda results: "")
    monkeypatch.setattr("sys.argv", ["benchmarks", "cpu", "--json", str(tmp_path / "new" / "cpu.json")])
    assert command.main() == 0 and json.loads((tmp_path / "new" / "cpu.json").read_text())["cells"] == []


@NO_GPU
@pytest.mark.parametrize(
    "name", ["gpu", "host", "kernels", "moe", "options", "published", "quantised", "stock", "tune"]
)
def test_what_needs_a_gpu_says_so(name, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["benchmarks", name])
    assert command.main() == 2 and "CUDA GPU" in capsys.readouterr().out
