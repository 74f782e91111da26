"""Launch plans by the record of an operator's arguments: made once per metadata, then run."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from moe_ops import arguments as of, records
from moe_ops.kernels import fused, products, ready
from moe_ops.kernels.gpu import Gpu, gpu_of
from moe_ops.kernels.keys import alike_of, glance_of, key_of
from moe_ops.kernels.packed import Packed
from moe_ops.kernels.program import Filled, Program, TensorMeta, describe, describe_index
from moe_ops.kernels.table import PROGRAMS, TAKES
from moe_ops.kernels.templates import OfCounts, Templates
from moe_ops.records import Role
from moe_ops.values import Router, SharedAlone, SharedExpert


class Planned(NamedTuple):
    """An operator that was planned: its record's type, and the leaves of the record, tensors described."""

    record: type
    device: torch.device
    gpu: Gpu
    leaves: tuple[Any, ...]

    def program(self) -> Program | None:
        """Its launches, made anew; None where a library's product runs instead."""
        plan = _PLANS[self.record]
        takes = TAKES.get(self.record)
        if takes is not None and not takes(records.builder(self.record)(*self.leaves), self.gpu):
            return None
        return plan.make.__wrapped__(self.gpu, *self.leaves)

    def prepare(self, compiled: Sequence[Any]) -> None:
        """Has the template that calls like this one are filled in from, once there were two, and packs it.

        compiled: of each launch, what Triton compiled and loaded on the device.
        """
        plan = _PLANS[self.record]
        tensors = dict(zip(plan.names, self.leaves, strict=False))
        plan.templates.prepare(compiled, tensors, self.device, self.gpu, *self.leaves)

    def dtypes(self) -> dict[str, torch.dtype]:
        """Of the operator's tensors, by name."""
        pairs = zip(_PLANS[self.record].names, self.leaves, strict=False)
        return {name: leaf.dtype for name, leaf in pairs if leaf is not None}


_SEEN: list[list[Planned]] = []  # of those who watch


@contextmanager
def watched() -> Iterator[list[Planned]]:
    """What is planned within, by any thread, in order; also what is in the cache."""
    seen: list[Planned] = []
    _SEEN.append(seen)
    try:
        yield seen
    finally:
        _SEEN.remove(seen)


