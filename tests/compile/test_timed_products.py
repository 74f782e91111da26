"""Products chosen by time under max-autotune: what is compiled for an H200 when a timer says what is the fastest."""

import logging
import re
from dataclasses import replace

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.lowering import lowerings

import moe_ops
from inductor_passes import _compat, pipeline
from inductor_passes.lowerings import LaunchPrograms, TimeProducts, timed
from moe_ops.kernels import gemm_config
from moe_ops.product_timing import GroupedMm, Timed, ways
from tests.compile.fake_cuda import body, compile_for_h200
from tests.helpers import relative_error
from tests.kernels.catalogue import meta, product

TOKENS, HIDDEN, EXPERTS, INTERMEDIATE = 64, 64, 8, 32
ROUTING = moe_ops.RoutingConfig(top_k=2)
MM = "_grouped_mm("


class Prefers:
    """A timer by which the ways that `is_best` names are the fastest, and what it was asked for."""

    def __init__(self, is_best):
        self.is_best = is_best
        self.asked = []

    def __call__(self, gemm, device):
        self.asked.append((gemm.product, gemm.num_slots, str(device)))
        return [Timed(way, 1.0 if self.is_best(gemm, way) else 2.0) for way in ways(gemm)]


def by_library(gemm, way):
    return isinstance(way, GroupedMm)


def tall(gemm, way):
    return getattr(way, "block_m", 0) == 128


def _passes(timer):
    passes = (TimeProducts(timer) if isinstance(each, TimeProducts) else each for each in pipeline.PIPELINE)
    return pipeline.MoEPasses(passes=tuple(passes))


def _compile(function, inputs, timer, autotunes=True, **options):
    with inductor_config.patch(max_autotune_gemm=autotunes):
        return compile_for_h200(function, inputs, graph_pass=_passes(timer), **options)


def _empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, device="cuda", dtype=dtype)


def _inputs(tokens):
    weights = _empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN), _empty(EXPERTS, HIDDEN, INTERMEDIATE)
    return _empty(tokens, HIDDEN), _empty(tokens, EXPERTS), *weights


def _layer(hidden, logits, w13, w2):
    return moe_ops.fused_moe(hidden * 2, logits, w13, w2, ROUTING, emit="stages").sin()


def _ours(compiled):
    names = (re.sub(r"_\d+$", "", name) for name in compiled.launches)
    return [name for name in names if not name.startswith("triton_")]


def _sorts():
    return ["_topk_routing_kernel", "_rank_kernel"]


GEMM = "grouped_gemm_mixed_kernel"  # of 16 rows an expert, where no other is faster


def test_where_torchs_product_is_the_fastest_the_graph_calls_it():
    compiled = _compile(_layer, _inputs, Prefers(by_library))
    assert _ours(compiled) == [*_sorts(), "_permute_kernel"]
    assert body(compiled.code).count(MM) == 2 and "torch.ops.moe" not in body(compiled.code)
    # The activation, and the sum with what follows it, are one kernel each.
    assert len(compiled.launches) == 6


@pytest.mark.parametrize(
    ("is_best", "launches", "calls"),
    [
        (
            lambda gemm, way: by_library(gemm, way) and gemm.gated,
            ["_permute_kernel", "_tile_map_kernel", GEMM],
            1,
        ),
        (lambda gemm, way: by_library(gemm, way) and not gemm.gated, ["_tile_map_kernel", GEMM], 1),
        (tall, ["_tile_map_kernel", GEMM, GEMM, "_combine_kernel"], 0),
    ],
    ids=["up", "down", "neither"],
)
def test_each_product_is_computed_as_was_the_fastest(is_best, launches, calls):
    compiled = _compile(_layer, _inputs, Prefers(is_best))
    found = [name for name in _ours(compiled) if name not in (*_sorts(), "_combine_kernel")]
    assert found == [name for name in launches if name != "_combine_kernel"]
    assert body(compiled.code).count(MM) == calls and "torch.ops.moe" not in body(compiled.code)


def test_a_gate_without_a_name_stays_with_the_product_that_computes_it():
    """It is timed as one with a name, which torch's product takes."""

    def layer(hidden, logits, w13, w2):
        gate = lambda gate, up: gate.sigmoid() * (up + 0.25)  # noqa: E731
        return moe_ops.fused_moe(hidden, logits, w13, w2, ROUTING, gate, emit="stages")

    compiled = _compile(layer, _inputs, Prefers(by_library))
    assert _ours(compiled) == [*_sorts(), "_tile_map_kernel", GEMM] and body(compiled.code).count(MM) == 1


