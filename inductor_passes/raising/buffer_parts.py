"""What stands around products with experts in a layer that puts tokens into buffers, and what makes slots of it."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from inductor_passes.raising.evaluation import VIEWS, WIDE, Cut, aten, concrete, cut
from inductor_passes.raising.finders import may_repeat
from inductor_passes.raising.indices import is_integral
from inductor_passes.raising.moved_rows import is_choice, is_drawn, num_rows
from inductor_passes.raising.place_masks import Chosen, num_choices, top_k
from inductor_passes.raising.row_trials import Steps, steps_between
from inductor_passes.raising.spreads import Inside
from inductor_passes.raising.views_of_rows import same_shape


@dataclass(frozen=True)
class Buffers:
    """A layer with what may be its tokens, and their sum."""

    inside: Inside
    tokens: Node
    root: Node
    into: Node | None = None
    """What the sum is added to, if `root` has that in it."""

    @property
    def num_experts(self) -> int:
        """E."""
        return self.inside.second.num_experts

    @property
    def num_tokens(self) -> int | torch.SymInt:
        """T."""
        return num_rows(self.tokens)

    @cached_property
    def choices(self) -> tuple[Node, ...]:
        """Ids of tokens."""
        return tuple(
            leaf for leaf in self.between.leaves if is_choice(leaf, self.num_tokens, self.num_experts)
        )

    @property
    def top_k(self) -> int:
        """The slots of each token."""
        return top_k(self.choices, self.num_tokens)

    @cached_property
    def made(self) -> Cut:
        """What places and weights are made of."""
        behind = steps_between(self.between, self.ends).behind
        leaves = tuple(leaf for leaf in self.between.leaves if leaf not in self.ends)
        return Cut(leaves, tuple(node for node in self.between.nodes if node not in behind))

    @cached_property
    def chosen(self) -> Chosen:
        """What is tried of it."""
        values = (node.meta.get("val") for node in self.made.nodes if node.target not in VIEWS)
        sizes = (concrete(value.numel()) or 0 for value in values if isinstance(value, Tensor))
        numbers = max([self.num_experts * (concrete(self.num_tokens) or 0), *sizes])
        of = (self.inside, self.choices, self.num_experts, self.num_tokens)
        return Chosen(*of, self.made, numbers, "put into buffers")

    @cached_property
    def put(self) -> tuple[Steps, ...]:
        """How tokens come to each of the first products."""
        rows = dict.fromkeys(each.rows for each in self.inside.firsts)
        return tuple(steps_between(self._before([each]), [self.tokens]) for each in rows)

    @cached_property
    def read(self) -> Steps:
        """How the sum is made of what experts give."""
        return steps_between(self._before([self.root]), self.ends[1:])

    @cached_property
    def weights(self) -> tuple[Node, ...]:
        """What may be the weights [T, K] of slots, if it has their values. Nearest the router first."""
        nodes = (*self.made.leaves, *self.made.nodes)
        return tuple(node for node in nodes if self._has_a_weight_of_each(node) and self._is_followed(node))

    def _has_a_weight_of_each(self, node: Node) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.dtype not in WIDE or not value.dim():
            return False
        shape = (math.prod(value.shape[:-1]), *value.shape[-1:]) if value.dim() > 1 else (*value.shape, 1)
        return same_shape(shape, (self.num_tokens, self.top_k))

    def _is_followed(self, weights: Node) -> bool:
        """Whether gradients stop nowhere between rows and `weights`."""
        behind = self.read.behind
        met = {each for node in behind - {*self.ends} for each in node.all_input_nodes} - behind
        between = cut(met, lambda node: node is weights or is_integral(node) or is_drawn(node))
        return all(node.target is not aten.alias.default for node in between.nodes)

    @cached_property
    def slots(self) -> "Slots":
        """What makes slots of ids and of what stands in places."""
        outs, place = self.inside.second.node, self.inside.second.place
        places = [each for dim, each in enumerate(outs.meta["val"].shape[:-1]) if dim != place]
        columns = tuple(num_choices(each, self.num_tokens) or 1 for each in self.choices)
        repeats = len(columns) > 1 or any(map(may_repeat, self.choices))
        known = tuple(each if isinstance(each, int) else -1 for each in places)
        return Slots(self.num_experts, columns, repeats, place, known)

    @property
    def ends(self) -> tuple[Node, ...]:
        """What is moved: tokens, what experts give, and what that is added to."""
        return self.tokens, self.inside.second.node, *([] if self.into is None else [self.into])

    @cached_property
    def between(self) -> Cut:
        """What brings tokens to their places, and back."""
        return self._before([*(each.rows for each in self.inside.firsts), self.root])

    def _before(self, nodes: list[Node]) -> Cut:
        tokens, number = self.num_tokens, self.num_experts
        return cut(nodes, lambda each: each in self.ends or is_drawn(each) or is_choice(each, tokens, number))


class Slots(NamedTuple):
    """How slots follow from which token stands in which place."""

    num_experts: int
    columns: tuple[int, ...]
    """How many ids of a token each choice has."""
    repeats: bool
    """Whether a token may have an id twice: then it is its first slot that has the places."""
    place: int
    """Which dimension of what experts give is that of experts."""
    places: tuple[int, ...]
    """The others, but for columns: -1 is what is left."""

    def __call__(self, numbers: Tensor, *choices: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [T, K], -1 where a token has no place, and whose each place is: one column for each of K slots.

        Args:
            numbers: [E, C, 1]: the token in each place, counted from 1, or 0.
            choices: The ids.
        """
        shown = [each.reshape(-1, columns) for each, columns in zip(choices, self.columns, strict=True)]
        ids, at = torch.cat(shown, 1), numbers.squeeze(-1).long()
        is_there = (at > 0) & (at <= ids.shape[0])
        token = at.where(is_there, 1) - 1
        experts = torch.arange(self.num_experts, device=at.device).view(-1, 1, 1)
        own = ids[token].eq(experts) & is_there.unsqueeze(-1)
        if self.repeats:
            own = own & (own.cumsum(-1) == 1)
        placed = torch.zeros_like(ids).index_put((token,), own.to(ids.dtype), accumulate=True)
        return ids.where(placed > 0, -1), own

    def as_given(self, rows: Tensor) -> Tensor:
        """Rows [E, C, F] as experts give them."""
        shown = rows if len(self.places) == 1 else rows.reshape(rows.shape[0], *self.places, rows.shape[2])
        return shown.movedim(0, self.place)
