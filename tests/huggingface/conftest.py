import pytest
import torch

from tests.huggingface import trials  # noqa: F401  # what has been imported by then, tests/conftest.py lets share


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Each test compiles from nothing: recompile limits and counters are per test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
