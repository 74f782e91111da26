"""options(): what to hand to `torch.compile(options=...)` so that our passes run."""

from collections.abc import Mapping
from typing import Any

from inductor_passes import _compat, _compat_options
from inductor_passes.guards import kept_guards
from inductor_passes.pipeline import MoEPasses, passes_in
from inductor_passes.together import CompileTogether
from inductor_passes.training import RaiseForTraining


def options(mode: str | None = None, **inductor_options: Any) -> dict[str, Any]:
    """Inductor options with our passes among them.

        torch.compile(model, options=inductor_passes.options("reduce-overhead"))

    Args:
        mode: a `torch.compile` mode, expanded here because `torch.compile` takes mode or options, not both.
        inductor_options: any Inductor option; they win over those of the mode. Dots are not allowed in keywords:
            pass such options as `**{"triton.cudagraphs": True}`.

    Returns:
        A new dict. `torch.compile`, which takes a `guard_filter_fn` out of its options, gets `trust_library` where the
        user put none. A pass of the user's in one of our slots runs after ours: the one given here, else the one that
        the global config holds when a graph is compiled, whenever it was put there.

    Raises:
        ValueError: an unknown mode or option.
        TypeError: a mode that is no string, an option of another type than Inductor's, or a pass that cannot be called.

    Example:
        >>> compiled = torch.compile(model, options=inductor_passes.options())
    """
    given = {name.replace("-", "_"): value for name, value in inductor_options.items()}
    _expect_known(given)
    ours = {slot: kind.around(given[slot]) if slot in given else kind() for slot, kind in _SLOTS.items()}
    return _Options({**_expand(mode), **given, **ours})


class _Options(dict[str, Any]):
    """Options of Inductor, and for `torch.compile` alone, which asks for it by `pop`, a filter of Dynamo's guards."""

    def pop(self, key: str, *default: Any) -> Any:
        if key == "guard_filter_fn" and key not in self:
            return kept_guards
        return super().pop(key, *default)


def _expand(mode: str | None) -> dict[str, Any]:
    if mode is None:
        return {}
    if not isinstance(mode, str):
        raise TypeError(f"mode={mode!r}: expected None or a string")
    table = _compat_options.mode_table()
    if mode not in table:
        raise ValueError(f"mode={mode!r}: expected one of {', '.join(map(repr, table))}")
    return dict(table[mode])


def _expect_known(given: Mapping[str, Any]) -> None:
    known = _compat_options.inductor_option_names()
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"option {name!r}: expected an option of torch._inductor.config")
        _expect_type(name, value)


def _expect_type(name: str, value: Any) -> None:
    wanted = _compat_options.inductor_option_type(name)
    if not isinstance(value, wanted):
        raise TypeError(f"option {name}={value!r}: expected {wanted.__name__}, got {type(value).__name__}")
    if name in _SLOTS and not all(map(callable, passes_in(value))):
        raise TypeError(f"option {name}={value!r}: expected a pass, which can be called")


_SLOTS = {
    _compat.POST_GRAD_SLOT: MoEPasses,
    _compat.PRE_GRAD_SLOT: RaiseForTraining,
    _compat.POST_FUSION_SLOT: CompileTogether,
}
