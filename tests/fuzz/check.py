"""Runs one case and compares its output and gradients with the float64 oracle.

An error by norm must stay below the bound of the dtypes involved times the norm of what was expected; a gradient
passes through twice as many roundings as a value and gets twice the bound. Where the exact result is the small rest
of terms that cancel, or a clamp's derivative jumps, rounding is not relative to the result. So an error above the
bound is held against a second figure from the oracle alone: how far the exact result moves when every input is off
by up to half the bound, the largest of some draws (backward stability). For sums of many terms it is the smaller one.
In every other draw whole rows are off alike, as the sums are that a layer rounds and stores on its way.

Below its smallest normal number a dtype rounds to multiples of a step, and no bound is relative to the number. For what
is returned that is half a step for each number. What a layer stores on its way is multiplied and summed before it
reaches a result, so the draws round it as well (`oracle.underflow`).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz import (
    halves as _halves,  # noqa: F401  # adds its level
    oracle,
    quantising as _quantising,  # noqa: F401  # adds its levels and those of `quantised`
)
from tests.fuzz.cases import Case
from tests.fuzz.levels import LEVELS
from tests.fuzz.problem import Mismatch, Problem, Tensors
from tests.fuzz.tensors import Maker
from tests.helpers import RELATIVE_NORM, nan_in_empty_memory

DRAWS = 32
TOKEN_BY_TOKEN = (
    "fused_moe",
    "fused_experts",
    "halves",
    "compiled",
    "scaled_fused_experts",
    "quantised_layer",
)  # levels from hidden states to hidden states
STAGED = ("scaled_fused_experts", "quantised_layer")
"""Levels whose exact rows go through stages when gradients are recorded, which round where one operator may not."""
PER_TOKEN = ("hidden_states", "topk_weights", "router_logits", "shared")


@dataclass
class Verdict:
    """`shares`: the error of each output over what is allowed; `wrong`: a line for each that is above 1."""

    shares: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)  # outputs that needed the second figure


def check(case: Case, device: str) -> Verdict:
    """Builds, runs and judges a case. What the call raises comes through."""
    make, verdict = Maker(case, device), Verdict()
    problem = LEVELS[case.level](make)
    before = {name: tensor.clone() for name, tensor in problem.tensors.items()}
    try:
        _judge(problem, make, verdict)
        for name, tensor in problem.tensors.items():
            if not torch.equal(tensor.nan_to_num(), before[name].nan_to_num()):
                verdict.wrong.append(f"{name} was changed by the call")
    except Mismatch as mismatch:
        verdict.wrong.append(str(mismatch))
    return verdict


def _judge(problem: Problem, make: Maker, verdict: Verdict) -> None:
    wants_gradients = make.case.backward
    inputs = {
        name: t.detach().requires_grad_(wants_gradients and name not in problem.constants)
        for name, t in problem.tensors.items()
    }
    output = _call(lambda: problem.run(inputs), make)
    if output is None:
        return
    grad = make.grad(output.shape, output.dtype) if wants_gradients else None
    actual = {"output": output.detach()}
    if wants_gradients:
        actual |= _call(lambda: gradients(output, inputs, grad), make)
    exact = Exact(problem, grad, make)
    _expect_metadata(output, exact, make)
    for name, value in actual.items():
        _compare(name, value, exact, verdict)
    if not make.case.is_compiled:
        _judge_again(problem, inputs, actual, exact, verdict)
    if make.case.poisoned and make.case.level in TOKEN_BY_TOKEN and not _torch_reads_on(make):
        _judge_containment(problem, inputs, grad, actual, make, verdict)


def _judge_again(problem: Problem, inputs: Tensors, first: Tensors, exact: "Exact", verdict: Verdict) -> None:
    """The same again after calls that record nothing: what is kept of calls must not change a bit of later ones."""
    make, grad = exact.make, exact.grad
    with torch.no_grad():
        again = {f"output, call {call}": _call(lambda: problem.run(inputs), make) for call in (2, 3)}
    if grad is not None and make.case.level in STAGED and make.case.scaled.rows == "exact":
        unrecorded = again.pop("output, call 2")
        _compare("output", unrecorded, exact, verdict)
        _expect_same("output, call 3", again.pop("output, call 3"), unrecorded, verdict)
    output = _call(lambda: problem.run(inputs), make)
    again["output"] = output.detach()
    if grad is not None:
        again |= _call(lambda: gradients(output, inputs, grad), make)
    for name, value in again.items():
        _expect_same(name, value, first[name.partition(",")[0]], verdict)


def _expect_same(name: str, value: Tensor, first: Tensor, verdict: Verdict) -> None:
    are_nan_alike = torch.equal(value.isnan(), first.isnan())
    if not are_nan_alike or not torch.equal(value.nan_to_num(), first.nan_to_num()):
        verdict.wrong.append(f"{name}: others than in the first call")


def _judge_containment(
    problem: Problem, inputs: Tensors, grad: Tensor | None, clean: Tensors, make: Maker, verdict: Verdict
) -> None:
    """The same with tokens that are NaN or infinite: the bits of all others' outputs and gradients must stay."""
    hidden_states = problem.tensors["hidden_states"]
    num_tokens = hidden_states.shape[0]
    if num_tokens < 2 or hidden_states.stride(0) == 0:
        return
    is_bad = make.uniform(num_tokens) < 0.2
    is_bad[int(make.uniform(1) * num_tokens)] = True
    is_bad = is_bad.to(make.device)
    with spoilt_rows(hidden_states, is_bad):
        hidden_of_bad = hidden_states.clone()
        output = _call(lambda: problem.run(inputs), make)
        spoilt = {"output": output.detach()}
        if grad is not None:
            found = _call(lambda: gradients(output, inputs, grad), make)
            spoilt |= {name: found[name] for name in PER_TOKEN if name in found}
    for name, value in spoilt.items():
        if not torch.equal(value[~is_bad], clean[name][~is_bad]):
            verdict.wrong.append(
                f"{name}: other tokens changed beside {int(is_bad.sum())} that are not finite"
            )
    if problem.reached is not None:
        is_nan = hidden_of_bad.isnan().all(1) & problem.reached
        if not spoilt["output"][is_nan].isnan().all():
            verdict.wrong.append("output: numbers of tokens that are NaN")


