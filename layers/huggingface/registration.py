"""Registration of the experts implementation without importing transformers for it.

Importing transformers' model code takes more than a second, and whoever imports us may not need it. So the
implementation is registered at once where it has been imported, and otherwise right after somebody does: every
model is built from `transformers.modeling_utils`.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_BEFORE_ANY_MODEL = "transformers.modeling_utils"


def register_with_transformers() -> None:
    """Registers now if transformers' model code has been imported, else as soon as it is."""
    if _BEFORE_ANY_MODEL in sys.modules:
        _register_if_possible()
    else:
        sys.meta_path.insert(0, _AfterImport(_BEFORE_ANY_MODEL, _register_if_possible))


def _register_if_possible() -> None:
    # A transformers too old to have the registry must stay importable; register() says what is missing.
    with contextlib.suppress(ImportError):
        from layers.huggingface import experts, refusing

        experts.register()
        refusing.refuse_where_ignored()


class _AfterImport(MetaPathFinder):
    """Finds one module as the other finders do, and calls a function when it has been executed."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self.name = name
        self.function = function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._call_after(spec.loader)
        return spec

    def _call_after(self, loader: object) -> None:
        execute = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.function()

        loader.exec_module = exec_module  # type: ignore[attr-defined]
