"""Triton's interpreter without what it does in vain, which is more than half of its work. No value depends on it.

It makes the language its own before every call of a function inside a kernel, not only before the kernel: it looks at a
thousand attributes again, though what is replaced stays so until the launch ends. It computes for every sum and product
of integers whether they overflow, to assert it in debug mode alone; for GPUs Triton leaves that out. And it builds the
table of NumPy's dtypes for each look into it. What is made anew for every value, though there are a few dozen in all,
`brisk_types` makes once. Test-only: it patches private names.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.runtime import interpreter

from tests.kernels.brisk_types import shared_types


class _NothingToRestore:
    def restore(self) -> None:
        """Who replaced the language restores it."""


@contextmanager
def brisk() -> Iterator[None]:
    """Within it a launch replaces the language once for each module, and nobody computes what nobody reads."""
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    options = interpreter.interpreter_builder.options
    look_up = interpreter._get_np_dtype
    seen: set[int] = set()
    dtypes: dict[str, Any] = {}

    def launched(executor: Any, *arguments: Any, **options: Any) -> Any:
        seen.clear()
        return launch(executor, *arguments, **options)

    def patch_if_new(function: Any) -> Any:
        module = id(function.__globals__)
        if module in seen:
            return _NothingToRestore()
        seen.add(module)
        return patch(function)

    def dtype_of(kind: Any) -> Any:
        if kind.name not in dtypes:
            dtypes[kind.name] = look_up(kind)
        return dtypes[kind.name]

    def patch_attribute(holder: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def called(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return member(*arguments, **named)

        scope.set_attr(holder, name, called)

    with (
        shared_types(),
        mock.patch.object(interpreter, "_patch_attr", patch_attribute),
        mock.patch.object(interpreter.GridExecutor, "__call__", launched),
        mock.patch.object(interpreter, "_patch_lang", patch_if_new),
        mock.patch.object(interpreter, "_get_np_dtype", dtype_of),
        mock.patch.object(
            interpreter.interpreter_builder,
            "options",
            dataclasses.replace(options, sanitize_overflow=options.debug),
        ),
    ):
        yield
