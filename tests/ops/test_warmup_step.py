"""moe_ops.warmup_step without a GPU: what it would load is what any T then launches, as Triton counts kernels."""

import re
import sys

import pytest
import torch
import triton

import moe_ops
from moe_ops import Activation, RoutingConfig, _library
from moe_ops.arguments import DenseGemm, FusedExperts, FusedExpertsWithShared, FusedMoe, TopkRouting
from moe_ops.dense_gemm import _cuda as dense_gemm_cuda
from moe_ops.fused_experts import _cuda as fused_experts_cuda
from moe_ops.fused_moe import _cuda as fused_moe_cuda
from moe_ops.kernels import plans, templates
from moe_ops.kernels.loading import Loader, variant
from moe_ops.kernels.plans import watched
from moe_ops.kernels.program import Filled, Launch, Program, Ref
from moe_ops.routing import _cuda as topk_routing_cuda
from moe_ops.shared import _cuda as shared_cuda
from tests.kernels.by_name import launches_of

ON_A_GPU = {
    FusedMoe: fused_moe_cuda,
    FusedExperts: fused_experts_cuda,
    DenseGemm: dense_gemm_cuda,
    TopkRouting: topk_routing_cuda,
}
MOST = 400
ROUTING = RoutingConfig(top_k=2)


def _variants(program, dtypes):
    known = dtypes | {buffer.name: buffer.dtype for buffer in program.buffers}
    return {variant(launch, known) for launch in program.launches}


@pytest.fixture
def loaded(monkeypatch):
    """Kernels that would be loaded."""
    kernels = set()

    def load(self, program, dtypes):
        kernels.update(_variants(program, dtypes))
        return [None for _ in program.launches]

    monkeypatch.setattr(Loader, "load", load)
    return kernels


@pytest.fixture
def launched(monkeypatch):
    """Kernels that public functions launch, as on a GPU; nothing is computed."""
    kernels = set()

    def run(self, tensors):
        dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
        kernels.update(_variants(Program(self.buffers, tuple(launches_of(self)), self.outputs), dtypes))
        buffers = {buffer.name: buffer for buffer in self.buffers}
        return tuple(torch.zeros(buffers[name].shape, dtype=buffers[name].dtype) for name in self.outputs)

    monkeypatch.setattr(Filled, "run", run)
    monkeypatch.setattr(_library, "call", lambda arguments: ON_A_GPU[type(arguments)](arguments))
    return kernels


def _weight(rows, columns, transposed):
    experts = 13
    if transposed:
        return torch.zeros(experts, columns, rows, dtype=torch.bfloat16).transpose(1, 2)
    return torch.zeros(experts, rows, columns, dtype=torch.bfloat16)


def _of_logits(transposed=False, shared=False, interleaved=False):
    w13, w2 = _weight(64, 48, transposed), _weight(48, 32, transposed)
    activation = Activation("silu", interleaved=interleaved)

    def step(tokens):
        hidden = torch.zeros(tokens, 48, dtype=torch.bfloat16)
        logits = torch.zeros(tokens, 13, dtype=torch.bfloat16)
        beside = torch.zeros_like(hidden) if shared else None
        moe_ops.fused_moe(hidden, logits, w13, w2, ROUTING, activation, shared=beside)

    return step


def _of_ids_in_columns(tokens):
    """Hidden states, weights and ids are columns of wider tensors; sizes that no TMA takes; a router in front."""
    w13, w2 = torch.zeros(13, 30, 22), torch.zeros(13, 22, 15)
    hidden = torch.zeros(tokens, 57)[:, 5:27]
    moe_ops.dense_gemm(hidden, torch.zeros(13, 22))
    ids = torch.zeros(tokens, 8, dtype=torch.int32)[:, :2]
    moe_ops.fused_experts(hidden, w13, w2, torch.zeros(2, tokens).T, ids)


