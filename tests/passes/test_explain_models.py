"""explain() on models of transformers as people have them: patched or not, deep, wrapped, dense, without memory."""

import functools
from typing import NamedTuple

import pytest
import torch
import transformers

import inductor_passes
from inductor_passes import recorder
from inductor_passes.pipeline import FUSIONS
from inductor_passes.stories import Verdict, alike
from layers import MoEBlock, MoEConfig, huggingface
from tests.helpers import mixed, usually
from tests.huggingface.families import tiny_config, tiny_model, tokens
from tests.passes.moe import inputs
from tests.passes.test_explain import Model

IDS = tokens(2, 12)
# 24 tokens of 3 slots times 3 * 64 * 32 weights, two FLOPs each.
COST_OF_ONE = "9 -> 6 kernels, 342 kB -> 268 kB, 885 kFLOP"
COST_OF_ALL = "45 -> 30 kernels, 1.71 MB -> 1.34 MB, 4.42 MFLOP"


def model_of(family, patched=True, **options):
    model = tiny_model(family, use_cache=False, **options)
    if patched:
        huggingface.patch(model)
    return model


def names(report):
    return [each.name for each in report.layers]


@torch.no_grad()
def test_alike_layers_are_short():
    report = inductor_passes.explain(model_of("qwen3_moe", num_hidden_layers=5), IDS)
    assert names(report) == [f"model.layers.{index}.mlp" for index in range(5)]
    assert str(report).splitlines() == [
        f"1 inference graph, 5 MoE layers, all fused (torch {torch.__version__})",
        f"estimated for a GPU, all MoE layers: {COST_OF_ALL}",
        "model.layers.0-4.mlp (5 layers): 7 -> 1 operator calls",
        f"  estimated for a GPU: {COST_OF_ONE}",
        "  fused: routing_dispatch, gather_gemm_act, gemm_combine, fused_moe",
        "  written out: fused_moe_default as ATen",
        "graph breaks: none",
        "capture hazards: none",
    ]


@pytest.mark.parametrize(
    ("family", "implementation"), mixed(("mixtral", "gpt_oss"), ("batched_mm", "grouped_mm"))
)
@torch.no_grad()
def test_an_unpatched_model_is_raised(family, implementation):
    report = inductor_passes.explain(model_of(family, patched=False, implementation=implementation), IDS)
    assert names(report) == ["model.layers.0.mlp", "model.layers.1.mlp"] and not report.unfused
    assert "2 MoE layers, all fused" in str(report)
    assert "  raised: experts, topk_routing" in str(report).splitlines()


@pytest.mark.parametrize("family", usually(["mixtral", "gpt_oss"], ["mixtral"]))
@torch.no_grad()
def test_an_unpatched_model_that_loops_over_experts_is_told_what_to_call(family):
    model = model_of(family, patched=False, implementation="eager")
    report = inductor_passes.explain(model, IDS)
    kind = type(model.model.layers[0].mlp).__name__
    assert [(each.name, each.kind) for each in report.unfused] == [
        ("model.layers.0.mlp", kind),
        ("model.layers.1.mlp", kind),
    ]
    assert f"model.layers.0-1.mlp ({kind})" in str(report)
    assert "2 MoE layers, none fused, 2 " in str(report)
    assert "layers.huggingface.patch(model)" in str(report) and not report.layers
    assert all(".py:" in each.location for each in report.graph_breaks)


@torch.no_grad()
def test_the_layers_a_patch_left_are_named():
    model = model_of("mixtral")
    stock = model_of("mixtral", patched=False)
    model.model.layers[1].mlp = stock.model.layers[1].mlp
    report = inductor_passes.explain(model, IDS)
    assert names(report) == ["model.layers.0.mlp"]
    assert [each.name for each in report.unfused] == ["model.layers.1.mlp"]


@torch.no_grad()
def test_a_stock_layer_is_counted_and_drawn(monkeypatch):
    monkeypatch.setattr(recorder, "_REWRITES", FUSIONS)  # whatever else finds stock layers
    model = model_of("qwen3_moe", patched=False, implementation="grouped_mm", dtype=torch.bfloat16)
    report = inductor_passes.explain(model, IDS)
    assert str(report).startswith("1 inference graph, 2 MoE layers, none fused, 2 stock (")
    for story in report.stories:
        labels = [node.label for node in story.before if node.layer]
        assert labels.count("aten._grouped_mm") == 2 and "aten.topk" in labels
        assert "aten.empty" not in {node.label for node in story.before}
        assert story.verdict is Verdict.STOCK and story.size.before == len(labels)
        assert story.size.cost_before.flops == 2 * 72 * 3 * 64 * 32 + 2 * 24 * 64 * 8  # experts and router
        weights = {node.label.removeprefix(f"{story.name}.") for node in story.before if node.is_input}
        assert weights == {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}
    assert len(alike(report.stories)) == 1


@torch.no_grad()
def test_layers_that_run_the_code_of_another_are_not_called_stock():
    """After a graph break Dynamo compiles each layer alone, and alike ones share what it compiled."""
    layers = model_of("qwen3_moe", num_hidden_layers=3).model.layers
    model = InTurn([layers[0].mlp, layers[1].mlp, Breaking(layers[2].mlp)])
    report = inductor_passes.explain(model, torch.randn(2, 12, 64))
    unseen = [story.name for story in report.stories if story.verdict is Verdict.UNSEEN]
    assert unseen == ["blocks.1"] and "2 fused, 1 not traced" in str(report)
    (remark,) = report.remarks
    assert "in no graph: blocks.1 (Qwen3MoeSparseMoeBlock)" in remark and "patch" not in remark


