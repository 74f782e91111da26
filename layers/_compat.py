"""Private PyTorch APIs that layers use: nested arguments as leaves, who wrote to a tensor, hooks of all modules."""

from typing import Any

from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree

Structure = pytree.TreeSpec
"""What is left of nested containers without their leaves; `==` compares."""


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of nested containers, and what puts them back."""
    return pytree.tree_flatten(tree)


def unflatten(leaves: list[Any], structure: Structure) -> Any:
    """The inverse of `flatten`."""
    return pytree.tree_unflatten(leaves, structure)


def paths(tree: Any) -> list[str]:
    """Where each leaf is, in the order of `flatten`: "[0].topk_ids", "['mask']"."""
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]


def version(tensor: Tensor) -> int:
    """A counter that each write into `tensor`, or into a view of it, moves."""
    return tensor._version


def has_global_hooks() -> bool:
    """Whether a call of any module runs hooks: those of `register_module_forward_hook` and the like."""
    return bool(_has_any_global_hook())
