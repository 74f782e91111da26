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


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder of a family in 4 bits of some kind, and a stock model of what it stands for."""
    from tests.huggingface.publishing import publish

    made = {}

    def of(family, kind):
        if (family, kind) not in made:
            folder = tmp_path_factory.mktemp("published")
            made[family, kind] = folder, publish(folder, family, kind)
        return made[family, kind]

    return of
