"""Experts that transformers keeps in float8, with scales of their tokens from a checkpoint."""

import pytest
import torch

from tests.helpers import relative_error
from tests.huggingface.families import EXPERTS
from tests.huggingface.test_quantised_experts import _pair, _routed, plain_kernels  # noqa: F401  # a fixture


@pytest.mark.parametrize("block", [(16, 32), None], ids=str)
def test_the_largest_of_a_layer_counts(plain_kernels, block):  # noqa: F811
    """Those of all experts of a layer count as the largest of them, as in vLLM; larger tokens become the most."""
    stock, ours = _pair(block=block, activation_scheme="static")
    for name, largest in (("gate_up_proj", 2e-3), ("down_proj", 3e-4)):
        given = torch.linspace(0.1, 1, EXPERTS) * largest
        getattr(ours, f"{name}_activation_scale").data.copy_(given)
        getattr(stock, f"{name}_activation_scale").data.fill_(largest)
    hidden, ids, weights = _routed(7)
    assert (hidden.abs() > 448 * 2e-3).any()
    expected = stock(hidden, ids, weights)
    with torch.no_grad():
        assert relative_error(ours(hidden, ids, weights), expected) < 2e-3
    hidden.requires_grad_()
    assert relative_error(ours(hidden, ids, weights).detach(), expected) > 1e-2, (
        "exact where it has a gradient"
    )


def test_compiled(plain_kernels):  # noqa: F811
    """Scales are read as they are in each call, not as they were when it was compiled."""
    stock, ours = _pair(block=None, activation_scheme="static")
    compiled = torch.compile(ours, backend="moe_inductor", fullgraph=True)
    given = _routed(7)
    for largest in (2e-3, 5e-4):
        for each in (stock, ours):
            each.gate_up_proj_activation_scale.data.fill_(largest)
            each.down_proj_activation_scale.data.fill_(largest / 8)
        with torch.no_grad():
            assert relative_error(compiled(*given), stock(*given)) < 2e-3
