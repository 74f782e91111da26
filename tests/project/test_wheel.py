"""The wheel smoke test fails on a wheel that is not whole. What it says of the real one is `make wheel`."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def _smoke(wheel: Path, folder: Path, change: Callable[[Path], None]) -> subprocess.CompletedProcess[str]:
    """Runs it on a changed wheel, unpacked into an environment that gets everything else from this one."""
    venv.create(folder / "env", symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(folder / "env"), "platbase": str(folder / "env")})
    site = Path(paths["purelib"])
    zipfile.ZipFile(wheel).extractall(site)
    change(site)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    command = [str(folder / "env/bin/python"), "-P", str(ROOT / ".ci/wheel_smoke.py"), str(ROOT)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def _lose(name: str) -> Callable[[Path], None]:
    return lambda site: next(site.glob(name)).unlink()


def _both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda site: [change(site) for change in changes]


def _add(name: str) -> Callable[[Path], None]:
    return lambda site: (site / name).write_text("")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_lose("moe_ops/combine.py"), "moe_ops was built from other files than there are: ['combine.py']"),
        (
            _both(_lose("layers/huggingface/report.py"), _lose("layers/py.typed")),
            "layers was built from other files than there are: ['huggingface/report.py', 'py.typed']",
        ),
        (_add("moe_ops/old.py"), "['old.py']"),
        (_lose("moe_inductor-*.dist-info/RECORD"), "KeyError"),
        (_lose("moe_inductor-*.dist-info/entry_points.txt"), "backend moe_inductor is not among"),
    ],
    ids=["module", "lazy module and typing marker", "left-over module", "record", "entry point"],
)
def test_what_is_missing_is_found(wheel: Path, tmp_path: Path, change, text: str) -> None:
    result = _smoke(wheel, tmp_path, change)
    assert result.returncode == 1 and text in result.stderr, result.stderr[-1000:]


def test_a_wrong_product_is_found(monkeypatch) -> None:
    """By the check itself, in this process: compiled and eager code are wrong alike, so neither may be the measure."""
    smoke = _module()
    from moe_ops import _cpu_experts

    activate = _cpu_experts.apply_activation
    monkeypatch.setattr(_cpu_experts, "apply_activation", lambda *args: 3 * activate(*args))
    with pytest.raises(AssertionError, match="not close"):
        smoke.check_values()


def _module():
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("wheel_smoke", ROOT / ".ci" / "wheel_smoke.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
