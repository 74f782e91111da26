"""What Dynamo sees of a layer is one call; behind AOTAutograd it is the operators of its stages."""

import sys
import warnings

import pytest
import torch
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.testing import AotEagerAndRecordGraphs, EagerAndRecordGraphs
from torch._subclasses import FakeTensorMode

import moe_ops
from layers import MoEBlock, MoEConfig
from moe_ops import RoutingConfig
from tests.helpers import assert_matches_oracle, assert_same, grads_of
from tests.ops.samples import samples

OPS = torch.ops.moe
TOP2 = RoutingConfig(top_k=2)
STAGES = ["build_dispatch", "permute", "grouped_gemm", "gated_activation", "grouped_gemm", "combine"]
HALVES = ["build_dispatch", "gather_gemm", "act_gemm_combine"]


def tensors():
    generator = torch.Generator().manual_seed(3)
    shapes = (7, 8), (7, 5), (5, 12, 8), (5, 8, 6)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def layer(x, logits, w13, w2, emit="auto"):
    return moe_ops.fused_moe(x, logits, w13, w2, TOP2, emit=emit)


def experts(x, logits, w13, w2, emit="auto"):
    weights, ids = logits.topk(2)
    return moe_ops.fused_experts(x, w13, w2, weights, ids, emit=emit)


def called(graph_module):
    """Operators of ours that a graph calls."""
    targets = (node.target for node in graph_module.graph.nodes if node.op == "call_function")
    return [str(target).removeprefix("moe.") for target in targets if str(target).startswith("moe.")]


def compiled(function, *args):
    """What it gives, and our operators in Dynamo's graph and in that of AOTAutograd."""
    torch._dynamo.reset()
    before, behind = EagerAndRecordGraphs(), AotEagerAndRecordGraphs()
    torch.compile(function, backend=before, fullgraph=True)(*args)
    torch._dynamo.reset()
    out = torch.compile(function, backend=behind, fullgraph=True)(*args)
    return out, called(before.graphs[0]), called(behind.fw_graphs[0])


@pytest.mark.parametrize(
    ("function", "routes"), [(layer, ["topk_routing"]), (experts, [])], ids=["moe", "experts"]
)
@pytest.mark.parametrize(
    ("emit", "trains", "overload"),
    [
        ("auto", False, "stages"), ("auto", True, "halves"), ("stages", True, "stages"), ("halves", False, "halves"),
    ],
)  # fmt: skip
def test_a_layer_is_one_call_for_dynamo(function, routes, emit, trains, overload):
    given = [each.requires_grad_(trains) for each in tensors()]

    def run(*args):
        return function(*args, emit=emit)

    out, before, behind = compiled(run, *given)
    assert before == [f"{'fused_moe' if routes else 'fused_experts'}.{overload}"]
    stages = HALVES if overload == "halves" else STAGES
    assert behind == [f"{name}.default" for name in (*routes, *stages)]
    assert_matches_oracle(out, function(*given, emit="fused"))
    if trains:
        runs = (lambda: run_compiled(*given)), (lambda: function(*given))
        run_compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        assert_same(*(grads_of(each, given) for each in runs))


@pytest.mark.parametrize("emit", ["auto", "stages", "halves"])
def test_in_vmap_nothing_is_a_loop(emit):
    """PyTorch would call an operator made of others once for each of a batch, and warn."""
    x, logits, w13, w2 = tensors()
    xs, batch = torch.stack((x, x + 1, x * 2)), logits.expand(3, -1, -1)

    def function(xs):
        return torch.vmap(lambda x, logits: layer(x, logits, w13, w2, emit))(xs, batch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, before, _ = compiled(function, xs)
    assert not {"fused_moe.stages", "fused_moe.halves"} & {*before}
    assert_matches_oracle(out, torch.stack([layer(x, logits, w13, w2) for x in xs]))


def test_an_exported_program_names_stages_only():
    class Layer(torch.nn.Module):
        def forward(self, *args):
            return layer(*args)

    for strict in (False, True):
        program = torch.export.export(Layer(), tuple(tensors()), strict=strict)
        assert called(program.graph_module) == [f"{name}.default" for name in ("topk_routing", *STAGES)]


@pytest.mark.parametrize("name", ["fused_moe", "fused_experts"])
@pytest.mark.parametrize("overload", ["stages", "halves"])
def test_called_directly(name, overload):
    """It computes what the operator does, with its gradients, and has its schema."""
    default, expansion = getattr(OPS, name).default, getattr(getattr(OPS, name), overload)
    assert str(expansion._schema).replace(f".{overload}", "") == str(default._schema)
    for args in samples()[name]:
        given = [each.detach().double() if is_floating(each) else each for each in args]
        out, expected = expansion(*given), default(*given)
        assert_matches_oracle(out, expected)
        arguments = zip(given, default._schema.arguments, strict=True)
        inputs = [
            each for each, argument in arguments if is_floating(each) and argument.name != "correction_bias"
        ]
        for each in inputs:
            each.requires_grad_()
        assert_same(*(grads_of(lambda op=op, given=given: op(*given), inputs) for op in (expansion, default)))
        checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        assert set(torch.library.opcheck(expansion, given, test_utils=checks).values()) == {"SUCCESS"}


def is_floating(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("emit", ["auto", "halves"])
def test_errors_are_in_the_callers_names(emit, dynamic):
    """Of sizes that are symbols as well, which the operators' own checks would not take for another number."""
    x, logits, w13, w2 = tensors()
    w2 = w2[..., 1:]
    for size in range(3) if dynamic else ():
        torch._dynamo.mark_dynamic(w2, size)
    with pytest.raises(
        torch._dynamo.exc.TorchRuntimeError, match=r"ValueError: w2 has shape .*: expected \[5, 8, 6\]"
    ):
        torch.compile(layer, backend="eager", fullgraph=True)(x, logits, w13, w2, emit)


def test_nothing_compiles_where_it_runs(monkeypatch):
    """As a graph does whose backend only calls it: other threads would be told that they compile."""
    module, given, nothing, told = sys.modules["moe_ops.fused_experts"], tensors(), [None] * 6, []

    def product(rows, *others, of=module.product):
        told.append(torch.compiler.is_compiling())
        return of(rows, *others)

    run = torch.compile(layer, backend="eager")
    assert_matches_oracle(run(*given), layer(*given))
    monkeypatch.setattr(module, "product", product)
    for call in (run, lambda *given: OPS.fused_moe.stages(*given, *nothing, TOP2.spec, "silu")):
        assert_matches_oracle(call(*given), layer(*given))
    assert told == [False] * 4
    with FakeTensorMode(allow_non_fake_inputs=True):
        call(*given)
    assert told == [False] * 4 + [True] * 2 and not torch.compiler.is_compiling()


def test_tracing_a_block_is_little_work(monkeypatch):
    """Stages one by one were 3800 instructions of Python for a block."""
    steps = 0

    def step(self, original=InstructionTranslatorBase.step):
        nonlocal steps
        steps += 1
        return original(self)

    blocks = torch.nn.Sequential(*[MoEBlock(MoEConfig(8, 2, 32, 16)) for _ in range(3)]).eval()
    x = torch.randn(16, 32)
    with torch.no_grad():
        torch.compile(blocks, backend="eager", fullgraph=True)(x)
        monkeypatch.setattr(InstructionTranslatorBase, "step", step)
        torch._dynamo.reset()
        torch.compile(blocks, backend="eager", fullgraph=True)(x)
    assert 0 < steps <= 3 * 1300
