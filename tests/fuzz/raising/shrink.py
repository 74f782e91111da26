"""A failing layer with as little in it as still fails."""

from collections.abc import Iterator
from dataclasses import replace

from tests.fuzz.raising.check import check
from tests.fuzz.raising.grammar import AXES, Case, Sizes

SMALL = Sizes(tokens=3, experts=4, top_k=2, hidden=16, intermediate=8)


def _simpler(case: Case) -> Iterator[Case]:
    for mutation in case.mutations:
        yield replace(case, mutations=tuple(each for each in case.mutations if each != mutation))
    for name in ("is_training", "is_dynamic", "is_lowered"):
        if getattr(case, name):
            yield replace(case, **{name: False})
    if case.dtype != "float32":
        yield replace(case, dtype="float32")
    for axis, options in AXES.items():
        if case[axis] != options[0] and axis != "form":
            yield case.but(axis, options[0])
    if case.sizes != SMALL:
        yield replace(case, sizes=SMALL)


def shrunk(case: Case, kind: str) -> Case:
    """The simplest layer on the way down that still has a verdict of this kind."""
    for simpler in _simpler(case):
        if check(simpler).kind == kind:
            return shrunk(simpler, kind)
    return case