def _torch_reads_on(make: Maker) -> bool:
    """Whether torch's own products of these sizes let a token that is NaN into the sums of the token before it.

    oneDNN takes bfloat16 in pairs. On processors with AMX it multiplies what lies behind a row of odd length by zero.
    """
    is_odd = make.case.hidden % 2 or make.case.intermediate % 2
    if make.device != "cpu" or make.case.dtype != "bfloat16" or not is_odd:
        return False
    rows = torch.ones(256, 31, dtype=torch.bfloat16)
    rows[1::2] = float("nan")
    return bool(F.linear(rows, rows.new_ones(130, 31))[::2].isnan().any())


@contextmanager
def spoilt_rows(tensor: Tensor, is_bad: Tensor) -> Iterator[None]:
    """Some rows hold what is not finite, in place: another tensor might be aligned otherwise and run other kernels."""
    kept = tensor[is_bad]
    strange = torch.tensor(
        [float("nan"), float("inf"), float("-inf")], dtype=tensor.dtype, device=tensor.device
    )
    tensor[is_bad] = strange[torch.arange(len(kept), device=tensor.device) % 3].unsqueeze(1).expand_as(kept)
    try:
        yield
    finally:
        tensor[is_bad] = kept


def _call(function: Callable[[], Any], make: Maker) -> Any:
    """Under poisoned memory, but for compiled code, which a patch would break. Waits, so that a fault shows here."""
    if make.case.is_compiled:
        result = function()
    else:
        with nan_in_empty_memory():
            result = function()
    if make.device == "cuda":
        torch.cuda.synchronize()
    return result


def gradients(output: Tensor, inputs: Tensors, grad: Tensor | None) -> Tensors:
    """The gradient of every input that asks for one, by name; zeros where the output does not depend on it."""
    asked = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    if not output.requires_grad:
        return {name: torch.zeros_like(tensor) for name, tensor in asked.items()}
    found = torch.autograd.grad(output, list(asked.values()), grad, materialize_grads=True)
    return dict(zip(asked, found, strict=True))


