"""Patched models leave torch as programs: exported, exported in draft, compiled inside either, in one region."""

import pytest
import torch
from torch import nn

import inductor_passes
from inductor_passes import _compat
from inductor_passes.graph_tools import parts
from inductor_passes.pipeline import FUSIONS, run_passes
from layers import huggingface
from tests.helpers import assert_same
from tests.huggingface.families import pair, tokens
from tests.huggingface.test_compile import STAGES, names, stage_nodes


class Logits(nn.Module):
    """What a program returns is tensors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("export", [torch.export.export, torch.export.draft_export])
@torch.no_grad()
def test_programs_hold_the_stages(export, is_compiled):
    stock, ours = pair("qwen3_moe", num_hidden_layers=1)
    huggingface.patch(ours)
    expected = Logits(stock)(tokens(1, 9))
    model = torch.compile(ours, options=inductor_passes.options()) if is_compiled else ours
    program = export(Logits(model), (tokens(1, 9),), strict=False)
    assert names(stage_nodes(program)) == STAGES
    assert_same([program.module()(tokens(1, 9))], [expected], tolerance=1e-5)


@torch.no_grad()
def test_alike_layers_in_a_region_are_fused_once():
    stock, ours = pair("qwen3_moe", num_hidden_layers=3)
    huggingface.patch(ours)
    blocks = [[layer.mlp for layer in model.model.layers] for model in (stock, ours)]
    region = torch.compiler.nested_compile_region(lambda block, hidden: block(hidden))

    def run(hidden, some):
        for block in some:
            hidden = hidden + region(block, hidden)
        return hidden

    fused = []

    def rewrite(module, _):
        for part in parts(module):
            fused.append(run_passes(part.graph, FUSIONS).counts()["fused_moe"])
            part.graph.owning_module.recompile()

    hidden = torch.randn(1, 9, stock.config.hidden_size)
    compiled = torch.compile(
        lambda hidden: run(hidden, blocks[1]), backend=_compat.post_grad_backend(rewrite), fullgraph=True
    )
    assert_same([compiled(hidden)], [run(hidden, blocks[0])], tolerance=1e-5)
    assert fused == [0, 1]
