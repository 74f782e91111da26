"""LaunchPrograms: a fused operator on CUDA with static sizes becomes the Triton launches it would make.

The launch plan is the operator's own `moe_ops.kernels.program.Program`, made from the same metadata by the same
function, so compiled and eager code run the same kernels. What is saved is the operator call: the generated wrapper
launches the kernels itself, and Inductor plans the workspaces with the rest of its memory.

With a symbolic token count nothing is done and nothing is guarded: the operator picks its kernels at run time.
"""

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from inductor_passes import _compat
from inductor_passes.base import LOGGER, PassLog, Refusal
from inductor_passes.graph_tools import arguments, find, inherit_meta, outputs, rewrite_each
from moe_ops import records

_FUSED = (
    *("topk_routing", "build_dispatch", "routing_dispatch"),
    *("gather_gemm_act", "gather_gemm_formula", "gemm_combine"),
    *("fused_experts", "fused_experts_formula", "fused_moe", "fused_moe_formula"),
    *("gather_gemm", "act_gemm_combine", "dense_gemm"),
    *("scaled_fused_experts", "quantise_rows", "scaled_grouped_gemm"),
)
_OF_TRAINING = (
    *("grouped_gemm", "grouped_gemm_weight_backward", "weighted_activation_backward", "dequantise_weight"),
    *("permute", "permute_backward", "topk_routing_backward"),
)

TIMED = "moe_gpu_timed"
"""`node.meta[TIMED]` is the `Gpu` to plan an operator for, with a tuning table of what was timed for it."""


class LaunchPrograms:
    """Fused operators and those of a backward become Triton launches."""

    name = "launch_programs"
    requires: tuple[str, ...] = (*_FUSED, *_OF_TRAINING)
    inference_only = False

    def run(self, graph: Graph, log: PassLog) -> None:
        """Writes out the launches of every fused operator with static sizes on CUDA."""
        candidates = [node for node in find(graph, *self.requires) if on_cuda(node)]
        rewrite_each(graph, candidates, partial(_rewrite, launched={}), log, log.keep)


def on_cuda(node: Node) -> bool:
    """Whether all tensors that an operator of ours takes are on a GPU."""
    return all(value.device.type == "cuda" for value in _tensors(node).values())


def _tensors(node: Node) -> dict[str, Tensor]:
    return {name: value for name, value in _values(node).items() if isinstance(value, Tensor)}


def _values(node: Node) -> dict[str, Any]:
    """What an operator is given that the graph computes: tensors, and sizes that are open."""
    return {name: given.meta["val"] for name, given in _given(node).items()}


_Launched = dict[Any, dict[str, Node]]
"""What launches gave, by what they are and what they were given: layers that share ids share their sorting."""


def _rewrite(graph: Graph, fused: Node, log: PassLog, launched: _Launched) -> None:
    expect_static(fused)
    program = _program(fused)
    results = write_launches(graph, fused, program, _given(fused), launched)
    log.lower(f"{len(program.launches)} launches", fused)
    _replace(graph, fused, results)


def _given(fused: Node) -> dict[str, Node]:
    return {name: value for name, value in records.named(arguments(fused)).items() if isinstance(value, Node)}


def write_launches(
    graph: Graph, fused: Node, program: Any, given: Mapping[str, Node], launched: _Launched
) -> list[Node]:
    """The launches of a program in front of `fused`, of what is `given` by name; what gives the values of `fused`.

    Raises Refusal, and leaves the graph as it was, where they do not give what the operator does.
    """
    launcher = _Launcher(graph, fused, given, dict(launched))
    try:
        with graph.inserting_before(fused):
            values = launcher.write(program)
        results = [values[name] for name in program.outputs]
        _expect_layouts(fused, results)
    except Refusal:
        launcher.take_back()
        raise
    launched |= launcher.launched
    return results


def expect_static(fused: Node) -> None:
    """Refuses sizes that are symbolic or 0."""
    for name, value in _values(fused).items():
        numbers = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
        if not all(isinstance(number, int) for number in numbers):
            raise Refusal(fused, f"{name} has symbolic sizes; the operator picks its kernels at run time")
    if any(0 in value.shape for value in _tensors(fused).values()):
        raise Refusal(fused, "an argument is empty; the operator returns without a launch")


