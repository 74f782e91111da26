"""Operators as the compiler sees them: opcheck on every one, tags, single registration, cache key."""

import itertools

import pytest
import torch

import moe_ops
from tests.forked import run_python
from tests.helpers import usually
from tests.ops.samples import LAYOUTS, empty_samples, laid_out, samples

OPS = torch.ops.moe


def all_operators():
    names = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name[:5] == "moe::"
    }
    return sorted(names)


@pytest.mark.parametrize("name", all_operators())
@pytest.mark.parametrize(
    ("layout", "dtype"),
    usually(itertools.product(LAYOUTS, [torch.float32, torch.bfloat16]), [("dense", torch.float32)]),
)
def test_opcheck(name, layout, dtype):
    for args in samples()[name]:
        result = torch.library.opcheck(getattr(OPS, name).default, laid_out(args, layout, dtype))
        assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", all_operators())
def test_schema_and_fake_of_other_layouts(name):
    """Half of what opcheck looks at: whether autograd and AOTAutograd take an operator is not a matter of strides."""
    for args in samples()[name]:
        given = laid_out(args, "strided", torch.bfloat16)
        checks = ("test_schema", "test_faketensor")
        result = torch.library.opcheck(getattr(OPS, name).default, given, test_utils=checks)
        assert set(result.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", all_operators())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_real_and_fake_outputs_agree(name, layout):
    """In shape, dtype and strides, whatever the layout of the inputs; torch 2.11's opcheck does not look at strides."""
    for args in samples()[name]:
        given = laid_out(args, layout, torch.float32)
        outputs = getattr(OPS, name).default(*given)
        fakes = getattr(OPS, name).default(
            *(a.to("meta") if isinstance(a, torch.Tensor) else a for a in given)
        )
        pairs = zip(*(out if isinstance(out, tuple) else (out,) for out in (outputs, fakes)), strict=True)
        for out, fake in pairs:
            assert (out.shape, out.dtype, out.stride()) == (fake.shape, fake.dtype, fake.stride())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["grouped_gemm", "grouped_gemm_weight_backward"])
def test_what_compiled_code_calls_computes_the_same(name, layout, dtype):
    """And its fake has the strides of the real one; it has no gradient, for there is nothing left to differentiate."""
    default, compiled = getattr(OPS, name).default, getattr(OPS, name).compiled
    assert str(compiled._schema).removeprefix(f"moe::{name}.compiled") == str(default._schema).removeprefix(
        f"moe::{name}"
    )
    assert compiled.tags == default.tags
    for args in samples()[name]:
        given = [
            arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in laid_out(args, layout, dtype)
        ]
        out = compiled(*given)
        assert torch.equal(out, default(*given))
        fake = compiled(*(arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in given))
        assert (out.shape, out.dtype, out.stride()) == (fake.shape, fake.dtype, fake.stride())
        checks = ("test_schema", "test_faketensor")
        assert set(torch.library.opcheck(compiled, given, test_utils=checks).values()) == {"SUCCESS"}


KEPT_IN_FLOAT32 = {"router_logits", "correction_bias", "topk_weights", "grad_weights"}


@pytest.mark.parametrize("name", all_operators())
def test_real_and_fake_dtypes_agree_in_a_mixed_model(name):
    """bfloat16 with float32 routing or without: each output has the dtype of the right input."""
    op = getattr(OPS, name).default
    for args, kept in itertools.product(samples()[name], (KEPT_IN_FLOAT32, ())):
        given = [
            arg.detach().bfloat16() if is_cast(arg) and argument.name not in kept else arg
            for arg, argument in zip(args, op._schema.arguments, strict=True)
        ]
        outputs = op(*given), op(*(arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in given))
        real, fake = ([each.dtype for each in (out if isinstance(out, tuple) else (out,))] for out in outputs)
        assert real == fake


def is_cast(arg):
    return isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.itemsize > 1


