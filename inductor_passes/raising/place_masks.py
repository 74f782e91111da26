"""Masks of tokens and places, as products read them: which token goes to which place of an expert, and back."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes import _compat
from inductor_passes.raising.choices import is_of_router
from inductor_passes.raising.elsewhere import is_noise
from inductor_passes.raising.evaluation import Cut, concrete, cut
from inductor_passes.raising.finders import is_found_in_rows, num_found_among
from inductor_passes.raising.indices import is_integral
from inductor_passes.raising.seen_rows import Sizes, seen_rows, shows_rows
from inductor_passes.raising.spreads import Inside
from inductor_passes.raising.views_of_rows import SHOWN, args, aten, is_one, only_user, rank, same_shape


class Mask(NamedTuple):
    """What a product multiplies rows with: a number for each token and place."""

    node: Node
    """[B, S, P], where B batches have S tokens and P places, or [S, P]."""
    is_turned: bool
    """Whether it is [B, P, S]."""
    is_by_expert: bool = False
    """Whether it is [E, C, S]: each expert's places are multiplied with all tokens."""

    def by_token(self, value: Tensor) -> Tensor:
        """[B, S, P]."""
        value = value.flatten(0, 1) if self.is_by_expert else value
        value = value if value.dim() == 3 else value.unsqueeze(0)
        return value.mT if self.is_turned else value

    @property
    def num_tokens(self) -> int | torch.SymInt:
        """T."""
        *batches, x, y = self.node.meta["val"].shape
        return math.prod([*([] if self.is_by_expert else batches), y if self.is_turned else x])


class Moved(NamedTuple):
    """A product that moves rows to other places, or back from them."""

    product: Node
    rows: Node
    mask: Mask

    @property
    def columns(self) -> int:
        """Which dimension is that of columns: of rows, and of what the product gives."""
        return -2 if self.rows is args(self.product)[0] else -1


class Chosen(NamedTuple):
    """A layer whose tokens go to places by ids."""

    inside: Inside
    choices: tuple[Node, ...]
    """Ids [T, K] each, or [B, S, K], or [T], or [B, S]."""
    num_experts: int
    num_tokens: int | torch.SymInt
    made: Cut
    """What places and weights are made of: ids, logits, and noise."""
    numbers: int
    """How many a tensor of them has at most."""
    how: str
    """How tokens come to their places."""

    @property
    def top_k(self) -> int:
        """The slots of each token."""
        return top_k(self.choices, self.num_tokens)


class Masks(NamedTuple):
    """The masks of a layer, and what they stand around."""

    inside: Inside
    dispatch: Moved
    combine: Moved
    choices: tuple[Node, ...]
    """Ids [T, K] each, or [B, S, K], or [T], or [B, S], that masks are made of."""

    @property
    def num_experts(self) -> int:
        """E."""
        return self.inside.second.num_experts

    @property
    def num_tokens(self) -> int | torch.SymInt:
        """T."""
        return self.dispatch.mask.num_tokens

    @property
    def top_k(self) -> int:
        """The slots of each token."""
        return top_k(self.choices, self.num_tokens)

    @property
    def made(self) -> Cut:
        """What both masks are made of: ids, logits, and noise."""
        return _made_of((self.dispatch.mask.node, self.combine.mask.node))

    @property
    def chosen(self) -> Chosen:
        """What is tried of them."""
        numbers = concrete(math.prod(self.combine.mask.node.meta["val"].shape)) or 0
        of = (self.inside, self.choices, self.num_experts, self.num_tokens)
        return Chosen(*of, self.made, numbers, "placed by a mask")


def masks_around(inside: Inside) -> Masks | None:
    """Those around some products with experts, if what they read is placed by a mask that is made of ids."""
    dispatch = _dispatch(inside)
    combine = None if dispatch is None else _combine(inside.second.node)
    if dispatch is None or combine is None:
        return None
    tokens = dispatch.mask.num_tokens
    leaves = _made_of((dispatch.mask.node, combine.mask.node)).leaves
    choices = tuple(leaf for leaf in leaves if num_choices(leaf, tokens) is not None)
    return Masks(inside, dispatch, combine, choices) if choices else None


def top_k(choices: Sequence[Node], tokens: int | torch.SymInt) -> int:
    """How many ids of `choices` each of T tokens has."""
    return sum(num_choices(each, tokens) or 0 for each in choices)


def num_choices(node: Node, tokens: int | torch.SymInt) -> int | None:
    """How many ids `node` has for each of T tokens; None where it has none that were found in rows of numbers."""
    if not is_found(node):
        return None
    *leading, last = node.meta["val"].shape
    if _compat.statically_known_true(math.prod([*leading, last]) == tokens):
        return 1
    is_by_token = _compat.statically_known_true(math.prod(leading) == tokens)
    return last if is_by_token and isinstance(last, int) else None


def _made_of(masks: tuple[Node, ...]) -> Cut:
    return cut(masks, lambda node: is_found(node) or is_of_router(node) or is_noise(node))


def is_found(node: Node) -> bool:
    """Whether `node` has numbers of what was found in rows."""
    return is_integral(node) and num_found_among(node) is not None and is_found_in_rows(node)


def _dispatch(inside: Inside) -> Moved | None:
    """The product that gives experts their rows, each its own."""
    product = inside.firsts[0].rows
    while shows_rows(product):
        product = args(product)[0]
    for moved in _moves(product):
        leaves = _made_of((moved.mask.node,)).leaves
        tokens = moved.mask.num_tokens
        if any(num_choices(leaf, tokens) is not None for leaf in leaves) and _is_apart(moved, inside):
            return moved
    return None


def _is_apart(moved: Moved, inside: Inside) -> bool:
    """Whether experts read different rows."""
    tokens = moved.mask.num_tokens
    rows = seen_rows(
        moved.product,
        inside.firsts[0].rows,
        Sizes(tokens, concrete(tokens) or 0),
        (moved.columns, -1),
    )
    return rows is not None and rows.unique().numel() == rows.numel()


def _moves(product: Node) -> Iterator[Moved]:
    """How a product may move rows: either factor may be the mask."""
    if product.target in (aten.bmm.default, aten.mm.default) and not product.kwargs:
        left, right = args(product)
        tokens = _tokens_of_all(right)
        yield Moved(product, tokens or right, Mask(left, True, tokens is not None))
        yield Moved(product, left, Mask(right, False))


def _tokens_of_all(rows: Node) -> Node | None:
    """[S, H] of which `rows` [E, S, H] shows each expert the same."""
    shape = rows.meta["val"].shape
    while rows.target in SHOWN and same_shape(args(rows)[0].meta["val"].shape, shape):
        rows = args(rows)[0]
    is_repeated = rows.target is aten.expand.default and (rank(rows), rank(args(rows)[0])) == (3, 2)
    return args(rows)[0] if is_repeated and not is_one(shape[0]) else None


def _combine(outs: Node) -> Moved | None:
    """The product in which what experts give is weighed and added up."""
    shown, user = outs, only_user(outs)
    while user is not None and shows_rows(user):
        shown, user = user, only_user(user)
    for moved in () if user is None else _moves(user):
        if moved.rows is shown:
            mask = moved.mask._replace(is_turned=not moved.mask.is_turned)
            return moved._replace(mask=mask)
    return None
