"""Functions that say by what calls of an operator differ, written out for its leaves."""

from collections.abc import Callable, Hashable, Sequence

from moe_ops import records
from moe_ops.records import Role


def key_of(leaves: Sequence[records.Leaf]) -> Callable[..., Hashable]:
    """The function of leaves that says all that checks and plans read of them; written out, as it runs in every call.

    But for where tensors start: a run that finds one elsewhere does not launch what was kept.
    """
    return eval(f"lambda {_names(leaves)}: ({_parts(leaves, '{0}.shape')},)")


def alike_of(leaves: Sequence[records.Leaf]) -> Callable[..., tuple[int, Hashable]] | None:
    """The function of leaves that gives the number of tokens, and all that counts but for it; None without tokens."""
    rows = [index for index, leaf in enumerate(leaves) if Role.PER_TOKEN in leaf.roles]
    if not rows or leaves[rows[0]].is_optional:
        return None
    others = _parts(leaves, "{0}.shape[1:], {0}.shape[0] == tokens", Role.PER_TOKEN)
    return eval(f"lambda {_names(leaves)}: (tokens := leaf{rows[0]}.shape[0], ({others},))")


def glance_of(leaves: Sequence[records.Leaf]) -> Callable[..., Hashable]:
    """The function of leaves that tells most calls apart at little cost: where two share it, metadata decides."""
    parts = ["leaf0.get_device()"]
    for index, leaf in enumerate(leaves):
        if leaf.is_tensor:
            parts.append(f"leaf{index} is None" if leaf.is_optional else f"leaf{index}.shape")
        else:
            parts.append(f"leaf{index}")
    return eval(f"lambda {_names(leaves)}: ({', '.join(parts)},)")


def _names(leaves: Sequence[records.Leaf]) -> str:
    return ", ".join(f"leaf{index}" for index in range(len(leaves)))


def _parts(leaves: Sequence[records.Leaf], shape: str, role: Role | None = None) -> str:
    """Expressions of all that counts of leaves; of those with `role`, if any, `shape` stands for the shape."""
    parts = []
    for index, leaf in enumerate(leaves):
        sizes = shape if role in (None, *leaf.roles) else "{0}.shape"
        described = f"None if {{0}} is None else ({sizes}, {{0}}.stride(), {{0}}.dtype, {{0}}.device)"
        parts.append((described if leaf.is_tensor else "{0}").format(f"leaf{index}"))
    return ", ".join(parts)
