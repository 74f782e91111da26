"""Compiled operators on inputs that are not contiguous: fakes promise the strides that implementations return."""

import pytest
import torch

import moe_ops


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2", "swiglu_oai"])
def test_column_major_activation(activation):
    gate_up = torch.randn(16, 12, dtype=torch.float64)

    def columns(gate_up):
        return moe_ops.gated_activation(gate_up.t(), activation).sum(0)

    torch.testing.assert_close(torch.compile(columns, fullgraph=True)(gate_up), columns(gate_up))


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_gradient_of_a_column_major_activation(activation):
    gate_up = torch.randn(16, 12, dtype=torch.float64, requires_grad=True)

    def loss(gate_up):
        return moe_ops.gated_activation(gate_up.t(), activation).sin().sum()

    (expected,) = torch.autograd.grad(loss(gate_up), gate_up)
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(gate_up), gate_up)
    torch.testing.assert_close(compiled, expected)
