"""Adapters of quantised experts against those of experts that have the weights which these stand for."""

import copy

import pytest
import torch
from torch.distributed.tensor.parallel import parallelize_module

import inductor_passes
from layers import (
    BatchedExperts,
    BatchedPrepareAndFinalize,
    ExpertLora,
    FusedMoE,
    LocalPrepareAndFinalize,
    ModularKernel,
    MoEConfig,
    StandardExperts,
    WeightScale,
    huggingface,
    quantise_experts,
)
from layers.parallel import ExpertParallel, ExpertTensorParallel
from layers.quantised import products, scaled_linears
from moe_ops.weight_formats import dequantised
from tests.helpers import relative_error
from tests.layers.lora import SCALINGS, Adapter, attach, draw_ids, make_adapters
from tests.layers.parallel.world import on_ranks

E, K, H, I = 6, 2, 64, 128
FORMATS = {
    "float8": (WeightScale.BLOCK, torch.float8_e4m3fn, False),
    "int8": (WeightScale.CHANNEL, torch.int8, False),
    "MXFP4": (WeightScale.GROUP, torch.uint8, False),
    "int4": (WeightScale.GROUP, torch.uint4, True),
}
forms = pytest.mark.parametrize("form", FORMATS)


def make_layers(form, rows="exact") -> tuple[FusedMoE, FusedMoE]:
    """A quantised one, and one with the weights that its own stand for."""
    torch.manual_seed(3)
    usual = FusedMoE(MoEConfig(E, K, H, I, has_bias=True))
    with torch.no_grad():
        usual.w13_bias.normal_(), usual.w2_bias.normal_()
    layer, (kind, dtype, zero_points) = copy.deepcopy(usual), FORMATS[form]
    quantise_experts(layer, kind, (16, 32), dtype=dtype, rows=rows, zero_points=zero_points)
    linears = scaled_linears(layer, layer.expert_weights())
    with torch.no_grad():
        for weight, linear in zip((usual.w13_weight, usual.w2_weight), linears, strict=True):
            weight.copy_(dequantised(linear, torch.float32))
    return layer, usual


def with_adapters(form, ids, rows="exact", count=3):
    layers = make_layers(form, rows)
    adapters = make_adapters(layers[1])[:count]
    small = [Adapter(*(low._replace(b=0.1 * low.b) for low in each[:2]), each.scaling) for each in adapters]
    for each in layers:
        attach(each, small, ids)
    return layers


def tokens(count):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, H, generator=generator), torch.randn(count, E, generator=generator)


@forms
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_values(num_tokens, count, form):
    layer, usual = with_adapters(form, draw_ids(num_tokens), count=count)
    with torch.no_grad():
        torch.testing.assert_close(
            layer(*tokens(num_tokens)), usual(*tokens(num_tokens)), rtol=1e-4, atol=1e-4
        )


def test_tokens_without_an_adapter_are_what_they_are_without_any():
    layer, _ = with_adapters("int8", torch.tensor([0, -1, 2, -1], dtype=torch.int32), rows="quantised")
    with torch.no_grad():
        found = layer(*tokens(4))
        layer.lora = None
        expected = layer(*tokens(4))
    is_changed = (found - expected).abs().amax(1) > 1e-2
    assert is_changed.tolist() == [True, False, True, False]
    torch.testing.assert_close(found[~is_changed], expected[~is_changed], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["float8", "int8"])
def test_quantised_rows(form):
    layer, usual = with_adapters(form, draw_ids(9), rows="quantised")
    with torch.no_grad():
        found, expected = layer(*tokens(9)), usual(*tokens(9))
    assert 1e-4 < relative_error(found, expected) < 0.05
    message = (
        "rows='quantised' and tokens, biases or adapters with a gradient: expected 'exact' or torch.no_grad"
    )
    with pytest.raises(ValueError, match=message):
        layer(*tokens(9))  # adapters have gradients


@forms
def test_gradients(form):
    gradients = []
    for layer in with_adapters(form, draw_ids(9)):
        hidden, logits = (each.requires_grad_() for each in tokens(9))
        layer(hidden, logits).square().sum().backward()
        gradients.append([hidden.grad, logits.grad, *(each.grad for each in layer.lora.parameters())])
    assert len(gradients[0]) == 6
    for found, expected in zip(*gradients, strict=True):
        assert expected.norm() > 0 and relative_error(found, expected) < 1e-4


