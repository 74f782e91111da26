"""torch's compilers without what they do in vain, a fifth of their time in tests. No graph depends on it.

Dynamo flushes the processor's caches after each compile to time its guards for a log. Inductor has one object that
knows the dtype of an operator's result, and makes it again for each operator of a kernel. pytest listens to every
logger that does not propagate, and while anybody listens to that of traces, torch prints each graph a dozen times.
It looks up the fields of what it knows of a fake tensor for each of them, imports two names for each of its sizes, and
asks before each question about a size whether that is recorded. Whenever it reads an expression of sizes it asks all
of its terms whether it is a number. Next to each tensor of a graph it keeps a second description of it, and a trace
makes a dozen empty tensors for states of random numbers, which are none of its arguments. After each compile it
collects garbage. Of every module that a trace calls AOTAutograd's tracer takes what it returns, but fx first replaces
two methods of `nn.Module`, and Python tells each of its thousands of subclasses.
Whenever pytest sets the level that the root of loggers has, six times a test, each logger forgets what it is told.
Each seed is kept for GPUs, of which there are none, with the stack of its caller as a text.
g++ spends more than half of its time for a kernel on making it fast, and tests run it once or twice on a few numbers.
Test-only: it replaces private names of torch. `python -P tests/spared.py module ...` is `python -m module ...` with it.
"""

import dataclasses
import functools
import logging
import runpy
import sys
from pathlib import Path
from typing import Any


def spare() -> None:
    """From now on, for what is imported already: a process of tests that compile nothing is not made to import it."""
    traces = logging.getLogger("torch.__trace")
    traces.handlers.clear()
    traces.addHandler = lambda handler: None
    _set_new_levels_alone()
    if torch := sys.modules.get("torch"):
        _seed_no_missing_devices(torch)
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *_: 0.0
    if config := sys.modules.get("torch._dynamo.config"):
        config.run_gc_after_compile = False
    if fakes := sys.modules.get("torch._subclasses.fake_tensor"):
        fakes.TensorMetadata._flatten_into = _flatten_at_once(fakes)
    if shapes := sys.modules.get("torch.fx.experimental.symbolic_shapes"):
        _record_nothing(shapes.ShapeEnv)
        _look_once(sys.modules["sympy"].Expr)
    if tracing := sys.modules.get("torch.fx.experimental.proxy_tensor"):
        _replace_no_methods(tracing)
        tracing._extract_tensor_metadata = lambda tensor: None
    if drawing := sys.modules.get("torch._decomp.decompositions_for_rng"):
        _share_empty_states(torch, drawing.PhiloxState)
    if propagation := sys.modules.get("torch._inductor.dtype_propagation"):
        _make_once(propagation.DtypePropagationOpsHandler)
    if builder := sys.modules.get("torch._inductor.cpp_builder"):
        _leave_slow(builder)


def _set_new_levels_alone() -> None:
    set_level = logging.Logger.setLevel

    def set_new_level(self: logging.Logger, level: int | str) -> None:
        if level != self.level:
            set_level(self, level)

    logging.Logger.setLevel = set_new_level  # type: ignore[method-assign]


def _seed_no_missing_devices(torch: Any) -> None:
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


def _flatten_at_once(fakes: Any) -> Any:
    """The key of a tensor's metadata in the cache of what operators return."""
    names = [field.name for field in dataclasses.fields(fakes.TensorMetadata)]

    def flatten(self: Any, result: list[Any], mode: Any, state: Any) -> None:
        for name in names:
            value = getattr(self, name)
            many = isinstance(value, tuple)
            if many:
                result.append(len(value))
            for each in value if many else (value,):
                if isinstance(each, fakes.SymInt):
                    state.convert_sym_int(result, each)
                else:
                    result.append(each)

    return flatten


def _record_nothing(environment: type) -> None:
    """Unless torch is asked to validate its own translations, nobody reads a record."""
    for name, method in vars(environment).copy().items():
        code = getattr(method, "__code__", None)
        if code is not None and Path(code.co_filename).name == "recording.py":
            setattr(environment, name, method.__wrapped__)


def _look_once(expression: type) -> None:
    expression.is_number = property(functools.cache(expression.is_number.fget))  # type: ignore[attr-defined]


def _replace_no_methods(tracing: Any) -> None:
    """For a tracer that overrides nothing of AOTAutograd's, which would call what it replaces."""
    from torch.fx import _symbolic_trace

    patch = _symbolic_trace._Patcher.patch_method

    def patch_for_others(self: Any, kind: type, name: str, method: Any, *more: Any, **named: Any) -> None:
        free = dict(zip(method.__code__.co_freevars, method.__closure__ or ()))
        if "self" not in free or type(free["self"].cell_contents) is not tracing.PythonKeyTracer:
            patch(self, kind, name, method, *more, **named)

    _symbolic_trace._Patcher.patch_method = patch_for_others


def _share_empty_states(torch: Any, state: Any) -> None:
    """As long as nothing is recorded in it, a state holds two tensors that nobody writes to."""
    empty = torch.tensor(())

    def reset(self: Any) -> None:
        self.seed = self.base_offset = empty
        self.relative_offset, self.offset_advanced_at_least_once = 0, False

    state.reset = reset


def _leave_slow(builder: Any) -> None:
    """Without optimisation and lines for a debugger. Inductor makes its header anew, once, as it does for any flags."""
    flags = builder._get_optimization_cflags
    instead = {"O3": "O0", "O1": "O0", "g1": "g0"}

    def slow(*given: Any, **named: Any) -> tuple[list[str], list[str]]:
        for_compiler, for_linker = flags(*given, **named)
        return [instead.get(flag, flag) for flag in for_compiler], for_linker

    builder._get_optimization_cflags = slow


def _make_once(handler: type) -> None:
    """It is made again where there are more rules than the last time."""
    from torch._inductor import utils
    from torch._inductor.codegen import common

    make = handler.__init__
    made: list[tuple[int, int]] = []

    def made_once(self: Any) -> None:
        rules = len(utils.op_dtype_propagation_rules), len(common.pointwise_overrides_data)
        if made != [rules]:
            make(self)
            made[:] = [rules]

    handler.__init__ = made_once


if __name__ == "__main__":
    import torch._inductor.compile_fx  # noqa: F401

    spare()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
