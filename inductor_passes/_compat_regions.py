"""Private torch APIs behind functions in generated code: with `_compat`, where such may be imported."""

from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import compilation_time_metrics
from torch._inductor.compile_fx import _recursive_post_grad_passes, record_original_output_strides
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from inductor_passes._compat import POST_GRAD_SLOT


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
    with inductor_config.patch({POST_GRAD_SLOT: None}):  # which has rewritten these nodes
        _recursive_post_grad_passes(region, is_inference=True)


def call_region(region: Any, name: str, *operands: Any) -> Any:
    """What a node calls that stands for a function in the generated code, whose body is lowered at its first call.

    `invoke_subgraph` does this as well. Where a pass writes one, torch 2.13 runs it on fake tensors at each call.
    """
    return lowerings[torch.ops.higher_order.invoke_subgraph](region, name, *operands)


call_region._inductor_lowering_function = True  # type: ignore[attr-defined]


def inductor_seconds() -> float:
    """How long Inductor has compiled in this process, its passes included."""
    return sum(compilation_time_metrics.get("compile_fx_inner", [0.0]))
