"""What the passes make of a modular kernel: in the standard format exactly what they make of the plain layer."""

from collections import Counter

import pytest
import torch

import inductor_passes
from inductor_passes.pipeline import PIPELINE
from layers import MoEBlock, SharedExpertConfig
from tests.helpers import assert_matches_oracle
from tests.layers import oracle
from tests.layers.modular import H, batched, config, standard
from tests.passes.capture import computed, post_grad, rewrite

STAGES = [
    *("topk_routing", "build_dispatch", "permute", "grouped_gemm"),
    *("gated_activation", "grouped_gemm", "combine"),
]


def make_block(shared) -> MoEBlock:
    torch.manual_seed(0)
    return MoEBlock(config(shared_experts=SharedExpertConfig(40) if shared else None)).eval()


def fusions(module, hidden):
    with torch.no_grad():
        report = inductor_passes.explain(module, hidden)
    assert not report.graph_breaks and not report.capture_hazards and not report.refused
    return Counter(fusion.kind for fusion in report.fused)


@pytest.mark.parametrize("shared", [False, True])
def test_match_counts_of_the_plain_layer(shared):
    block, hidden = make_block(shared), torch.randn(6, H)
    plain, expected = fusions(block, hidden), oracle.block(block, hidden)
    ours = {"gather_gemm_act", "gemm_combine"}
    assert set(plain) == ours | ({"fused_experts"} if shared else {"routing_dispatch", "fused_moe"})
    block.experts = standard(block.experts)
    assert fusions(block, hidden) == plain
    assert_matches_oracle(computed(block, hidden, passes=PIPELINE)[1], expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_stages_of_the_plain_layer(dynamic):
    block = make_block(shared=False)
    plain = rewrite(block, torch.randn(6, H), passes=(), dynamic=dynamic)
    block.experts = standard(block.experts)
    ours = rewrite(block, torch.randn(6, H), passes=(), dynamic=dynamic)
    assert ours.ops() == plain.ops() == STAGES
    assert ours.before == plain.before


def test_batched_experts_compile_with_our_passes():
    block, hidden = make_block(shared=True), torch.randn(6, H)
    expected = oracle.block(block, hidden)
    block.experts = batched(block.experts)
    with torch.no_grad():
        report = inductor_passes.explain(block, hidden)
        assert not report.graph_breaks and not report.capture_hazards
        (graph,) = post_grad(block, hidden)
        names = [str(node.target) for node in graph.graph.nodes if str(node.target).startswith("moe.")]
        assert names.count("moe.batched_gemm.default") == 2
        compiled = torch.compile(block, fullgraph=True, options=inductor_passes.options())
        assert_matches_oracle(compiled(hidden), expected)


def test_twelve_alike_layers_share_graphs():
    for make in (standard, batched):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for _ in range(12):
            block = make_block(shared=False)
            block.experts = make(block.experts)
            with torch.no_grad():
                block.compile(backend="aot_eager", fullgraph=True)
                block(torch.randn(6, H))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
