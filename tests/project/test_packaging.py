"""The installed distribution: what belongs to it, and that the lock and the Makefile agree with it."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PACKAGES = ("moe_ops", "layers", "inductor_passes")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _distribution() -> metadata.Distribution:
    try:
        return metadata.distribution("moe-inductor")
    except metadata.PackageNotFoundError:
        pytest.skip("moe-inductor is not installed here: the packages come from the working directory")


def test_backend_is_found_by_torch_compile_without_an_import() -> None:
    _distribution()
    assert "moe_inductor" in torch.compiler.list_backends(exclude_tags=())


def test_no_other_distribution_ships_a_package_of_ours() -> None:
    _distribution()
    owners = metadata.packages_distributions()
    for package in PACKAGES:  # an editable install lists no files, so it may own none by name
        assert set(owners.get(package, [])) <= {"moe-inductor"}


def test_every_package_is_typed() -> None:
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)


def _locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", pin) for pin in pins), (
        "exact public versions only"
    )
    return {
        re.sub("[-_.]+", "-", name).lower(): version for name, version in (pin.split("==") for pin in pins)
    }


def test_lock_has_everything_the_project_asks_for() -> None:
    locked = _locked()
    wanted = PROJECT["dependencies"] + [
        each
        for extra in PROJECT["optional-dependencies"].values()
        for each in extra
        if not each.startswith("moe-inductor")
    ]
    names = {re.sub("[-_.]+", "-", re.match(r"[A-Za-z0-9_.-]+", each).group()).lower() for each in wanted}
    assert names <= set(locked)
    assert locked["torch"] == "2.13.0"


def test_triton_has_no_upper_bound() -> None:
    assert "triton; sys_platform == 'linux'" in PROJECT["dependencies"]
