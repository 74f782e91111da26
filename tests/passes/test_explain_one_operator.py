"""Layers that are one operator before any pass: quantised ones, and others that were asked to be."""

import pytest
import torch
from torch import nn

import inductor_passes
import moe_ops
from inductor_passes.stories import Verdict
from layers import FusedMoE, MoEConfig, WeightScale, quantise_experts

KINDS = {
    "quantised": (WeightScale.CHANNEL, torch.int8),
    "MXFP4": (WeightScale.GROUP, torch.uint8),
}


class Model(nn.Module):
    """Two layers with a router in front."""

    def __init__(self, **options):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(64, 8, bias=False) for _ in range(2))
        self.experts = nn.ModuleList(FusedMoE(MoEConfig(8, 2, 64, 32, **options)) for _ in range(2))

    def forward(self, x):
        for gate, experts in zip(self.gates, self.experts):
            x = x + experts(x, gate(x))
        return x


def _explained(model):
    with torch.no_grad():
        return inductor_passes.explain(model, torch.randn(9, 64))


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_layers_are_named_and_count_as_fused(kind, tmp_path):
    model, (of, dtype) = Model(), KINDS[kind]
    for experts in model.experts:
        quantise_experts(experts, of, (1, 32), dtype=dtype)
    report = _explained(model)
    assert [story.verdict for story in report.stories] == [Verdict.FUSED] * 2
    assert [story.name for story in report.stories] == ["experts.0", "experts.1"]
    assert "2 MoE layers, all fused" in str(report) and "nothing to do" not in str(report)
    (size,) = {(layer.before, layer.after, layer.cost_after.flops) for layer in report.layers}
    assert size == (2, 2, 2 * 9 * 2 * 64 * 32 * 3)
    assert "scaled_fused_experts" in report.to_html(tmp_path / "page.html").read_text()


def test_a_layer_whose_operator_is_asked_for():
    report = _explained(Model(emit="batch_invariant"))
    assert {story.verdict for story in report.stories} == {Verdict.FUSED} and len(report.stories) == 2


def test_a_shared_expert_in_the_operator():
    w13, w2 = torch.randn(8, 64, 64), torch.randn(8, 64, 32)

    def layer(x, logits):
        weights, ids = moe_ops.topk_routing(logits, moe_ops.RoutingConfig(2))
        return moe_ops.fused_experts_with_shared(x, w13, w2, weights, ids, w13[0], w2[0])

    with torch.no_grad():
        report = inductor_passes.explain(layer, torch.randn(9, 64), torch.randn(9, 8))
    assert [story.verdict for story in report.stories] == [Verdict.FUSED]


def test_a_quantised_layer_that_trains_is_its_stages():
    """Exact rows, whose gradients come through: no pass fuses them."""
    model = Model()
    for experts in model.experts:
        quantise_experts(experts, WeightScale.CHANNEL, rows="exact")
    report = inductor_passes.explain(model, torch.randn(9, 64))
    assert {story.verdict for story in report.stories} == {Verdict.NONE}
