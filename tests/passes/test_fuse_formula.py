"""FuseFormula: any elementwise gate goes into the first product, and what does not says which node keeps it out."""

import re

import expecttest
import pytest
import torch
from torch.nn import functional as F

import inductor_passes
import moe_ops
from inductor_passes.pipeline import FUSIONS, RAISES
from tests.gates import CASES, oracle, tensors
from tests.helpers import assert_matches_oracle, relative_error
from tests.passes import stock
from tests.passes.capture import computed, rewrite
from tests.passes.moe import EXPERTS, INTERMEDIATE, ROUTING, inputs, routed, up

COUNTS = {"routing_dispatch": 1, "gather_gemm_formula": 1, "gemm_combine": 1, "fused_moe_formula": 1}


def _layer(function):
    def layer(hidden, logits, w13, w2, *per_expert):
        return moe_ops.fused_moe(hidden, logits, w13, w2, ROUTING, function, per_expert=per_expert)

    return layer


def _stages(between):
    """A layer by hand: `between(gate_up, plan)` is what stands between the products."""

    def layer(hidden, logits, w13, w2, *more):
        weights, _, plan = routed(logits)
        rows = between(up(hidden, w13, plan), plan, *more)
        return moe_ops.combine(moe_ops.grouped_gemm(rows, w2, plan.expert_offsets), weights, plan.inverse)

    return layer


def _formula(result):
    (spec,) = [arg for node in result.graph.nodes for arg in node.args if "formula" in str(node.target)][-1:]
    return spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_of_what_is_captured(name, dtype):
    case = CASES[name]
    given = tensors(case, 9, dtype)
    result, out = computed(lambda: moe_ops.fused_experts(**given, activation=case.function))
    assert result.ops() == ["fused_experts_formula"] and not any("gate" in each for each in result.reasons)
    assert_matches_oracle(out, oracle(case, given))


class TestGolden(expecttest.TestCase):
    def test_whole_layer(self):
        def gate(gate, up, scale):
            return torch.tanh(gate) * (up + 1) * scale

        result = rewrite(_layer(gate), *inputs(dynamic=True), torch.ones(EXPERTS))
        self.assertExpectedInline(
            result.after.replace("|", "\n  "),
            """\
%0 = input() : float32[T0, 16]
%1 = input() : float32[T0, 4]
%2 = input() : float32[4, 16, 16]
%3 = input() : float32[4, 16, 8]
%4 = input() : float32[4]
%5 = moe.fused_moe_formula.default(%0, %1, %2, %3, None, None, None, None, None, None, %4, None, None, None, 'top_k=2', 'halves
  a0=expert*1+0+column*0
  t0=tanh(gate)
  t1=add(up,1.0)
  t2=mul(t0,t1)
  t3=mul(t2,a0)
  t3') : float32[T0, 16]
return [%5]""",  # noqa: E501
        )
        assert result.log.counts() == COUNTS

    def test_formula_of_gpt_oss(self):
        result = rewrite(_layer(CASES["gpt_oss"].function), *inputs())
        self.assertExpectedInline(
            _formula(result).replace("|", "\n"),
            """\
halves
t0=maximum(up,-2.0)
t1=minimum(t0,2.0)
t2=add(t1,1.0)
t3=minimum(gate,2.0)
t4=mul(t3,1.702)
t5=sigmoid(t4)
t6=mul(t3,t5)
t7=mul(t2,t6)
t7""",
        )


def test_a_second_run_finds_nothing():
    result = rewrite(_layer(CASES["situ"].function), *inputs(), passes=FUSIONS + FUSIONS)
    assert result.log.counts() == COUNTS and not result.reasons


def test_equal_gates_have_equal_texts():
    def both(hidden, logits, w13, w2):
        first = _layer(lambda g, u: torch.sigmoid(g) * u)(hidden, logits, w13, w2)
        return _layer(lambda gate, up: torch.sigmoid(gate) * up)(first, logits * 2, w13, w2)

    result = rewrite(both, *inputs())
    specs = [node.args[-1] for node in result.graph.nodes if "fused_moe_formula" in str(node.target)]
    assert len(specs) == 2 and len(set(specs)) == 1


