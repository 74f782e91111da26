"""Kernel tests run twice: on CPU tensors under TRITON_INTERPRET=1, and on a GPU with `-m gpu`."""

import numpy as np
import pytest
import torch
import triton

from moe_ops.kernels import scaled_pairs
from tests.kernels import memory
from tests.kernels.brisk import brisk

INTERPRETED = triton.knobs.runtime.interpret


def _interpreter_works() -> bool:
    # Triton 3.6's interpreter converts one-element arrays to int, which NumPy 2.4 refuses.
    try:
        int(np.ones(1, dtype=np.int32))
    except TypeError:
        return tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)
    return True


_NEEDS_INTERPRETER = pytest.mark.skipif(
    not (INTERPRETED and _interpreter_works()),
    reason="needs TRITON_INTERPRET=1 and a NumPy its interpreter takes",
)
_NEEDS_GPU = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU, not interpreted"
)


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=_NEEDS_INTERPRETER),
        pytest.param("cuda", marks=[pytest.mark.gpu, _NEEDS_GPU]),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Where the kernels run."""
    return request.param


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements that a kernel should write and does not are NaN, or -7, not what the allocator left."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.dtype.is_floating_point else -7)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(autouse=True)
def _many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tests have so few tiles that those of weights of 4 bits would be mixed, never low."""
    monkeypatch.setattr(scaled_pairs, "FEW_TILES", 0)


@pytest.fixture(autouse=INTERPRETED, scope="session")
def _brisk_interpreter() -> object:
    with brisk():
        yield


@pytest.fixture(autouse=INTERPRETED)
def _checked_memory() -> object:
    """No interpreted kernel may touch what is none of its tensors."""
    with memory.checked():
        yield


@pytest.fixture(autouse=True)
def _quiet_numpy() -> object:
    """The interpreter computes with NumPy, which warns where a GPU returns inf or NaN."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
