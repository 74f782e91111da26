"""options(): what to hand to `torch.compile(options=...)` so that our passes run."""

from collections.abc import Callable, Iterable
from typing import Any

from inductor_passes import _compat
from inductor_passes.pipeline import MoEPasses

_SLOT = "post_grad_custom_pre_pass"


def options(mode: str | None = None, **inductor_options: Any) -> dict[str, Any]:
    """Inductor options with our passes among them.

        torch.compile(model, options=inductor_passes.options("reduce-overhead"))

    Args:
        mode: a `torch.compile` mode, expanded here because `torch.compile` takes mode or options, not both.
        inductor_options: any Inductor option; they win over those of the mode. Dots are not allowed in keywords:
            pass such options as `**{"triton.cudagraphs": True}`.

    Returns:
        A new dict. A pass already in the post-grad slot, of these options or of the global config, runs after ours.

    Raises:
        ValueError: an unknown mode or option.

    Example:
        >>> compiled = torch.compile(model, options=inductor_passes.options())
    """
    patches = {**_expand(mode), **inductor_options}
    _expect_known(patches)
    theirs = patches.get(_SLOT, _compat.post_grad_pre_pass())
    return {**patches, _SLOT: _chain(_as_passes(theirs))}


def _expand(mode: str | None) -> dict[str, Any]:
    if mode is None:
        return {}
    table = _compat.mode_table()
    if mode not in table:
        raise ValueError(f"mode={mode!r}: expected one of {', '.join(map(repr, table))}")
    return dict(table[mode])


def _expect_known(patches: Iterable[str]) -> None:
    known = _compat.inductor_option_names()
    for name in patches:
        if name.replace("-", "_") not in known:
            raise ValueError(f"option {name!r}: expected an option of torch._inductor.config")


def _as_passes(slot: Any) -> tuple[Callable[..., None], ...]:
    """The passes in a slot: none, one, or (torch 2.13) several."""
    if slot is None:
        return ()
    return tuple(slot) if isinstance(slot, list | tuple) else (slot,)


def _chain(theirs: Iterable[Callable[..., None]]) -> MoEPasses:
    """Ours once, then theirs, unwrapping a pass that `options` already made."""
    chained: list[Callable[..., None]] = []
    for each in theirs:
        chained.extend(each.chained if isinstance(each, MoEPasses) else (each,))
    return MoEPasses(tuple(chained))