LAYOUTS = {
    "interleaved": (lambda x: x.unflatten(1, (-1, 2)).unbind(-1), "interleaved"),
    "strided": (lambda x: (x[:, ::2], x[:, 1::2]), "interleaved"),
    "up first": (lambda x: x.chunk(2, 1)[::-1], "halves"),
    "clamped, then split": (lambda x: x.clamp(max=3).chunk(2, -1), "halves"),
    "by shape": (lambda x: x.view(-1, 2, INTERMEDIATE).permute(1, 0, 2).unbind(0), "halves"),
}


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_layouts_of_gate_and_up(name):
    split, layout = LAYOUTS[name]

    def between(gate_up, plan):
        gate, up = split(gate_up)
        return torch.tanh(gate) * up

    result, out = computed(_stages(between), *inputs())
    assert result.log.counts() == COUNTS and _formula(result).startswith(layout)
    assert_matches_oracle(out, _stages(between)(*(each.double() for each in inputs())))


def test_tensors_that_are_one_for_all_experts():
    def between(gate_up, plan, bias, scale):
        gate, up = (gate_up + bias).chunk(2, 1)
        return F.silu(gate) * up * scale

    more = torch.randn(2 * INTERMEDIATE), torch.tensor(0.3)
    result, out = computed(_stages(between), *inputs(), *more)
    assert result.log.counts() == COUNTS
    doubled = (each.double() for each in (*inputs(), *more))
    assert_matches_oracle(out, _stages(between)(*doubled))


def test_the_expert_of_each_row_may_be_computed_otherwise():
    scale = torch.randn(EXPERTS)

    def compared(gate_up, plan):
        rows = torch.arange(gate_up.shape[0])
        expert = (rows[:, None] >= plan.expert_offsets[1:-1]).sum(1)
        return gate_up.chunk(2, 1)[0] * scale[expert][:, None]

    result, out = computed(_stages(compared), *inputs())
    assert result.log.counts() == COUNTS
    assert_matches_oracle(out, _stages(compared)(*(each.double() for each in inputs())))


def _refusal(between, *more):
    result, out = computed(_stages(between), *inputs(), *more)
    assert result.log.counts()["gather_gemm_formula"] == 0 and "grouped_gemm" in result.ops()
    torch.testing.assert_close(out, _stages(between)(*inputs(), *more))  # in stages, it is what it was
    (refused,) = [each for each in result.log.refused if "the input of gemm_combine" not in each.reason]
    return refused


