"""Kernels around a captured gate: values of every operation, every layout, and what they are compiled to."""

import pytest
import torch
import triton

from moe_ops.formula import OPERATIONS, Formula
from moe_ops.kernels import formula as device
from moe_ops.kernels.formula import source, with_formula
from moe_ops.kernels.gemm_generic import grouped_gemm_generic_kernel
from tests.helpers import mixed
from tests.kernels import aot
from tests.kernels.by_name import launch, program_of

SWIGLU = "t0=sigmoid(gate)|t1=mul(gate,t0)|t2=mul(t1,up)"
SIZES = {"decode": (3, 41, 3, 48, 40), "grouped": (33, 5, 2, 40, 24)}  # T, E, K, H, I


def _tensors(size, layout, dtype=torch.float32):
    tokens, num_experts, top_k, hidden, features = SIZES[size]
    rows = features if layout == "ungated" else 2 * features
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    ids = torch.rand(tokens, num_experts, generator=generator).argsort(-1)[:, :top_k].int()
    ids[0, 0] = -1
    return {
        "hidden_states": normal(tokens, hidden),
        "w13": normal(num_experts, rows, hidden) / hidden**0.5,
        "w2": normal(num_experts, hidden, features) / features**0.5,
        "topk_weights": torch.rand(tokens, top_k, generator=generator),
        "topk_ids": ids,
        "operand0": normal(num_experts, 2 * features),
        "operand1": normal(num_experts),
        "operand2": normal(features),
        "operand3": normal(),
    }


def _oracle(given, layout):
    """Slot by slot in float64: tanh(g) * u * second half of operand0 + operand1, at most operand2, less operand3."""
    x, w13, w2, weights, a, b, c, d = (
        given[name].double().cpu()
        for name in (
            "hidden_states",
            "w13",
            "w2",
            "topk_weights",
            "operand0",
            "operand1",
            "operand2",
            "operand3",
        )
    )
    out = torch.zeros_like(x)
    for token, ids in enumerate(given["topk_ids"].tolist()):
        for k, expert in enumerate(ids):
            if expert < 0:
                continue
            product = w13[expert] @ x[token]
            gate, up = (product, product) if layout == "ungated" else product.chunk(2)
            if layout == "interleaved":
                gate, up = product[::2], product[1::2]
            value = torch.minimum(gate.tanh() * up * a[expert].chunk(2)[1] + b[expert], c) - d
            out[token] += weights[token, k] * (w2[expert] @ value)
    return out


def _spec(size, layout):
    features = SIZES[size][4]
    operands = f"a0=expert*{2 * features}+{features}+column*1|a1=expert*1+0+column*0|a2=expert*0+0+column*1"
    up = "gate" if layout == "ungated" else "up"
    steps = f"t0=tanh(gate)|t1=mul(t0,{up})|t2=mul(t1,a0)|t3=add(t2,a1)|t4=minimum(t3,a2)|t5=sub(t4,a3)"
    return f"{layout}|{operands}|a3=expert*0+0+column*0|{steps}|t5"


def _first_kernel(given, size, layout):
    program = program_of("fused_experts_formula", **given, formula=_spec(size, layout))
    return program.launches[0].kernel.__name__


@pytest.mark.parametrize("layout", ["halves", "interleaved", "ungated"])
@pytest.mark.parametrize("size", SIZES)
def test_operands_of_every_kind_in_every_layout(size, layout, device):
    given = {name: tensor.to(device) for name, tensor in _tensors(size, layout).items()}
    assert _first_kernel(given, size, layout).startswith("gemv_activation") == (size == "decode")
    out = launch("fused_experts_formula", **given, formula=_spec(size, layout)).cpu()
    error = (out.double() - _oracle(given, layout)).abs().max()
    assert error <= 2e-5


@pytest.mark.parametrize("size", SIZES)
def test_the_first_half_alone_and_transposed_weights(size, device):
    given = {name: tensor.to(device) for name, tensor in _tensors(size, "halves").items()}
    given["w13"] = given["w13"].transpose(1, 2).contiguous().transpose(1, 2)
    assert _first_kernel(given, size, "halves").startswith("gemv_columns") == (size == "decode")
    out = launch("fused_experts_formula", **given, formula=_spec(size, "halves")).cpu()
    assert (out.double() - _oracle(given, "halves")).abs().max() <= 2e-5


@pytest.mark.parametrize("size", SIZES)
def test_no_step_at_all(size, device):
    """Two products with nothing between, as in LoRA."""
    given = {
        name: tensor.to(device) for name, tensor in _tensors(size, "ungated").items() if name[:2] != "op"
    }
    out = launch("fused_experts_formula", **given, formula="ungated|gate").cpu()
    x, w1, w2, weights = (given[n].double().cpu() for n in ("hidden_states", "w13", "w2", "topk_weights"))
    ids = given["topk_ids"].long().cpu()
    rows = torch.einsum("tkih,th->tki", w1[ids], x)
    each = torch.einsum("tkhi,tki->tkh", w2[ids], rows) * (weights * (ids >= 0)).unsqueeze(-1)
    assert (out.double() - each.sum(1)).abs().max() <= 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["tma", "generic"])
def test_rows_of_no_expert_are_zeros_whatever_the_formula_makes_of_zeros(dtype, device):
    given = {
        "hidden_states": torch.zeros(5, 32, dtype=dtype, device=device),
        "w13": torch.ones(2, 16, 32, dtype=dtype, device=device),
        "sorted_slots": torch.arange(5, dtype=torch.int32, device=device),
        "expert_offsets": torch.tensor([0, 2, 3], dtype=torch.int32, device=device),
    }
    out = launch("gather_gemm_formula", **given, formula="halves|t0=exp(gate)|t0").cpu()
    assert torch.equal(out[:3], torch.ones(3, 8, dtype=dtype))
    assert torch.equal(out[3:], torch.zeros(2, 8, dtype=dtype))


