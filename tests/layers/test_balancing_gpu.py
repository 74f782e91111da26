"""On a GPU: a captured layer reads its placement, its padding and its switches at every replay."""

import pytest
import torch

from layers import EplbState, FusedMoE, MoEConfig, RoutedExpertsCapture, rebalance_experts
from tests.layers import oracle

pytestmark = pytest.mark.gpu
E, REDUNDANT, TOKENS = 16, 4, 64


@torch.no_grad()
def test_a_captured_layer_sees_a_new_placement_between_two_replays():
    config = MoEConfig(E, 4, 64, 32, num_redundant_experts=REDUNDANT)
    module = FusedMoE(config, device="cuda")
    state = EplbState.initial(1, E, REDUNDANT, device="cuda")
    num_real_tokens, is_recording = torch.tensor(TOKENS).cuda(), torch.tensor(True).cuda()
    module.set_eplb_state(0, *state, num_real_tokens=num_real_tokens, is_recording=is_recording)
    module.capture = RoutedExpertsCapture(torch.zeros(TOKENS, 4, dtype=torch.int32, device="cuda"))
    hidden, logits = torch.randn(TOKENS, 64).cuda(), torch.randn(TOKENS, E).cuda()
    plain = FusedMoE(MoEConfig(E, 4, 64, 32))
    for mine, other in zip(plain.parameters(), module.parameters(), strict=True):
        mine.copy_(other[:E])
    module(hidden, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = module(hidden, logits)
    state.expert_load_view.zero_()
    for real, recording in ((TOKENS, True), (10, True), (TOKENS, False)):
        placement = rebalance_experts(torch.rand(E), E + REDUNDANT, 1, 1, 4)
        module.balancing.place(placement, module.get_expert_weights())
        num_real_tokens.fill_(real), is_recording.fill_(recording)
        hidden.normal_(), logits.normal_()
        graph.replay()
        expected = oracle.experts(plain, hidden.cpu(), logits.cpu())
        assert oracle.relative_error(output.cpu(), expected) < 1e-5
        chosen = logits.cpu().topk(4).indices
        assert torch.equal(module.capture.buffer.cpu().long(), chosen)
        counted = chosen[:real].flatten().bincount(minlength=E) * recording
        assert torch.equal(module.balancing.load_per_expert().cpu(), counted)
