"""Compiled autograd: the backward of eager operators, traced and compiled as it runs."""

import torch
from torch._dynamo import compiled_autograd

import moe_ops
from moe_ops import RoutingConfig
from tests.helpers import assert_same


def inputs(tokens):
    shapes = (tokens, 6), (tokens, 5), (5, 8, 6), (5, 6, 4)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def gradients(tensors, activation, emit):
    x, logits, w13, w2 = tensors
    out = moe_ops.fused_moe(x, logits, w13, w2, RoutingConfig(2), activation, emit=emit)
    out.square().sum().backward()
    found = [each.grad for each in tensors]
    for each in tensors:
        each.grad = None
    return found


def test_every_operator_and_option_has_its_own_backward():
    """Alike but for a string: what is kept for one must not answer for the other."""
    compiled = torch.compile(backend="eager")
    for emit, activation in (("fused", "silu"), ("fused", "gelu"), ("halves", "gelu")):
        tensors = inputs(7)
        expected = gradients(tensors, activation, emit)
        with compiled_autograd._enable(compiled):
            found = gradients(tensors, activation, emit)
        assert_same(found, expected)
