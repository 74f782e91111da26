"""Compiles that end early: a kernel takes the C++ compiler a second, and what is behind passes takes another."""

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


class Stopped(Exception):
    """The passes have run."""


@contextmanager
def passes_alone() -> Iterator[None]:
    """The one compile within ends where Inductor has run every pass of a forward graph; no cache is asked or filled."""
    with fresh_graphs(), mock.patch.object(GraphLowering, "run", side_effect=Stopped):
        try:
            yield
        except Exception as error:
            if not _is_of(Stopped, error):
                raise
        else:
            raise AssertionError("nothing was compiled")


def _is_of(kind: type[Exception], error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None


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
