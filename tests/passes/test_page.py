"""The page of a report: its structure, without a browser."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
import torch

from inductor_passes.base import Fusion, Refused
from inductor_passes.drawing import KINDS, WIDTH, draw, kind_of
from inductor_passes.hazards import Hazard
from inductor_passes.records import Break, Cost, Entry, GraphView, LayerGraph, NodeView, Unfused
from inductor_passes.report import Report

STAGES = (
    "topk_routing",
    "build_dispatch",
    "permute",
    "grouped_gemm",
    "gated_activation",
    "grouped_gemm_1",
    "combine",
)
BEFORE, AFTER = Cost(9, 4_000_000, 10), Cost(6, 3_000_000, 10)


def stages(layer, number):
    """The seven stages of a layer, each reading the one above, and what the dispatch gives to both products."""
    names = [f"{stage.removesuffix('_1')}_{number * 10 + index}" for index, stage in enumerate(STAGES)]
    extra = {3: (names[1], f"w13_{number}"), 5: (names[1],), 6: (names[0], names[1])}
    weight = NodeView(f"w13_{number}", f"{layer}.experts.w13", "float32[4, 8, 8]", (), "", is_input=True)
    nodes = [
        NodeView(
            name,
            f"moe.{STAGES[index].removesuffix('_1')}",
            "float32[6, 8]",
            (*names[max(index - 1, 0) : index], *extra.get(index, ())),
            layer,
        )
        for index, name in enumerate(names)
    ]
    return (weight, *nodes)


def fused(layer, number):
    inputs = (f"w13_{number}",)
    return (
        stages(layer, number)[0],
        NodeView(f"fused_moe_{number}", "moe.fused_moe", "float32[6, 8]", inputs, layer),
    )


def report(number, **more):
    """A model of alike layers, all fused."""
    names = [f"model.layers.{index}.mlp" for index in range(number)]
    before = tuple(node for index, name in enumerate(names) for node in stages(name, index))
    after = tuple(node for index, name in enumerate(names) for node in fused(name, index))
    given = {
        "layers": tuple(LayerGraph(name, 7, 1, 0, "", 1, BEFORE, AFTER) for name in names),
        "fused": tuple(Fusion(name, "fused_moe", (f"combine_{i}",)) for i, name in enumerate(names)),
        "graphs": (GraphView(before, after, "", after),),
        "is_training": False,
        "subject": "Tiny",
    }
    empty = dict.fromkeys(("graph_breaks", "refused", "capture_hazards", "lowered", "kept"), ())
    return Report(**{**empty, **given, **more})


class Page(HTMLParser):
    """Checks that tags close, and keeps texts by the tag and class they are in."""

    VOID = {"meta", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.attributes = [], [], []
        self.feed(text)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append((tag, dict(attrs).get("class", "")))

    def handle_startendtag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1] if self.open else ("", ""), data))

    def of(self, tag, look=None):
        return [text for (each, has), text in self.texts if each == tag and look in (None, has)]

    def count(self, tag, look):
        return sum(each == tag and attrs.get("class") == look for each, attrs in self.attributes)


def page(given, tmp_path):
    text = given.to_html(tmp_path / "page.html").read_text()
    return text, Page(text)


def svgs(text):
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.S)]


def words(svg):
    return [each.text for each in svg.iter("text")]


def test_the_verdict_comes_first_then_what_was_saved(tmp_path):
    text, read = page(report(48), tmp_path)
    assert read.of("strong") == ["All 48 MoE layers are fused."]
    assert text.index("<strong>") < text.index("class='tiles'") < text.index("<svg")
    tiles = list(zip(read.of("b", ""), read.of("span", ""), strict=False))
    assert tiles[:6] == [
        ("48 / 48", "layers fused"),
        ("0", "layers with refusals"),
        ("0", "graph breaks"),
        ("0", "capture hazards"),
        ("144 ", "of 432 launches saved"),
        ("48 MB ", "of 192 MB traffic saved"),
    ]


@pytest.mark.parametrize("number", [1, 12, 48])
def test_alike_layers_are_drawn_once_with_their_count(number, tmp_path):
    text, read = page(report(number), tmp_path)
    assert len(svgs(text)) == 2 and len(text) < 30_000
    assert read.count("section", "layer") == 1 and read.count("a", "fused-cell") == number
    assert read.of("h3") == ["model.layers.0-47.mlp (48 layers)"] or number != 48
    before, after = svgs(text)
    assert words(before).count("moe.grouped_gemm") == 2 and words(after).count("moe.fused_moe") == 1
    assert "⊏ experts.w13  float32[4, 8, 8]" in words(before)


def test_layers_that_differ_by_one_refusal_are_apart(tmp_path):
    refused = (Refused("model.layers.5.mlp", "fused_moe_5", "something <else> reads it"),)
    text, read = page(report(12, refused=refused), tmp_path)
    assert read.of("h3") == ["model.layers.0-4,6-11.mlp (11 layers)", "model.layers.5.mlp"]
    assert read.of("strong") == ["11 of 12 MoE layers fused, 1 in part."]
    assert read.count("a", "fused-cell") == 11 and read.count("a", "part-cell") == 1
    notes = [[word for word in words(svg) if "refused" in word] for svg in svgs(text)]
    assert notes == [[], [], [], ["✕ refused: something <else> reads it"]]
    (box,) = [
        group for group in svgs(text)[3].iter("g") if "✕ refused: something <else> reads it" in words(group)
    ]
    assert box.find("rect").get("class") == "fused is-refused" and words(box)[0] == "moe.fused_moe"


def test_layers_of_another_drawing_are_apart(tmp_path):
    given = report(3)
    (view,) = given.graphs
    odd = tuple(
        NodeView(node.name, "moe.fused_experts", node.detail, node.inputs, node.layer)
        if node.name == "fused_moe_1"
        else node
        for node in view.after
    )
    _, read = page(report(3, graphs=(GraphView(view.before, odd, "", odd),)), tmp_path)
    assert read.of("h3") == ["model.layers.0,2.mlp (2 layers)", "model.layers.1.mlp"]


def test_a_refusal_of_a_node_that_is_gone_is_where_it_was(tmp_path):
    refused = (Refused("model.layers.0.mlp", "combine_6", "no"),)
    before, after = svgs(page(report(1, refused=refused), tmp_path)[0])
    assert "✕ refused: no" in words(before) and "✕ refused: no" not in words(after)


def test_a_refusal_at_an_output_is_at_what_computes_it(tmp_path):
    given = report(1)
    (view,) = given.graphs
    last = view.after[-1]
    picked = NodeView(last.name, last.label, last.detail, last.inputs, last.layer, aliases=("getitem_3",))
    views = (GraphView(view.before, (*view.after[:-1], picked), "", view.after),)
    refused = (Refused("model.layers.0.mlp", "getitem_3", "no"),)
    assert "✕ refused: no" in words(svgs(page(report(1, refused=refused, graphs=views), tmp_path)[0])[1])


def test_raised_layers_and_stock_ones_with_their_reason(tmp_path):
    raised = tuple(Fusion(f"model.layers.{i}.mlp", "fused_moe", (f"combine_{10 * i + 6}",)) for i in range(2))
    name = "model.layers.2.mlp"
    nodes = (
        NodeView("sort", "aten.sort", "int64[6]", (), name),
        NodeView("mm", "aten.mm", "f[2]", ("sort",), name),
    )
    (view,) = report(2).graphs
    stock = Unfused(name, "SparseMoe", LayerGraph(name, 2, 2, 0))
    refused = (Refused(name, "mm", "its offsets come from nowhere"),)
    views = (GraphView((*view.before, *nodes), (*view.after, *nodes), "", (*view.after, *nodes)),)
    text, read = page(report(2, raised=raised, unfused=(stock,), refused=refused, graphs=views), tmp_path)
    assert read.of("strong") == ["2 of 3 MoE layers fused."]
    assert "raised: fused_moe" in read.of("li") and read.of("h3")[1] == "model.layers.2.mlp (SparseMoe)"
    (drawn,) = svgs(text)[2:]
    assert "✕ refused: its offsets come from nowhere" in words(drawn) and words(drawn)[0] == "aten.sort"
    assert read.count("a", "stock-cell") == 1


def test_breaks_have_their_line_and_hazards_their_reason(tmp_path):
    broken = Break("print\nbecause <so>", "model.py:7 in forward", "print(x < 1)", ("model.layers.0.mlp",))
    hazard = Hazard("item", "aten.item", "its output is read on the host", "model.layers.0.mlp.gate")
    text, read = page(report(2, graph_breaks=(broken,), capture_hazards=(hazard,)), tmp_path)
    assert "print (model.py:7 in forward)" in read.of("b") and "print(x < 1)" in read.of("pre")
    assert "in model.layers.0.mlp" in read.of("div", "where") and "print\nbecause <so>" in read.of("pre")
    assert any("its output is read on the host" in line for line in read.of("li"))
    assert "1 graph break and 1 capture hazard in the way" in text and "class='verdict warn'" in text
    for alone in ({"graph_breaks": (broken,)}, {"capture_hazards": (hazard,)}):  # each sets its layer apart
        assert len(page(report(2, **alone), tmp_path)[1].of("h3")) == 2


def test_the_legend_has_every_colour_that_is_drawn(tmp_path):
    text, read = page(report(1), tmp_path)
    drawn = {rect.get("class") for svg in svgs(text) for rect in svg.iter("rect")}
    assert drawn == {"routing", "move", "product", "pointwise", "fused"}
    for kind, meaning in KINDS.items():
        assert read.count("i", kind) == 1 and meaning in read.of("span")
        assert f".{kind} {{ fill" in text


def test_nothing_is_loaded_and_no_script_runs(tmp_path):
    text, read = page(report(12), tmp_path)
    assert "http" not in text and not {"script", "link", "img", "iframe"} & {
        tag for tag, _ in read.attributes
    }
    assert "url(" not in text and "@import" not in text and "prefers-color-scheme: dark" in text


def test_no_layer_at_all(tmp_path):
    _, read = page(report(0), tmp_path)
    assert read.of("strong") == ["No MoE layer was found."] and not read.of("h3")


def test_the_text_is_on_the_page_and_the_model_in_its_title(tmp_path):
    given = report(2)
    _, read = page(given, tmp_path)
    assert str(given) in read.of("pre") and read.of("title")[0] == "Tiny: MoE passes"


# The drawing


def _numbers(path):
    return [float(number) for number in re.findall(r"-?[\d.]+", path)]


def test_boxes_do_not_overlap_and_all_is_inside():
    svg = ElementTree.fromstring(draw(stages("l", 0), "l", {}))
    rects = [
        {key: float(rect.get(key)) for key in ("x", "y", "width", "height")} for rect in svg.iter("rect")
    ]
    for above, below in zip(rects, rects[1:], strict=False):
        assert above["y"] + above["height"] < below["y"]
    assert float(svg.get("width")) == WIDTH and all(rect["x"] + rect["width"] < WIDTH for rect in rects)
    assert rects[-1]["y"] + rects[-1]["height"] <= float(svg.get("height"))
    assert max(_numbers(path.get("d"))[0] for path in svg.iter("path")) < WIDTH


def test_what_is_not_read_next_runs_beside_in_lanes_of_its_own():
    """The dispatch is read by both products and the sum, the router by the sum: two lanes, side by side."""
    svg = ElementTree.fromstring(draw(stages("l", 0), "l", {}))
    lanes = [path.get("d") for path in svg.iter("path") if re.fullmatch(r"M\d+ \d+ H\d+ V\d+", path.get("d"))]
    columns = {re.search(r"H(\d+)", lane)[1] for lane in lanes}
    assert len(lanes) == 2 and len(columns) == 2
    arrows = [path for path in svg.iter("path") if path.get("class") == "head"]
    assert len(arrows) == 6 + 3 + 1  # from above, of the dispatch, of the router


def test_lanes_that_do_not_meet_share_a_column():
    nodes = [NodeView(f"n{i}", "aten.add", "f[1]", (), "l") for i in range(6)]
    nodes[2] = NodeView("n2", "aten.add", "f[1]", ("n0",), "l")
    nodes[5] = NodeView("n5", "aten.add", "f[1]", ("n3",), "l")
    svg = ElementTree.fromstring(draw(nodes, "l", {}))
    found = [re.search(r"H(\d+) V", path.get("d")) for path in svg.iter("path")]
    assert len({match[1] for match in found if match}) == 1


def test_long_texts_are_wrapped_or_cut():
    node = NodeView("n", "aten." + "x" * 90, ", ".join(["float32[24, 64]"] * 9), (), "l")
    reason = "a very long reason that says " + "again and " * 20 + "stop"
    svg = ElementTree.fromstring(draw([node], "l", {"n": [Entry("refused", "l", ("n",), "", reason)]}))
    assert all(len(word) <= 96 for word in words(svg)) and words(svg)[0].endswith("…")
    told = " ".join(word.strip() for word in words(svg) if "…" not in word)
    assert told == f"✕ refused: {reason}"


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("moe.fused_moe", "fused"),
        ("moe.topk_routing", "routing"),
        ("moe.grouped_gemm", "product"),
        ("moe.combine", "move"),
        ("moe.gated_activation", "pointwise"),
        ("_gemv_kernel", "fused"),
        ("aten.topk", "routing"),
        ("aten._grouped_mm", "product"),
        ("aten.bmm", "product"),
        ("transformers.grouped_mm_fallback", "product"),
        ("aten.index_put", "move"),
        ("aten.mul", "pointwise"),
    ],
)
def test_colours(label, kind):
    assert kind_of(NodeView("n", label, "", (), "l")) == kind
    assert kind_of(NodeView("n", label, "", (), "")) == "outside"


def test_nothing_to_draw():
    assert torch.__version__ in str(report(1)) and not list(ElementTree.fromstring(draw([], "l", {})))
