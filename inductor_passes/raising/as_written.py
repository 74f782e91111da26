"""Graphs as models wrote them, for as long as passes look for layers: Inductor has rewritten products by then."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import Graph

from inductor_passes.raising.best_of_row import best_kept
from inductor_passes.raising.cut_apart import selected_parts
from inductor_passes.raising.from_the_left import products_of_rows
from inductor_passes.raising.gathered import gathered_by_index
from inductor_passes.raising.glu import multiplied_glu
from inductor_passes.raising.merged import summed_by_expert
from inductor_passes.raising.padding import unpadded
from inductor_passes.raising.repeated import multiplied_by_expert
from inductor_passes.raising.summed import multiplied_sums
from inductor_passes.raising.summed_choices import multiplied_by_choice
from inductor_passes.raising.turned import turned_once
from inductor_passes.raising.written_out import multiplied


@contextmanager
def as_written(graph: Graph) -> Iterator[None]:
    """Products are products, of padded or summed ones too, `glu` is one of halves, a maximum a top-1, turns are single.

    Weights are gathered as `weight[ids]`, or lie there once. What is left gets back what it was.
    """
    with (
        multiplied(graph),
        gathered_by_index(graph),
        multiplied_by_expert(graph),
        summed_by_expert(graph),
        multiplied_by_choice(graph),
        multiplied_sums(graph),
        unpadded(graph),
        multiplied_glu(graph),
        best_kept(graph),
        products_of_rows(graph),
        turned_once(graph),
        selected_parts(graph),
    ):
        yield
