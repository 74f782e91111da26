"""explain(): what it reports, and that it leaves everything as it was."""

import dataclasses
import inspect
import os
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import inductor_passes
import moe_ops
from tests.passes.moe import EXPERTS, HIDDEN, INTERMEDIATE, MANY_TOKENS, ROUTING, inputs, layer


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.w13 = nn.Parameter(torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 4)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / 4)

    def forward(self, hidden):
        return layer(hidden, self.gate(hidden), self.w13, self.w2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, hidden):
        for block in self.layers:
            hidden = hidden + block(hidden)
        return hidden


@pytest.fixture
def hidden():
    torch._dynamo.reset()
    return inputs().hidden_states


@torch.no_grad()
def test_a_model_layer_by_layer(hidden):
    report = inductor_passes.explain(Model(), hidden)
    assert not report.is_training and not report.graph_breaks and not report.refused
    assert [(each.name, each.before, each.after) for each in report.layers] == [
        ("layers.0", 7, 1),
        ("layers.1", 7, 1),
    ]
    kinds = [each.kind for each in report.fused if each.layer == "layers.1"]
    assert kinds == ["routing_dispatch", "gather_gemm_act", "gemm_combine", "fused_moe"]
    assert "layers.0-1 (2 layers): 7 -> 1 operator calls" in str(report) and "graph breaks: none" in str(
        report
    )
    assert not report.remarks and not report.unfused


@torch.no_grad()
def test_functions_get_numbered_layers(hidden):
    report = inductor_passes.explain(layer, *inputs())
    assert [each.name for each in report.layers] == ["moe_0"]


@torch.no_grad()
def test_the_same_module_twice_is_two_layers(hidden):
    block = Block()
    report = inductor_passes.explain(lambda x: block(block(x)), hidden)
    assert len({each.name for each in report.layers}) == 2


@torch.no_grad()
def test_refusals_say_why(hidden):
    def observed(hidden, logits, w13, w2):
        weights, ids = moe_ops.topk_routing(logits, ROUTING)
        plan = moe_ops.build_dispatch(ids, EXPERTS)
        rows = moe_ops.permute(hidden, plan.sorted_slots)
        gate_up = moe_ops.grouped_gemm(rows, w13, plan.expert_offsets)
        out = moe_ops.grouped_gemm(moe_ops.gated_activation(gate_up), w2, plan.expert_offsets)
        return moe_ops.combine(out, weights, plan.inverse), gate_up.abs().amax()

    report = inductor_passes.explain(observed, *inputs())
    assert "gate_up has another user: aten.abs" in [each.reason for each in report.refused]
    assert {each.kind for each in report.lowered} == {"ATen"}
    assert [(each.before, each.after) for each in report.layers] == [(7, 5)]  # picking an output is no call


def test_training_graph_is_said_and_halves_are_fused(hidden):
    report = inductor_passes.explain(Model(), hidden)
    assert report.is_training and not report.refused
    assert [(each.layer, each.kind) for each in report.fused] == [
        ("layers.0", "act_gemm_combine"),
        ("layers.1", "act_gemm_combine"),
    ]
    assert len(report.remarks) == 1 and "torch.no_grad()" in report.remarks[0]
    assert str(report).startswith("1 training graph, 2 MoE layers, all fused")


@torch.no_grad()
def test_graph_breaks_and_hazards(hidden):
    block = Block()

    def broken(hidden):
        hidden = block(hidden)
        torch._dynamo.graph_break()
        return hidden[hidden.sum(1) > 0]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = inductor_passes.explain(broken, hidden)
    assert len(report.graph_breaks) == 1 and "graph_break" in report.graph_breaks[0].reason
    assert report.graph_breaks[0].location == _line_of(broken, "graph_break()")
    assert report.graph_breaks[0].source == "torch._dynamo.graph_break()"
    assert [each.reason for each in report.capture_hazards] == [
        "its output size is known only after running it"
    ]


def _line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    (offset,) = [number for number, line in enumerate(lines) if text in line]
    return f"{__file__}:{first + offset} in {function.__name__}"


def _prints_first(hidden):
    print("before any graph")
    return hidden + 1


def _reads(hidden):
    hidden = hidden * 2
    return hidden + 1 if hidden.sum().item() > 0 else hidden


def _opens(hidden):
    with open(os.devnull) as file:
        return hidden + len(file.read())


@pytest.mark.parametrize(
    ("function", "text"), [(_prints_first, "print("), (_reads, ".item()"), (_opens, "open(")]
)
@torch.no_grad()
def test_every_graph_break_has_its_line(hidden, function, text):
    (found,) = inductor_passes.explain(lambda x: function(x) * 1, hidden).graph_breaks
    assert found.location == _line_of(function, text)
    assert f"({found.location})" in str(inductor_passes.explain(function, hidden))


@torch.no_grad()
def test_two_breaks_for_one_reason_are_two(hidden):
    def twice(hidden):
        print("first")
        hidden = hidden + 1
        print("second")
        return hidden * 2

    report = inductor_passes.explain(twice, hidden)
    assert [each.location for each in report.graph_breaks] == [
        _line_of(twice, "first"),
        _line_of(twice, "second"),
    ]


