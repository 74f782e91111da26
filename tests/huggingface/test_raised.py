"""Stock models of transformers, nothing changed but the backend: every MoE layer becomes one operator."""

import copy

import pytest
import torch

import inductor_passes
from inductor_passes import _compat
from inductor_passes.backend import moe_inductor
from inductor_passes.base import PassLog
from inductor_passes.pipeline import FUSIONS, RAISES, run_passes
from tests.helpers import mixed, relative_error
from tests.huggingface.blocks import BLOCKS, EXPERTS, HIDDEN, block
from tests.huggingface.families import FAMILIES, tiny_model, tokens

CASES = [("grouped_mm", torch.float32), ("batched_mm", torch.bfloat16)]
ALLOWED_FLOAT32, TIMES_STOCK = 1e-5, 2.0


def raised(module, log, **options):
    """`module` compiled up to our passes, and then run as ATen: what they make of it, without its machine code."""

    def rewrite(graph_module, _):
        run_passes(graph_module.graph, (*RAISES, *FUSIONS), log)
        graph_module.recompile()
        log.operators += [
            node.target for node in graph_module.graph.nodes if str(node.target).startswith("moe.")
        ]

    log.operators = []
    return torch.compile(module, backend=_compat.post_grad_backend(rewrite), fullgraph=True, **options)


class Log(PassLog):
    """With the operators of ours that are left."""

    operators: list


def names(log):
    return [str(each).split(".")[1] for each in log.operators]


def output(result):
    return (
        result.logits
        if hasattr(result, "logits")
        else result
        if isinstance(result, torch.Tensor)
        else result[0]
    )


def check(module, inputs, dtype, num_layers):
    """All layers raised, and values within the contract: of float32, or of what stock itself is off in bfloat16."""
    exact, rounded = module.float(), copy.deepcopy(module).to(dtype)
    cast = inputs.to(dtype) if inputs.is_floating_point() else inputs
    exact = copy.deepcopy(rounded).float() if dtype != torch.float32 else exact
    expected = output(exact(cast.float() if inputs.is_floating_point() else inputs)).double()
    log = Log()
    ours = output(raised(rounded, log)(cast))
    assert [each.kind for each in log.raised].count("experts") == num_layers
    assert [each.kind for each in log.raised].count("topk_routing") == num_layers
    assert names(log) in (["fused_moe"] * num_layers, ["topk_routing", "fused_experts"] * num_layers)
    stock_error = relative_error(output(rounded(cast)), expected)
    allowed = ALLOWED_FLOAT32 if dtype == torch.float32 else TIMES_STOCK * stock_error
    assert relative_error(ours, expected) <= allowed


@pytest.mark.parametrize(("family", "case"), mixed(FAMILIES, CASES), ids=str)
@torch.no_grad()
def test_models(family, case):
    implementation, dtype = case
    model = tiny_model(family, torch.float32, implementation, use_cache=False, num_hidden_layers=1)
    check(model, tokens(2, 9), dtype, num_layers=1)


@pytest.mark.parametrize(("family", "case"), mixed(BLOCKS, CASES), ids=str)
@torch.no_grad()
def test_blocks(family, case):
    implementation, dtype = case
    inputs = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0))
    check(block(family, implementation), inputs, dtype, num_layers=1)


class OneOfTwoRanks(torch.nn.Module):
    """The second half of a layer's experts, which masks what the first half has, as transformers' ranks do."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts
        experts._is_expert_parallel = True

    def forward(self, hidden_states, scores):
        weights, ids = scores.topk(3)
        elsewhere = ids // EXPERTS != 1
        ids = torch.where(elsewhere, EXPERTS, ids % EXPERTS)
        return self.experts(hidden_states, ids, weights.masked_fill(elsewhere, 0.0))


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@torch.no_grad()
def test_experts_of_a_rank(implementation):
    module, log = OneOfTwoRanks(block("qwen3_next", implementation).experts), Log()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(9, HIDDEN, generator=generator), torch.rand(9, 2 * EXPERTS, generator=generator)
    ours = raised(module, log)(*inputs)
    assert names(log) == ["fused_experts"] and [each.kind for each in log.raised] == ["experts"]
    assert relative_error(ours, module(*inputs).double()) <= ALLOWED_FLOAT32


@torch.no_grad()
def test_the_backend_alone_generates_the_same_tokens():
    """From first to last: the registered backend, Inductor's code, generation."""
    model = tiny_model("qwen3_moe", torch.float32, "grouped_mm", num_hidden_layers=1)
    stock = model.generate(tokens(2, 7), max_new_tokens=2, do_sample=False)
    model.forward = torch.compile(model.forward, backend=moe_inductor)
    assert torch.equal(model.generate(tokens(2, 7), max_new_tokens=2, do_sample=False), stock)


@torch.no_grad()
def test_any_length_is_one_graph():
    options = {"use_cache": False, "num_hidden_layers": 1}
    model, log = tiny_model("deepseek_v3", torch.float32, "grouped_mm", **options), Log()
    compiled = raised(model, log, dynamic=True)
    for length in (7, 12, 33):
        torch.testing.assert_close(compiled(tokens(2, length)).logits, model(tokens(2, length)).logits)
    assert len(log.raised) == 2


@torch.no_grad()
def test_router_logits_are_still_there():
    model, log = tiny_model("mixtral", torch.float32, "grouped_mm", use_cache=False), Log()
    stock = model(
        tokens(1, 9), output_router_logits=True
    )  # first: it installs its hooks, which Dynamo cannot
    ours = raised(model, log)(tokens(1, 9), output_router_logits=True)
    for one, other in zip(ours.router_logits, stock.router_logits, strict=True):
        torch.testing.assert_close(one, other)
    assert len(log.raised) == 4


def test_explain_says_so():
    model = tiny_model("mixtral", torch.float32, "grouped_mm", use_cache=False)
    with torch.no_grad():
        report = inductor_passes.explain(model, tokens(1, 9))
    assert "2 MoE layers, all fused" in str(report)
