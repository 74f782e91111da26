"""Every private torch API the passes use, in one place, but for those of `_compat_options.py`.

Nothing else in the three packages may import `torch._inductor`, `torch._dynamo`, `torch._functorch` or
`torch._higher_order_ops`: when a torch release moves a name, this file is what changes. Tested on torch 2.11,
2.13 and 2.14; differences between them are noted where they matter.
"""

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
import torch._inductor.config as inductor_config
from functorch.compile import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import compilation_time_metrics, counters, graph_break_reasons
from torch._guards import CompileContext, detect_fake_mode
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx, record_original_output_strides
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.post_grad import reorder_for_locality
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._inductor.utils import is_cudagraph_unsafe_fx_node
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily as real_tensors
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import _disable_current_modes

try:  # torch 2.13: Inductor tells such a pass what kind of graph it compiles
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass as InferenceAwareGraphPass
except ImportError:  # torch 2.11
    InferenceAwareGraphPass = CustomGraphPass

# fmt: off
__all__ = [
    "cache_hits", "call_region", "call_when_compiled", "call_with_is_inference", "called_op", "can_call_regions",
    "compile_fx", "compile_id", "CustomGraphPass", "detect_fake_mode", "finish_region", "graph_breaks", "grouped_mm",
    "inductor_seconds", "InferenceAwareGraphPass", "is_cudagraph_unsafe_fx_node",
    "is_packaging", "kernel_constants", "kernel_index", "kernel_name", "maybe_mark_dynamic", "op_body",
    "order_behind", "packages_grouped_mm", "post_grad_backend", "POST_FUSION_SLOT", "POST_GRAD_SLOT", "PRE_GRAD_SLOT",
    "preserved_dynamo_state", "real_tensors", "reorder_for_locality", "slot_and_covered", "stable_topological_sort",
    "statically_known_true", "trace", "triton_launch", "triton_launch_in_place", "uncompiled", "watch_slots",
    "with_launch_options", "written_arguments",
]
# fmt: on


# The slots our passes sit in

POST_GRAD_SLOT, PRE_GRAD_SLOT = "post_grad_custom_pre_pass", "pre_grad_custom_pass"
POST_FUSION_SLOT = "_post_fusion_custom_pass"
_COVERED: dict[str, ContextVar[tuple[Any, ...]]] = {
    slot: ContextVar(f"values of {slot} that later ones cover", default=())
    for slot in (POST_GRAD_SLOT, PRE_GRAD_SLOT, POST_FUSION_SLOT)
}


@lru_cache(maxsize=1)
def watch_slots() -> None:
    """Remembers from now on which value each new value of the slots covers.

    `torch.compile(options=...)` patches a slot around a compile, and Inductor has no way to ask for what the user
    has there underneath. Every change goes through `__setattr__` of the config module's own class; a patch that ends
    puts the old value back from its `__exit__`.
    """
    config_class: Any = type(inductor_config)
    set_plainly = config_class.__setattr__

    def set_and_remember(config: Any, name: str, value: Any) -> None:
        if name in _COVERED:
            covered = _COVERED[name].get()
            ends_patch = sys._getframe(1).f_code.co_name == "__exit__"
            now = covered[:-1] if ends_patch else (*covered, getattr(inductor_config, name))
            _COVERED[name].set(now[-_MOST_COVERED:])
        set_plainly(config, name, value)

    config_class.__setattr__ = set_and_remember


_MOST_COVERED = 32  # plain assignments cover a value for good: the oldest are forgotten


def slot_and_covered(slot: str) -> tuple[Any, ...]:
    """What is in a slot now (None, a pass, or in torch 2.13 several), then what that covers, and so on down."""
    return (getattr(inductor_config, slot), *reversed(_COVERED[slot].get()))


def call_with_is_inference(run: Callable[..., None], graph: torch.fx.Graph, is_inference: bool) -> None:
    """Runs a user's pass as Inductor would: 2.13's inference-aware ones also take `is_inference`."""
    is_told = InferenceAwareGraphPass is not CustomGraphPass and isinstance(run, InferenceAwareGraphPass)
    given: tuple[Any, ...] = (graph, is_inference) if is_told else (graph,)
    run(*given)


def trace(function: Callable[..., Any], values: Sequence[Any], kept: Any = ()) -> torch.fx.GraphModule:
    """The ATen graph of `function` on fake `values`, after Inductor's decompositions of all but what is `kept`."""
    from torch._inductor.decomposition import select_decomp_table as rules

    mode, table = detect_fake_mode(values), {op: rule for op, rule in rules().items() if op not in kept}
    with mode if mode is not None else contextlib.nullcontext():
        return make_fx(function, decomposition_table=table, tracing_mode="real")(*values)


# Triton launches as graph nodes

