"""Stock experts whose gate has no name: it is captured, in transformers' own way of writing the layer."""

import copy
import importlib

import pytest
import torch

from tests.helpers import relative_error
from tests.huggingface.blocks import EXPERTS, HIDDEN, block
from tests.huggingface.test_raised import ALLOWED_FLOAT32, CASES, TIMES_STOCK, Log, names, raised


def _check(module, inputs, dtype):
    """One operator with a formula, and values as in `test_raised`."""
    log, rounded = Log(), module.to(dtype)
    cast = [each.to(dtype) if each.is_floating_point() else each for each in inputs]
    exact = (each.float() if each.is_floating_point() else each for each in cast)
    expected = copy.deepcopy(rounded).float()(*exact).double()
    ours = raised(rounded, log)(*cast)
    assert [each.kind for each in log.raised].count("experts") == 1
    assert names(log)[-1] in ("fused_experts_formula", "fused_moe_formula") and len(names(log)) <= 2
    allowed = ALLOWED_FLOAT32
    if dtype != torch.float32:
        allowed = TIMES_STOCK * relative_error(rounded(*cast), expected)
    assert relative_error(ours, expected) <= allowed


@pytest.mark.parametrize(("implementation", "dtype"), CASES, ids=["grouped float32", "batched bfloat16"])
@pytest.mark.parametrize("name", ["quick_gelu", "mish", "leaky_relu", "laplace"])
@torch.no_grad()
def test_activations_of_transformers(name, implementation, dtype):
    from transformers.activations import ACT2FN

    module = block("qwen3_next", implementation)
    module.experts.act_fn = ACT2FN[name]
    inputs = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0))
    _check(module, [inputs], dtype)


@pytest.mark.parametrize(("implementation", "dtype"), CASES, ids=["grouped float32", "batched bfloat16"])
@torch.no_grad()
def test_softcapped_swiglu(implementation, dtype):
    pytest.importorskip("transformers.models.inkling2")
    config = importlib.import_module(
        "transformers.models.inkling2.configuration_inkling2"
    ).Inkling2TextConfig()
    config.update({"hidden_size": HIDDEN, "moe_intermediate_size": 32, "n_routed_experts": EXPERTS})
    config._experts_implementation = implementation
    experts = importlib.import_module("transformers.models.inkling2.modeling_inkling2").Inkling2Experts(
        config
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    scores = torch.rand(9, EXPERTS, generator=generator).argsort(-1) / EXPERTS  # no two alike, in any dtype
    _check(_Routed(experts), [torch.randn(9, HIDDEN, generator=generator) * 4, scores], dtype)


class _Routed(torch.nn.Module):
    """Experts with what chooses them: ids from elsewhere might be negative, and `weight[-1]` is the last expert's."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, hidden, scores):
        weights, ids = scores.topk(3)
        return self.experts(hidden, ids, weights)
