import atexit
import gc
import os
import sys

import pytest
import torch

from tests import spared
from tests.helpers import nan_in_empty_memory
from tests.linker import write_linker

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Or every process with a compile cache of its own asks g++ for ten seconds which vectors it knows.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # several workers, each with a thread per core, wait for each other
    torch.set_num_threads(1)


def pytest_collection_finish():
    """What is imported by now stays, so the collector need not look at it; compilers make much else that stays a while.

    Of the time of tests that compile this saves a tenth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    spared.spare()
    if trials := sys.modules.get("tests.huggingface.trials"):
        trials.share()


@pytest.fixture(autouse=True, scope="module")
def small_heap():
    """What a file's tests leave in torch's caches stays as well: late in a run a `gc.collect` took 1.5 s for it."""
    yield
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Only as Python ends, or bindings think that it leaked: pytest collects ten times before, half a second each."""
    atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True, scope="session")
def faster_linker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("linker")
    if write_linker(folder):
        os.environ.setdefault("COMPILER_PATH", str(folder))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


@pytest.fixture
def poisoned_empty():
    with nan_in_empty_memory():
        yield
