"""What a user's pass is, as text: equal in every process where the pass does the same, and only there.

A pass is its class and what its instance holds. The class is the source of its module and of the user's modules that
one imports; torch, the standard library and our own packages are in the cache key by other means, and an installed
package counts by its version. Where running code and source cannot be seen to agree (a class typed at a prompt, a
patched method, a file edited after it was imported) there is no fingerprint, and nothing may be cached.
"""

import abc
import ast
import enum
import functools
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inductor_passes import _compat

_OURS = {"moe_ops", "inductor_passes"}
_IN_OTHER_KEYS = {*sys.stdlib_module_names, *_OURS, "torch", "functorch"}
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_BASES_WITHOUT_STATE = {
    object,
    abc.ABC,
    typing.Protocol,
    typing.Generic,
    *_compat.InferenceAwareGraphPass.__mro__,
}
_MACHINERY = {"_abc_impl", "_is_protocol", "_is_runtime_protocol"}
_INSTALLED = tuple({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")})


class NoFingerprint(Exception):
    """Raised with the reason why a pass cannot be told by its content."""


def fingerprint(graph_pass: object) -> str:
    """sha256 over what `graph_pass` is.

    Raises:
        NoFingerprint: its source cannot be had or is not what runs, or it holds something that has no stable text
            (a tensor, a handle, itself).
    """
    reader = _Reader()
    try:
        text = reader.text(graph_pass)
    except RecursionError:
        raise NoFingerprint(
            f"{type(graph_pass).__qualname__} holds something that refers to itself"
        ) from None
    return hashlib.sha256(repr((text, sorted(reader.modules.items()))).encode()).hexdigest()


class _Reader:
    """Walks a pass, and collects the modules its code comes from."""

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}
        self._classes: set[type] = set()
        self._checked: set[types.CodeType] = set()

    def text(self, value: object) -> str:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, torch._ops.OpOverload):
            return f"{kind.__name__}:{value!r}"
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        parts = _parts(value)
        if parts is not None:
            return self._joined(kind.__name__, parts)
        return self._class(kind) + self.text(object.__getstate__(value))  # type: ignore[attr-defined]

    def _joined(self, name: str, parts: Iterable[object]) -> str:
        texts = map(self.text, parts)
        return f"{name}({', '.join(sorted(texts) if name.endswith('set') else texts)})"

    def _class(self, cls: type) -> str:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if cls in self._classes:
            return name
        self._classes.add(cls)
        theirs = [base for base in cls.__mro__ if base not in _BASES_WITHOUT_STATE and not _is_ours(base)]
        for base in theirs:
            self._module(base.__module__, base.__qualname__)
        return self._joined(name, [item for base in theirs for item in _attributes(base)])

    def _function(self, function: types.FunctionType) -> str:
        if _is_generated(function):
            return function.__name__
        if not _is_ours(function):
            self._module(function.__module__, function.__qualname__)
            self._expect_from_source(function)
        held = (_closed_over(function), function.__defaults__, function.__kwdefaults__)
        return self._joined(f"{function.__module__}.{function.__qualname__}", held)

    def _module(self, name: str, wanted: str) -> None:
        """Adds a module of the user's and those of the user's that it imports."""
        if name in self.modules:
            return
        path = _source_file(name)
        if path is None or _package(name) in _IN_OTHER_KEYS:
            raise NoFingerprint(f"{name}.{wanted} has no source file")
        source = _read(path)
        self.modules[name] = source.digest
        for other in source.imports(name):
            other_path = _source_file(other)
            if other_path is None:
                continue
            if _package(other) != _package(name) and _is_installed(other_path):
                package = sys.modules.get(_package(other))
                self.modules[_package(other)] = str(getattr(package, "__version__", ""))
            else:
                self._module(other, "")

    def _expect_from_source(self, function: types.FunctionType) -> None:
        """Refuses when a function, or one it calls in its module, is not what its file says."""
        function = inspect.unwrap(function)
        if function.__code__ in self._checked:
            return
        self._checked.add(function.__code__)
        path = _source_file(function.__module__)
        if path is None or function.__code__ not in _read(path).codes:
            raise NoFingerprint(
                f"{function.__module__}.{function.__qualname__} is not what its source file says"
            )
        for name in _names(function.__code__):
            called = function.__globals__.get(name)
            if isinstance(called, types.FunctionType) and called.__module__ == function.__module__:
                self._expect_from_source(called)