@torch.no_grad()
def test_a_dense_model_has_no_moe():
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    report = inductor_passes.explain(model, IDS)
    assert not report.unfused and len(report.remarks) == 1
    assert "no module looks like an MoE layer" in str(report) and "patch" not in str(report)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_without_memory_gets_a_remark(patched, device):
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(tiny_config("mixtral", use_cache=False)).eval()
    if patched:
        huggingface.patch(model)
    report = inductor_passes.explain(model, IDS.to(device))
    assert not (report.graphs or report.layers or report.unfused)
    assert str(report).startswith("no graph")
    (remark,) = report.remarks
    assert "meta device" in remark and "model.layers.0-1.mlp (MixtralSparseMoeBlock)" in remark


@torch.no_grad()
def test_a_model_with_some_memory_is_traced():
    model = model_of("mixtral")
    model.unused = torch.nn.Linear(2, 2, device="meta")
    report = inductor_passes.explain(model, IDS)
    assert len(report.layers) == 2 and not report.remarks


def test_an_input_without_memory_gets_a_remark():
    report = inductor_passes.explain(lambda x: x["hidden"] + 1, {"hidden": torch.ones(2, device="meta")})
    assert "meta device" in report.remarks[0] and not report.graphs


def test_errors_of_the_model_stay_its_own():
    block = MoEBlock(MoEConfig(num_experts=4, top_k=2, hidden_size=16, intermediate_size=8))
    with pytest.raises(Exception, match="15"):
        inductor_passes.explain(block, torch.randn(3, 15))


class Logits(NamedTuple):
    logits: torch.Tensor


class Causal(torch.nn.Module):
    """A model around a model, as those of transformers are, and traced in a tenth of their time."""

    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, hidden, use_cache=True):
        return Logits(self.model(hidden) * 2)


class Runner:
    """Holds a model, as pipelines and trainers do."""

    def __init__(self, model):
        self.model = model

    def run(self, hidden):
        return self.model(hidden).logits

    __call__ = run


@torch.no_grad()
def test_names_are_those_of_the_model_however_it_is_called():
    model, hidden = Causal(), inputs().hidden_states
    wanted = ["model.layers.0", "model.layers.1"]

    def step(model):
        return lambda hidden: model(hidden).logits

    inner = step(model)
    calls = {
        "module": model,
        "method": model.forward,
        "closure": step(model),
        "closure in a closure": lambda hidden: inner(hidden) + 0,
        "compiled": torch.compile(model),
        "compiled in a closure": step(torch.compile(model)),
        "partial": functools.partial(model, use_cache=False),
        "default": lambda hidden, model=model: model(hidden),
        "object": Runner(model),
        "method of an object": Runner(model).run,
    }
    for how, call in calls.items():
        report = inductor_passes.explain(call, hidden)
        assert (names(report), report.unfused) == (wanted, ()), how
    report = inductor_passes.explain(lambda model, hidden: model(hidden), model, hidden)
    assert names(report) == wanted
    assert names(inductor_passes.explain(model.model, hidden)) == ["layers.0", "layers.1"]


GLOBAL = torch.nn.ModuleDict()


@torch.no_grad()
def test_names_through_a_global():
    GLOBAL["inner"] = model_of("mixtral")
    report = inductor_passes.explain(lambda ids: GLOBAL["inner"](ids).logits, IDS)
    assert names(report) == ["inner.model.layers.0.mlp", "inner.model.layers.1.mlp"] and not report.unfused


class InTurn(torch.nn.Module):
    """Layers without the attention between them, which takes Dynamo longest."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, hidden):
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


class Breaking(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        torch._dynamo.graph_break()
        return self.inner(*args)


@torch.no_grad()
def test_names_after_a_graph_break_are_whole():
    model = Causal()
    model.model.layers[1] = Breaking(model.model.layers[1])
    report = inductor_passes.explain(model, inputs().hidden_states)
    assert names(report) == ["model.layers.0", "model.layers.1.inner"] and not report.unfused
    assert len(report.graph_breaks) == 1 and "test_explain_models.py:" in report.graph_breaks[0].location


@torch.no_grad()
def test_names_in_a_lora_model():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model_of("mixtral"), peft.LoraConfig(target_modules=["q_proj"]))
    report = inductor_passes.explain(model, IDS)
    assert names(report) == [f"base_model.model.model.layers.{index}.mlp" for index in range(2)]


@pytest.mark.parametrize("call", ["block", "forward", "experts"])
@torch.no_grad()
def test_a_block_alone_is_not_called_unfused(call):
    block = MoEBlock(MoEConfig(num_experts=4, top_k=2, hidden_size=16, intermediate_size=8)).eval()
    hidden = torch.randn(3, 16)
    calls = {
        "block": (block, hidden),
        "forward": (block.forward, hidden),
        "experts": (block.experts.forward, hidden, torch.randn(3, 4)),
    }
    report = inductor_passes.explain(*calls[call])
    assert len(report.layers) == 1 and not report.unfused and not report.remarks


def test_training_is_said_with_the_way_out():
    report = inductor_passes.explain(model_of("mixtral"), IDS)
    assert report.is_training
    assert any("torch.no_grad()" in remark for remark in report.remarks)
    assert "model.layers.0-1.mlp (2 layers): 4 -> 4 operator calls" in str(report)
