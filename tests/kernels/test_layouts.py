"""Odd H and I in every layout, against float64, each group in a fresh process; and what the driver says of a crash."""

import pytest
import torch
import triton

from tests.kernels.fresh import failure
from tests.kernels.layouts import GROUPS

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="these processes do not interpret")
_NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@_NEEDS_GPU
@pytest.mark.parametrize("group", GROUPS, ids="-".join)
def test_odd_sizes_on_the_gpu(group: tuple[str, ...]) -> None:
    assert failure("-m", "tests.kernels.layouts", "cuda", *group) is None


def test_the_cases_run() -> None:
    """On the CPU, whose definition they hold for too."""
    assert (
        failure("-m", "tests.kernels.layouts", "cpu", "float32", "halves", "transposed", "standard") is None
    )


def test_a_wrong_value_is_named_and_hides_no_other() -> None:
    wrong = (
        "import runpy, sys, moe_ops; right = moe_ops.fused_experts\n"
        "def wrong(hidden_states, **given):\n"
        "    out = right(hidden_states, **given)\n"
        "    return out * 2 if hidden_states.shape in ((1, 96), (4, 101)) else out\n"
        "moe_ops.fused_experts = wrong\n"
        "sys.argv = ['layouts', 'cpu', 'float32', 'ungated', 'standard', 'transposed']\n"
        "runpy.run_module('tests.kernels.layouts', run_name='__main__')"
    )
    message = failure("-c", wrong)
    assert message is not None
    lines = message.splitlines()[1:]
    named = [line.partition(": relative error")[0] for line in lines if "relative error" in line]
    assert named == [
        f"{size} float32 ungated standard transposed"
        for size in ("T=1 H=96 I=100", "T=4 H=101 I=300", "T=4 H=101 I=101")
    ]


@pytest.mark.parametrize(
    "code, expected",
    [
        (
            "import os; print('case one', flush=True); print('case two', flush=True); os.abort()",
            "two: exit status -6",
        ),
        (
            "print('case one'); raise SystemExit('illegal instruction')",
            "one: exit status 1\nillegal instruction",
        ),
        ("raise ImportError('gone')", "before the first case: exit status 1"),
        ("pass", "before the first case: exit status 0"),
    ],
)
def test_a_worker_that_dies_is_reported_with_its_case(code: str, expected: str) -> None:
    message = failure("-c", code)
    assert message is not None and message.startswith(expected)


def test_a_worker_that_hangs_is_reported_with_its_case() -> None:
    code = "import time; print('case slow', flush=True); time.sleep(60)"
    assert failure("-c", code, timeout=3) == "slow: no end after 3 s"


def test_a_worker_without_faults_reports_none() -> None:
    assert failure("-c", "print('case one')") is None
