"""Kernels in the place of the CPU's implementations, with TRITON_INTERPRET=1 in the environment:

    python -m tests.fuzz --levels "scaled_.*|quanti.*" --hook tests.fuzz.interpreted:install

Each operator below runs what it does on a GPU, choices included, with every access of memory checked. Compiled code
calls overloads of its own, and so stays on the CPU's.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from moe_ops import _library
from moe_ops.arguments import BuildDispatch, Combine, GatedActivation
from moe_ops.kernels import plans
from moe_ops.scaled_arguments import DequantiseWeight, QuantiseRows, ScaledFusedExperts, ScaledGroupedGemm
from tests.fuzz import worker
from tests.fuzz.cases import Case
from tests.fuzz.check import Verdict
from tests.fuzz.quantised_cases import num_blocks
from tests.kernels import memory
from tests.kernels.brisk import brisk

OPERATORS = {
    QuantiseRows: "quantise_rows",
    DequantiseWeight: "dequantise_weight",
    ScaledGroupedGemm: "scaled",
    ScaledFusedExperts: "scaled_experts",
    BuildDispatch: "dispatch",
    GatedActivation: "activation",
    Combine: "combine",
}
"""By their arguments, the modules of `moe_ops` in which they are."""
TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}
# Multiplications, and steps through the depth of a product: the interpreter takes seconds for more.
LARGEST_PRODUCT, MOST_STEPS = 2**20, 24
_KEPT = ExitStack()
_LIBRARY: list[torch.library.Library] = []


def install() -> None:
    """In this process, until it ends. Raises RuntimeError unless Triton interprets."""
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is not set: expected 1 before Python starts")
    _KEPT.enter_context(brisk())
    _KEPT.enter_context(memory.checked())
    _KEPT.enter_context(np.errstate(all="ignore"))
    _KEPT.enter_context(mock.patch.object(interpreter, "_convert_float", _converted))
    _KEPT.enter_context(mock.patch.object(worker, "check", partial(_check_small, worker.check)))
    _library.launch = plans.launch
    library = torch.library.Library(_library.NAMESPACE, "IMPL")
    _LIBRARY.append(library)
    for record, name in OPERATORS.items():
        module = import_module(f"moe_ops.{name}")  # some names of these are functions' as well
        operator = _library.OPERATORS[record]
        library.impl(operator.name, _launching(operator.build, module._cuda), "CPU", allow_override=True)


def _launching(build: Callable[..., Any], cuda: Callable[[Any], Any]) -> Callable[..., Any]:
    def launching(*leaves: Any) -> Any:
        with torch.no_grad():
            return cuda(build(*leaves))

    return launching


def _check_small(check: Callable[[Case, str], Verdict], case: Case, device: str) -> Verdict:
    """Of no other cases: a worker that takes too long counts as hung."""
    size, steps = case.tokens * case.top_k * case.hidden * case.intermediate, 1
    if case.scaled is not None:
        steps = max(
            num_blocks(case.hidden, case.scaled.w13_block[1]),
            num_blocks(case.intermediate, case.scaled.w2_block[1]),
        )
    return check(case, device) if size <= LARGEST_PRODUCT and steps <= MOST_STEPS else Verdict()


def _converted(values: np.ndarray, given: Any, wanted: Any, rounding: Any) -> np.ndarray:
    """As torch converts: the interpreter's own loses carries, and cuts off what is below the smallest normal number."""
    bits = torch.from_numpy(np.ascontiguousarray(values).view(f"int{given.primitive_bitwidth}"))
    converted = bits.view(TORCH[given]).to(TORCH[wanted])
    width = wanted.primitive_bitwidth
    return converted.view(getattr(torch, f"int{width}")).numpy().view(f"uint{width}")