STEPS = {
    "rows": _of_logits(),
    "columns": _of_logits(transposed=True),
    "alternating rows and a shared output": _of_logits(shared=True, interleaved=True),
    "views": _of_ids_in_columns,
}


@pytest.mark.parametrize("name", STEPS)
def test_loads_what_any_count_launches_and_no_more(name, loaded, launched):
    step = STEPS[name]
    moe_ops.warmup_step(step, MOST)
    launched.clear()
    for tokens in range(1, MOST + 1):
        step(tokens)
    assert len(launched) > 8
    assert launched <= loaded
    assert (
        loaded - launched == set() or name == "views"
    )  # a router's kernel for one token, which ran and is there


@pytest.mark.parametrize("name", STEPS)
def test_what_is_planned_of_a_count_is_what_it_calls(name, launched):
    operators = [*sys.modules["moe_ops.warmup_step"]._operators(STEPS[name], MOST)]
    for tokens in (4, 33, 256, MOST):
        with watched() as seen:
            STEPS[name](tokens)
        assert seen and all(any(operator(tokens) == call for operator in operators) for call in seen)


@pytest.mark.parametrize("features", [32, 64], ids=["narrow", "wide"])
def test_a_shared_expert_that_is_in_the_launches_of_few_tokens(features, loaded, launched, monkeypatch):
    """Of up to four, or two where it is wider than a routed one: behind that other operators are called."""
    monkeypatch.setitem(ON_A_GPU, FusedExpertsWithShared, shared_cuda)
    beside = lambda routed, alone, products: plans.launch(routed._replace(shared=products(alone)))  # noqa: E731
    monkeypatch.setattr(_library, "launch_with_shared", beside)
    w13, w2 = (
        torch.zeros(90, *shape).bfloat16() for shape in ((64, 48), (48, 32))
    )  # enough for few tokens each
    shared = torch.zeros(2 * features, 48).bfloat16(), torch.zeros(48, features).bfloat16()
    monkeypatch.setattr("moe_ops.shared.gated_activation", lambda rows, _: rows[:, :features])

    def step(tokens):
        hidden, weights = torch.zeros(tokens, 48).bfloat16(), torch.zeros(tokens, 2)
        moe_ops.fused_experts_with_shared(hidden, w13, w2, weights, weights.int(), *shared)

    for most in (2, 3, 4, 5, 6, MOST):
        moe_ops.warmup_step(step, most)
    already = set(launched)  # by counts that ran
    launched.clear()
    for tokens in range(1, MOST + 1):
        step(tokens)
    assert launched <= loaded | already
    names = {kernel for kernel, *_ in launched}
    assert len(names) > 3 and any(loaded - already)


@triton.jit
def _kernel(x_ptr, as_it_is, number, constant: triton.language.constexpr):
    pass


def test_what_triton_compiles_a_launch_by():
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter compiles nothing")
    kernel = triton.jit(_kernel.fn, do_not_specialize=["as_it_is"])

    def of(as_it_is, number, constant=7, dtype=torch.float32):
        args = {"x_ptr": Ref("x"), "as_it_is": as_it_is, "number": number, "constant": constant}
        return variant(Launch(kernel, (1,), args), {"x": dtype})

    assert of(5, 33) == of(1, 35) == of(16, 37)
    others = [of(5, 32), of(5, 1), of(5, 1 << 31), of(1 << 31, 33), of(5, 33, 8), of(5, 33, dtype=torch.int8)]
    assert len({of(5, 33), *others}) == 7


def test_no_count_needs_another_template(loaded, launched, monkeypatch):
    moe_ops.warmup_step(STEPS["rows"], MOST)
    made = []
    template = templates._template
    monkeypatch.setattr(templates, "_template", lambda *given: made.append(given) or template(*given))
    for tokens in range(1, MOST + 1):
        STEPS["rows"](tokens)
    assert made == []
    STEPS["rows"](64 * MOST)
    assert len(made) == 1


