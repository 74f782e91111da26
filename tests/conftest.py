import os

import pytest
import torch

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
def poisoned_empty(monkeypatch):
    """Memory from torch.empty and new_empty comes full of NaN (integers: a huge id), so a hole in an output shows."""

    def poison(tensor):
        if tensor.dtype.is_floating_point:
            return tensor.fill_(float("nan"))
        return (
            tensor.fill_(torch.iinfo(tensor.dtype).max)
            if tensor.dtype in (torch.int32, torch.int64)
            else tensor
        )

    def wrap(original):
        return lambda *args, **kwargs: poison(original(*args, **kwargs))

    monkeypatch.setattr(torch, "empty", wrap(torch.empty))
    monkeypatch.setattr(torch, "empty_like", wrap(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", wrap(torch.Tensor.new_empty))