class _Plan(NamedTuple):
    """How the plan of an operator is found from its leaves, of which the first are tensors, named and described."""

    record: type
    flatten: Callable[[Any], tuple[Any, ...]]
    names: tuple[str, ...]
    describe: tuple[Callable[[Any], TensorMeta], ...]
    indices: tuple[int, ...]
    make: Callable[..., Program]
    templates: Templates
    key: Callable[..., Hashable]
    known: dict[Hashable, ready.Runs]
    ready: ready.Ready
    rows: frozenset[int]
    alike: Callable[..., tuple[int, Hashable]] | None
    checked: dict[Hashable, tuple[int, OfCounts]]

    def leaves(self, arguments: Any) -> list[Any]:
        """The record's, with vectors that kernels take as contiguous."""
        leaves = list(self.flatten(arguments))
        for index in self.indices:
            if leaves[index] is not None:
                leaves[index] = leaves[index].contiguous()
        return leaves

    def tensors(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Of the leaves, by name."""
        return dict(zip(self.names, leaves, strict=False))

    def expected(self, arguments: Any, gpu: Gpu | None = None) -> tuple[Any, ...]:
        """`described` of arguments as they are. Raises ValueError where kernels take a strided vector as contiguous."""
        leaves = self.flatten(arguments)
        for index in self.indices:
            _expect_contiguous(self.names[index], leaves[index])
        return self.described(leaves, gpu)

    def described(self, leaves: Sequence[Any], gpu: Gpu | None = None) -> tuple[Any, ...]:
        """What a plan is made from, for `gpu` or the one that the leaves are on."""
        gpu = gpu or gpu_of(leaves[0].device)
        tensors = [
            None if leaf is None else of(leaf) for leaf, of in zip(leaves, self.describe, strict=False)
        ]
        options = leaves[len(tensors) :]
        for seen in _SEEN:
            seen.append(Planned(self.record, leaves[0].device, gpu, (*tensors, *options)))
        return gpu, *tensors, *options

    def packed_of_fewer(self, leaves: Sequence[Any]) -> Packed | None:
        """The same for leaves with fewer tokens than some that were checked, and else like these; None for others."""
        if self.alike is None:
            return None
        try:
            tokens, kind = self.alike(*leaves)
        except IndexError:
            return None  # a scalar, which the checks refuse
        most, of_counts = self.checked.get(kind, (0, None))
        if of_counts is None or not 0 < tokens < most:
            return None
        return of_counts.packed(tokens, self.rows, leaves[0].device)

    def know(self, leaves: Sequence[Any], packed: ready.Runs) -> None:
        """Has `packed` at hand for such leaves."""
        if len(self.known) >= ready.MOST:
            del self.known[next(iter(self.known))]  # one at a time: to free all would take milliseconds
        self.known[self.key(*leaves)] = packed

    def keep_checked(self, leaves: Sequence[Any], described: Sequence[Any]) -> None:
        """Remembers that such leaves need no more checks if they have fewer tokens."""
        if self.alike is not None:
            tokens, kind = self.alike(*leaves)
            if kind not in self.checked and len(self.checked) >= ready.MOST:
                self.checked.clear()
            if tokens > self.checked.get(kind, (0,))[0]:
                self.checked[kind] = tokens, self.templates.of_counts(*described)


def _plan(record: type, make: Callable[[Any, Gpu], Program]) -> _Plan:
    leaves, build = records.leaves(record), records.builder(record)

    def planned(gpu: Gpu, *leaves: Any) -> Program:
        return make(build(*leaves), gpu)

    return _Plan(
        record,
        records.flattener(record),
        tuple(leaf.name for leaf in leaves if leaf.is_tensor),
        tuple(describe_index if Role.INDEX in leaf.roles else describe for leaf in leaves if leaf.is_tensor),
        tuple(index for index, leaf in enumerate(leaves) if Role.INDEX in leaf.roles),
        lru_cache(maxsize=1024)(planned),
        Templates(planned),
        key_of(leaves),
        {},
        ready.Ready(glance_of(leaves), sum(leaf.is_tensor for leaf in leaves), {}),
        frozenset(index for index, leaf in enumerate(leaves) if Role.PER_TOKEN in leaf.roles),
        None if record in TAKES else alike_of(leaves),
        {},
    )


_PLANS = {record: _plan(record, make) for record, make in PROGRAMS.items()}


def program(arguments: Any, gpu: Gpu | None = None) -> Program:
    """The launches of the operator that takes `arguments`, whose tensors may be real, fake, meta or sketches.

    Made for `gpu`, or the one that the tensors are on. Raises ValueError for a vector of slots, offsets or experts
    that is not contiguous: the kernels take it as such.
    """
    plan = _PLANS[type(arguments)]
    return plan.make(*plan.expected(arguments, gpu))


class Together(NamedTuple):
    """The launches of experts and what stands around them: whether they route, whether they have the shared expert."""

    program: Program
    routes: bool
    joins: bool


def decode_together(experts: Any, router: Router | None, shared: SharedExpert | None) -> Together | None:
    """The launches of experts, of the router that chooses them and of the shared expert whose output joins them.

    None where each has launches of its own. Raises ValueError as `program` does.
    """
    plan = _PLANS[type(experts)]
    gpu, *leaves = plan.expected(experts)
    experts = records.builder(plan.record)(*leaves)
    router, shared = (records.transform(_described_here, each) for each in (router, shared))
    joins = shared is not None and fused.takes_shared(experts, shared)
    routes = router is not None and fused.decodes_from_logits(experts, router, gpu)
    if not (joins or routes):
        return None
    experts, shared = (experts._replace(shared=None), shared) if joins else (experts, None)
    return Together(fused.layer_program(experts, router if routes else None, gpu, shared), routes, joins)


def _described_here(leaf: Any) -> Any:
    return describe(leaf) if hasattr(leaf, "data_ptr") else leaf


def products_of(arguments: Any, gpu: Gpu | None = None) -> tuple[products.Gemm, ...]:
    """The grouped products among the launches of `program(arguments)`, those of which there is a choice."""
    plan = _PLANS[type(arguments)]
    gpu, *leaves = plan.described(plan.flatten(arguments), gpu)
    return products.of(records.builder(plan.record)(*leaves), gpu)


def _expect_contiguous(name: str, index: Any) -> None:
    if index is not None and index.shape[0] > 1 and index.stride()[0] != 1:
        raise ValueError(f"{name} has stride {index.stride()[0]}: expected a contiguous tensor")


def launch(arguments: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Runs the launches of the operator that takes `arguments`: what the operator returns."""
    filled, tensors = _bound(arguments)
    return _results(filled.run(tensors))


def launch_checked(arguments: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The same for an operator that has checked them, and would launch this for any arguments with this metadata."""
    plan = _PLANS[type(arguments)]
    leaves = plan.leaves(arguments)
    tensors, described = plan.tensors(leaves), plan.described(leaves)
    packed = plan.templates.packed(tensors, leaves[0].device, *described)
    results = None if packed is None else packed.run([*tensors.values()])
    if packed is None or results is None:
        return _results(plan.templates.plan(*described).run(tensors))
    plan.know(leaves, packed)
    plan.keep_checked(leaves, described)
    return _results(results)


def launch_ready(record: type, leaves: tuple[Any, ...]) -> Any:
    """What the operator of `record` returns, if `keep_ready` was told of such a call; else None, and nothing runs."""
    plan = _PLANS.get(record)
    results = None if plan is None or _SEEN else plan.ready.run(leaves)
    return None if results is None else _results(results)


def keep_ready(record: type, leaves: tuple[Any, ...]) -> None:
    """Has a call at hand that has gone past every autograd kernel and mode, in the state it was called in."""
    plan = _PLANS.get(record)
    packed = None if plan is None else plan.known.get(plan.key(*leaves))
    if plan is not None and packed is not None:
        plan.ready.keep(leaves, packed)


def launch_known(record: type, leaves: tuple[Any, ...]) -> Any:
    """What the operator of `record` returns, if it has launched for such leaves; None if they are to be checked."""
    plan = _PLANS.get(record)
    if plan is None or _SEEN:
        return None
    packed = plan.known.get(plan.key(*leaves))
    if packed is not None:
        results = packed.run(leaves[: len(plan.names)])
    elif (packed := plan.packed_of_fewer(leaves)) is not None:
        results = packed.run(leaves[: len(plan.names)])
        plan.know(leaves, packed)
    else:
        results = None
    return None if results is None else _results(results)


def keep_library(arguments: Any, product: Callable[..., torch.Tensor]) -> None:
    """Has calls with this metadata go to `product` of the operator's tensors, as those of launches go to these."""
    plan = _PLANS[type(arguments)]
    plan.know(plan.flatten(arguments), ready.Library(product))


def forget_known() -> None:
    """Has the next call of each operator checked and planned again, for the GPU as `gpu_of` then says it is."""
    for plan in _PLANS.values():
        plan.known.clear()
        plan.ready.calls.clear()
        plan.checked.clear()


def _results(results: tuple[torch.Tensor, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    return results[0] if len(results) == 1 else results


def _bound(arguments: Any) -> tuple[Filled, dict[str, Any]]:
    plan = _PLANS[type(arguments)]
    leaves = plan.leaves(arguments)
    return plan.templates.plan(*plan.described(leaves)), plan.tensors(leaves)


def is_taken(arguments: Any) -> bool:
    """Whether the kernels are for these arguments, of those that a library's products may run instead."""
    device = next(leaf.device for leaf in records.flatten(arguments) if isinstance(leaf, torch.Tensor))
    return TAKES[type(arguments)](records.transform(_described, arguments), gpu_of(device))


def launch_with_shared(
    routed: of.FusedExperts, alone: SharedAlone, products: Callable[[SharedAlone], torch.Tensor]
) -> torch.Tensor:
    """`launch(routed._replace(shared=...))` of `alone`'s output, with both on their way at once where that is faster.

    What is shared, launches of ours or `products`, runs on a second stream, forked from the caller's and joined before
    the first launch that reads it.
    """
    shared = partial(launch if is_taken(alone) else products, alone)
    if not fused.leaves_room(routed):
        return launch(routed._replace(shared=shared()))
    device = routed.hidden_states.device
    with torch.cuda.device(device):
        current = torch.cuda.current_stream()
        second = _second_stream(device.index, current.cuda_stream)
        second.wait_stream(current)
        with torch.cuda.stream(second):
            output = shared()
        output.record_stream(current)
        filled, tensors = _bound(routed._replace(shared=output))
        bound, first = filled.bind(tensors, device), filled.first_reader("shared")
        bound.launch(0, first)
        current.wait_stream(second)
        bound.launch(first)
    return bound.results[0]


def _described(leaf: Any) -> Any:
    return describe(leaf) if isinstance(leaf, torch.Tensor) else leaf


@lru_cache(maxsize=None)
def _second_stream(device: int, first: int) -> torch.cuda.Stream:
    """One for each stream: of callers on two streams, one may be capturing. It goes first: what is shared is short."""
    return torch.cuda.Stream(device, priority=-1)