def test_it_runs_the_step_for_few_counts_and_on_a_gpu_only(loaded, launched):
    counts = []
    moe_ops.warmup_step(counts.append, MOST)
    assert sorted(set(counts)) == [1, 2, 3, 4, 5, 6, MOST - 1, MOST]
    assert len(counts) == 12
    for most in range(1, 8):
        counts.clear()
        moe_ops.warmup_step(counts.append, most)
        assert sorted(set(counts)) == [*range(1, most + 1)]
    counts.clear()
    moe_ops.warmup_step(counts.append, MOST, device="cpu")
    assert counts == []


def test_a_step_of_one_or_two_tokens_is_loaded_by_running(loaded, launched):
    moe_ops.warmup_step(STEPS["rows"], 1)
    assert launched
    assert not loaded


def test_equal_layers_are_planned_once(monkeypatch, launched):
    programs = []

    def load(self, program, dtypes):
        programs.append(program)
        return [None for _ in program.launches]

    monkeypatch.setattr(Loader, "load", load)
    moe_ops.warmup_step(STEPS["rows"], 8)
    once = len(programs)
    assert once == 8 * 2  # of two pairs
    moe_ops.warmup_step(lambda tokens: [STEPS["rows"](tokens) for _ in range(3)], 8)
    assert len(programs) == 2 * once


def test_bad_steps(loaded, launched):
    with pytest.raises(ValueError, match="max_tokens=0: expected at least 1"):
        moe_ops.warmup_step(STEPS["rows"], 0)

    def odd(tokens):
        for _ in range(tokens % 2 + 1):
            STEPS["rows"](tokens)

    message = "step(5) calls FusedMoe, FusedMoe and step(6) calls FusedMoe: expected the same operators"
    with pytest.raises(ValueError, match=re.escape(message)):
        moe_ops.warmup_step(odd, 6)

    def others(tokens):
        STEPS["views" if tokens % 2 else "alternating rows and a shared output"](tokens)

    message = "step(5) calls DenseGemm, FusedExperts and step(6) calls TopkRouting, FusedExperts: expected"
    with pytest.raises(ValueError, match=re.escape(message)):
        moe_ops.warmup_step(others, 6)


def test_another_form_from_the_last_count_on(loaded, launched):
    """As of quantised experts, whose weights are copied from some count on."""

    def step(tokens):
        STEPS["views" if tokens >= 12 else "rows"](tokens)

    moe_ops.warmup_step(step, 12)
    launched.clear()
    for tokens in range(1, 13):
        step(tokens)
    assert launched and launched <= loaded

    def odd(tokens):
        STEPS["views" if tokens % 2 else "rows"](tokens)

    with pytest.raises(
        ValueError, match=re.escape("step(10) calls FusedMoe and step(11) calls FusedExperts")
    ):
        moe_ops.warmup_step(odd, 12)


def test_each_variant_is_loaded_once(monkeypatch):
    loads = []
    monkeypatch.setattr(Loader, "_load", lambda self, launch, dtypes: loads.append(launch))
    loader = Loader(torch.device("cuda"))
    with watched() as seen:
        monkeypatch.setattr(_library, "call", lambda arguments: ON_A_GPU[type(arguments)](arguments))
        monkeypatch.setattr(Filled, "run", lambda self, tensors: (torch.zeros(1),))
        for tokens in (5, 6, 300):
            STEPS["rows"](tokens)
    for planned in seen:
        loader.load(planned.program(), planned.dtypes())
    first = len(loads)
    for planned in seen:
        loader.load(planned.program(), planned.dtypes())
    assert len(loads) == first
    assert (
        len({launch.kernel for launch in loads}) < first < sum(len(each.program().launches) for each in seen)
    )


@pytest.mark.parametrize(("step", "tokens", "told"), [(3, 8, "step=3"), (print, True, "max_tokens=True")])
def test_a_step_is_a_function_and_a_count_an_int(step, tokens, told):
    with pytest.raises(TypeError, match=f"{told}: expected"):
        moe_ops.warmup_step(step, tokens, device="cpu")