_KERNELS = triton_kernel_wrap.kernel_side_table


def triton_launch() -> Any:
    """The functional higher-order op that stands for one launch of a user's Triton kernel."""
    return triton_kernel_wrap.triton_kernel_wrapper_functional


def triton_launch_in_place() -> Any:
    """The one that Dynamo writes, which may change whatever it is given."""
    return triton_kernel_wrap.triton_kernel_wrapper_mutation


def kernel_index(kernel: Any) -> int:
    """A process-local number for a Triton kernel; it lives only as long as the compile that uses it."""
    return _KERNELS.add_kernel(kernel)


def kernel_constants(constants: dict[str, Any]) -> int:
    """A process-local number for a launch's compile-time arguments."""
    same = [index for index, each in _KERNELS.constant_args.items() if repr(each) == repr(constants)]
    return same[0] if same else _KERNELS.add_constant_args(dict(constants))


def kernel_name(index: int) -> str:
    """Name of the kernel behind a number of `kernel_index`."""
    kernel = _KERNELS.get_kernel(index)
    return (kernel if hasattr(kernel, "__name__") else kernel.fn).__name__  # type: ignore[union-attr]


def written_arguments(
    kernel: Any, arguments: Mapping[str, Any], descriptors: Mapping[str, Any]
) -> frozenset[str]:
    """Names of the tensors a Triton kernel writes, as Inductor's own analysis of its TTIR will find them.

    All tensors when the analysis fails. Inductor drops a launch that writes nothing anybody reads, so a launch must
    be described the way this analysis sees it.
    """
    if hasattr(triton_kernel_wrap, "identify_accessed_tensors"):  # torch 2.13
        accesses = triton_kernel_wrap.identify_accessed_tensors(kernel, dict(arguments), dict(descriptors))
        names = {dependency.name for dependency in accesses.read_writes.writes}
    else:  # torch 2.11
        identify = getattr(triton_kernel_wrap, "identify_mutated_tensors")  # noqa: B009 (absent from 2.13's types)
        names = set(identify(kernel, dict(arguments), dict(descriptors)))
    return frozenset(name for name in names if isinstance(arguments.get(name), torch.Tensor))


def with_launch_options(kernel: Any, num_warps: int, num_stages: int) -> Any:
    """`kernel` bound to one launch configuration, the only form in which Inductor takes these two."""
    import triton

    return triton.autotune([triton.Config({}, num_warps=num_warps, num_stages=num_stages)], key=[])(kernel)


# What AOTInductor packs


def is_packaging() -> bool:
    """Whether AOTInductor compiles: what runs in another process, which may know none of our operators."""
    return V.aot_compilation


@lru_cache(maxsize=1)
def packages_grouped_mm() -> bool:
    """Whether a package can call `_grouped_mm` on a CPU: since torch 2.12; before, its C++ does not compile."""
    from torchgen.aoti.fallback_ops import inductor_fallback_ops

    return "aten._grouped_mm.default" in inductor_fallback_ops


@lru_cache(maxsize=1)
def grouped_mm() -> Callable[..., Any]:
    """Inductor's own lowering of `_grouped_mm` to the operator, to be called in a graph.

    The operator takes more dtypes than its fake, which takes bfloat16 alone and would be asked of a node that calls
    the operator. (torch 2.13) Under max-autotune its node would be timed against Inductor's templates, of which one
    made an illegal access on an H100. (torch 2.11)
    """
    from torch._inductor.lowering import lowerings

    def grouped_mm(x: Any, weight: Any, offsets: Any) -> Any:
        if isinstance(x, torch.Tensor):  # a fake one: torch runs branches of `cond` before it lowers them
            return x.new_empty((x.shape[0], weight.shape[2]))
        with inductor_config.patch(max_autotune_gemm_backends="ATEN"):
            return lowerings[torch.ops.aten._grouped_mm.default](x, weight, offsets)

    return _called_by_lowering(grouped_mm)


