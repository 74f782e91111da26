"""The words of a report: names in short, alike layers once, nothing lost."""

import pytest
import torch

from inductor_passes import text
from inductor_passes.base import Fusion, Refused
from inductor_passes.hazards import Hazard
from inductor_passes.records import Break, Cost, GraphView, LayerGraph, Unfused
from inductor_passes.report import Report


@pytest.mark.parametrize(
    ("names", "short"),
    [
        ([f"model.layers.{i}.mlp" for i in range(12)], "model.layers.0-11.mlp"),
        ([f"model.layers.{i}.mlp" for i in (1, 3, 4, 5, 9)], "model.layers.1,3-5,9.mlp"),
        ([f"layers.{i}.experts.{i + 1}" for i in range(2)], "layers.0.experts.1, layers.1.experts.2"),
        ([f"moe_{i}" for i in range(3)], "moe_0-2"),
        (["encoder.0.moe", "encoder.1.moe", "decoder.0.moe"], "encoder.0-1.moe, decoder.0.moe"),
        (["mlp", "mlp#2"], "mlp, mlp#2"),
        (["block2.mlp", "block3.mlp"], "block2.mlp, block3.mlp"),
        ([f"a.{i} in true_graph_{i} of cond" for i in range(3)], "a.0-2 in true_graph_* of cond"),
        (["a.0 in x_0 of cond", "a.1 in x_0 of cond"], "a.0-1 in x_0 of cond"),
        (["a in t_0 of cond", "a in f_0 of cond"], "a in t_0 of cond, a in f_0 of cond"),
        ([], ""),
    ],
)
def test_name_ranges(names, short):
    assert text.name_ranges(names) == short


def _report(layers, **more):
    empty = dict.fromkeys(
        ("graph_breaks", "fused", "refused", "capture_hazards", "lowered", "kept", "graphs"), ()
    )
    return Report(**{**empty, "layers": tuple(layers), "is_training": False, **more})


def test_alike_layers_are_told_once_and_others_apart():
    names = [f"layers.{i}.mlp" for i in range(12)]
    fused = [
        Fusion(name, kind, (f"{kind}_{i}",)) for i, name in enumerate(names) for kind in ("a", "fused_moe")
    ]
    refused = [Refused(names[5], "grouped_gemm_11", "gate_up has another user: add_3")]
    lowered = [Fusion(name, "ATen", (f"permute_{i}", f"combine_{i}")) for i, name in enumerate(names[:4])]
    kept = [
        Refused(name, f"fused_moe_default_{i}", "symbolic sizes of arg7_1")
        for i, name in enumerate(names[8:])
    ]
    layers = [LayerGraph(name, 7, 1, 0) for name in names]
    lines = str(_report(layers, fused=fused, refused=refused, lowered=lowered, kept=kept)).splitlines()[1:-2]
    assert lines == [
        "layers.0-3.mlp (4 layers): 7 -> 1 operator calls",
        "  fused: a, fused_moe",
        "  written out: permute, combine as ATen",
        "layers.4,6-7.mlp (3 layers): 7 -> 1 operator calls",
        "  fused: a, fused_moe",
        "layers.5.mlp: 7 -> 1 operator calls",
        "  fused: a, fused_moe",
        "  refused: grouped_gemm_11: gate_up has another user: add_3",
        "layers.8-11.mlp (4 layers): 7 -> 1 operator calls",
        "  fused: a, fused_moe",
        "  kept as a call: fused_moe_default: symbolic sizes of arg",
    ]


@pytest.mark.parametrize(
    "other", [LayerGraph("l.1", 7, 2, 0), LayerGraph("l.1", 6, 1, 0), LayerGraph("l.1", 7, 1, 3)]
)
def test_layers_of_another_size_are_not_alike(other):
    lines = str(_report([LayerGraph("l.0", 7, 1, 0), other])).splitlines()
    assert len([line for line in lines if line.startswith("l.")]) == 2


def test_reasons_that_differ_are_not_alike():
    reasons = ("17 experts per token are too many", "18 experts per token are too many")
    kept = [Refused(f"l.{i}", "combine", reason) for i, reason in enumerate(reasons)]
    told = str(_report([LayerGraph(f"l.{i}", 7, 7, 0) for i in range(2)], kept=kept))
    assert all(reason in told for reason in reasons)


def test_what_belongs_to_no_layer_is_told_too():
    lowered = [Fusion("?", "ATen", (f"gated_activation{number}",)) for number in ("", "_1", "_12")]
    kept = [Refused("?", f"combine_{number}", "why") for number in range(3)]
    told = str(_report([], lowered=lowered, kept=kept))
    assert (
        "operators outside a layer:\n"
        "  written out: gated_activation x3 as ATen\n"
        "  kept as a call: combine: why (3 times)\n"
    ) in told