def _blocks(monkeypatch, function, inputs, timer, **options):
    """Rows to a tile of the products that a compile launches."""
    launched = []
    launch = LaunchPrograms.run

    def run(self, graph, log):
        from moe_ops.kernels import plans

        plan = plans.program

        def planned(*args):
            program = plan(*args)
            launched.extend(each.args["BLOCK_M"] for each in program.launches if "BLOCK_N" in each.args)
            return program

        with monkeypatch.context() as patched:
            patched.setattr(plans, "program", planned)
            launch(self, graph, log)

    with monkeypatch.context() as patched:
        patched.setattr(LaunchPrograms, "run", run)
        _compile(function, inputs, timer, **options)
    return launched


def test_the_fastest_block_sizes_are_launched(monkeypatch):
    short = Prefers(lambda gemm, way: getattr(way, "block_m", 0) == (16 if gemm.gated else 32))
    assert _blocks(monkeypatch, _layer, _inputs, Prefers(lambda *_: False)) == [64, 64]
    assert _blocks(monkeypatch, _layer, _inputs, short) == [16, 32]
    mixed = Prefers(
        lambda gemm, way: by_library(gemm, way) if gemm.gated else getattr(way, "block_m", 0) == 16
    )
    assert _blocks(monkeypatch, _layer, _inputs, mixed) == [16]
    assert _blocks(monkeypatch, _layer, _inputs, short, autotunes=False) == [64, 64]


def test_products_are_timed_once_in_a_process():
    def two(hidden, logits, w13, w2):
        return _layer(_layer(hidden, logits, w13, w2), logits * 3, w13, w2)

    timer = Prefers(by_library)
    assert body(_compile(two, _inputs, timer).code).count(MM) == 4
    first = list(timer.asked)
    assert [product.gated for product, *_ in first] == [True, False]
    assert {(slots, device) for _, slots, device in first} == {(2 * TOKENS, "cuda:0")}
    _compile(_layer, _inputs, timer)
    assert timer.asked == first
    _compile(_layer, _inputs, timer, tokens=65)
    assert len(timer.asked) == 4


def test_nothing_is_timed_without_max_autotune_for_few_tokens_or_on_a_cpu():
    timer = Prefers(by_library)
    assert MM not in body(_compile(_layer, _inputs, timer, autotunes=False).code)
    assert MM not in body(_compile(_layer, _inputs, timer, tokens=1).code)
    on_cpu = [torch.randn(9, 8), torch.randn(9, 4), torch.randn(4, 12, 8), torch.randn(4, 8, 6)]
    with inductor_config.patch({"max_autotune_gemm": True, "post_grad_custom_pre_pass": _passes(timer)}):
        torch._dynamo.reset()
        out = torch.compile(_layer, fullgraph=True)(*on_cpu)
    assert relative_error(out, _layer(*on_cpu)) <= 1e-5
    assert not timer.asked


def _told(caplog, timer, **options):
    """The one line of a compile that keeps the plain choice."""
    with caplog.at_level(logging.INFO, logger="inductor_passes"):
        compiled = _compile(_layer, _inputs, timer, **options)
    (line,) = [each for each in caplog.messages if "not timed" in each]
    assert MM not in body(compiled.code)
    return compiled, line


def test_without_a_gpu_the_plain_choice_is_launched_and_told(caplog):
    compiled, line = _told(caplog, timed.time_here)
    assert _ours(compiled) == [*_sorts(), "_tile_map_kernel", GEMM, GEMM, "_combine_kernel"]
    assert re.search(r"not timed 1 time: \w+Error: ", line)


def test_a_symbolic_count_is_told(caplog):
    compiled, line = _told(caplog, Prefers(by_library), symbolic=True)
    assert body(compiled.code).count("torch.ops.moe.fused_moe.default(") == 1 and not _ours(compiled)
    assert "not timed 1 time: hidden_states has symbolic sizes" in line


def test_gate_and_up_in_two_weights_are_told(caplog):
    def layer(hidden, logits, gate, up, w2):
        return moe_ops.fused_moe(hidden, logits, (gate, up), w2, ROUTING, emit="stages")

    def inputs(tokens):
        hidden, logits, _, w2 = _inputs(tokens)
        return hidden, logits, *(_empty(EXPERTS, INTERMEDIATE, HIDDEN) for _ in range(2)), w2

    with caplog.at_level(logging.INFO, logger="inductor_passes"):
        compiled = _compile(layer, inputs, Prefers(by_library))
    assert MM not in body(compiled.code) and _ours(compiled).count(GEMM) == 2
    assert any("not timed 1 time: gate and up are two weights" in each for each in caplog.messages)


def test_a_choice_in_use_that_is_wrong_is_told(caplog):
    def wrong(gemm, device):
        first, *others = ways(gemm)
        return [Timed(first, float("inf"), "is wrong: nan"), *(Timed(way, 1.0) for way in others)]

    compiled, line = _told(caplog, wrong)
    assert len(_ours(compiled)) == 6 and "not timed 1 time: the choice in use, LaunchConfig(" in line
    assert line.count("is wrong: nan") == 1


