"""permute, combine and the activations, forward and backward."""

import pytest
import torch

from moe_ops.types import Activation
from tests.cases import MORE_ACTIVATIONS
from tests.helpers import mixed
from tests.kernels import oracles
from tests.kernels.by_name import launch
from tests.kernels.oracles import assert_close, joined

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
ACTIVATIONS = [
    Activation("silu"),
    Activation("silu", interleaved=True),
    Activation("silu", limit=0.7),  # no float32 is 0.7
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("relu2"),
    Activation("swiglu_oai", alpha=1.2, limit=1.3, interleaved=True),
    Activation("swiglu_oai", alpha=1.1),
    *MORE_ACTIVATIONS,
    Activation("situ", beta=1e4, linear_beta=1e4),  # nearly linear: what a difference of sigmoids loses shows
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, columns", [(1, 5), (7, 48), (3, 2100)])  # more than one program copies
def test_permute_gathers_and_its_gradient_sums(
    tokens: int, columns: int, dtype: torch.dtype, device: str
) -> None:
    hidden = torch.randn(tokens, columns).to(dtype)
    slots = torch.randperm(tokens * 3).to(torch.int32)
    out = launch("permute", hidden.to(device), slots.to(device))
    assert torch.equal(out.cpu(), hidden[slots.long() // 3])
    grad = torch.randn(tokens * 3, columns).to(dtype)
    expected = torch.zeros(tokens, columns, dtype=torch.float64).index_add_(
        0, slots.long() // 3, grad.double()
    )
    assert_close(launch("permute_backward", grad.to(device), slots.to(device), tokens), expected, dtype)


def test_permute_takes_strided_rows(device: str) -> None:
    hidden = torch.randn(10, 4).t()
    slots = torch.randperm(8).to(torch.int32)
    assert torch.equal(
        launch("permute", hidden.to(device), slots.to(device)).cpu(), hidden[slots.long() // 2]
    )


def _combine_case(tokens: int, columns: int, dtype: torch.dtype, device: str):
    topk_ids = torch.randint(-1, 5, (tokens, 3), dtype=torch.int32)
    _, inverse, offsets = launch("build_dispatch", topk_ids.to(device), None, 5)
    rows = torch.randn(tokens * 3, columns).to(dtype)
    rows[int(offsets[-1]) :] = float("nan")  # what fused kernels leave unwritten must never be read
    weights = torch.rand(tokens, 3)
    weights[topk_ids < 0] = float("nan")
    return rows, weights, inverse.cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, columns", [(1, 5), (7, 48), (9, 1100)])
def test_combine_skips_dropped_slots(tokens: int, columns: int, dtype: torch.dtype, device: str) -> None:
    rows, weights, inverse = _combine_case(tokens, columns, dtype, device)
    shared = torch.randn(tokens, columns).to(dtype)
    expected = shared.double().clone()
    for slot, row in enumerate(inverse.tolist()):
        if row >= 0:
            expected[slot // 3] += weights[slot // 3, slot % 3].double() * rows[row].double()
    args = rows.to(device), weights.to(device), inverse.to(device)
    with_shared = launch("combine", *args, shared.to(device))
    assert_close(with_shared, expected)
    assert_close(launch("combine", *args, None), expected - shared.double(), dtype)
    assert torch.equal(with_shared, launch("combine", *args, shared.to(device)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated, added", [(True, False), (True, True), (False, True)])
def test_combine_takes_in_a_gated_output_and_a_residual(
    gated: bool, added: bool, dtype: torch.dtype, device: str
) -> None:
    rows, weights, inverse = (tensor.to(device) for tensor in _combine_case(7, 1100, dtype, device))
    shared = torch.randn(1100, 7).to(dtype).T  # strides of its own
    gate = torch.randn(7, 3).to(dtype)[:, 1:2] if gated else None
    residual = torch.randn(7, 2200).to(dtype)[:, ::2] if added else None
    taken_in = [None if each is None else each.to(device) for each in (shared, gate, residual)]
    routed = launch("combine", rows.double(), weights, inverse, None).cpu()
    assert_close(
        launch("combine", rows, weights, inverse, *taken_in), routed + joined(shared, gate, residual), dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, columns", [(1, 5), (9, 48), (3, 1100)])
def test_combine_gradients(tokens: int, columns: int, dtype: torch.dtype, device: str) -> None:
    rows, weights, inverse = _combine_case(tokens, columns, dtype, device)
    grad = torch.randn(tokens, columns).to(dtype)
    expected_rows = torch.zeros(tokens * 3, columns, dtype=torch.float64)
    expected_weights = torch.zeros(tokens, 3, dtype=torch.float64)
    for slot, row in enumerate(inverse.tolist()):
        if row >= 0:
            token, k = divmod(slot, 3)
            expected_rows[row] = weights[token, k].double() * grad[token].double()
            expected_weights[token, k] = grad[token].double() @ rows[row].double()
    args = (t.to(device) for t in (grad, rows, weights, inverse))
    grad_rows, grad_weights = launch("combine_backward", *args)
    assert_close(grad_rows, expected_rows, dtype)
    assert grad_weights.dtype == torch.float32
    assert_close(grad_weights, expected_weights)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.spec)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_and_gradient(activation: Activation, dtype: torch.dtype, device: str) -> None:
    columns = 2 * 21 if activation.is_gated else 21
    gate_up = (2 * torch.randn(6, columns)).to(dtype)
    exact = gate_up.double().requires_grad_()
    expected = oracles.activate(exact, activation)
    grad = torch.randn(6, 21).to(dtype)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    assert_close(launch("gated_activation", gate_up.to(device), activation), expected)
    assert_close(
        launch("gated_activation_backward", grad.to(device), gate_up.to(device), activation), expected_grad
    )


@pytest.mark.parametrize("name", ["silu", "swiglu_oai", "swiglustep"])
@pytest.mark.parametrize(
    ("dtype", "limit"), [*((dtype, 40.0) for dtype in DTYPES), (torch.float64, 40.1)], ids=str
)
def test_gradient_at_a_limit(name: str, dtype: torch.dtype, limit: float, device: str) -> None:
    """Of 40.1 float32 has no more than the neighbour."""
    activation = Activation(name, limit=limit)
    values = torch.tensor([limit, -limit, limit - 1, limit + 1, 0.5], dtype=torch.float64)
    gate_up = torch.cartesian_prod(values, values).to(dtype)
    exact = gate_up.double().requires_grad_()
    expected = torch.autograd.grad(oracles.activate(exact, activation).sum(), exact)[0]
    grad = torch.ones(len(gate_up), 1, dtype=dtype)
    ours = launch("gated_activation_backward", grad.to(device), gate_up.to(device), activation)
    assert_close(ours, expected)
    assert torch.equal(ours.cpu() == 0, expected.to(dtype) == 0)


# Of the widest bound float64 keeps 12 digits, which cancel in a sum; `test_activation_and_gradient` has it.
@pytest.mark.parametrize(
    ("activation", "dtype", "features"),
    mixed([each for each in ACTIVATIONS if each.beta != 1e4], DTYPES, (21, 1031), rounds=2),
    ids=str,
)
def test_gradient_of_weighted_rows(
    features: int, activation: Activation, dtype: torch.dtype, device: str
) -> None:
    columns = 2 * features if activation.is_gated else features
    gate_up, grad = (2 * torch.randn(5, columns)).to(dtype), torch.randn(5, features).to(dtype)
    scale = torch.rand(5, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    exact = gate_up.double().requires_grad_()
    activated, weighted_grad = oracles.activate(exact, activation), grad.double() * scale.double()[:, None]
    (expected_grad,) = torch.autograd.grad(activated, exact, weighted_grad)
    given = grad.to(device), gate_up.to(device), scale.to(device), activation
    to_gate_up, weighted, dots = launch("weighted_activation_backward", *given)
    assert_close(to_gate_up, expected_grad)
    assert_close(weighted, activated.detach() * scale.double()[:, None])
    assert dots.dtype == scale.dtype
    assert_close(dots, (grad.double() * activated.detach()).sum(1))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.spec)
def test_activation_of_zero_and_extreme_rows_is_finite(activation: Activation, device: str) -> None:
    columns = 2 * 8 if activation.is_gated else 8
    gate_up = torch.zeros(3, columns)
    gate_up[1], gate_up[2] = 1e4, -1e4
    out = launch("gated_activation", gate_up.to(device), activation)
    grad = launch("gated_activation_backward", torch.ones(3, 8).to(device), gate_up.to(device), activation)
    assert out.isfinite().all() and grad.isfinite().all()
    assert (out[0] == 0).all()
