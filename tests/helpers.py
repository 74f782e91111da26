"""Comparisons every test uses."""

import torch

# Relative to a float64 oracle of the same rounded inputs, by norm. float64 and float32: the contract. Half precision:
# a layer rounds at most four times (gate_up, activation, expert output, sum), each time by at most half an epsilon.
RELATIVE_NORM = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps / 2,
    torch.float16: 4 * torch.finfo(torch.float16).eps / 2,
}


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
