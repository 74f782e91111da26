"""C++ kernels of one graph, compiled together. Private torch APIs, beside `_compat.py`; tested on torch 2.11 to 2.14.

Inductor calls the C++ compiler once for each kernel, and most of a call goes into what is the same for all: to load the
precompiled header and to link. Here kernels are noted while the generated code defines them, and what it waits for are
libraries of several kernels each, with the flags, locks and cache that Inductor has for one.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, groupby
from math import ceil
from operator import itemgetter
from typing import Any

import torch
from torch._inductor.async_compile import AsyncCompile, get_compile_threads, kernel_code_log
from torch._inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.virtualized import V

try:  # torch 2.13
    from torch._inductor.custom_graph_pass import CustomSchedulerPass as SchedulerPass
except ImportError:  # torch 2.11, which has no kind of its own
    from torch._inductor.custom_graph_pass import CustomGraphPass as SchedulerPass

__all__ = ["compile_kernels_together", "KernelsTogether", "SchedulerPass", "want_together"]

_WANTED = "moe_kernels_together"


def want_together(graph: torch.fx.Graph) -> None:
    """Notes of a graph that its kernels may be compiled together, with those of graphs around it."""
    if graph.owning_module is not None:
        graph.owning_module.meta[_WANTED] = True


def compile_kernels_together() -> None:
    """Has the code of the graph that is being scheduled compile its C++ kernels together, if somebody wants that.

    Functions inside it define their kernels in its header, so it is asked for all of them. How many libraries there are
    is written into the code: cached code finds them again, whoever runs it.
    """
    wrapper, modules = V.graph.wrapper_code, V.graph.module.modules()
    is_wanted = any(_WANTED in getattr(each, "meta", {}) for each in modules)
    if is_wanted and type(wrapper) is PythonWrapperCodegen:
        wrapper.header.writeline(f"from {__name__} import {KernelsTogether.__name__}")
        wrapper.header.writeline(f"async_compile = {KernelsTogether.__name__}({get_compile_threads()})")


@dataclass(frozen=True)
class _Kernel:
    """A kernel as the generated code defines it."""

    argument_types: tuple[str, ...]
    source: str


class KernelsTogether:
    """Stands for `async_compile` in generated code, around Inductor's own: pools and what is known of them are its."""

    def __init__(self, libraries: int) -> None:
        self.libraries, self._inductors = libraries, AsyncCompile()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inductors, name)

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
        """Notes a kernel; one that is more than a function is compiled for itself, as ever."""
        if not _is_one_function(source_code):
            return self._inductors.cpp_pybinding(argtypes, source_code)
        kernel_code_log.info("CPP+Bindings Kernel:\n%s", source_code)
        return _Kernel(tuple(argtypes), source_code)

    def wait(self, scope: dict[str, Any]) -> None:
        """Puts functions in the place of the kernels noted in `scope`."""
        noted = {name: value for name, value in scope.items() if isinstance(value, _Kernel)}
        functions: dict[_Kernel, Any] = {}
        for kernels in _in_libraries([*dict.fromkeys(noted.values())], self.libraries):
            functions |= zip(kernels, map(LambdaFuture, _started(kernels)), strict=True)
        for name, kernel in noted.items():
            scope[name] = functions[kernel] if get_compile_threads() > 1 else functions[kernel].result()
        self._inductors.wait(scope)


_SMALLEST = 16384
"""Characters of source for which it takes another library. One costs 0.4 s of a core, so many characters 0.1 s."""


def _in_libraries(kernels: Sequence[_Kernel], most: int) -> Iterator[list[_Kernel]]:
    """Kernels in their order, cut into at most so many parts of about equal length."""
    lengths = [len(each.source) for each in kernels]
    number = min(most, ceil(sum(lengths) / _SMALLEST))
    middles = (end - length / 2 for end, length in zip(accumulate(lengths), lengths, strict=True))
    parts = [int(middle / sum(lengths) * number) for middle in middles]
    for _, part in groupby(zip(parts, kernels, strict=True), key=itemgetter(0)):
        yield [kernel for _, kernel in part]


def _started(kernels: Sequence[_Kernel]) -> list[Callable[[], Any]]:
    """Starts to compile one library; what gives each kernel's function when it is there."""
    # Inductor holds the library's lock while it submits: a task that ran at once would wait for it.
    submit = AsyncCompile.submit if get_compile_threads() > 1 else None
    if len(kernels) == 1:
        (kernel,) = kernels
        load = CppPythonBindingsCodeCache.load_pybinding_async
        return [load([*kernel.argument_types], kernel.source, submit_fn=submit)]
    names = [f"kernel_{index}" for index in range(len(kernels))]
    sources, bindings = map(_named, names, kernels), map(_binding, names, kernels)
    library = _Library.load_async("\n".join((_PREFIX, *sources, _HEADERS, *bindings)), submit_fn=submit)
    return [partial(_function, library, name) for name in names]


def _function(library: Callable[[], tuple[str, str]], name: str) -> Any:
    return getattr(_module(name)._load_library(*library()), name)


class _Library(CppPythonBindingsCodeCache):
    """Compiles and caches libraries of several modules, and loads none of these."""

    @classmethod
    def _load_library(cls, path: str, key: str) -> Any:
        return path, key


@lru_cache(maxsize=1024)
def _module(name: str) -> type[CppPythonBindingsCodeCache]:
    """Loads the Python module of one kernel out of a library."""
    calls = {"entry_function": name, "call_entry_function": f"{name}({{}}); Py_RETURN_NONE;"}
    return type(name, (CppPythonBindingsCodeCache,), calls)


_PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>"
_SIGNATURE = re.compile(re.escape(_PREFIX) + r'\s+extern "C"\s+void\s+kernel\(')
_HEADERS = """#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sstream>
#include <cstdlib>
#include <cerrno>"""


def _is_one_function(source: str) -> bool:
    """Whether a kernel's source is Inductor's header and one function behind it, whose name is nowhere else in it."""
    source = source.strip()
    depths = [*accumulate(1 if each == "{" else -1 for each in source if each in "{}")]
    is_one = bool(depths) and depths[-1] == 0 and 0 not in depths[:-1] and source.endswith("}")
    is_plain = not re.search(r"^\s*#\s*(?!pragma)", source.removeprefix(_PREFIX), re.MULTILINE)
    has_name = len(re.findall(r"\bkernel\b", source)) == 1
    return bool(_SIGNATURE.match(source)) and is_one and is_plain and has_name


def _named(name: str, kernel: _Kernel) -> str:
    return re.sub(r"\bkernel\b", name, kernel.source.strip().removeprefix(_PREFIX))


def _binding(name: str, kernel: _Kernel) -> str:
    """Inductor's code that makes a Python module of one function, in a namespace of its own."""
    module = _module(name)
    types = (each.replace("const ", "") for each in kernel.argument_types)
    arguments = ", ".join(f"parse_arg<{each}>(args, {index})" for index, each in enumerate(types))
    text = module.suffix_template.format(
        arg_len=len(kernel.argument_types),
        call_entry_func=module.call_entry_function.format(arguments),
        entry_func=name,
        extra_parse_arg="",
    )
    return f"namespace of_{name} {{\n{text}\n}}"