def test_a_timer_that_fails_is_asked_once(caplog):
    asked = []

    def failing(gemm, device):
        asked.append(gemm)
        raise torch.cuda.OutOfMemoryError("no memory left\nmore of it")

    _, line = _told(caplog, failing)
    assert "not timed 1 time: OutOfMemoryError: no memory left" in line and "more of it" not in line
    _compile(_layer, _inputs, failing)
    assert len(asked) == 1


def test_an_operator_without_a_plan_is_told(monkeypatch, caplog):
    def broken(arguments):
        raise NotImplementedError("no kernel for this")

    monkeypatch.setattr("moe_ops.kernels.plans.products_of", broken)
    timer = Prefers(by_library)
    _, line = _told(caplog, timer)
    assert "not timed 1 time: the kernels make no launch plan: NotImplementedError('no kernel" in line
    assert not timer.asked


def _plan_of(hidden):
    return moe_ops.build_dispatch(_ids(hidden), EXPERTS), hidden[:, :2].float()


def _ids(hidden):
    """Expert 0 or 1, or none."""
    return torch.where(hidden[:, :2] > 0, hidden[:, 2:4] > 0, -1).to(torch.int32)


def _product(hidden, _, w13, w2):
    plan, _ = _plan_of(hidden)
    return moe_ops.grouped_gemm(moe_ops.permute(hidden, plan.sorted_slots), w13, plan.expert_offsets)


def _gathered(hidden, _, w13, w2):
    plan, _ = _plan_of(hidden)
    return moe_ops.gather_gemm(hidden, w13, plan)


def _first_half(hidden, _, w13, w2):
    plan, _ = _plan_of(hidden)
    return moe_ops.gather_gemm_act(hidden, w13, plan)


def _second_half(hidden, _, w13, w2):
    plan, weights = _plan_of(hidden)
    rows = hidden.repeat(2, 1)[:, :INTERMEDIATE].contiguous()
    return moe_ops.gemm_combine(rows, w2, weights, plan)


def _activated_half(hidden, _, w13, w2):
    plan, weights = _plan_of(hidden)
    return moe_ops.act_gemm_combine(hidden.repeat(2, 1), w2, weights, plan)


def _experts(hidden, _, w13, w2):
    return moe_ops.fused_experts(hidden, w13, w2, hidden[:, :2].float(), _ids(hidden), emit="fused")


OPERATORS = {
    _product: "grouped_gemm",
    _gathered: "gather_gemm",
    _first_half: "gather_gemm_act",
    _second_half: "gemm_combine",
    _activated_half: "act_gemm_combine",
    _experts: "fused_experts",
}


def backends():
    return inductor_config.max_autotune_gemm_backends


@pytest.mark.parametrize("function", OPERATORS, ids=lambda each: each.__name__.strip("_"))
def test_values_by_torchs_product(function, monkeypatch):
    """What the pass writes, computed on a CPU; half the ids name no expert that is here.

    The product is not timed again against Inductor's own templates.
    """
    torch.manual_seed(0)
    choices, operator = [], torch.ops.aten._grouped_mm.default
    lower = lowerings[operator]
    monkeypatch.setitem(lowerings, operator, lambda *args: (choices.append(backends()), lower(*args))[1])
    shapes = (33, HIDDEN), (33, EXPERTS), (EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    given = [torch.randn(shape).to(torch.bfloat16) / 4 for shape in shapes]
    expected, before, after = function(*given), [], []
    passes = pipeline.MoEPasses((), passes=(TimeProducts(Prefers(by_library)),))

    def run(graph):
        before.extend(str(node.target) for node in graph.nodes)
        passes(graph)
        after.extend(str(node.target) for node in graph.nodes)

    monkeypatch.setattr(timed, "on_cuda", lambda node: True)
    torch._dynamo.reset()
    patches = {"max_autotune_gemm": True, "post_grad_custom_pre_pass": run, "fx_graph_cache": False}
    with inductor_config.patch(patches), torch.no_grad():
        out = torch.compile(function, fullgraph=True, dynamic=False)(*given)
    operator = f"moe.{OPERATORS[function]}.default"
    assert operator in before and operator not in after and str(_compat.grouped_mm()) in after
    assert set(choices) == {"ATEN"}
    assert relative_error(out, expected) <= 2 * torch.finfo(torch.bfloat16).eps
    assert not out[expected == 0].any()


def test_a_choice_for_a_rank_is_found_again():
    """By the rows of an expert, of which it has an eighth of those that all slots would give it."""
    gemm = replace(product(meta(8, 256, 128), 8 * 8 * 16), num_ids=64)
    way = gemm_config.alternatives(gemm)[-1]
    assert gemm_config.pick_config(gemm) != way
    assert gemm_config.pick_config(replace(gemm, gpu=timed._tuned([gemm], [way]))) == way
