"""ExpandFewSlots: layers of few slots on a CPU become ATen with the same values; all else is left to the next pass."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import inductor_passes
import moe_ops
from inductor_passes import _compat
from inductor_passes.lowerings import ExpandFewSlots
from inductor_passes.pipeline import PIPELINE, run_passes
from layers import FusedMoE, MoEBlock, MoEConfig, RouterConfig, SharedExpertConfig
from moe_ops import Activation, RoutingConfig, _compat as processor
from tests.cases import MORE_ACTIVATIONS, Case, make
from tests.helpers import assert_matches_oracle, assert_same, grads_of, mixed, usually
from tests.ops.test_values import oracle
from tests.passes.capture import rewrite

PASS = (ExpandFewSlots(),)
ACTIVATIONS = [
    *(Activation(name) for name in ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")),
    Activation("silu", limit=0.5),
    Activation("swiglu_oai", interleaved=True),
    *MORE_ACTIVATIONS,
]
MORE_SLOTS = [(21, 10, 1), (33, 4, 3), (64, 9, 8)]  # few where experts are small, not in float64
SIZES = [(1, 13, 3), (5, 4, 3), (16, 8, 1), (2, 8, 8), (1, 2, 1), (8, 4, 2), (20, 10, 1), (16, 32, 4)]


@torch.no_grad()
def compute(function, *tensors):
    """What the rewritten graph of `function` computes, in which no operator of ours is left."""
    left = []

    def rewrite_in_place(module, _):
        run_passes(module.graph, PASS)
        module.recompile()
        left.extend(str(node.target) for node in module.graph.nodes if str(node.target).startswith("moe."))

    torch._dynamo.reset()
    backend = _compat.post_grad_backend(rewrite_in_place)
    out = torch.compile(function, backend=backend, fullgraph=True)(*tensors)
    assert not left
    return out


def layer_of(problem, emit="fused"):
    """The layer as a function of its tensors, and these."""
    biases = {name: bias for name, bias in problem.biases().items() if bias is not None}

    def layer(hidden, logits, w13, w2, *rest):
        given = dict(zip(biases, rest, strict=True))
        return moe_ops.fused_moe(
            hidden, logits, w13, w2, problem.routing, problem.activation, emit=emit, **given
        )

    return layer, (problem.hidden_states, problem.router_logits, problem.w13, problem.w2, *biases.values())


@pytest.mark.parametrize(
    ("sizes", "bias", "dtype"),
    [
        *mixed(SIZES, (False, True), (torch.float64, torch.float32, torch.bfloat16, torch.float16), rounds=2),
        *mixed(MORE_SLOTS, (False, True), (torch.float32, torch.bfloat16, torch.float16)),
    ],
    ids=str,
)
def test_values(sizes, bias, dtype):
    problem = make(Case(*sizes, 9, 5, bias=bias), dtype)
    layer, tensors = layer_of(problem)
    weights, ids = moe_ops.topk_routing(problem.router_logits, problem.routing)
    assert_matches_oracle(compute(layer, *tensors), oracle(problem, weights, ids))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation):
    problem = make(Case(5, 4, 3, 8, 6, activation, bias=True))
    layer, tensors = layer_of(problem)
    weights, ids = moe_ops.topk_routing(problem.router_logits, problem.routing)
    assert_matches_oracle(compute(layer, *tensors), oracle(problem, weights, ids))


def experts_given(ids):
    generator = torch.Generator().manual_seed(1)
    shapes = ((ids.shape[0], 8), (3, 12, 8), (3, 8, 6), tuple(ids.shape))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("with_map", [False, True])
@pytest.mark.parametrize("with_shared", [False, True])
def test_ids_out_of_range_read_nothing(with_map, with_shared):
    """Neither a weight that is NaN nor a token's own."""
    ids = torch.tensor([[0, 7, -1], [2, 1, 1 << 40], [-5, 3, 9], [1, 2, 4]])
    hidden, w13, w2, weights = experts_given(ids)
    expert_map = torch.tensor([1, 2, 1, -1, 2], dtype=torch.int32) if with_map else None
    shared = torch.randn(4, 8, dtype=torch.float64) if with_shared else None
    w13[0], w2[0] = float("nan"), float("nan")  # an index that is clamped would read these
    ids = ids if with_map else ids.where(ids != 0, -3)
    extras = [tensor for tensor in (expert_map, shared) if tensor is not None]

    def run(hidden, w13, w2, weights, ids, *extras):
        given = dict(
            zip([n for n, t in (("expert_map", expert_map), ("shared", shared)) if t is not None], extras)
        )
        return moe_ops.fused_experts(hidden, w13, w2, weights, ids, emit="fused", **given)

    tensors = (hidden, w13, w2, weights, ids, *extras)
    expected = run(*tensors)
    assert expected.isfinite().all() and expected[2].any() == with_shared
    torch.testing.assert_close(compute(run, *tensors), expected)


