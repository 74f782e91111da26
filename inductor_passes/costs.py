"""What one MoE layer costs, estimated from a graph: kernels, bytes and FLOPs.

Our operators are asked for their launch plans, for the GPU that the graph is on or else for an H200, so that a report
made on a CPU says what a GPU would do. Symbolic sizes count as they were in the call that was traced.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from inductor_passes.graph_tools import arguments, is_moe_op
from inductor_passes.records import Cost, LayerGraph
from inductor_passes.sizes import size_hint
from inductor_passes.views import computes, past_bookkeeping
from moe_ops import records


def costs(graph: Graph, layers: Mapping[str, str]) -> dict[str, Cost]:
    """The cost of each layer; `layers` says which one a node belongs to, by the node's name."""
    found: dict[str, list[Cost]] = defaultdict(list)
    for node in graph.nodes:
        if node.name in layers and computes(node):
            found[layers[node.name]].append(_Call(node, layers).cost())
    return {name: total(each) for name, each in found.items()}


def total(costs: Iterable[Cost]) -> Cost:
    """The sum."""
    costs = list(costs)
    return Cost(
        sum(each.kernels for each in costs),
        sum(each.bytes for each in costs),
        sum(each.flops for each in costs),
    )


def of_run(layers: Iterable[LayerGraph]) -> tuple[Cost, Cost]:
    """What one run of all layers takes, before and after."""
    sizes = [layer for layer in layers for _ in range(layer.calls)]
    return total(layer.cost_before for layer in sizes), total(layer.cost_after for layer in sizes)


@dataclass(frozen=True)
class _Call:
    node: Node
    layers: Mapping[str, str]

    def cost(self) -> Cost:
        program = self._program() if is_moe_op(self.node) else None
        if program is not None:
            return Cost(len(program.launches), self._planned_bytes(program), self.flops)
        if self._joins_its_input():
            return Cost(0, 0, self.flops)
        moved = (*self.given, *_sketches(self.node.meta.get("val")))
        return Cost(1, sum(map(self._bytes, moved)), self.flops)

    def _joins_its_input(self) -> bool:
        """Whether Inductor computes it in the kernel of what it reads, as far as that is in the same layer."""
        own = self.layers[self.node.name]
        inputs = map(past_bookkeeping, self.node.all_input_nodes)
        inside = [each for each in inputs if self.layers.get(each.name) == own]
        return _is_pointwise(self.node) and any(map(_is_pointwise, inside))

    @cached_property
    def sketches(self) -> dict[Node, Any]:
        return {source: _sketch(source.meta.get("val")) for source in self.node.all_input_nodes}

    @property
    def given(self) -> list[Tensor]:
        return [sketch for sketch in self.sketches.values() if sketch is not None]

    @cached_property
    def record(self) -> Any:
        """The arguments of an operator of ours, with sketches for tensors."""
        known = self.sketches
        return records.transform(
            lambda leaf: known[leaf] if isinstance(leaf, Node) else leaf, arguments(self.node)
        )

    @cached_property
    def flops(self) -> int:
        target = self.node.target
        if len(self.given) < len(self.sketches):
            return 0
        args: Any = map_arg(self.node.args, lambda each: self.sketches[each])
        kwargs: Any = map_arg(dict(self.node.kwargs), lambda each: self.sketches[each])
        if _is_grouped_mm(self.node):  # torch has no formula for it
            return 2 * args[0].shape[0] * prod(args[1].shape[-2:])
        if not isinstance(target, torch._ops.OpOverload):
            return 0
        formula = flop_registry.get(target.overloadpacket)
        return int(formula(*args, **kwargs, out_val=_sketch(self.node.meta.get("val")))) if formula else 0

    def _program(self) -> Any:
        """The operator's launches; None without Triton, for sizes that are not known and where there is no plan."""
        try:
            device = self.node.all_input_nodes[0].meta["val"].device
            from moe_ops.kernels import plans
            from moe_ops.kernels.gpu import gpu_of

            return plans.program(self.record, gpu_of(device))
        except Exception:  # an estimate: the operator counts as one kernel
            return None

    def _planned_bytes(self, program: Any) -> int:
        sizes = {each.name: prod(each.shape) * each.dtype.itemsize for each in program.buffers}
        named = records.named(self.record).items()
        sizes |= {name: self._bytes(leaf) for name, leaf in named if isinstance(leaf, Tensor)}
        return sum(sizes[name] for launch in program.launches for name in _names(launch))

    def _bytes(self, tensor: Tensor) -> int:
        """Of weights [E, B, A] only those of as many experts as there are slots to visit them."""
        is_weight = tensor.dim() == 3 and (is_moe_op(self.node) or _is_grouped_mm(self.node))
        num_bytes = tensor.numel() * tensor.element_size()
        per_slot = 2 * sum(prod(each.shape[1:]) for each in self.given if each.dim() == 3)
        if not (is_weight and num_bytes and per_slot and self.flops):
            return num_bytes
        return num_bytes * min(tensor.shape[0], self.flops // per_slot) // tensor.shape[0]


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_grouped_mm(node: Node) -> bool:
    return "grouped_mm" in str(node.target)


def _sketches(value: Any) -> list[Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [sketch for sketch in map(_sketch, values) if sketch is not None]


def _sketch(value: Any) -> Any:
    """A tensor without memory and with numbers for sizes; None for anything else and for sizes not known."""
    if not isinstance(value, Tensor):
        return None
    sizes = [size_hint(size) for size in (*value.shape, *value.stride())]
    if None in sizes:
        return None
    shape, strides = sizes[: value.dim()], sizes[value.dim() :]
    return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")  # type: ignore[arg-type]


def _names(launch: Any) -> set[str]:
    """Tensors that a launch is given: by the name of a `Ref`, the source of a `Descriptor`."""
    named = (getattr(each, "source", getattr(each, "name", None)) for each in launch.args.values())
    return {name for name in named if isinstance(name, str)}
