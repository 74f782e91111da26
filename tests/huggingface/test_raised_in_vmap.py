"""A block of transformers over a batch in `torch.vmap`: raised as it is without, or it says why not."""

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from inductor_passes.pipeline import FUSIONS, RAISES
from tests.passes.capture import computed


def block(implementation):
    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2)
    config._experts_implementation = implementation
    torch.manual_seed(0)
    made = Qwen3MoeSparseMoeBlock(config).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


RAISED = {"batched_mm": ["experts", "topk_routing"], "grouped_mm": []}


@torch.no_grad()
@pytest.mark.parametrize("implementation", RAISED)
def test_a_block(implementation):
    stock, batch = block(implementation), torch.randn(3, 2, 5, 32)

    def over(tokens):  # Dynamo takes no module there
        return stock(tokens)

    result, out = computed(torch.vmap(over), batch, passes=(*RAISES, *FUSIONS))
    assert [each.kind for each in result.log.raised] == RAISED[implementation]
    assert result.log.raised or "aten.cat reads it" in result.reasons[0]
    torch.testing.assert_close(out, torch.stack([stock(tokens) for tokens in batch]), rtol=1e-4, atol=1e-4)
