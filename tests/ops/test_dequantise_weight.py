"""Quantised weights in a wider dtype, and products and layers that are made of such copies."""

import pytest
import torch

import moe_ops
from moe_ops import ScaledWeight, _library, records, scaled, scaled_experts, slabs, weight_copies
from moe_ops.arguments import Epilogue
from moe_ops.kernels import scaled as kernels
from moe_ops.scaled_arguments import ScaledFusedExperts, ScaledGroupedGemm
from moe_ops.types import Activation
from moe_ops.values import Placement
from moe_ops.weight_formats import quantised_weight
from tests.helpers import assert_matches_oracle, assert_same, grads_of, relative_error
from tests.kernels import test_scaled_integers, test_scaled_nvfp4, test_scaled_pairs

E, A, I, T, K = 13, 64, 32, 33, 3
FORMATS = {"float8": (torch.float8_e4m3fn, (16, 16)), "int8": (torch.int8, (1, 64)), "MXFP4": (torch.uint8, (1, 32)),
           "NVFP4": (torch.float4_e2m1fn_x2, (1, 16)), "int4": (torch.uint4, (1, 32)),
           "int4 from zeros": (torch.uint4, (1, 32))}  # fmt: skip


def quantised(name, rows, columns, dtype=torch.float32):
    stored, (height, width) = FORMATS[name]
    weight, has_zeros = torch.randn(E, rows, columns, dtype=dtype) / 8, name.endswith("zeros")
    weight = weight + 0.05 if has_zeros else weight
    return quantised_weight(weight, (height, min(width, columns)), stored, has_zeros)


def linear(weight, bias=None):
    return scaled.scaled_linear("weight", weight, bias)


def meant(weight):
    """[E, B, A] in float64, by another way than the library's."""
    if weight.weight.dtype == torch.uint8:
        if weight.scale.dtype == torch.uint8:
            return test_scaled_pairs.dense(weight.weight, weight.scale, weight.block)
        if weight.global_scale is not None:
            return test_scaled_nvfp4.dense(weight.weight, weight.scale, weight.block, weight.global_scale)
        return test_scaled_integers.dense(weight.weight, weight.scale, weight.block, weight.zero)
    rows, columns = weight.block
    scale = weight.scale.double().repeat_interleave(rows, 1).repeat_interleave(columns, 2)
    return weight.weight.double() * scale[:, : weight.weight.shape[1], : weight.weight.shape[2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_what_weights_stand_for(name, dtype, is_compiled):
    weight = quantised(name, 48, A)
    call = (
        torch.compile(moe_ops.dequantise_weight, fullgraph=True) if is_compiled else moe_ops.dequantise_weight
    )
    found = call(weight, dtype)
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), meant(weight), rtol=torch.finfo(dtype).eps, atol=0)


def test_in_bfloat16_unless_said():
    assert moe_ops.dequantise_weight(quantised("int8", 8, A)).dtype == torch.bfloat16


def test_quantised_weights_are_equal_to_themselves_alone():
    """Compared by their tensors, they could not be looked for in a list."""
    one, other = quantised("int8", 8, A), quantised("int8", 8, A)
    assert one in [other, one] and one != other


def test_scales_have_no_gradient():
    """It is a constant, as in products."""
    weight = quantised("float8", 16, A)
    assert not moe_ops.dequantise_weight(
        ScaledWeight(weight.weight, weight.scale.requires_grad_(), weight.block)
    ).requires_grad


