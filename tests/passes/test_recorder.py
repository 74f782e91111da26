"""What explain() keeps of a graph: layers raised out of plain PyTorch, MoE modules that were left, and their names."""

import pytest
import torch
from torch import nn

import inductor_passes
import moe_ops
from inductor_passes import recorder
from inductor_passes.base import LAYER_KEY, Fusion, Refusal
from inductor_passes.graph_tools import inherit_meta, replacement
from inductor_passes.stories import Verdict
from moe_ops import arguments as of
from tests.passes.moe import EXPERTS, HIDDEN, INTERMEDIATE, ROUTING, inputs
from tests.passes.test_explain import Model


class PlainMoe(nn.Module):
    """Has what an MoE layer has, and computes something that a pass below takes for one."""

    def __init__(self, raised=True):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.w13 = nn.Parameter(torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE))
        self.raised = raised

    def forward(self, hidden):
        return plain(hidden, self.gate(hidden), self.w13, self.w2, self.raised)


def plain(hidden, logits, w13, w2, raised=True):
    weight = w13.sum() + w2.sum()
    sines = (hidden + logits.sum()).sin()
    return sines * weight if raised else sines + weight


class Raise:
    """Takes `sin(...) * weight` for a layer, and refuses `sin(...) + weight`."""

    name, requires, inference_only = "raise", (), False

    def run(self, graph, log):
        for sine in [node for node in graph.nodes if node.target is torch.ops.aten.sin.default]:
            (last,) = sine.users
            if last.target is torch.ops.aten.mul.Tensor:
                self.rewrite(graph, sine, last, log)
            else:
                last.meta[LAYER_KEY] = "1"
                log.refuse(Refusal(last, "it adds"), last)

    def rewrite(self, graph, sine, last, log):
        (added,), (_, total) = sine.all_input_nodes, last.all_input_nodes
        hidden, logits = added.all_input_nodes[0], added.all_input_nodes[1].all_input_nodes[0]
        w13, w2 = (each.all_input_nodes[0] for each in total.all_input_nodes)
        experts = of.ExpertWeights(of.PairedLinear(w13), of.GroupedLinear(w2))
        router = of.Router(logits, None, ROUTING.spec)
        fused = replacement(graph, of.FusedMoe(hidden, router, experts, of.Placement(), "silu"), last)
        inherit_meta(fused, last)
        last.replace_all_uses_with(fused)
        log.raised.append(Fusion("moe_0", "fused_moe", (sine.name, last.name)))
        graph.eliminate_dead_code()


@pytest.fixture
def hidden(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(recorder, "run_passes", _with_raise(recorder.run_passes))
    return inputs().hidden_states


def _with_raise(run_passes):
    def run(graph, passes, log):
        if passes is recorder._REWRITES:
            Raise().run(graph, log)
        return run_passes(graph, passes, log)

    return run


@torch.no_grad()
def test_a_raised_layer_was_all_that_vanished_with_it(hidden):
    report = inductor_passes.explain(nn.Sequential(PlainMoe(), PlainMoe()), hidden)
    assert not report.unfused and not report.remarks
    for index, story in enumerate(report.stories):
        assert (story.name, story.size.before, story.size.after) == (str(index), 7, 1)
        traced = [node.label.removeprefix("aten.") for node in story.before if node.layer]
        assert sorted(traced) == ["add", "add", "mul", "sin", "sum", "sum", "sum"]
        assert [node.label for node in story.after if node.layer] == ["moe.fused_moe"]
        before, after = story.size.cost_before, story.size.cost_after
        assert (
            before.flops == 0 < after.flops and before.kernels == 5
        )  # three sums, and two that they cut apart


@torch.no_grad()
def test_a_function_s_layer_is_what_the_records_name(hidden):
    (layer,) = inductor_passes.explain(plain, *inputs()).layers
    assert (layer.name, layer.before, layer.after) == ("moe_0", 2, 1)


@torch.no_grad()
def test_an_moe_module_that_was_refused_is_stock_with_its_reason(hidden, tmp_path):
    report = inductor_passes.explain(nn.Sequential(PlainMoe(), PlainMoe(raised=False)), hidden)
    assert [each.name for each in report.layers] == ["0"]
    assert [(each.name, each.kind) for each in report.unfused] == [("1", "PlainMoe")]
    (stock,) = [story for story in report.stories if story.verdict is Verdict.STOCK]
    assert [(each.action, each.reason) for each in stock.entries] == [("refused", "it adds")]
    assert stock.size.before == 8 and "1 stock" in str(report)  # the gate too
    assert "✕ refused: it adds" in report.to_html(tmp_path / "page.html").read_text()


@torch.no_grad()
def test_a_refused_layer_of_no_module_is_told_too(hidden):
    report = inductor_passes.explain(lambda *given: plain(*given, raised=False), *inputs())
    (layer,) = report.layers
    assert (layer.name, layer.before, layer.after) == ("1", 1, 1)
    assert "refused: add_2: it adds" in str(report) and "none fused" in str(report)


@torch.no_grad()
def test_a_module_in_whose_forward_a_graph_begins_has_its_name(hidden):
    class Printing(PlainMoe):
        def forward(self, hidden):
            print("a graph begins behind this")
            return super().forward(hidden)

    report = inductor_passes.explain(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Printing()), hidden)
    (story,) = report.stories
    assert story.name == "1" and report.graph_breaks[0].layers == ("1",)
    weights = {node.label for node in story.before if node.is_input}
    assert weights >= {"1.w13", "1.w2"}


@torch.no_grad()
def test_weights_are_told_by_their_whole_path_wherever_a_graph_begins(hidden):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = PlainMoe()

        def forward(self, hidden):
            torch._dynamo.graph_break()
            return self.moe(hidden)

    report = inductor_passes.explain(nn.ModuleDict({"a": Inner()})["a"].forward, hidden)
    inner = inductor_passes.explain(nn.Sequential(nn.Identity(), Inner()), hidden)
    (story,) = inner.stories
    assert story.name == "1.moe"
    assert {"1.moe.w13", "1.moe.w2"} <= {node.label for node in story.before}
    assert {"moe.w13", "moe.w2"} <= {node.label for node in report.stories[0].before}


def test_a_training_graph_is_told_once(monkeypatch):
    class ForInference:
        name, requires, inference_only = "for_inference", ("fused_moe",), True

    monkeypatch.setattr(recorder, "LOWERINGS", (ForInference(), *recorder.LOWERINGS))
    report = inductor_passes.explain(Model(), inputs().hidden_states)
    assert [each.layer for each in report.fused] == ["layers.0", "layers.1"] and not report.refused


def test_a_layer_that_both_parts_refuse_in_training_is_told_once():
    def model(hidden, w13, w2, weights, ids):
        return moe_ops.fused_experts(hidden, w13, w2, weights, ids, activation=lambda g, u: g.tanh() * u)

    given = inputs()
    weights, ids = moe_ops.topk_routing(given.router_logits, ROUTING)
    tensors = (given.hidden_states, given.w13.requires_grad_(), given.w2, weights, ids)
    report = inductor_passes.explain(model, *tensors)
    assert report.is_training and len(report.refused) == 1


def test_rewrites_are_all_passes_but_the_lowerings():
    assert {each.name for each in recorder._REWRITES} >= {"fuse_gemm_combine", "collapse_moe"}
    assert not {each.name for each in recorder._REWRITES} & {each.name for each in recorder.LOWERINGS}
    assert len(recorder._REWRITES) + len(recorder.LOWERINGS) == len(recorder.PIPELINE)