def _called_by_lowering(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has Inductor call `function` where it lowers a node, wherever inputs lie by then (torch 2.14 asks)."""
    for told in ("_inductor_lowering_function", "_inductor_lowering_output_metadata_ignores_input_storage"):
        setattr(function, told, True)
    return function


# Functions in generated code


def can_call_regions() -> bool:
    """Whether Inductor is compiling to a Python wrapper, the only one that calls functions of its own."""
    is_python = not (inductor_config.cpp_wrapper or inductor_config.fx_wrapper or V.aot_compilation)
    return is_python and isinstance(V.fake_mode, FakeTensorMode)


def finish_region(region: torch.fx.GraphModule) -> None:
    """Does to a graph module that a pass made what Inductor has done to the subgraphs it finds."""
    output = region.graph.output_node()
    inputs = [node.meta["val"] for node in region.graph.find_nodes(op="placeholder")]
    output.meta["user_visible_output_idxs"] = [*range(len(output.args[0]))]  # type: ignore[arg-type]
    FakeTensorProp(region, V.fake_mode).propagate_dont_convert_inputs(*inputs)
    record_original_output_strides(region)
    # Its passes have rewritten these nodes, which stay in the order of those that no region has: one text, one kernel.
    with inductor_config.patch({POST_GRAD_SLOT: None, "reorder_for_locality": False}):
        _recursive_post_grad_passes(region, is_inference=True)


@_called_by_lowering
def call_region(region: Any, name: str, *operands: Any) -> Any:
    """What a node calls that stands for a function in the generated code, whose body is lowered at its first call.

    `invoke_subgraph` does this as well. Where a pass writes one, torch 2.13 runs it on fake tensors at each call.
    """
    from torch._inductor.lowering import lowerings

    if isinstance(region, torch.fx.GraphModule):  # with fake tensors, as in `grouped_mm`
        return region(*operands)
    return lowerings[torch.ops.higher_order.invoke_subgraph](region, name, *operands)


# Order


def order_behind(graph: torch.fx.Graph, behind: Mapping[torch.fx.Node, Iterable[torch.fx.Node]]) -> None:
    """Has Inductor run each node after those it comes with, whatever it reads; nodes keep their names."""
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    preserve_node_ordering(graph, {node: OrderedSet(others) for node, others in behind.items()})


# When a compile is over


def compile_id() -> str | None:
    """Dynamo's name of the compile that is running, such as "0/0"; None outside one."""
    found = CompileContext.current_compile_id()
    return None if found is None else str(found)


def call_when_compiled(callback: Callable[[Any], None]) -> None:
    """Calls `callback` at the end of this and of later compiles; `torch._dynamo.reset` forgets it."""
    if callback not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(callback)


def cache_hits() -> int:
    """How many graphs have come out of Inductor's and AOTAutograd's caches."""
    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


def inductor_seconds() -> float:
    """How long Inductor has compiled in this process, its passes included."""
    return sum(compilation_time_metrics.get("compile_fx_inner", [0.0]))


# What explain() needs of Dynamo and AOTAutograd

OnGraph = Callable[[torch.fx.GraphModule, Sequence[Any]], None]


def post_grad_backend(on_graph: OnGraph, before_autograd: Any = None) -> Callable[..., Any]:
    """A backend that shows every graph as our pass would get it, generates no code and runs the ATen graph.

    `before_autograd` is the pass of the other slot. Caches are off, so a graph compiled before is traced again.
    """

    def inner(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        with _disable_current_modes():  # as Inductor does around the passes
            on_graph(gm, example_inputs)
        return make_boxed_func(gm.forward)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with inductor_config.patch({"force_disable_caches": True, PRE_GRAD_SLOT: before_autograd}):
            return compile_fx(gm, example_inputs, inner_compile=inner)  # type: ignore[arg-type]

    return backend


def called_op(node: torch.fx.Node) -> Any:
    """What a node calls; of an operator that changes its inputs, which AOTAutograd wraps, the operator."""
    from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

    return node.args[0] if node.target in (auto_functionalized, auto_functionalized_v2) else node.target


def op_body(name: str) -> Callable[..., Any] | None:
    """The Python function that a `torch.library.custom_op` runs on a GPU; torch keeps none of other operators."""
    from torch._library.custom_ops import OPDEFS

    definition: Any = OPDEFS.get(name)
    if definition is None:
        return None
    on_gpu = definition._backend_fns.get("cuda")  # registered for it alone, and wrapped
    return inspect.getclosurevars(inspect.unwrap(on_gpu)).nonlocals["fn"] if on_gpu else definition._init_fn


def uncompiled(function: Any) -> Any:
    """The module or function behind `torch.compile`'s wrapper."""
    while True:
        inner = getattr(function, "_orig_mod", None) or getattr(function, "_torchdynamo_orig_callable", None)
        if inner is None:
            return function
        function = inner


def graph_breaks() -> list[tuple[str, Sequence[Any]]]:
    """Reason and user's stack of every graph break, once for each frame it ended. No stack where Dynamo kept none."""
    kept = [(each.reason, each.user_stack) for each in graph_break_reasons]
    return [*kept, *((reason, ()) for reason in counters["graph_break"])]


@contextlib.contextmanager
def preserved_dynamo_state() -> Iterator[None]:
    """Counts afresh inside, and leaves Dynamo's counters as they were."""
    saved, reasons = copy.deepcopy(dict(counters)), list(graph_break_reasons)
    counters.clear()
    graph_break_reasons.clear()
    try:
        yield
    finally:
        counters.clear()
        counters.update(saved)
        graph_break_reasons[:] = reasons
