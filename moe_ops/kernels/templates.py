"""Plans for many numbers of rows at once: a plan is made with `Count`s once, and filled in with numbers from then on.

A template is what was planned, with expressions where numbers depend on the counts, and conditions under which it is
so. Steps of one template share the machine code that Triton has looked up for them; once it is there for all of them,
the template has launches by address too, with expressions in them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from moe_ops.kernels.counts import Count, CountError
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.packed import Packed, pack
from moe_ops.kernels.program import Buffer, Descriptor, Filled, Program, Step, TensorMeta
from moe_ops.kernels.written import Written, function_of, has_count

_MOST = 64
"""Templates of an operator whose other metadata are the same; a plan beyond them is made as it is asked for."""

Make = Callable[..., Program]


class Templates:
    """The templates of an operator that have been needed so far. `make`: of (gpu, *leaves), tensors described."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._known: Callable[[Gpu, Hashable], _Known] = lru_cache(maxsize=256)(lambda gpu, key: _Known())
        self.plan = lru_cache(maxsize=1024)(self._plan)

    def packed(
        self, tensors: Mapping[str, torch.Tensor | None], device: torch.device, gpu: Gpu, *leaves: Any
    ) -> Packed | None:
        """What `make` plans, by addresses; None if Triton has not compiled all of it for `device`.

        leaves: of which `tensors`, by name, are the first.
        """
        key, counts = _apart(leaves)
        known = self._known(gpu, key)
        packed = known.packed(counts, device)
        if packed is None:
            packed = self.plan(gpu, *leaves).pack(tensors, device)
            template = None if packed is None else known.template(counts)
            if template is not None:
                template.pack(counts, tensors, device)
        return packed

    def of_counts(self, gpu: Gpu, *leaves: Any) -> "OfCounts":
        """The templates for all that differ from these leaves in counts alone."""
        key, counts = _apart(leaves)
        places = [place for place, leaf in enumerate(leaves) if _is_sized(leaf) or type(leaf) is int]
        return OfCounts(self._known(gpu, key), tuple(zip(places, counts)))

    def prepare(
        self,
        compiled: Sequence[Any],
        tensors: Mapping[str, Any],
        device: torch.device,
        gpu: Gpu,
        *leaves: Any,
    ) -> None:
        """Has all of this ready but the plan itself. compiled: of each launch, what Triton loaded on `device`.

        tensors: as of `packed`, or what has their dtypes.
        """
        key, counts = _apart(leaves)
        known = self._known(gpu, key)
        template = known.template(counts)
        if template is None:
            self._plan(gpu, *leaves)
            template = known.template(counts)
        if template is not None and (device, template.kinds(*counts)) not in template.packs:
            template.fill(counts).know(compiled, device)
            template.pack(counts, tensors, device)

    def _plan(self, gpu: Gpu, *leaves: Any) -> Filled:
        """What `make` plans, ready to run. There are templates from the second of plans that differ in counts alone."""
        key, counts = _apart(leaves)
        known = self._known(gpu, key)
        template = known.template(counts)
        if template is not None:
            return template.fill(counts)
        if not known.is_new and len(known.templates) < known.most:
            try:
                known.templates.append(_template(self._make, gpu, leaves))
                return known.templates[-1].fill(counts)
            except CountError:
                known.most = 0
        known.is_new = False
        return self._make(gpu, *leaves).filled


class OfCounts(NamedTuple):
    """Templates of one kind of leaves, and the counts of one of it, each with the place of its leaf."""

    known: "_Known"
    counts: tuple[tuple[int, int], ...]

    def packed(self, tokens: int, places: frozenset[int], device: torch.device) -> Packed | None:
        """By addresses, with `tokens` for the counts at `places`; None if that has not been made before."""
        counts = [tokens if place in places else count for place, count in self.counts]
        return self.known.packed(counts, device)


@dataclass(slots=True)
class _Known:
    templates: list["_Template"] = field(default_factory=list)
    is_new: bool = True
    most: int = _MOST

    def template(self, counts: Sequence[int]) -> "_Template | None":
        """The one for these counts."""
        return next((each for each in self.templates if each.is_for(*counts)), None)

    def packed(self, counts: Sequence[int], device: torch.device) -> Packed | None:
        """The plan for them by addresses, if there is a template that has it for such numbers."""
        template = self.template(counts)
        pack_counts = None if template is None else template.packs.get((device, template.kinds(*counts)))
        return None if pack_counts is None else pack_counts(*counts)


class _Template(NamedTuple):
    """Functions of the counts, which have `names`; `places` are those of arguments that depend on them, for each step.

    kinds: what machine code can differ by. packs: the plan by addresses, by device and kinds.
    """

    names: tuple[str, ...]
    is_for: Callable[..., bool]
    numbers: Callable[..., tuple[tuple[tuple[int, ...], ...], tuple["_Numbers | None", ...]]]
    kinds: Callable[..., Hashable]
    planned: Filled
    places: tuple[tuple[int, ...], ...]
    packs: dict[Hashable, Callable[..., Packed]]

    def fill(self, counts: Sequence[int]) -> Filled:
        shapes, numbers = self.numbers(*counts)
        buffers, steps, outputs, _ = self.planned
        return Filled(
            tuple([Buffer(buffer.name, shape, buffer.dtype) for buffer, shape in zip(buffers, shapes)]),
            tuple([_filled(*each) for each in zip(steps, self.places, numbers)]),
            outputs,
            {},
        )

    def pack(self, counts: Sequence[int], tensors: Mapping[str, Any], device: torch.device) -> None:
        """Has the plan by addresses for these counts, and others of their kinds, if Triton has compiled all of it."""
        steps = [
            step._replace(kinds=like.kinds) for step, like in zip(self.planned.steps, self.fill(counts).steps)
        ]
        packed = pack(self.planned._replace(steps=tuple(steps)), tensors, device)
        if packed is not None:
            self.packs[device, self.kinds(*counts)] = function_of(self.names, packed)


