"""Runs checks in a process of their own, so that one that dies hides nothing but itself."""

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_NAMED = "case "


def failure(*arguments: str, timeout: float = 900) -> str | None:
    """What went wrong in `python *arguments`, None if nothing did.

    A line `case <name>` on its stdout says what it is at; what it dies or hangs of is then said of that case.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    try:
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=_ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as expired:
        return f"{_last_case((expired.stdout or b'').decode())}: no end after {timeout} s"
    if result.returncode == 0 and _last_case(result.stdout) != _NONE:
        return None
    return f"{_last_case(result.stdout)}: exit status {result.returncode}\n{result.stderr[-4000:]}"


_NONE = "before the first case"


def _last_case(output: str) -> str:
    named = [line.removeprefix(_NAMED) for line in output.splitlines() if line.startswith(_NAMED)]
    return named[-1] if named else _NONE