WHOLE, SCALE = torch.ones(2, 3, 4).to(torch.int8), torch.rand(2, 3, 1)
REFUSED = {
    "a tensor": (torch.randn(2, 3, 4), torch.bfloat16, TypeError, "expected a ScaledWeight"),
    "another dtype": (
        ScaledWeight(torch.randn(2, 3, 4), SCALE), torch.bfloat16, TypeError,
        "weight has dtype torch.float32: expected torch.float8",
    ),
    "a narrow dtype": (
        ScaledWeight(WHOLE, SCALE), torch.int8, TypeError, "dtype=torch.int8: expected a floating point dtype",
    ),
    "no dtype": (ScaledWeight(WHOLE, SCALE), 16, TypeError, "dtype=16: expected a torch.dtype"),
    "blocks": (
        ScaledWeight(WHOLE, SCALE, (1, 2)), torch.bfloat16, ValueError,
        r"scale has shape \[2, 3, 1\]: expected \[2, 3, 2\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    weight, dtype, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        moe_ops.dequantise_weight(weight, dtype)


def layer_of(name, dtype, **changed):
    """Arguments of a layer with exact rows, a bias, dropped slots, an expert that is elsewhere, and shared outputs."""
    experts = torch.arange(E, dtype=torch.int32)
    given = {
        "hidden_states": torch.randn(T, A, dtype=dtype),
        "w13": linear(quantised(name, 2 * I, A, dtype), torch.randn(E, 2 * I, dtype=dtype)),
        "w2": linear(quantised(name, A, I, dtype), None),
        "topk_weights": torch.rand(T, K, dtype=dtype),
        "topk_ids": torch.randint(-1, E, (T, K), dtype=torch.int32),
        "placement": Placement(experts.where(experts != 3, -1)),
        "shared": torch.randn(T, A, dtype=dtype),
        "activation": Activation("swiglu_oai", interleaved=True).spec,
        "epilogue": Epilogue(),
        "rows": "exact",
    }
    return ScaledFusedExperts(**given | changed)


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_of_copies(name):
    """Is that of its stages."""
    args = layer_of(name, torch.float64)
    assert_matches_oracle(scaled_experts._of_copies(args), scaled_experts.run_stages(args))


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_of_a_copy(name, gathers):
    args = layer_of(name, torch.float64)
    slots, _, offsets = moe_ops.build_dispatch(args.topk_ids, E)
    x = args.hidden_states if gathers else moe_ops.permute(args.hidden_states, slots)
    bias = None if gathers else args.w13.bias.float()
    product = ScaledGroupedGemm(
        x, None, args.w13._replace(bias=bias), offsets, slots if gathers else None, x.dtype
    )
    assert_matches_oracle(scaled._copied(product), scaled._reference(product))


@pytest.fixture
def copied_from_few_rows(monkeypatch):
    monkeypatch.setattr(kernels, "_COPIED_ROWS", {1: 4, 2: 4})
    monkeypatch.setattr(kernels, "_ROWS_OF_SLABS", {1: 4, 2: 4})
    _library.forget_launches()
    yield
    _library.forget_launches()


def _moved(args):
    return records.transform(lambda leaf: leaf.cuda() if isinstance(leaf, torch.Tensor) else leaf, args)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 200])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("copied_from_few_rows")
def test_many_rows_are_multiplied_with_copies(name, tokens, monkeypatch):
    """From so many rows an expert on; fewer are not."""
    ids = torch.randint(-1, E, (tokens, K), dtype=torch.int32)
    args = layer_of(
        name, torch.bfloat16, hidden_states=torch.randn(tokens, A).bfloat16(), topk_ids=ids,
        topk_weights=torch.rand(tokens, K), shared=torch.randn(tokens, A).bfloat16(),
    )  # fmt: skip
    called = []
    copied = weight_copies.copied
    monkeypatch.setattr(weight_copies, "copied", lambda *args: called.append(args) or copied(*args))
    found = [_library.call(_moved(args)) for _ in range(2)]
    assert len(called) == (4 if tokens * K >= 4 * E else 0)
    expected = scaled_experts.run_stages(args)
    assert torch.equal(*found) and relative_error(found[0].cpu(), expected) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("copied_from_few_rows")
def test_copies_of_some_features_at_a_time(name, interleaved, monkeypatch):
    """Of a quarter of the first weight, of half of the second."""
    ids, x, shared = torch.randint(-1, E, (200, K), dtype=torch.int32), *torch.randn(2, 200, 512).bfloat16()
    w13, w2 = (linear(quantised(name, *sizes, torch.bfloat16)) for sizes in ((1024, 512), (512, 512)))
    spec = Activation("swiglu_oai", interleaved=interleaved).spec
    args = layer_of(
        name, torch.bfloat16, hidden_states=x, topk_ids=ids, topk_weights=torch.rand(200, K), shared=shared,
        w13=w13, w2=w2, activation=spec,
    )  # fmt: skip
    called, copied = [], weight_copies.copied
    monkeypatch.setattr(weight_copies, "copied", lambda *args: called.append(args) or copied(*args))
    monkeypatch.setattr(slabs, "_MOST_BYTES", 256 * 512 * E * 2)
    found = _library.call(_moved(args))
    assert len(called) == (4 if interleaved else 8) + 2
    assert relative_error(found.cpu(), scaled_experts.run_stages(args)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("copied_from_few_rows")
def test_gradients_through_copies(name):
    """Of a layer whose stages are products of copies, and of what goes back through them."""
    args, found = layer_of(name, torch.bfloat16), {}
    for device in ("cpu", "cuda"):
        inputs = [each.to(device).requires_grad_() for each in (args.hidden_states, args.topk_weights)]
        moved = _moved(args) if device == "cuda" else args
        moved = moved._replace(hidden_states=inputs[0], topk_weights=inputs[1])
        found[device] = [
            each.cpu() for each in grads_of(lambda at=moved: scaled_experts.run_stages(at), inputs)
        ]
    assert_same(found["cuda"], found["cpu"], 2e-2)