class _Numbers(NamedTuple):
    """Of a step: grid, arguments that depend on counts, descriptors, and what its machine code can differ by."""

    grid: tuple[int, ...]
    values: tuple[int, ...]
    descriptors: tuple[tuple[int, Descriptor], ...]
    kinds: tuple[Any, ...]


def _filled(step: Step, places: tuple[int, ...], numbers: _Numbers | None) -> Step:
    if numbers is None:  # nothing depends on a count
        return step
    grid, values, descriptors, kinds = numbers
    template = step.template.copy()
    for place, value in zip(places, values):
        template[place] = value
    kernel, _, _, refs, _, num_warps, num_stages, codes, _ = step
    return Step(kernel, grid, template, refs, descriptors, num_warps, num_stages, codes, kinds)


def _is_sized(leaf: Any) -> bool:
    """Whether the first of a tensor's sizes is a count: not of weights, nor of what does not lie row by row."""
    if type(leaf) is not TensorMeta:
        return False
    strides = leaf.strides
    return len(strides) == 1 or (len(strides) == 2 and strides[0] >= strides[1])


def _apart(leaves: Sequence[Any]) -> tuple[Hashable, list[int]]:
    """What is the same for other counts, and the counts: first sizes, and numbers among the options."""
    key, counts = [], []
    for leaf in leaves:
        if _is_sized(leaf):
            shape, *others = leaf
            counts.append(shape[0])
            leaf = (shape[1:], *others)
        elif type(leaf) is int:
            counts.append(leaf)
            leaf = int
        key.append(leaf)
    return tuple(key), counts


def _counted(leaves: Sequence[Any], decided: dict[str, None]) -> tuple[list[Any], list[str]]:
    """The leaves with a `Count` for each count, and the counts' names."""
    names: list[str] = []
    given = []
    for leaf in leaves:
        name = f"t{len(names)}"
        if _is_sized(leaf):
            leaf = leaf._replace(shape=(Count(name, leaf.shape[0], decided), *leaf.shape[1:]))
            names.append(name)
        elif type(leaf) is int:
            leaf = Count(name, leaf, decided)
            names.append(name)
        given.append(leaf)
    return given, names


def _template(make: Make, gpu: Gpu, leaves: Sequence[Any]) -> _Template:
    decided: dict[str, None] = {}
    given, names = _counted(leaves, decided)
    buffers, steps, outputs, _ = make(gpu, *given).filled
    steps = tuple(map(_settled, steps))
    places = tuple([_counted_places(step) for step in steps])
    numbers = tuple([_numbers(*each) for each in zip(steps, places)])
    shapes = tuple(tuple(buffer.shape) for buffer in buffers)
    return _Template(
        tuple(names),
        eval(f"lambda {','.join(names)}: {' and '.join(decided) or 'True'}"),
        function_of(names, (shapes, numbers)),
        function_of(names, tuple(dict.fromkeys(kind for each in numbers if each for kind in each.kinds))),
        Filled(buffers, steps, outputs, {}),
        places,
        {},
    )


def _settled(step: Step) -> Step:
    """A step of which all that is compiled into its kernel has been decided, and what is no int."""
    constants = {param.num for param in _params(step) if param.is_constexpr}
    template = [
        _known(value) if place in constants or _is_fraction(value) else value
        for place, value in enumerate(step.template)
    ]
    descriptors = tuple([(place, _boxed(each)) for place, each in step.descriptors])
    options = {"num_warps": _known(step.num_warps), "num_stages": _known(step.num_stages)}
    return step._replace(template=template, descriptors=descriptors, **options)


def _boxed(descriptor: Descriptor) -> Descriptor:
    return replace(descriptor, block=tuple(map(_known, descriptor.block)))


def _is_fraction(value: Any) -> bool:
    return isinstance(value, Count) and not value.is_whole


def _known(value: Any) -> Any:
    return value.known() if isinstance(value, Count) else value


def _counted_places(step: Step) -> tuple[int, ...]:
    """Where arguments depend on counts."""
    return tuple(place for place, value in enumerate(step.template) if isinstance(value, Count))


def _numbers(step: Step, places: tuple[int, ...]) -> _Numbers | None:
    values = tuple([step.template[place] for place in places])
    as_it_is = {param.num for param in _params(step) if param.do_not_specialize}
    kinds = tuple([_kind(value.text, place not in as_it_is) for place, value in zip(places, values)])
    numbers = _Numbers(step.grid, values, step.descriptors, kinds)
    return numbers if has_count(numbers) else None


def _kind(text: str, is_specialised: bool) -> Written:
    """For what a number has a kernel compiled anew: its type, and if it may be specialised on that, 1 and alignment."""
    return Written(f"({text}==1,{text}%16==0,{text}>>31)" if is_specialised else f"{text}>>31")


def _params(step: Step) -> Sequence[Any]:
    return getattr(step.kernel, "params", ())  # what is interpreted has none, and compiles nothing