def _package(module_name: str) -> str:
    return str(module_name).partition(".")[0]


def _is_ours(code: type | types.FunctionType) -> bool:
    return _package(code.__module__) in _OURS


def _parts(value: Any) -> Iterable[object] | None:
    """What a container or wrapper of the language holds, None for any other object."""
    kind = type(value)
    if kind in (tuple, list, set, frozenset):
        return value
    if kind is dict:
        return value.items()
    if kind in (staticmethod, classmethod):
        return (value.__func__,)
    if kind is types.MethodType:
        return value.__func__, value.__self__
    if kind is property:
        return value.fget, value.fset, value.fdel
    if kind is functools.partial:
        return value.func, value.args, value.keywords
    return (kind.__qualname__, value.name) if isinstance(value, enum.Enum) else None


def _attributes(cls: type) -> Iterator[object]:
    """What a class holds now: its functions, and its attributes, for these may have been set later."""
    for name, item in vars(cls).items():
        is_code = isinstance(item, types.FunctionType | staticmethod | classmethod | property)
        is_slot = isinstance(item, types.MemberDescriptorType)
        if is_code or not (name.startswith("__") or name in _MACHINERY or is_slot):
            yield item


def _closed_over(function: types.FunctionType) -> list[object]:
    return [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]


def _is_generated(function: types.FunctionType) -> bool:
    """A special method that a decorator such as `dataclass` wrote from what the class body says."""
    function = inspect.unwrap(function)
    from_elsewhere = _package(function.__module__) in sys.stdlib_module_names
    is_special = function.__name__.startswith("__") and function.__name__.endswith("__")
    return is_special and (from_elsewhere or function.__code__.co_filename == "<string>")


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return {*code.co_names}.union(*inner)


def _is_installed(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in _INSTALLED)


def _source_file(module_name: str) -> Path | None:
    origin = _found(module_name)[0]
    path = Path(origin) if origin else None
    return path if path is not None and path.suffix == ".py" and path.is_file() else None


def _found(module_name: str) -> tuple[str | None, Any]:
    """Where a module is and, for a package, where its modules are. Imports nothing, as `find_spec` would."""
    module = sys.modules.get(module_name)
    if module is not None:
        return getattr(module, "__file__", None), getattr(module, "__path__", None)
    parent = module_name.rpartition(".")[0]
    folders = _found(parent)[1] if parent else None
    if parent and folders is None:  # a name inside a module
        return None, None
    specs = (finder.find_spec(module_name, folders) for finder in sys.meta_path)
    spec = next((spec for spec in specs if spec is not None), None)
    return (spec.origin, spec.submodule_search_locations) if spec is not None else (None, None)


@dataclass(frozen=True)
class _Source:
    """One source file, read."""

    digest: str
    codes: frozenset[types.CodeType]
    tree: ast.Module

    def imports(self, module_name: str) -> Iterator[str]:
        """Names of the modules imported anywhere in it, also inside functions, and of what may be a module."""
        module = sys.modules.get(module_name)
        package = getattr(module, "__package__", None) or module_name.rpartition(".")[0]
        for node in ast.walk(self.tree):
            for name in _imported(node, package):
                if _package(name) not in _IN_OTHER_KEYS:
                    yield from _with_parents(name)


def _imported(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        base = importlib.util.resolve_name("." * node.level + base, package)
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _read(path: Path) -> _Source:
    stat = path.stat()
    return _parse(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=1024)
def _parse(path: Path, mtime_ns: int, size: int) -> _Source:
    text = path.read_bytes()
    try:
        tree = ast.parse(text)
        codes = frozenset(_codes(compile(text, str(path), "exec", dont_inherit=True)))
    except SyntaxError as error:
        raise NoFingerprint(f"{path} is not Python any more") from error
    return _Source(hashlib.sha256(text).hexdigest(), codes, tree)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)
