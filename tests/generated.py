"""Code that Inductor writes, without what it would be compiled to: a kernel takes the C++ compiler a second."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn
from unittest import mock

from torch._functorch import config as functorch_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering

from inductor_passes._compat_kernels import KernelsTogether
from tests.helpers import fresh_graphs


class NotCompiled(Exception):
    """A kernel in whose place there is nothing was called."""


def codes_of(run: Callable[[], Any]) -> list[str]:
    """The code of every graph that `run` compiles until it calls the first C++ kernel; no cache is asked."""
    with _noted() as codes, suppress(NotCompiled):
        run()
    return codes


@contextmanager
def _noted() -> Iterator[list[str]]:
    codes: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(fresh_graphs())
        stack.enter_context(
            functorch_config.patch(force_non_lazy_backward_lowering=True)
        )  # nor any backward runs
        stack.enter_context(mock.patch.object(GraphLowering, "save_output_code", codes.append))
        for compiler in (AsyncCompile, KernelsTogether):
            stack.enter_context(mock.patch.object(compiler, "cpp_pybinding", return_value=_nothing))
        yield codes


def _nothing(*_: Any) -> NoReturn:
    raise NotCompiled