@pytest.mark.parametrize("name", all_operators())
def test_schema_is_small_functional_and_tagged(name):
    """But for the load that is recorded. Two kinds of experts have weights twice, a captured gate has tensors; what
    sums over experts has a gate and a residual; a pair of weights has its up half and the bias of that; weights of 8
    bits have scales and sizes of blocks, a word for the rows they multiply, and scales of these; integers of 4 bits
    have zero points, NVFP4 global scales.
    """
    op = getattr(OPS, name).default
    more = 4 if name.endswith("_formula") or name == "fused_experts_with_shared" else 0
    names = {each.name for each in op._schema.arguments}
    more += 2 * ("residual" in names) + 2 * bool({"up", "w13_up"} & names) + 7 * ("w13_scale" in names)
    beside = ("zero", "global_scale", "input_scale")
    more += len({f"{weight}{each}" for each in beside for weight in ("", "w13_", "w2_")} & names)
    assert len(op._schema.arguments) <= 10 + more
    changed = [each.name for each in op._schema.arguments if each.alias_info is not None]
    assert changed == (["load"] if name in ("map_and_record", "route_and_record") else [])
    assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= set(op.tags)


@pytest.mark.parametrize("name", all_operators())
def test_every_operator_has_an_autograd_kernel(name):
    for key in ("AutogradCPU", "AutogradCUDA"):
        kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"moe::{name}", key)
        assert kernel
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"moe::{name}", "Autograd")


_FILLED = ("plan_exchange", "push_rows")  # tokens of rows, ids of rows


@pytest.mark.parametrize("name", all_operators())
def test_no_tokens(name):
    """T = 0 works in the implementation and in the fake; what does not shrink with T is zero, or -1 for nothing."""
    args = empty_samples()[name]
    outputs = getattr(OPS, name).default(*args)
    fakes = getattr(OPS, name).default(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args))
    pairs = zip(*(out if isinstance(out, tuple) else (out,) for out in (outputs, fakes)), strict=True)
    for out, fake in pairs:
        assert out.shape == fake.shape
        assert (
            out == (-1 if name in _FILLED and out.dim() == 2 and not out.is_floating_point() else 0)
        ).all()


def test_registering_twice_raises(tmp_path):
    code = f"""
import importlib.util, sys, moe_ops
spec = importlib.util.spec_from_file_location("again.permute", {moe_ops.__path__[0]!r} + "/permute.py")
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
    result = run_python(code)
    assert result.returncode != 0
    assert "moe::permute is already registered" in result.stderr


def test_cache_key_tag_keeps_the_users():
    code = """
import torch
torch.compiler.config.cache_key_tag = "mine"
import moe_ops
print(torch.compiler.config.cache_key_tag, moe_ops.source_hash())
"""
    result = run_python(code)
    tag, source_hash = result.stdout.split()
    assert tag == f"mine+moe-{source_hash}"


def test_cache_key_tag_survives_one_set_later():
    """Checked before the key of a compile is made, and again for the next compile."""
    code = """
import torch, moe_ops
layer = lambda x: moe_ops.gated_activation(x, "silu")
for tag in ("mine", "other"):
    torch.compiler.config.cache_key_tag = tag
    torch._dynamo.reset()
    torch.compile(layer, backend="aot_eager")(torch.randn(3, 4))
    print(torch.compiler.config.cache_key_tag)
print(moe_ops.source_hash())
"""
    result = run_python(code)
    *tags, source_hash = result.stdout.split()
    assert tags == [f"mine+moe-{source_hash}", f"other+moe-{source_hash}"]


def test_modes_see_calls_with_gradients_on():
    """A mode may compute what it likes in the place of an operator that records nothing itself."""
    factor, seen = torch.ones((), requires_grad=True), []

    class Scaled(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function is OPS.permute.default:
                seen.append(result * factor)
            return result

    with Scaled():
        moe_ops.permute(torch.ones(2, 4), torch.tensor([1, 0], dtype=torch.int32))
    assert [each.requires_grad for each in seen] == [True]


def test_an_import_runs_no_backward():
    """It would start autograd's threads, one for each GPU, after which a process cannot fork."""
    engine = "torch.autograd.Variable._execution_engine"
    code = f"import torch; {engine} = type('Engine', (), {{}})(); import moe_ops, layers, inductor_passes"
    done = run_python(code)
    assert done.returncode == 0, done.stderr
