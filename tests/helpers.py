"""Comparisons every test uses."""

import itertools
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

# Relative to a float64 oracle of the same rounded inputs, by norm. float64 and float32: the contract. Half precision:
# a layer rounds at most four times (gate_up, activation, expert output, sum), each time by at most half an epsilon.
RELATIVE_NORM = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps / 2,
    torch.float16: 4 * torch.finfo(torch.float16).eps / 2,
}


def usually(values, often):
    """`values`, or tuples of values, to parametrise over: those not `often` only in `make exhaustive`."""
    values = tuple(values)
    assert set(often) <= set(values)
    marks = {value: [] if value in often else [pytest.mark.exhaustive] for value in values}
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks[value])
        for value in values
    ]


def mixed(*axes, rounds=1):
    """One value from each of `axes`, to parametrise over: not each with each, but each as often as it is in `rounds`.

    So there are `rounds` times as many as the longest axis has; the other combinations are in `make exhaustive`.
    """
    axes = [tuple(axis) for axis in axes]
    sizes = [len(axis) for axis in axes]
    numbers = range(rounds * max(sizes))
    often = {tuple((number + number // size) % size for size in sizes) for number in numbers}
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, indices, strict=True)),
            marks=[] if indices in often else [pytest.mark.exhaustive],
        )
        for indices in itertools.product(*map(range, sizes))
    ]


def mixed_but(rare, forms, sizes):
    """`mixed(forms, sizes)`, and every sixth form with a size that takes long; all have it in `make exhaustive`."""
    forms, sizes = tuple(forms), tuple(sizes)
    often = {(form, sizes[number % len(sizes)]) for number, form in enumerate(forms)}
    often |= {(form, rare) for form in forms[::6]}
    return usually(itertools.product(forms, (*sizes, rare)), often)


@contextmanager
def fresh_graphs():
    """Inductor knows no graph, as in a new process; C++ of the same source and flags stays compiled.

    Each kernel takes the compiler a second, and what it makes of a text is not what any test asks.
    """
    from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache  # seconds to import
    from torch._inductor.utils import fresh_cache

    with ExitStack() as stack:
        for cache in (CppCodeCache, CppPythonBindingsCodeCache):
            stack.enter_context(mock.patch.object(cache, "cache_clear", staticmethod(lambda: None)))
        stack.enter_context(fresh_cache())
        yield


def relative_error(actual, expected):
    """Relative Frobenius distance to a float64 oracle; NaN never passes a comparison.

    A gradient may be exactly zero, and then rounding has nothing to be relative to: hence the smallest norm.
    """
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-3)).item()


def assert_matches_oracle(actual, oracle):
    """Within what `actual`'s dtype allows, a number that depends on no path under test."""
    assert actual.shape == oracle.shape, f"shape {tuple(actual.shape)}, oracle {tuple(oracle.shape)}"
    if actual.numel() == 0:
        return
    error, bound = relative_error(actual, oracle), RELATIVE_NORM[actual.dtype]
    assert error <= bound, f"relative error {error:.3e} of {actual.dtype}, allowed {bound:.3e}"


def grads_of(fn, tensors):
    """Gradients of a scalar made from fn() that weighs every element differently."""
    out = fn()
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
    return torch.autograd.grad((out * weights).sum(), tensors)


def assert_same(actual, expected, tolerance=1e-12):
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        error = relative_error(a, b)
        assert error <= tolerance, f"tensor {index}: relative error {error:.3e}, allowed {tolerance:.0e}"


def sqrt_softplus(x):
    """sqrt(log(1 + e^x)), which below -40 is e^(x/2) to the last bit, and has the derivative of that."""
    near = torch.logaddexp(x.clamp(min=-40), x.new_zeros(())).sqrt()
    return torch.where(x < -40, (x / 2).exp(), near)


SCORES = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid, "sqrtsoftplus": sqrt_softplus}


def weights_of(logits, ids, valid, routing):
    """The weights of experts already chosen, in plain PyTorch, so that torch differentiates them."""
    score = SCORES[routing.score_fn]
    picked = logits.gather(1, ids) if routing.order == "topk_then_score" else score(logits).gather(1, ids)
    if routing.order == "topk_then_score":
        picked = score(picked.masked_fill(~valid, float("-inf")))
    weights = torch.where(valid, picked, 0.0)
    if routing.renormalize:
        total = weights.sum(-1, keepdim=True) + routing.renorm_eps
        weights = weights / torch.where(total == 0, 1.0, total)
    return weights * routing.scale


@contextmanager
def nan_in_empty_memory():
    """Memory from torch.empty and new_empty comes full of NaN (integers: a huge id), so a hole in an output shows."""

    def poison(tensor):
        if tensor.dtype.is_floating_point:
            return tensor.fill_(float("nan"))
        return (
            tensor.fill_(torch.iinfo(tensor.dtype).max)
            if tensor.dtype in (torch.int32, torch.int64)
            else tensor
        )

    def patched(holder, name):
        original = getattr(holder, name)
        return mock.patch.object(holder, name, lambda *args, **kwargs: poison(original(*args, **kwargs)))

    with patched(torch, "empty"), patched(torch, "empty_like"), patched(torch.Tensor, "new_empty"):
        yield