class Exact:
    """The oracle's output and gradients of a problem, and how far they move with its inputs."""

    def __init__(self, problem: Problem, grad: Tensor | None, make: Maker) -> None:
        self.problem, self.grad, self.make = problem, grad, make
        self.results = self._compute(0.0)
        self.sizes = dict(problem.sizes)
        self.allowed = problem.allowed(grad) if problem.allowed else {}

    def _compute(self, off_by: float, by_rows: bool = False) -> Tensors:
        problem, wants_gradients = self.problem, self.grad is not None
        inputs = {
            name: self._near(t, off_by, by_rows).requires_grad_(
                wants_gradients and name not in problem.constants
            )
            for name, t in problem.tensors.items()
        }
        with oracle.underflow(self.make.dtype) if off_by else nullcontext():
            output = problem.expected(inputs)
            if not wants_gradients:
                return {"output": output}
            found = gradients(output, inputs, self._near(self.grad, off_by, by_rows))
        # A row of logits that is not finite has no derivative in plain PyTorch; the operator's is zero there.
        if "router_logits" in found:
            spoilt = ~problem.tensors["router_logits"].isfinite().all(1, keepdim=True)
            clean = found["router_logits"].nan_to_num(nan=0.0)
            found["router_logits"] = torch.where(
                spoilt | self._has_strange_bias, clean, found["router_logits"]
            )
        return {"output": output.detach(), **found}

    @property
    def _has_strange_bias(self) -> bool:
        return self.make.case.correction == "not finite"

    def _near(self, tensor: Tensor, off_by: float, by_rows: bool) -> Tensor:
        exact = tensor.detach().to(torch.float64, copy=True)
        if off_by:
            shape = (*tensor.shape[:-1], 1) if by_rows else tensor.shape
            noise = 2 * torch.rand(shape, generator=self.make.generator).to(exact) - 1
            exact *= 1 + off_by * (noise.sign() if by_rows else noise)
        return exact

    @cached_property
    def movement(self) -> dict[str, float]:
        """By name, the largest distance from the exact result over some draws of inputs off by half the bound."""
        farthest = dict.fromkeys(self.results, 0.0)
        for draw in range(DRAWS):
            for name, moved in self._compute(self.problem.bound / 2, by_rows=draw % 2 == 1).items():
                farthest[name] = max(farthest[name], (moved - self.results[name]).norm().item())
        return farthest

    def bound(self, name: str, dtype: torch.dtype) -> float:
        """Of the relative error of a result that is stored in `dtype`."""
        if name == "output":
            return self.problem.bound
        return 2 * max(self.problem.bound, RELATIVE_NORM[dtype])


def _expect_metadata(output: Tensor, exact: Exact, make: Maker) -> None:
    wanted = exact.results["output"].shape
    if output.shape != wanted:
        raise Mismatch(f"output has shape {list(output.shape)}, expected {list(wanted)}")
    if not output.is_contiguous():
        raise Mismatch(f"output has strides {list(output.stride())}, expected it contiguous")
    is_routing = make.case.level in ("topk_routing", "routing_dispatch")
    compute = torch.float64 if make.logits_dtype == torch.float64 else torch.float32
    if output.dtype != (compute if is_routing else make.dtype):
        raise Mismatch(f"output has dtype {output.dtype}")


def smallest_step(dtype: torch.dtype) -> float:
    """Between numbers below the smallest normal one."""
    limits = torch.finfo(dtype)
    return limits.smallest_normal * limits.eps


def _compare(name: str, actual: Tensor, exact: Exact, verdict: Verdict) -> None:
    expected = exact.results[name]
    if actual.numel() == 0:
        return
    if exact.allowed:
        _compare_each(name, actual, exact, verdict)
        return
    error, bound = (actual.double() - expected).norm().item(), exact.bound(name, actual.dtype)
    size = max(expected.norm().item(), exact.sizes.get(name, 0.0))
    last = smallest_step(actual.dtype) / 2 * actual.numel() ** 0.5
    allowed = bound * size + last
    if error > allowed:
        verdict.cancelled.append(name)
        allowed = max(allowed, exact.movement[name] * bound / exact.problem.bound + last)
    verdict.shares[name] = error / max(allowed, sys.float_info.min)
    if not error <= allowed:
        verdict.wrong.append(
            f"{name} {list(actual.shape)} {actual.dtype}: error {error:.3e}, allowed {allowed:.3e} "
            f"(relative {bound:.1e}), size {size:.3e}, NaN {int(actual.isnan().sum())}"
        )


def _compare_each(name: str, actual: Tensor, exact: Exact, verdict: Verdict) -> None:
    """Number by number, where each has a bound."""
    expected = exact.results[name]
    last = smallest_step(actual.dtype) / 2 + torch.finfo(actual.dtype).eps / 2 * expected.abs()
    allowed = exact.allowed[name](expected) + last
    error = (actual.double() - expected).abs()
    verdict.shares[name] = (error / allowed.clamp(min=sys.float_info.min)).max().item()
    if not (error <= allowed).all():
        worst = int((error - allowed).nan_to_num(nan=float("inf")).argmax())
        at = [int(each) for each in torch.unravel_index(torch.tensor(worst), error.shape)]
        verdict.wrong.append(
            f"{name} {list(actual.shape)} {actual.dtype}: {int((~(error <= allowed)).sum())} numbers are off, at {at} "
            f"{actual.flatten()[worst].item():.6e} for {expected.flatten()[worst].item():.6e}, "
            f"allowed {allowed.flatten()[worst].item():.3e}"
        )
