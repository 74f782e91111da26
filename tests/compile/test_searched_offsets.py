"""The expert of each row, looked up among all offsets: torch 2.11 searches in a view as if it began with its memory.

Compiled on a GPU, `torch.searchsorted(offsets[1:], rows)` so gave each row the expert behind its own.
"""

import ast
import copy
import re
from pathlib import Path

import pytest
import torch

import inductor_passes
import layers
import moe_ops
from layers.prepare_finalize import batched_places
from moe_ops.gate import expert_of_rows
from tests.compile.fake_cuda import compile_for_h200
from tests.helpers import relative_error

E, K, H, I = 8, 2, 64, 32
SOURCES = [
    path
    for package in ("moe_ops", "inductor_passes", "layers")
    for path in sorted(Path(package).rglob("*.py"))
]


def adapted(_, ids, biases):
    plan = moe_ops.build_dispatch(ids, E)
    return biases.index_select(0, expert_of_rows(plan.expert_offsets, ids.numel()).clamp(max=E - 1))


def batched(hidden, ids, _):
    plan = moe_ops.build_dispatch(ids, E)
    return hidden.new_zeros(E * 4 + 1).index_fill(0, batched_places(plan, 4), 1)


def gated(hidden, ids, biases):
    """A gate of its own that no pass has captured."""
    plan = moe_ops.build_dispatch(ids, E)
    gate_up = moe_ops.permute(hidden, plan.sorted_slots)
    own = moe_ops.gate.Custom(lambda gate, up, bias: gate * (up + bias), (biases,))
    return moe_ops.gate.apply_function(gate_up, own, H // 2, plan.expert_offsets)


SEARCHES = {"adapters": adapted, "batches": batched, "gates": gated}


@pytest.mark.parametrize("name", ["adapters", "gates"])  # Python indexing wants a GPU to be traced
@pytest.mark.parametrize("symbolic", [False, True])
def test_all_offsets_are_searched(name, symbolic):
    def inputs(tokens):
        ids = torch.empty(tokens, K, dtype=torch.int32, device="cuda")
        return torch.empty(tokens, H, device="cuda"), ids, torch.empty(E, H // 2, device="cuda")

    compiled = compile_for_h200(SEARCHES[name], inputs, symbolic=symbolic, graph_pass=None)
    searched = re.findall(r"bucketize_binary_search\(\w+, \w+, (\d+),", compiled.code)
    assert searched and set(searched) == {str(E + 1)}


def test_views_are_searched_nowhere():
    calls = [
        (path, node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".searchsorted", ".bucketize"))
    ]
    assert len(calls) > 4
    for path, call in calls:
        among = call.args[ast.unparse(call.func).endswith(".bucketize")]
        assert isinstance(among, ast.Name) or path.parent.name == "raising", f"{path}: {ast.unparse(call)}"


def _adapted_block(device):
    torch.manual_seed(0)
    block = layers.MoEBlock(layers.MoEConfig(E, K, H, I))
    ids = torch.arange(64, dtype=torch.int32) % 3 - 1
    block.experts.lora = layers.ExpertLora(block.experts, 2, 4, ids)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return block.to(device), torch.randn(33, H, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_adapters_of_a_compiled_layer_on_a_gpu(dynamic):
    block, hidden = _adapted_block("cuda")
    plain = copy.deepcopy(block)
    plain.experts.lora = None
    compiled = torch.compile(block, dynamic=dynamic, fullgraph=True, options=inductor_passes.options())
    with torch.no_grad():
        expected = block(hidden)
        assert relative_error(plain(hidden), expected) > 0.1
        assert relative_error(compiled(hidden), expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", SEARCHES)
def test_what_compiled_code_finds_on_a_gpu(name):
    ids = torch.rand(33, E, device="cuda").topk(K).indices.int()
    given = torch.randn(33, H, device="cuda"), ids, torch.randn(E, H // 2, device="cuda")
    expected = SEARCHES[name](*given)
    assert relative_error(torch.compile(SEARCHES[name])(*given), expected) < 1e-6
