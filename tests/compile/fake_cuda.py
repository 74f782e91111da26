"""Inductor's code for an H200, generated without a GPU.

Fake tensors on "cuda", the device queries of torch and Triton answered from a table, and Inductor's own passes and
code generator behind them. What comes back is the wrapper that a GPU machine would run; Triton kernels in it are
generated but not compiled. Test-only: it patches private names.
"""

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._dynamo import device_interface
from torch._dynamo.source import ConstantSource
from torch._inductor import codecache, decomposition
from torch._inductor.codegen.common import init_backend_registration
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _triton

from inductor_passes.pipeline import MoEPasses

_OURS = MoEPasses()
_SM90 = 90
_PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    cc=_SM90,
    gcnArchName="",
    uuid="fake",
    warp_size=32,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    total_memory=140 << 30,
    L2_cache_size=50 << 20,
)


def _driver() -> Any:
    from triton.backends.compiler import GPUTarget

    limits = {"max_shared_mem": 232448, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}
    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", _SM90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_benchmarker=lambda: None,
        is_active=lambda: True,
        map_python_to_cpp_type=lambda kind: kind,
        utils=types.SimpleNamespace(get_device_properties=lambda device: limits),
    )


_INTERFACE = {
    "is_available": True,
    "is_triton_capable": True,
    "raise_if_triton_unavailable": None,
    "current_device": 0,
    "device_count": 1,
    "set_device": None,
    "exchange_device": 0,
    "maybe_exchange_device": 0,
    "synchronize": None,
    "get_raw_stream": 0,
    "get_compute_capability": _SM90,
    "get_device_properties": _PROPERTIES,
}
_TORCH_CUDA = {
    "get_device_capability": (9, 0),
    "get_device_properties": _PROPERTIES,
    "current_device": 0,
    "device_count": 1,
}


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


@contextlib.contextmanager
def fake_h200() -> Iterator[None]:
    """torch, Triton and Inductor believe there is one H200."""
    import triton

    cuda = device_interface.CudaInterface
    system = {"device": {"name": "fake"}, "version": {"triton": "fake", "cuda": "fake"}, "hash": "fake"}
    with contextlib.ExitStack() as stack:
        for name, value in _INTERFACE.items():
            stack.enter_context(mock.patch.object(cuda, name, staticmethod(_answer(value))))
        for name in ("get_device_properties", "current_device"):
            stack.enter_context(mock.patch.object(cuda.Worker, name, staticmethod(_answer(_INTERFACE[name]))))
        for name, value in _TORCH_CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, _answer(value)))
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", _driver()))
        stack.enter_context(
            mock.patch.object(codecache.CacheBase, "get_system", staticmethod(_answer(system)))
        )
        workers = {"cuda": [_PROPERTIES]}
        stack.enter_context(mock.patch.object(device_interface, "caching_worker_device_properties", workers))
        stack.enter_context(
            mock.patch.object(_triton, "has_triton_tensor_descriptor_host_tma", _answer(True))
        )
        stack.enter_context(mock.patch.object(decomposition, "select_decomp_table", _decompositions))
        init_backend_registration()
        stack.callback(_forget_what_torch_found)
        _forget_what_torch_found()
        yield


def _forget_what_torch_found() -> None:
    """torch asks once per process whether there is a GPU and a Triton for it."""
    for value in vars(_triton).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@dataclass(frozen=True)
class Compiled:
    """What Inductor made of a function."""

    code: str
    """The wrapper's source."""
    guards: int
    """Guards added while our passes and Inductor's lowering ran, on top of those of tracing."""
    launches: tuple[str, ...]
    """Names of the kernels the wrapper launches, in order."""


def compile_for_h200(
    function: Callable[..., Any],
    arguments: Callable[[Any], Sequence[torch.Tensor]],
    *,
    tokens: int = 64,
    symbolic: bool = False,
    graph_pass: Callable[[torch.fx.Graph], None] | None = _OURS,
) -> Compiled:
    """Generates code for `function(*arguments(T))`, T being `tokens` or a symbol with that hint."""
    # Padding is chosen by timing products.
    patches: dict[str, Any] = {"compile_threads": 1, "fx_graph_cache": False, "shape_padding": False}
    patches["post_grad_custom_pre_pass"] = graph_pass
    with (
        fake_h200(),
        FakeTensorMode(shape_env=ShapeEnv()) as mode,
        inductor_config.patch(patches),
        torch.no_grad(),
    ):
        given = arguments(_symbol(mode.shape_env, tokens) if symbolic else tokens)
        module = make_fx(function, decomposition_table=_decompositions())(*given)
        with V.set_fake_mode(mode):
            joint_graph_passes(module)
            traced = len(mode.shape_env.guards)
            code = _generate(module, given, mode.shape_env)
    return Compiled(code, len(mode.shape_env.guards) - traced, _launches(code))


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's. That of index_select indexes as Python does, which wants a GPU while it is traced."""
    aten = torch.ops.aten
    plain = {aten.index_select.default: lambda x, dim, index: aten.index.Tensor(x, [None] * dim + [index])}
    return {**select_decomp_table(), **plain}


def _symbol(shape_env: ShapeEnv, hint: int) -> Any:
    source = ConstantSource("T")
    symbol = shape_env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    return shape_env.create_symintnode(symbol, hint=hint, source=source)


def _generate(module: torch.fx.GraphModule, arguments: Sequence[torch.Tensor], shape_env: ShapeEnv) -> str:
    post_grad_passes(module, is_inference=True)
    view_to_reshape(module)
    lowering = GraphLowering(module, example_inputs=arguments, shape_env=shape_env, is_inference=True)
    with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
        lowering.run(*arguments)
        code = lowering.codegen()
    code = code[0] if isinstance(code, tuple) else code
    return getattr(code, "value", code)


def body(code: str) -> str:
    """The part of a wrapper that runs."""
    return code[code.index("def call(") :]


def _launches(code: str) -> tuple[str, ...]:
    import re

    return tuple(re.findall(r"(\w+)\.run\(", body(code)))