REFUSED = {
    "softmax over columns": (
        lambda x, _: x.chunk(2, 1)[0] * x.softmax(-1).chunk(2, 1)[1],
        "is not elementwise over gate and up",
    ),
    "float8 on the way": (
        lambda x, _: torch.tanh(x.chunk(2, 1)[0].to(torch.float8_e4m3fn).float()) * x.chunk(2, 1)[1],
        "to torch.float8_e4m3fn is no step of a formula",
    ),
    "the bits of another dtype": (
        lambda x, _: torch.tanh(x.bfloat16().view(torch.float16).float()).chunk(2, 1)[0],
        "is not elementwise over gate and up",
    ),
    "rows behind": (lambda x, _: x.chunk(2, 1)[0] + x.chunk(2, 1)[1].roll(1, 0), "is not elementwise"),
    "a row's own scale": (
        lambda x, plan: x.chunk(2, 1)[0] * plan.sorted_slots.float()[:, None],
        "is another for each row, and not by its expert",
    ),
    "experts of other rows": (
        lambda x, plan: x.chunk(2, 1)[0] * torch.ones(EXPERTS)[plan.sorted_slots % EXPERTS][:, None],
        "is another for each row, and not by its expert",
    ),
    "other columns": (lambda x, _: x[:, 1 : INTERMEDIATE + 1] * 2, "reads columns of gate_up by"),
    "two layouts": (lambda x, _: x[:, ::2] * x.chunk(2, 1)[1], "reads columns of gate_up by"),
    "columns that are copied": (
        lambda x, _: x.view(-1, 2, INTERMEDIATE).mT.reshape(x.shape).chunk(2, 1)[0],
        "is shown in a way that is no view",
    ),
    "columns in reverse": (lambda x, _: x.chunk(2, 1)[0].flip(1), "is not elementwise"),
    "no step": (lambda x, _: torch.atan2(*x.chunk(2, 1)), "is not elementwise over gate and up"),
    "a power": (lambda x, _: x.chunk(2, 1)[0].abs() ** 1.3, "is no step of a formula"),
    "whole numbers": (lambda x, _: x.chunk(2, 1)[0].int().float(), "is no step of a formula"),
    "float64": (lambda x, _: x.chunk(2, 1)[0].double().tanh().float(), "is no step of a formula"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refuses_what_is_not_elementwise(name):
    between, reason = REFUSED[name]
    refused = _refusal(between)
    assert reason in refused.reason, refused


def test_refuses_a_gate_of_other_columns():
    given = inputs()
    layer = _stages(lambda gate_up, plan: torch.tanh(gate_up[:, :4]))
    result = rewrite(layer, *given[:3], given.w2[:, :, :4].contiguous())
    assert result.reasons[0] == "the gate makes 4 columns of 16" and "permute" in result.ops()


OTHER_TENSORS = {
    "whole numbers": (torch.arange(INTERMEDIATE), "the gate reads the graph input .*, torch.int64 on cpu"),
    "gaps": (torch.randn(INTERMEDIATE, 3)[:, 1], "the gate reads the graph input .*, torch.float32 on cpu"),
}


@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_refuses_tensors_that_a_kernel_does_not_take(name):
    tensor, reason = OTHER_TENSORS[name]
    refused = _refusal(lambda x, _, more: torch.tanh(x.chunk(2, 1)[0]) * more, tensor)
    assert re.fullmatch(reason, refused.reason)


def test_refuses_a_number_that_is_a_symbol():
    def scaled(gate_up, plan):
        return gate_up.chunk(2, 1)[0] * gate_up.shape[0]

    result = rewrite(_stages(scaled), *inputs(dynamic=True))
    assert "no number that is known" in result.reasons[0] and "permute" in result.ops()


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_refuses_sizes_that_depend_on_data():
    def chosen(hidden, logits, w13, w2):
        rows = hidden[:, 0].nonzero().flatten()
        return _layer(lambda g, u: torch.tanh(g) * u)(hidden[rows], logits[rows], w13, w2)

    result = rewrite(chosen, *inputs())
    assert any(reason.endswith("has a size that depends on data") for reason in result.reasons)


def test_refuses_many_tensors_and_long_gates():
    def many(gate_up, plan, *more):
        return sum(more, gate_up.chunk(2, 1)[0])

    def long(gate_up, plan):
        gate = gate_up.chunk(2, 1)[0]
        for number in range(70):
            gate = torch.tanh(gate + number)
        return gate

    refused = _refusal(many, *torch.randn(5, INTERMEDIATE).unbind())
    assert refused.reason == "the gate reads more than 4 tensors besides gate and up"
    assert "more than 64 are not inlined" in _refusal(long).reason


def test_refuses_a_gate_that_somebody_else_reads():
    def observed(hidden, logits, w13, w2):
        weights, _, plan = routed(logits)
        gate = torch.tanh(up(hidden, w13, plan).chunk(2, 1)[0])
        out = moe_ops.grouped_gemm(gate * 2, w2, plan.expert_offsets)
        return moe_ops.combine(out, weights, plan.inverse), gate.amax()

    result = rewrite(observed, *inputs())
    assert "gather_gemm_formula" not in result.log.counts()
    assert result.reasons[0] == "aten.tanh of the gate is also read by aten.amax"


def test_a_stock_gate_with_a_mask():
    inputs = stock.layer(9)
    style = stock.grouped_with(gate=lambda gate_up, rows: stock.masked_gate(gate_up, rows, more=1.0))
    result, out = computed(style, *inputs, passes=(*RAISES, *FUSIONS))
    assert result.ops() == ["fused_moe_formula"]
    (spec,) = [node.args[-1] for node in result.graph.nodes if "formula" in str(node.target)]
    assert (
        spec
        == "halves|t0=neg(gate)|t1=exp(t0)|t2=add(t1,1.0)|t3=div(gate,t2)|t4=add(up,1.0)|t5=mul(t3,t4)|t5"
    )
    exact = style(*(tensor.float() for tensor in inputs))
    assert relative_error(out, exact.double()) <= 2 * relative_error(style(*inputs), exact.double())


def test_explain_shows_what_was_inlined_and_what_keeps_a_gate_out():
    def layers(hidden, logits, w13, w2):
        once = moe_ops.fused_moe(hidden, logits, w13, w2, ROUTING, lambda g, u: torch.tanh(g) * u)
        return moe_ops.fused_moe(once, logits, w13, w2, ROUTING, lambda g, u: g.softmax(-1) * u)

    with torch.no_grad():
        report = inductor_passes.explain(layers, *inputs(tokens=40))
    assert "gate inlined: halves; t0=tanh(gate); t1=mul(t0,up); t1" in str(report)
    assert [each.kind for each in report.captured] == ["halves; t0=tanh(gate); t1=mul(t0,up); t1"]
    assert any("is not elementwise over gate and up" in each.reason for each in report.refused)