def _program(fused: Node) -> Any:
    """The operator's launch plan; refuses, so that the operator call stays, when the kernels cannot make one."""
    try:
        from moe_ops.kernels import plans

        return plans.program(records.transform(metadata, arguments(fused)), fused.meta.get(TIMED))
    except Exception as error:
        LOGGER.warning("no launch plan for %s, it stays an operator call: %r", fused.target, error)
        raise Refusal(fused, f"the kernels make no launch plan: {error!r}") from error


@dataclass(frozen=True, slots=True)
class _Metadata:
    """What a launch plan may ask of a tensor; a fake tensor itself warns when asked for its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def storage_offset(self) -> int:
        return self.offset

    def data_ptr(self) -> int:
        raise RuntimeError("a tensor of a graph has no address")


def metadata(argument: Any) -> Any:
    """What a plan may ask of an argument."""
    if not isinstance(argument, Node):
        return argument
    value = argument.meta["val"]
    return _Metadata(tuple(value.shape), value.stride(), value.dtype, value.device, value.storage_offset())


# Analysing a kernel takes a tenth of a second; a model launches the same few once per layer.
_WRITTEN: dict[Any, list[str]] = {}


def _descriptors(launch: Any) -> dict[str, Any]:
    return {
        name: ("stable", (list(arg.block),)) for name, arg in launch.args.items() if hasattr(arg, "block")
    }


class _Launcher:
    """Writes a program's buffers and launches as functional nodes in front of the operator they stand for."""

    def __init__(self, graph: Graph, fused: Node, given: Mapping[str, Node], launched: _Launched) -> None:
        self.graph = graph
        self.fused = fused
        self.launched = launched
        self.values = dict(given)
        self.device = next(iter(_tensors(fused).values())).device
        self.written_nodes: list[Node] = []

    def write(self, program: Any) -> dict[str, Node]:
        """Every tensor of the program by name, as it is after the last launch."""
        buffers = {buffer.name: buffer for buffer in program.buffers}
        for launch in program.launches:
            sources = dict.fromkeys(map(_source, launch.args.values()))
            fresh = [buffers[name] for name in sources if name in buffers and name not in self.values]
            given = tuple(self.values.get(name) for name in sources if name is not None)
            key = (launch.kernel, launch.grid, *launch.args.items(), launch.num_warps, launch.num_stages)
            if (key, given, *fresh) not in self.launched:
                for buffer in fresh:  # as late as can be: Inductor reuses memory that is free by then
                    self.values[buffer.name] = self._allocate(buffer)
                self._launch(launch, buffers.keys())
                results = {name: self.values[name] for name in sources if name is not None}
                self.launched[(key, given, *fresh)] = results
            self.values |= self.launched[(key, given, *fresh)]
        return self.values

    def take_back(self) -> None:
        """Erases everything written so far."""
        for node in reversed(self.written_nodes):
            self.graph.erase_node(node)

    def _node(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        self.written_nodes.append(node)
        inherit_meta(node, self.fused)
        node.meta["val"] = value
        return node

    def _new_value(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # One fake tensor per node: reinplacing reads a shared one as shared storage and copies.
        mode = _compat.detect_fake_mode(list(_tensors(self.fused).values()))
        assert mode is not None
        with mode:
            return torch.empty(shape, dtype=dtype, device=self.device)

    def _allocate(self, buffer: Any) -> Node:
        options = {"dtype": buffer.dtype, "device": self.device}
        value = self._new_value(buffer.shape, buffer.dtype)
        return self._node(torch.ops.aten.empty.memory_format, (list(buffer.shape),), options, value)

    def _launch(self, launch: Any, workspaces: Collection[str]) -> None:
        tensors = {name: arg for name, arg in launch.args.items() if _source(arg) is not None}
        nodes = {name: self._tensor(arg) for name, arg in tensors.items()}
        written = self._written(launch, nodes)
        for name in written:
            if _source(tensors[name]) not in workspaces or not self._is_whole(tensors[name]):
                raise Refusal(
                    self.fused, f"{launch.kernel.__name__} seems to write {name}, which is no whole buffer"
                )
        kwargs = self._wrapper_arguments(launch, nodes, written)
        values = {name: self._new_value(*_shape_dtype(nodes[name])) for name in written}
        wrapper = self._node(_compat.triton_launch(), (), kwargs, values)
        wrapper.meta["eager_input_vals"] = ((), map_arg(kwargs, lambda node: node.meta["val"]))
        for name in written:
            result = self._node(operator.getitem, (wrapper, name), {}, values[name])
            self.values[_source(tensors[name])] = result  # type: ignore[index]

    def _written(self, launch: Any, nodes: dict[str, Node]) -> list[str]:
        values = {name: node.meta["val"] for name, node in nodes.items()}
        layout = tuple((name, value.dtype, value.device.type) for name, value in values.items())
        if (launch, layout) not in _WRITTEN:
            written = _compat.written_arguments(
                launch.kernel, {**launch.args, **values}, _descriptors(launch)
            )
            _WRITTEN[launch, layout] = sorted(written)
        if not _WRITTEN[launch, layout]:
            raise Refusal(
                self.fused, f"torch finds nothing that {launch.kernel.__name__} writes and would drop it"
            )
        return _WRITTEN[launch, layout]

    def _wrapper_arguments(self, launch: Any, nodes: dict[str, Node], written: list[str]) -> dict[str, Any]:
        compile_time = {parameter.name for parameter in launch.kernel.params if parameter.is_constexpr}
        scalars = {name: arg for name, arg in launch.args.items() if name not in nodes}
        constants = {name: arg for name, arg in scalars.items() if name in compile_time or arg is None}
        run_time = {name: arg for name, arg in scalars.items() if name not in constants}
        kernel = bound_kernel(launch.kernel, launch.num_warps, launch.num_stages)
        return {
            "kernel_idx": _compat.kernel_index(kernel),
            "constant_args_idx": _compat.kernel_constants(constants),
            "grid": [(*launch.grid, *(1,) * (3 - len(launch.grid)))],
            "tma_descriptor_metadata": _descriptors(launch),
            "kwargs": {**nodes, **run_time},
            "tensors_to_clone": written,
        }

    def _tensor(self, argument: Any) -> Node:
        source = self.values[_source(argument)]  # type: ignore[index]
        if self._is_whole(argument):
            return source
        base = source.meta["val"]
        geometry = (list(argument.shape), list(argument.strides), base.storage_offset())
        with _compat.detect_fake_mode([base]):  # type: ignore[union-attr]
            value = torch.as_strided(base, *geometry)
        return self._node(torch.ops.aten.as_strided.default, (source, *geometry), {}, value)

    def _is_whole(self, argument: Any) -> bool:
        base = self.values[_source(argument)].meta["val"]  # type: ignore[index]
        shape, strides = getattr(argument, "shape", base.shape), getattr(argument, "strides", base.stride())
        return tuple(shape) == tuple(base.shape) and tuple(strides) == tuple(base.stride())


def _source(argument: Any) -> str | None:
    """Name of the tensor an argument refers to, None for a scalar."""
    from moe_ops.kernels.program import Descriptor, Ref

    if isinstance(argument, Ref):
        return argument.name
    return argument.source if isinstance(argument, Descriptor) else None


def _shape_dtype(node: Node) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(node.meta["val"].shape), node.meta["val"].dtype


@lru_cache(maxsize=None)
def bound_kernel(kernel: Any, num_warps: int, num_stages: int) -> Any:
    """One object per kernel and configuration, so that equal launches share generated code."""
    return _compat.with_launch_options(kernel, num_warps, num_stages)


def _expect_layouts(fused: Node, results: list[Node]) -> None:
    values = fused.meta["val"]
    expected = values if isinstance(values, tuple | list) else (values,)
    for ours, theirs in zip((node.meta["val"] for node in results), expected, strict=True):
        if (ours.shape, ours.stride(), ours.dtype) != (theirs.shape, theirs.stride(), theirs.dtype):
            raise Refusal(fused, f"the launch plan returns {ours} where the operator returns {theirs}")


def _replace(graph: Graph, fused: Node, results: list[Node]) -> None:
    getitems: Mapping[int, Node] = outputs(fused) if isinstance(fused.meta["val"], tuple | list) else {}
    for index, getitem in getitems.items():
        getitem.replace_all_uses_with(results[index])
        graph.erase_node(getitem)
    if not getitems:
        fused.replace_all_uses_with(results[0])
    graph.erase_node(fused)