def test_autocast_and_compiled_code():
    layer, usual = with_adapters("int4", draw_ids(9))
    function = torch.compile(layer, fullgraph=True, options=inductor_passes.options())
    with torch.no_grad():
        assert relative_error(function(*tokens(9)), usual(*tokens(9))) < 1e-5
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = layer(*tokens(9)), usual(*tokens(9))
    assert found.dtype == expected.dtype == torch.bfloat16 and relative_error(found, expected) < 2e-2
    x, offsets = tokens(9)[0], torch.tensor([0] + [9] * E, dtype=torch.int32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert products(layer, layer.expert_weights())[0](x, offsets).dtype == torch.bfloat16


def test_modular_kernels():
    layer, usual = with_adapters("MXFP4", draw_ids(9))
    kernel = ModularKernel(LocalPrepareAndFinalize(), StandardExperts(layer))
    with torch.no_grad():
        assert relative_error(kernel(*tokens(9)), usual(*tokens(9))) < 1e-5
    batched = ModularKernel(BatchedPrepareAndFinalize(), BatchedExperts(layer))
    with pytest.raises(ValueError, match="lora with quantised experts in batches: expected None"):
        batched(*tokens(9))


def test_the_dtype_of_adapters():
    layer, usual = make_layers("float8")
    ids = torch.zeros(4, dtype=torch.int32)
    assert ExpertLora(layer, 2, 4, ids).a13.dtype == torch.float32
    assert ExpertLora(layer, 2, 4, ids, dtype=torch.bfloat16).b2.dtype == torch.bfloat16
    assert ExpertLora(usual.bfloat16(), 2, 4, ids).a13.dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"dtype=torch\.int8: expected a floating point dtype of 16 bits"):
        ExpertLora(layer, 2, 4, ids, dtype=torch.int8)


def test_adapters_come_after_scales():
    _, usual = make_layers("float8")
    attach(usual, make_adapters(usual), draw_ids(3))
    with pytest.raises(
        ValueError, match="module has lora: expected None, adapters are added to experts that"
    ):
        quantise_experts(usual, WeightScale.CHANNEL)
    assert usual.quantisation is None


@on_ranks(2)
@pytest.mark.parametrize(
    "style", [ExpertParallel("allreduce"), ExpertTensorParallel()], ids=["whole", "parts"]
)
def test_ranks(style):
    from tests.layers.parallel.test_quantised_parts import mesh_of_all

    whole, _ = with_adapters("int4", draw_ids(9))
    shared = parallelize_module(make_layers("int4")[0], mesh_of_all(), style)
    shared.lora = ExpertLora(shared, len(SCALINGS), whole.lora.a2.shape[2], draw_ids(9))
    for number in range(len(SCALINGS)):
        w13, w2 = (type(each)(each.a[:, number], each.b[:, number]) for each in whole.lora.linears())
        shared.lora.load_adapter(number, w13, w2, SCALINGS[number])
    with torch.no_grad():
        assert relative_error(shared(*tokens(9)), whole(*tokens(9))) < 1e-5


def test_adapters_of_models_in_16_bits():
    from tests.huggingface.families import tiny_model

    model, ids = tiny_model("gpt_oss").bfloat16(), torch.zeros(10, dtype=torch.int32)
    huggingface.patch(model)
    huggingface.quantise_experts(model, WeightScale.GROUP, (1, 32), dtype=torch.uint8)
    adapters = huggingface.add_adapters(model, 1, 4, ids)
    assert {lora.b13.dtype for lora in adapters.values()} == {torch.bfloat16}


@pytest.mark.parametrize("how", ["stored", "int8", "int4"])
def test_models_of_transformers(how):
    """Trained: tokens are exact then, whatever they are otherwise."""
    from tests.huggingface.families import tiny_model, tokens as given
    from tests.huggingface.test_quantised_experts import _quantised

    model = tiny_model("qwen3_moe") if how == "stored" else tiny_model("gpt_oss")
    model = _quantised(model) if how == "stored" else model
    huggingface.patch(model)
    if how != "stored":
        kind, dtype, zero_points = FORMATS[how]
        block = (1, 32)
        huggingface.quantise_experts(model, kind, block, dtype=dtype, zero_points=zero_points)
    model.requires_grad_(False)
    with torch.no_grad():
        before = model(given(2, 5)).logits
    ids = torch.zeros(10, dtype=torch.int32)
    adapters = huggingface.add_adapters(model, 1, 4, ids)
    with torch.no_grad():
        torch.testing.assert_close(model(given(2, 5)).logits, before, rtol=1e-5, atol=1e-5)
    optimizer = torch.optim.Adam([each for lora in adapters.values() for each in lora.parameters()], 1e-2)
    losses = []
    for _ in range(4):
        loss = model(given(2, 5), labels=given(2, 5)).loss
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.99 * losses[0]
    assert all(lora.a2.grad.isfinite().all() and lora.a13.dtype == model.dtype for lora in adapters.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 9, 300])
@forms
def test_on_a_gpu(form, num_tokens, dtype):
    layer, usual = with_adapters(form, draw_ids(num_tokens))
    hidden, logits = tokens(num_tokens)
    with torch.no_grad():
        expected = usual(hidden, logits)
        on_gpu = layer.to("cuda", dtype)
        assert on_gpu.lora.a13.dtype == dtype and on_gpu.lora.adapter_ids.is_cuda
        found = on_gpu(hidden.to("cuda", dtype), logits.cuda())
    assert relative_error(found.cpu(), expected) < (2e-2 if dtype == torch.bfloat16 else 4e-3)
    hidden = hidden.to("cuda", dtype).requires_grad_()
    on_gpu(hidden, logits.cuda()).float().square().sum().backward()
    gradients = [each.grad for each in (hidden, *on_gpu.lora.parameters())]
    assert all(each.isfinite().all() and (each.any() or num_tokens == 1) for each in gradients)