_VALUES = torch.tensor(
    [-90.0, -20.0, -3.0, -1.0, -0.3, -1e-4, -1e-9, 0.0, 1e-9, 1e-4, 0.3, 1.0, 3.0, 20.0, 90.0, float("nan")]
)


@pytest.mark.parametrize(("operation", "dtype"), mixed(OPERATIONS, (torch.float32, torch.float64)), ids=str)
def test_every_operation(operation, dtype, device):
    """x runs through all pairs of values: gate and up are columns of a product with single ones."""
    count, compute = OPERATIONS[operation]
    gate, up = (each.flatten() for each in torch.meshgrid(_VALUES, _VALUES, indexing="ij"))
    steps, last = (
        [],
        {"number": ("t0",), "where": ("t0", "gate", "up")}.get(operation, ("gate", "up")[:count]),
    )
    if operation in ("where", "number"):
        steps = [("gt", ("gate", "0.5"))]
    if operation.startswith("logical"):
        steps = [("gt", ("gate", "0.5")), ("gt", ("up", "0.1"))]
        last = ("t0", "t1")[:count]
    steps.append((operation, last))
    if compute in (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge) or operation.startswith(
        "logical"
    ):
        steps.append(("number", (f"t{len(steps) - 1}",)))
    formula = Formula("halves", (), tuple(steps), f"t{len(steps) - 1}")
    got = _columns(formula, gate, up, dtype, device)
    expected = formula(gate.double(), up.double(), ())
    finite = expected.float().isfinite()
    assert torch.equal(got.isnan(), expected.float().isnan())
    assert torch.equal(got[~finite].nan_to_num(), expected[~finite].to(dtype).nan_to_num())
    relative, absolute = (1e-5, 1e-30) if dtype == torch.float32 else (1e-12, 1e-15)
    bound = relative * expected.abs() + absolute
    assert ((got.double() - expected).abs() <= bound)[finite].all()


def _columns(formula, gate, up, dtype, device):
    """The gate of [N] values, from the kernel of the first half: one token, one expert, a product with 1."""
    w13 = torch.cat((gate, up))[None, :, None].to(dtype)
    offsets, slots = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    given = {"hidden_states": torch.ones(1, 1, dtype=dtype), "w13": w13, "sorted_slots": slots}
    given = {name: tensor.to(device) for name, tensor in {**given, "expert_offsets": offsets}.items()}
    return launch("gather_gemm_formula", **given, formula=formula.spec)[0].cpu()


def test_numbers_that_float32_has_not(device):
    formula = Formula("halves", (), (("add", ("gate", "0.1")), ("maximum", ("t0", "-inf"))), "t1")
    assert _columns(formula, torch.zeros(1), torch.zeros(1), torch.float64, device).item() == 0.1


def test_source_and_kernels_are_those_of_the_text_alone():
    one, same, other = (
        Formula.from_spec(f"halves|{SWIGLU}|{end}")
        for end in ("t3=mul(t2,2.0)|t3", "t3=mul(t2,2.0)|t3", "t2")
    )
    assert source(one) == source(same) != source(other)
    kernel = with_formula(grouped_gemm_generic_kernel, one)
    assert kernel is with_formula(grouped_gemm_generic_kernel, same)
    assert kernel is not with_formula(grouped_gemm_generic_kernel, other)
    assert grouped_gemm_generic_kernel is with_formula(grouped_gemm_generic_kernel, None)


needs_compiler = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")


@needs_compiler
def test_the_key_of_a_compiled_kernel_covers_its_formula():
    kernels = [
        with_formula(grouped_gemm_generic_kernel, Formula.from_spec(f"halves|{SWIGLU}|t3=mul(t2,{scale})|t3"))
        for scale in (2.0, 3.0)
    ]
    assert len({kernel.cache_key for kernel in (*kernels, grouped_gemm_generic_kernel)}) == 3
    assert [p.do_not_specialize for p in kernels[0].params] == [
        p.do_not_specialize for p in grouped_gemm_generic_kernel.params
    ]


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 4096])
def test_compiles_for_an_h200_without_spilling(tokens):
    experts, top_k, hidden, features = 128, 8, 2048, 768

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    given = {
        "hidden_states": meta(tokens, hidden),
        "w13": meta(experts, 2 * features, hidden),
        "w2": meta(experts, hidden, features),
        "topk_weights": meta(tokens, top_k, dtype=torch.float32),
        "topk_ids": meta(tokens, top_k, dtype=torch.int32),
        "operand0": meta(experts, features),
    }
    spec = f"halves|a0=expert*{features}+0+column*1|{SWIGLU}|t3=mul(t2,a0)|t4=erf(t3)|t4"
    program = program_of("fused_experts_formula", **given, formula=spec)
    dtypes = {name: tensor.dtype for name, tensor in given.items()} | {
        b.name: b.dtype for b in program.buffers
    }
    (first,) = [each for each in program.launches if each.args.get("NAME") == "formula"]
    compiled = aot.compile_launch(first, dtypes)
    assert compiled.misfit(aot.H200) is None
    assert "grouped_gemm_tma" in compiled.name or "gemv" in compiled.name
    assert "math.erf" in compiled.ttir


def test_there_is_a_device_function_for_every_operation():
    assert device._TRITON.keys() == OPERATIONS.keys()