def test_ids_of_one_token_out_of_range():
    hidden, w13, w2, weights = experts_given(torch.tensor([[3, 1, -1]]))
    w13[0], w2[0] = float("nan"), float("nan")  # what a dropped slot reads

    def run(hidden, w13, w2, weights, ids):
        return moe_ops.fused_experts(hidden, w13, w2, weights, ids, emit="fused")

    for ids in ([[3, 1, -1]], [[7, -1, 9]]):
        tensors = (hidden, w13, w2, weights, torch.tensor(ids))
        torch.testing.assert_close(compute(run, *tensors), run(*tensors))


def test_a_nan_token_stays_its_own():
    problem = make(Case(5, 4, 3, 8, 6))
    problem.hidden_states[2] = float("nan")
    layer, tensors = layer_of(problem)
    out = compute(layer, *tensors)
    assert out[2].isnan().all() and out[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize(
    ("sizes", "dynamic"),
    [
        ((9, 4, 2), False),
        ((17, 4, 1), False),
        ((21, 10, 1), False),
        ((13, 64, 5), False),
        ((0, 4, 2), False),
        ((4, 4, 2), True),
    ],
)
def test_more_slots_and_symbolic_ones_stay_an_operator(sizes, dynamic):
    layer, tensors = layer_of(make(Case(*sizes, 8, 6)))
    if dynamic:
        for tensor in tensors[:2]:
            torch._dynamo.mark_dynamic(tensor, 0)
    result = rewrite(layer, *tensors, passes=PASS)
    assert result.ops() == ["fused_moe"]
    assert not result.log.lowered and not result.log.kept


def stays(problem, monkeypatch, multiplies_bfloat16):
    """Whether the layer is an operator still, on a processor of that kind."""
    monkeypatch.setattr(processor, "has_bfloat16_products", lambda: multiplies_bfloat16)
    layer, tensors = layer_of(problem)
    return rewrite(layer, *tensors, passes=PASS).ops() == ["fused_moe"]


@pytest.mark.parametrize(
    ("dtype", "multiplies_bfloat16", "features"),
    [
        (torch.float32, False, (128, 128)),
        (torch.float32, True, (128, 128)),
        (torch.bfloat16, False, (128, 256)),
        (torch.bfloat16, True, (64, 128)),
        (torch.float16, False, (128, 256)),
        (torch.float16, True, (128, 128)),
    ],
    ids=str,
)
def test_small_layers_are_those_of_few_multiplications(dtype, multiplies_bfloat16, features, monkeypatch):
    """256 slots of two matrices reach the limit: 2 ** 23, 23, 24, 22, 24 and 23."""
    for slots, is_large in ((256, False), (257, True)):
        problem = make(Case(slots, 2, 1, *features, Activation("relu2")), dtype)
        assert stays(problem, monkeypatch, multiplies_bfloat16) == is_large, slots


@pytest.mark.parametrize("multiplies_bfloat16", [False, True])
def test_at_most_512_slots_are_few(multiplies_bfloat16, monkeypatch):
    for slots, is_many in ((512, False), (513, True)):
        problem = make(Case(slots, 2, 1, 4, 3), torch.float32)
        assert stays(problem, monkeypatch, multiplies_bfloat16) == is_many, slots


def test_both_halves_of_a_pair_are_multiplied(monkeypatch):
    """With one of them, 256 slots of 128 x 96 would be below the limit."""
    monkeypatch.setattr(processor, "has_bfloat16_products", lambda: True)
    hidden, gate, w2 = torch.randn(256, 128), torch.randn(2, 96, 128), torch.randn(2, 128, 96)
    weights, ids = torch.rand(256, 1), torch.randint(2, (256, 1))

    def layer(hidden, gate, up, w2, weights, ids):
        return moe_ops.fused_experts(hidden, (gate, up), w2, weights, ids, emit="fused")

    result = rewrite(layer, hidden, gate, gate.clone(), w2, weights, ids, passes=PASS)
    assert result.ops() == ["fused_experts"]


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_transposed_weights_stay_an_operator(name):
    """Their rows are not read in order."""
    problem = make(Case(2, 4, 2, 8, 6))
    setattr(problem, name, getattr(problem, name).mT.contiguous().mT)
    layer, tensors = layer_of(problem)
    result = rewrite(layer, *tensors, passes=PASS)
    assert result.ops() == ["fused_moe"] and not result.log.lowered


@pytest.mark.parametrize("emit", usually(["stages", "fused"], ["stages"]))
def test_training_graphs(emit):
    layer, tensors = layer_of(make(Case(2, 4, 2, 8, 6), torch.float64, requires_grad=True), emit)
    compiled = torch.compile(layer, fullgraph=True, options=inductor_passes.options())
    torch.testing.assert_close(compiled(*tensors), layer(*tensors))
    expected = grads_of(lambda: layer(*tensors), tensors)
    assert_same(grads_of(lambda: compiled(*tensors), tensors), expected, 1e-12)


def test_a_second_run_finds_nothing():
    layer, tensors = layer_of(make(Case(2, 4, 2, 8, 6)))
    result = rewrite(layer, *tensors, passes=PIPELINE)
    assert [fusion.kind for fusion in result.log.lowered] == ["ATen"]
    before = result.after
    assert not run_passes(result.graph, PIPELINE).lowered and result.after == before


@torch.no_grad()
def test_generated_code_calls_no_operator_and_copies_no_weight():
    module = MoEBlock(
        MoEConfig(
            16, 4, 64, 32, RoutingConfig(4, "sigmoid"), router=RouterConfig(has_correction_bias=True),
            shared_experts=SharedExpertConfig(48, "sigmoid"),
        )
    )  # fmt: skip
    torch.nn.init.normal_(module.experts.e_score_correction_bias)
    hidden = torch.randn(4, 64)
    compiled = torch.compile(module, fullgraph=True, options=inductor_passes.options())
    out, (code,) = run_and_get_code(compiled, hidden)
    torch.testing.assert_close(out, module(hidden))
    assert "torch.ops.moe" not in code
    sizes = [eval(size) for size in re.findall(r"empty_strided_cpu\((\([^)]*\))", code)]
    numbers = [torch.Size(size).numel() for size in sizes]
    assert (
        numbers and max(numbers) <= 4 * 4 * 64
    )  # slots x hidden size; a slot's own weights are 64 x 64 and more
    assert 4 * 4 * 32 in numbers, "the gate is computed once, not for every row that reads it"


@torch.no_grad()
def test_layers_of_few_slots_share_their_code():
    modules = [FusedMoE(MoEConfig(8, 2, 16, 24)) for _ in range(3)]
    hidden, logits = torch.randn(4, 16), torch.randn(4, 8)

    def model(hidden, logits):
        for module in modules:
            hidden = hidden + module(hidden, logits)
        return hidden

    compiled = torch.compile(model, fullgraph=True, options=inductor_passes.options())
    torch.testing.assert_close(compiled(hidden, logits), model(hidden, logits))
