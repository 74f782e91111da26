"""What Inductor makes of a captured gate: the first product's kernel with the formula in it, and C++ on a CPU."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import inductor_passes
import moe_ops
from tests.compile.fake_cuda import body, compile_for_h200
from tests.gates import CASES, oracle, tensors
from tests.helpers import assert_matches_oracle, fresh_graphs, mixed, usually

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 16, 64, 32, 2
ROUTING = moe_ops.RoutingConfig(TOP_K)


def _inputs(tokens):
    shapes = (
        (tokens, HIDDEN),
        (tokens, EXPERTS),
        (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        (EXPERTS, HIDDEN, INTERMEDIATE),
        (EXPERTS, INTERMEDIATE),
    )
    return [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def _gate(gate, up, scale):
    return torch.tanh(gate) * F.softplus(up) * scale


def _custom(x, logits, w13, w2, scale):
    return moe_ops.fused_moe(x, logits, w13, w2, ROUTING, _gate, per_expert=[scale], emit="stages")


def _named(x, logits, w13, w2, scale):
    return moe_ops.fused_moe(x, logits, w13, w2, ROUTING, "silu", emit="stages")


def _formulas(code):
    """The device functions in generated code that a formula was made into; the others stand for none."""
    functions = re.findall(r"^def captured\(.*?^    return [^\n]+$", code, re.DOTALL | re.MULTILINE)
    return [each for each in functions if "static_assert" not in each]


@pytest.mark.parametrize("tokens", usually((1, 4, 64, 1000), (1, 64)))
def test_launches_are_those_of_a_gate_with_a_name(tokens):
    compiled = compile_for_h200(_custom, _inputs, tokens=tokens)
    assert compiled.launches == compile_for_h200(_named, _inputs, tokens=tokens).launches != ()
    assert "torch.ops" not in body(compiled.code).replace("torch.ops.inductor", "")
    assert len(_formulas(compiled.code)) == 1
    (inlined,) = _formulas(compiled.code)
    steps = ("tanh_of(gate)", "log1p(", "tl.load(operand0_ptr", "* 32 ")
    assert all(step in inlined for step in steps)


def test_two_gates_are_two_kernels_and_one_gate_is_one():
    def layers(first, second):
        def run(x, logits, w13, w2, scale):
            once = moe_ops.fused_moe(x, logits, w13, w2, ROUTING, first, emit="stages")
            return moe_ops.fused_moe(once, logits, w13, w2, ROUTING, second, emit="stages")

        return _formulas(compile_for_h200(run, _inputs, tokens=64).code)

    assert len(layers(lambda g, u: torch.sigmoid(g) * u, lambda g, u: torch.sigmoid(g) * u)) == 1
    assert len(set(layers(lambda g, u: torch.sigmoid(g) * u, lambda g, u: torch.sigmoid(g * 2) * u))) == 2


def test_a_symbolic_token_count_gets_one_call_and_no_guard():
    compiled = compile_for_h200(_custom, _inputs, symbolic=True)
    assert body(compiled.code).count("torch.ops.moe.fused_moe_formula.default(") == 1
    assert compiled.guards <= compile_for_h200(_custom, _inputs, symbolic=True, graph_pass=None).guards


@pytest.mark.parametrize(("name", "tokens"), mixed(("learned_columns", "relu2"), (300, 3)))
@torch.no_grad()
def test_on_a_cpu_it_melts_into_loops(name, tokens):
    case = CASES[name]
    given = tensors(case, tokens)

    def layer(per_expert, **given):
        return moe_ops.fused_experts(**given, activation=case.function, per_expert=per_expert)

    compiled = torch.compile(layer, fullgraph=True, options=inductor_passes.options())
    out, (code,) = run_and_get_code(compiled, **given)
    assert_matches_oracle(out, oracle(case, given))
    assert re.findall(r"= torch\.ops\.moe\.(\w+)", code) == (["grouped_gemm"] * 2 if tokens > 16 else [])


@torch.no_grad()
def test_what_was_compiled_for_one_gate_serves_no_other():
    """One cache, two gates that differ in a number."""
    given = tensors(CASES["gpt_oss"], 5)
    with fresh_graphs():
        for limit in (0.2, 0.3):
            torch._dynamo.reset()

            def gate(gate, up, limit=limit):
                return torch.tanh(gate).clamp(max=limit) * up

            def layer(given, gate=gate):
                return moe_ops.fused_experts(**given, activation=gate)

            compiled = torch.compile(layer, fullgraph=True, options=inductor_passes.options())
            torch.testing.assert_close(compiled(given), layer(given))