def test_the_whole_text():
    shared = LayerGraph("l.0 in sub0 of invoke_subgraph", 7, 1, 4, "sub0 of invoke_subgraph", 12)
    report = _report(
        [shared, LayerGraph("l.12", 7, 5, 0), LayerGraph("l.13", 7, 7, 0)],
        graphs=(GraphView((), ()), GraphView((), (), shared.where)),
        fused=(Fusion(shared.name, "fused_moe", ()), Fusion("l.12", "gemm_combine", ())),
        refused=(Refused("l.12", "grouped_gemm", "no"),),
        graph_breaks=(
            Break("why\nmore", "a.py:3 in f", "print(x)", ("l.12", "l.13")),
            Break("unplaced", ""),
        ),
        capture_hazards=(
            *(Hazard(f"item_{i}", "aten.item", "read", f"head.{i}") for i in range(3)),
            Hazard("c", "t", "r", "l.13.gate"),
        ),
        unfused=(Unfused("l.14", "Moe"),),
        remarks=("do this",),
    )
    head, *rest = str(report).splitlines()
    assert head == (
        "1 inference graph, 15 MoE layers, 12 fused, 1 in part, 1 not traced; 12 in sub0 of invoke_subgraph "
        f"(torch {torch.__version__})"
    )
    assert rest == [
        "note: do this",
        "l.0 in sub0 of invoke_subgraph, called 12 times: 7 -> 1 operator calls, 4 Triton launches",
        "  fused: fused_moe",
        "l.12: 7 -> 5 operator calls",
        "  fused: gemm_combine",
        "  refused: grouped_gemm: no",
        "  graph break: why (a.py:3 in f)",
        "l.13: 7 -> 7 operator calls",
        "  graph break: why (a.py:3 in f)",
        "  capture hazard: c (t): r",
        "l.14 (Moe): not in a graph of its own",
        "graph breaks: 2",
        "  why (a.py:3 in f)",
        "      print(x)",
        "      in l.12-13",
        "  unplaced",
        "capture hazards: 4",
        "  item_0 (aten.item): read, and 2 more like it, in head.0-2",
        "  c (t): r, in l.13.gate",
    ]


def test_what_was_raised_is_told_as_what_was_fused():
    layers = [LayerGraph(f"l.{i}", 32, 1, 0) for i in range(2)]
    raised = [Fusion(f"l.{i}", "fused_moe", (f"sort_{i}", f"_grouped_mm_{i}")) for i in range(2)]
    refused = [Refused("l.2", "_grouped_mm_9", "its offsets come from nowhere")]
    report = _report(layers, raised=raised, refused=refused, unfused=(Unfused("l.2", "Moe"),))
    assert str(report).splitlines()[1:-2] == [
        "l.0-1 (2 layers): 32 -> 1 operator calls",
        "  raised: fused_moe",
        "l.2 (Moe): not in a graph of its own",
        "  refused: _grouped_mm_9: its offsets come from nowhere",
    ]


def test_costs_are_told_by_layer_and_in_all():
    before, after = Cost(9, 1_500_000, 2_000), Cost(4, 999_900, 2_000)
    layers = [LayerGraph(f"l.{i}", 7, 1, 0, "", 2, before, after) for i in range(3)]
    lines = str(_report(layers)).splitlines()
    assert lines[1] == "estimated for a GPU, all MoE layers: 54 -> 24 kernels, 9 MB -> 6 MB, 12 kFLOP"
    assert lines[3] == "  estimated for a GPU: 9 -> 4 kernels, 1.5 MB -> 1 MB, 2 kFLOP"


def test_what_costs_the_same_is_told_once():
    same = Cost(3, 10, 0)
    lines = str(_report([LayerGraph("l", 3, 3, 0, "", 1, same, same)])).splitlines()
    assert lines[1:3] == ["l: 3 -> 3 operator calls", "  estimated for a GPU: 3 kernels, 10 B, 0 FLOP"]


@pytest.mark.parametrize(
    ("number", "told"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1234, "1.23 kB"), (5e16, "5e+04 TB")],
)
def test_amounts(number, told):
    assert text.amount(number, "B") == told


def test_modules_are_told_by_class():
    seen = [*(Unfused(f"l.{i}", "Moe") for i in range(3)), Unfused("", "Whole")]
    assert text.unfused_lines(seen) == ["l.0-2 (Moe)", "the model (Whole)"]
