import os

import pytest
import torch

from tests.helpers import nan_in_empty_memory

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # several workers, each with a thread per core, wait for each other
    torch.set_num_threads(1)


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