@torch.no_grad()
def test_a_break_inside_a_module_is_one_and_recompiles_nothing(hidden):
    compiles = []

    class Broken(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x * 2

    model = nn.Sequential(Block(), Broken(), Block())
    compiled = torch.compile(model, backend=lambda gm, _: compiles.append(gm) or gm.forward)
    compiled(hidden)
    before = len(compiles)
    assert len(inductor_passes.explain(compiled, hidden).graph_breaks) == 1
    compiled(hidden)
    assert len(compiles) == before


@torch.no_grad()
def test_compiled_modules_and_functions_are_unwrapped(hidden):
    by_call, in_place = Model(), Model()
    in_place.compile(backend="eager")
    for compiled in (
        torch.compile(by_call, backend="eager"),
        in_place,
        torch.compile(by_call.forward, backend="eager"),
    ):
        assert len(inductor_passes.explain(compiled, hidden).layers) == 2


@torch.no_grad()
def test_existing_compiled_code_and_counters_stay(hidden):
    compiles = []

    def backend(gm, example_inputs):
        compiles.append(gm)
        return gm.forward

    model = Model()
    compiled = torch.compile(model, backend=backend)
    expected = compiled(hidden)
    counters["graph_break"]["kept"] = 3
    saved = {name: dict(values) for name, values in counters.items()}
    inductor_passes.explain(compiled, hidden)
    inductor_passes.explain(model, torch.randn(9, HIDDEN))
    assert {name: dict(values) for name, values in counters.items()} == saved
    torch.testing.assert_close(compiled(hidden), expected)
    assert len(compiles) == 1
    del counters["graph_break"]["kept"]


@torch.no_grad()
def test_every_call_is_fresh(hidden):
    model = Model()
    first = inductor_passes.explain(model, hidden)
    other = inductor_passes.explain(model, torch.randn(9, HIDDEN))  # not "dynamic by now"
    assert [len(r.fused) for r in (first, other, inductor_passes.explain(model, hidden))] == [8, 8, 8]
    assert "float32[9, 16]" in {node.detail for node in other.graphs[0].before}


@torch.no_grad()
def test_breaks_and_hazards_are_told_with_their_layer(hidden):
    class Noisy(Block):
        def forward(self, hidden):
            print("here")
            return super().forward(hidden * hidden.sum(0).nonzero().shape[0])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = inductor_passes.explain(nn.Sequential(Block(), Noisy()), hidden)
    quiet, noisy = report.stories
    assert (quiet.name, noisy.name) == ("0", "1") and not quiet.breaks and not quiet.hazards
    ((broken,), (hazard,)) = noisy.breaks, noisy.hazards
    assert broken.source == 'print("here")' and broken.layers == ("1",)
    assert hazard.target == "aten.nonzero.default" and hazard in report.capture_hazards


@torch.no_grad()
def test_a_layer_has_its_costs(hidden):
    for each in inductor_passes.explain(Model(), hidden).layers:
        before, after = each.cost_before, each.cost_after
        assert before.kernels > after.kernels > 0 and before.bytes > after.bytes > 0
        assert before.flops == after.flops == 2 * 9 * 2 * 3 * HIDDEN * INTERMEDIATE


@torch.no_grad()
def test_weights_have_the_names_of_the_model_and_inputs_those_of_the_call(hidden):
    model = Model()
    (view,) = inductor_passes.explain(lambda x: model(x) * 1, hidden).graphs
    inputs = {node.label for node in view.before if node.is_input}
    assert inputs == {"args[0]", *(f"layers.{i}.{weight}" for i in range(2) for weight in ("w13", "w2"))}


@torch.no_grad()
def test_what_was_written_out_is_apart_from_what_was_fused(hidden):
    (view,) = inductor_passes.explain(Block(), hidden[:2]).graphs  # so few slots become loops
    labels = [
        [node.label for node in nodes if node.layer] for nodes in (view.before, view.after, view.written)
    ]
    assert len(labels[0]) == 7 and labels[1] == ["moe.fused_moe"]
    assert len(labels[2]) > 20 and not [label for label in labels[2] if label.startswith("moe.")]


@torch.no_grad()
def test_only_what_is_called_can_be_explained():
    with pytest.raises(TypeError, match="fn=None: expected a function or a module"):
        inductor_passes.explain(None)


def test_report_is_frozen(hidden):
    report = inductor_passes.explain(layer, *inputs())
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.fused = ()


@torch.no_grad()
def test_html_draws_both_graphs_and_loads_nothing(tmp_path):
    path = inductor_passes.explain(Model(), inputs(MANY_TOKENS).hidden_states).to_html(
        tmp_path / "report.html"
    )
    text = path.read_text()
    assert "http" not in text and "<script" not in text and "src=" not in text
    before, after, written = [ElementTree.fromstring(svg) for svg in _svgs(text)]  # the two layers are alike
    assert _labels(before).count("moe.grouped_gemm") == 2 and _labels(after).count("moe.fused_moe") == 1
    assert _labels(written).count("moe.grouped_gemm") == 2 and "moe.fused_moe" not in _labels(written)
    assert len(before.findall("path")) > len(after.findall("path")) > 0


def _svgs(text):
    return ["<svg" + part.split("</svg>")[0] + "</svg>" for part in text.split("<svg")[1:]]


def _labels(svg):
    return [text.text for text in svg.iter("text")]
