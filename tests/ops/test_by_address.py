"""Plans that run again launch by address: checked with Triton's launchers, on a driver that stands in for CUDA's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_launches_by_address() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.launch_checks"],
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"CC": "gcc"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    lines = result.stdout.splitlines()
    assert "fails: " not in result.stdout, result.stdout
    assert sum(line.startswith("holds: ") for line in lines) == 28, result.stdout
