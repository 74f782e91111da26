"""What Inductor generates for an H200: launches for static sizes, one call for symbolic ones. No GPU needed."""

import dataclasses
import logging
import math
import re
from functools import partial

import pytest
import torch

import moe_ops
from inductor_passes.fuse_residual import FuseResidual
from inductor_passes.lowerings import programs
from inductor_passes.pipeline import PIPELINE, MoEPasses
from tests.compile.fake_cuda import body, compile_for_h200
from tests.helpers import mixed
from tests.kernels.by_name import program_of

HIDDEN, EXPERTS, INTERMEDIATE = 64, 8, 32
ROUTING = moe_ops.RoutingConfig(top_k=2)
FORMULAS = {
    "usual": (ROUTING, moe_ops.Activation()),
    "others": (
        moe_ops.RoutingConfig(2, "sqrtsoftplus"),
        moe_ops.Activation("situ", beta=4.0, linear_beta=25.0),
    ),
}


def _inputs(tokens):
    def empty(*shape):
        return torch.empty(shape, device="cuda", dtype=torch.bfloat16)

    weights = empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN), empty(EXPERTS, HIDDEN, INTERMEDIATE)
    return empty(tokens, HIDDEN), empty(tokens, EXPERTS), *weights


def _layer_of(hidden, logits, w13, w2, formulas):
    # make_fx is not a compiler to `is_compiling`, so the stages are asked for.
    return moe_ops.fused_moe(hidden * 2, logits, w13, w2, *formulas, emit="stages").sin()


_layer = partial(_layer_of, formulas=FORMULAS["usual"])


def _ours(compiled):
    return [name for name in compiled.launches if not name.startswith("triton_")]


@pytest.mark.parametrize(("tokens", "name"), mixed((1, 8, 64, 1000), FORMULAS))
def test_static_tokens_launch_the_plans_kernels_directly(tokens, name):
    formulas = FORMULAS[name]
    compiled = compile_for_h200(partial(_layer_of, formulas=formulas), _inputs, tokens=tokens)
    planned = _planned(tokens, *formulas)
    assert [re.sub(r"_\d+$", "", name) for name in _ours(compiled)] == planned
    assert "torch.ops.moe" not in body(compiled.code)
    # The neighbours stay one kernel each: nothing is copied into or out of the launches.
    assert len(compiled.launches) - len(planned) == 2


def _planned(tokens, routing, activation):
    given = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in _on_meta(tokens)]
    plan = program_of("fused_moe", *given, routing=routing, activation=activation)
    return [launch.kernel.__name__ for launch in plan.launches]


