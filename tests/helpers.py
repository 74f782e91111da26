"""Comparisons every test uses."""

import torch

RELATIVE_NORM = {torch.float64: 1e-12, torch.float32: 1e-5}


def relative_error(actual, expected):
    """Relative Frobenius distance to a float64 oracle; NaN never passes a comparison.

    A gradient may be exactly zero, and then rounding has nothing to be relative to: hence the smallest norm.
    """
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-3)).item()


def assert_matches_oracle(actual, oracle, stage=None):
    """float64 and float32 by the contract's bounds; lower precision by at most twice the stage reference's error."""
    assert actual.shape == oracle.shape, f"shape {tuple(actual.shape)}, oracle {tuple(oracle.shape)}"
    if actual.numel() == 0:
        return
    error = relative_error(actual, oracle)
    bound = RELATIVE_NORM.get(actual.dtype)
    if bound is None:
        bound = 2 * relative_error(stage, oracle) + 1e-6
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
