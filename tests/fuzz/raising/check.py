"""Runs a random layer as PyTorch does, in its dtype and in float64, and as our passes rewrite it."""

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from inductor_passes import _compat
from inductor_passes.base import PassLog
from inductor_passes.pipeline import FUSIONS, PIPELINE, RAISES, run_passes
from inductor_passes.training import RaiseForTraining
from tests.fuzz.raising.grammar import Case
from tests.fuzz.raising.source import PARAMETERS, in_double, model_of, source
from tests.fuzz.raising.tensors import KINDS, inputs
from tests.helpers import RELATIVE_NORM, relative_error

Model = Callable[..., Tensor]
RANKING = ("topk", "sort", "argsort", "argmax", "max")
RANKED = {"float32": 2e-6, "bfloat16": 2e-2}  # by how much what is ranked may be off
GRADIENTS = 10  # times what outputs may be off: they are long sums
DIVISIONS = ("div", "true_divide", "__truediv__", "__itruediv__")
ZERO = 1e-12  # times the terms of a sum in float64: they cancel
MORE_THAN_EAGER = 4  # times what PyTorch itself is off: a tie that rounding decides may go either way


@dataclass
class Verdict:
    """What became of a layer: "void" where PyTorch does not run it, "ok", "wrong" or "refused" to compile."""

    kind: str
    text: str = ""
    raised: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


class Difference(NamedTuple):
    """What is wrong with a result, and by how much."""

    text: str
    error: float


class Compiled:
    """A model behind our passes, graph by graph, without code."""

    def __init__(self, case: Case, model: Model) -> None:
        self.raised: list[str] = []
        self.reasons: list[str] = []
        self._passes = PIPELINE if case.is_lowered else (*RAISES, *FUSIONS)
        before = RaiseForTraining(note=self._note) if case.is_training else None
        backend = _compat.post_grad_backend(self._rewrite, before)
        self.run = torch.compile(model, backend=backend, fullgraph=True)

    def _rewrite(self, module: GraphModule, _: object) -> None:
        self._note(run_passes(module.graph, self._passes))
        module.recompile()

    def _note(self, log: PassLog) -> None:
        self.raised += [each.kind for each in log.raised]
        self.reasons += [each.reason for each in log.refused]


def _marked(case: Case, given: list[Tensor]) -> list[Tensor]:
    """Where the number of tokens is any, it says so."""
    if case.is_dynamic:
        torch._dynamo.mark_dynamic(given[0], given[0].dim() - 2)
    return given


def _results(case: Case, model: Model, given: list[Tensor]) -> dict[str, Tensor | None]:
    """The output and, in training, all gradients."""
    if not case.is_training:
        with torch.no_grad():
            return {"output": model(*_marked(case, given))}
    given = _marked(case, [each.detach().clone().requires_grad_() for each in given])
    out = model(*given)
    if not out.requires_grad:
        return {"output": out}
    by = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
    (out * by).sum().backward()
    grads = {f"gradient of {name}": each.grad for name, each in zip(("x", *PARAMETERS), given, strict=True)}
    return {"output": out.detach(), **grads}


def _difference(
    name: str, dtype: str, size: float, results: tuple[Tensor | None, Tensor | None, Tensor | None]
) -> Difference | None:
    """What is wrong with a result of (ours, eager, float64), if anything is."""
    there = next((each for each in results if each is not None), None)
    if there is None:
        return None
    ours, eager, exact = (torch.zeros_like(there) if each is None else each for each in results)
    if ours.shape != eager.shape or (results[0] is not None and ours.dtype != eager.dtype):
        text = f"{name} is {ours.dtype} {tuple(ours.shape)}, eager's {eager.dtype} {tuple(eager.shape)}"
        return Difference(text, math.inf)
    is_known = eager.isfinite() & exact.isfinite()
    if not is_known.any() or (name != "output" and not is_known.all()):
        return None
    ours, eager, exact = (each.double()[is_known] for each in (ours, eager, exact))
    error, theirs = (((each - exact).norm() / max(exact.norm(), size)).item() for each in (ours, eager))
    share = 1 if name == "output" else GRADIENTS
    allowed = share * RELATIVE_NORM[getattr(torch, dtype)] + MORE_THAN_EAGER * theirs
    if error <= allowed or theirs > 0.05:
        return None
    return Difference(f"{name} is off by {error:.2e}, eager by {theirs:.2e}", error)


def _sizes(case: Case, right: dict[str, Tensor | None]) -> dict[str, float]:
    """What rounding may be relative to, where a result is less: sums that cancel are nearly zero."""
    grads = (each for name, each in right.items() if name != "output" and each is not None)
    norms = [each.norm().item() for each in grads if each.isfinite().all()]
    of_grads = max([1e-3, *norms]) / (1 if case.dtype == "bfloat16" else 4)
    output = right["output"]
    return dict.fromkeys(right, of_grads) | {
        "output": 1e-2 * (output.numel() if output is not None else 1) ** 0.5
    }