def _on_meta(tokens):
    shapes = (
        (tokens, HIDDEN),
        (tokens, EXPERTS),
        (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        (EXPERTS, HIDDEN, INTERMEDIATE),
    )
    return [torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in shapes]


def test_symbolic_tokens_stay_one_call_and_add_no_guard():
    compiled = compile_for_h200(_layer, _inputs, symbolic=True)
    assert body(compiled.code).count("torch.ops.moe.fused_moe.default(") == 1
    assert not _ours(compiled)
    assert compiled.guards == compile_for_h200(_layer, _inputs, symbolic=True, graph_pass=None).guards


def test_without_our_passes_the_stages_are_calls():
    compiled = compile_for_h200(_layer, _inputs, graph_pass=None)
    assert len(re.findall(r"torch\.ops\.moe\.\w+\.default\(", body(compiled.code))) == 7 and not _ours(
        compiled
    )


@pytest.mark.parametrize("symbolic", [False, True])
def test_pointwise_stages_melt_into_their_neighbours(symbolic):
    def gated(hidden, logits, w13, w2):
        gate_up = torch.cat([hidden, hidden], 1) * 2
        return moe_ops.gated_activation(gate_up, "silu").sin()

    compiled = compile_for_h200(gated, _inputs, symbolic=symbolic)
    assert len(compiled.launches) == 1 and "torch.ops.moe" not in body(compiled.code)


def test_a_failing_plan_leaves_the_call_and_says_so(monkeypatch, caplog):
    def broken(*args):
        raise NotImplementedError("no kernel for this")

    monkeypatch.setattr("moe_ops.kernels.plans.program", broken)
    with caplog.at_level(logging.WARNING, logger="inductor_passes"):
        compiled = compile_for_h200(_layer, _inputs)
    assert body(compiled.code).count("torch.ops.moe.fused_moe.default(") == 1
    assert "no kernel for this" in caplog.text


def test_a_launch_torch_would_drop_leaves_the_call(monkeypatch):
    monkeypatch.setattr(programs, "_WRITTEN", {})
    monkeypatch.setattr("inductor_passes._compat.written_arguments", lambda *args: frozenset())
    compiled = compile_for_h200(_layer, _inputs)
    assert body(compiled.code).count("torch.ops.moe.fused_moe.default(") == 1 and not _ours(compiled)


def _refused(caplog, reason, inputs=_inputs, **options):
    """The layer stays one call, nothing of an unfinished plan is left, and the log says why."""
    left = []

    def passes(graph):
        MoEPasses(())(graph)
        left.extend(node for node in graph.nodes if node.op == "call_function" and not node.users)

    with caplog.at_level(logging.DEBUG, logger="inductor_passes"):
        compiled = compile_for_h200(_layer, inputs, graph_pass=passes, **options)
    assert not left
    assert body(compiled.code).count("torch.ops.moe.fused_moe.default(") == 1 and not _ours(compiled)
    assert reason in caplog.text


def test_an_argument_without_elements_leaves_the_call(caplog):
    def no_features(tokens):
        shapes = (EXPERTS, 0, HIDDEN), (EXPERTS, HIDDEN, 0)
        weights = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        return *_inputs(tokens)[:2], *weights

    _refused(caplog, "an argument is empty; the operator returns without a launch", no_features)


def test_symbolic_sizes_say_so(caplog):
    _refused(caplog, "has symbolic sizes; the operator picks its kernels at run time", symbolic=True)


@pytest.mark.parametrize("num_rows", [128, None], ids=["rows known", "rows open"])
def test_a_symbolic_number_beside_tensors_leaves_the_call(num_rows, caplog):
    """What a backward is told of sizes is a number among its tensors, which has no device."""

    def inputs(tokens):
        rows = 2 * tokens if num_rows is None else num_rows
        slots = torch.empty(rows, device="cuda", dtype=torch.int32)
        return torch.empty(tokens, HIDDEN, device="cuda"), torch.empty(rows, HIDDEN, device="cuda"), slots

    def backward(tokens, grad, slots):
        return torch.ops.moe.permute_backward(grad, slots, tokens.shape[0]).sin()

    with caplog.at_level(logging.DEBUG, logger="inductor_passes"):
        compiled = compile_for_h200(backward, inputs, symbolic=True)
    assert body(compiled.code).count("torch.ops.moe.permute_backward.default(") == 1 and not _ours(compiled)
    first = "num_tokens" if num_rows else "grad"
    assert f"{first} has symbolic sizes; the operator picks its kernels at run time" in caplog.text


def test_a_launch_that_seems_to_write_an_input_leaves_the_call(monkeypatch, caplog):
    def everything(kernel, arguments, descriptors):
        return [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]

    monkeypatch.setattr(programs, "_WRITTEN", {})
    monkeypatch.setattr("inductor_passes._compat.written_arguments", everything)
    _refused(caplog, "which is no whole buffer")


def test_a_plan_with_other_outputs_leaves_the_call(monkeypatch, caplog):
    from moe_ops.kernels import plans

    plan = plans.program

    def other(arguments, gpu):
        program = plan(arguments, gpu)
        unlike = next(buffer for buffer in program.buffers if buffer.name not in program.outputs)
        return dataclasses.replace(program, outputs=(unlike.name,))

    monkeypatch.setattr(plans, "program", other)
    _refused(caplog, "the launch plan returns")


def _gpt_oss_inputs(tokens):
    """Weights as the checkpoint stores them, [E, in, out] with interleaved gate and up columns, and biases."""
    stored = (EXPERTS, HIDDEN, 2 * INTERMEDIATE), (EXPERTS, INTERMEDIATE, HIDDEN)
    biases = (EXPERTS, 2 * INTERMEDIATE), (EXPERTS, HIDDEN)
    shapes = (tokens, HIDDEN), (tokens, EXPERTS), *stored, *biases
    return [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def _gpt_oss(hidden, logits, gate_up_proj, down_proj, gate_up_bias, down_bias):
    return moe_ops.fused_moe(
        hidden,
        logits,
        gate_up_proj.transpose(1, 2),
        down_proj.transpose(1, 2),
        moe_ops.RoutingConfig(top_k=2, order="topk_then_score"),
        moe_ops.Activation("swiglu_oai", interleaved=True),
        w13_bias=gate_up_bias,
        w2_bias=down_bias,
        emit="stages",
    )


@pytest.mark.parametrize(("tokens", "symbolic"), [(4, False), (40, False), (40, True)])
def test_gpt_oss_layout_makes_no_weight_sized_buffer(tokens, symbolic):
    compiled = compile_for_h200(_gpt_oss, _gpt_oss_inputs, tokens=tokens, symbolic=symbolic)
    allocated = re.findall(
        r"empty_strided_cuda\(\(([^)]*)\)", body(compiled.code).replace("s47", str(tokens))
    )
    sizes = [math.prod(eval(f"({shape})")) for shape in allocated]
    assert all(size < EXPERTS * HIDDEN * INTERMEDIATE for size in sizes)
    assert bool(_ours(compiled)) != symbolic
    assert not any("clone" in name for name in compiled.launches)


@pytest.mark.parametrize("symbolic", [False, True])
def test_halves_that_cannot_collapse_are_launched_or_called(symbolic):
    def scaled(hidden, logits, w13, w2):
        weights, ids = moe_ops.topk_routing(logits, ROUTING)
        plan = moe_ops.build_dispatch(ids, EXPERTS)
        rows = moe_ops.grouped_gemm(moe_ops.permute(hidden, plan.sorted_slots), w13, plan.expert_offsets)
        rows = moe_ops.gated_activation(rows) * 1.5
        return moe_ops.combine(moe_ops.grouped_gemm(rows, w2, plan.expert_offsets), weights, plan.inverse)

    compiled = compile_for_h200(scaled, _inputs, symbolic=symbolic)
    calls = re.findall(r"torch\.ops\.moe\.(\w+)", body(compiled.code))
    # A call's outputs are checked by name too, so names repeat.
    assert list(dict.fromkeys(calls)) == (
        ["routing_dispatch", "gather_gemm_act", "gemm_combine"] if symbolic else []
    )
    assert bool(_ours(compiled)) != symbolic


@pytest.mark.parametrize("tokens", [64, 1000])
def test_layers_that_read_the_same_ids_launch_one_router_and_one_sort(tokens):
    def twice(hidden, logits, w13, w2):
        for _ in range(2):
            hidden = moe_ops.fused_moe(hidden, logits, w13, w2, ROUTING, emit="stages")
        return hidden

    compiled = compile_for_h200(twice, _inputs, tokens=tokens)
    assert "torch.ops.moe" not in body(compiled.code)
    names = [re.sub(r"_\d+$", "", name) for name in _ours(compiled)]
    once = _planned(tokens, *FORMULAS["usual"])
    sorting = [name for name in once if "gemm" not in name and "combine" not in name]
    # Products with tiles of two heights have a map each.
    assert len(sorting) >= 3 and all(names.count(name) == sorting.count(name) for name in sorting)
    assert len(names) == 2 * len(once) - len(sorting)


_WITHOUT_RESIDUALS = MoEPasses(passes=tuple(each for each in PIPELINE if not isinstance(each, FuseResidual)))


def _added(hidden, logits, w13, w2):
    return hidden + _layer_alone(hidden, logits, w13, w2)


def _added_and_normalised(hidden, logits, w13, w2):
    out = _added(hidden, logits, w13, w2)
    return out, torch.nn.functional.rms_norm(out, (HIDDEN,))


def _added_with_a_gate(hidden, logits, w13, w2):
    out = hidden * logits.sum(1, keepdim=True).sigmoid() + _layer_alone(hidden, logits, w13, w2)
    return out, torch.nn.functional.rms_norm(out, (HIDDEN,))


def _beside_a_gated_expert(hidden, logits, w13, w2):
    """A shared expert with a sigmoid gate, as Qwen2-MoE has one."""
    gate, up = (hidden @ w13.select(0, 0).T).chunk(2, dim=1)
    shared = (torch.nn.functional.gelu(gate) * up) @ w2.select(
        0, 0
    ).T  # with silu it would be part of the layer
    weight = torch.sigmoid(hidden @ w2.select(0, 1).narrow(1, 0, 1))
    return _layer_alone(hidden, logits, w13, w2) + weight * shared


def _beside_a_gated_expert_added_and_normalised(hidden, logits, w13, w2):
    out = hidden + _beside_a_gated_expert(hidden, logits, w13, w2)
    return out, torch.nn.functional.rms_norm(out, (HIDDEN,))


def _layer_alone(hidden, logits, w13, w2):
    return moe_ops.fused_moe(hidden, logits, w13, w2, ROUTING, emit="stages")


@pytest.mark.parametrize(
    ("given", "tokens"),
    mixed(
        (
            (_added, 1),
            (_added_and_normalised, 0),
            (_added_with_a_gate, 0),
            (_beside_a_gated_expert, 1),
            (_beside_a_gated_expert_added_and_normalised, 0),
        ),
        (1, 1000, 64),
    ),
)
def test_a_residual_is_no_launch_and_never_one_more(given, tokens):
    function, spared = given
    before = compile_for_h200(function, _inputs, tokens=tokens, graph_pass=_WITHOUT_RESIDUALS)
    after = compile_for_h200(function, _inputs, tokens=tokens)
    assert "torch.ops.moe" not in body(before.code) + body(after.code)
    assert len(before.launches) - len(after.launches) == spared
    assert len(_ours(before)) == len(_ours(after))