class _Nudged(TorchFunctionMode):
    """Whoever ranks numbers gets them moved by nearly nothing."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self._by = by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in RANKING and args[0].is_floating_point():
            by = torch.linspace(-self._by, self._by, args[0].shape[-1], dtype=torch.float64)
            args = (args[0] * (1 + by) + by * 1e-38, *args[1:])
        return func(*args, **(kwargs or {}))


def _moved(case: Case, exact: Model, double: list[Tensor]) -> dict[str, float]:
    """By how much a movement by nearly nothing changes results, of tokens or where they are ranked: a tie decides."""
    right = _results(case, exact, double)
    moved = dict.fromkeys(right, 0.0)
    for by in (1e-9, -1e-9):
        with _Nudged(math.copysign(RANKED[case.dtype], by)):
            x = double[0] + by * torch.linspace(1, 2, double[0].shape[-1], dtype=torch.float64)
            results = _results(case, exact, [x, *double[1:]])
        for name, result in results.items():
            before = right[name]
            if result is not None and before is not None:
                moved[name] = max(moved[name], relative_error(result.nan_to_num(), before.nan_to_num()))
    return moved


class _Undivided(TorchFunctionMode):
    """What divides has no gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in DIVISIONS and isinstance(args[1], Tensor):
            args = (args[0], args[1].detach())
        return func(*args, **(kwargs or {}))


def _are_rounded(dtype: str, ours: Tensor | None, exact: Tensor | None, undivided: Tensor | None) -> bool:
    """Whether a gradient is zero as terms cancel, those of a weight and of what it is divided by: of rounding alone.

    A weight that is alone and divided by itself is one, whatever the router gives.
    """
    if exact is None or undivided is None or not exact.norm() <= ZERO * undivided.norm():
        return False
    allowed = GRADIENTS * RELATIVE_NORM[getattr(torch, dtype)] * undivided.norm()
    return ours is None or bool(ours.double().norm() <= allowed)


def _differences(case: Case, models: tuple[Model, Model, Model], given: list[Tensor]) -> list[str]:
    ours, eager, exact = models
    double = [each.double() for each in given]
    theirs, right = _results(case, eager, given), _results(case, exact, double)
    mine = _results(case, ours, given)
    sizes = _sizes(case, right)
    texts = {
        name: _difference(name, case.dtype, sizes[name], (mine[name], theirs[name], right[name]))
        for name in right
    }
    found = {name: each for name, each in texts.items() if each is not None}
    if not found:
        return []
    moved = _moved(case, exact, double)
    with _Undivided():
        undivided = _results(case, exact, double)
    return [
        each.text
        for name, each in found.items()
        if not each.error <= MORE_THAN_EAGER * moved[name]
        and not _are_rounded(case.dtype, mine[name], right[name], undivided[name])
    ]


def is_void(case: Case, eager: Model, given: list[Tensor]) -> str:
    """Why PyTorch does not run a layer, if it does not."""
    try:
        _results(case, eager, given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _fails_alone(case: Case, eager: Model) -> str:
    """Why it does not compile without our passes, if it does not."""
    torch._dynamo.reset()
    backend = _compat.post_grad_backend(lambda *_: None)
    plain = torch.compile(eager, backend=backend, fullgraph=True)
    return is_void(case, plain, inputs(case, "plain", case.sizes.tokens))


def check(case: Case) -> Verdict:
    """Compares the layer with itself on every kind of input."""
    text = source(case)
    eager, exact = model_of(text, f"<{case.number}>"), model_of(in_double(text), f"<{case.number} in double>")
    given = inputs(case, "plain", case.sizes.tokens)
    if reason := is_void(case, eager, given) or is_void(case, exact, [each.double() for each in given]):
        return Verdict("void", reason)
    torch._dynamo.reset()
    compiled = Compiled(case, eager)
    counts = (case.sizes.tokens, case.sizes.tokens + 3) if case.is_dynamic else (case.sizes.tokens,)
    wrong: list[str] = []
    try:
        for tokens, kind in product(counts, KINDS):
            found = _differences(case, (compiled.run, eager, exact), inputs(case, kind, tokens))
            wrong += [f"{kind}, {tokens} tokens: {each}" for each in found]
    except Exception as error:
        if reason := _fails_alone(case, eager):
            return Verdict("void", reason)
        trace = "".join(traceback.format_exception(error))
        return Verdict("refused", trace[-1500:], compiled.raised, compiled.reasons)
    kind = "wrong" if wrong else "ok"
    return Verdict(kind, "; ".join(wrong), compiled.raised, compiled.reasons)
