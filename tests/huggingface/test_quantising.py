"""`huggingface.quantise_experts`: a stock model whose weights are what the rounded ones stand for is the standard."""

import copy
import weakref

import pytest
import torch
from torch import nn

import moe_ops
from layers import WeightScale, huggingface
from tests.fuzz.quantised import meant, of_parts, spread, unpacked
from tests.helpers import relative_error
from tests.huggingface.families import EXPERTS, HIDDEN, INTER, tiny_model, tokens

INT8, FLOAT8, PAIRS = torch.int8, torch.float8_e4m3fn, torch.uint8
FROM_ZEROS = "uint4 with zero points"
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral")
FORMATS = [
    (WeightScale.CHANNEL, (1, 1), INT8),
    (WeightScale.CHANNEL, (1, 1), FLOAT8),
    (WeightScale.GROUP, (1, 16), FLOAT8),
    (WeightScale.GROUP, (1, 32), PAIRS),
    (WeightScale.GROUP, (1, 32), torch.uint4),
    (WeightScale.GROUP, (1, 32), FROM_ZEROS),
    (WeightScale.GROUP, (1, 16), torch.float4_e2m1fn_x2),
]
APART = [(WeightScale.BLOCK, (8, 16), FLOAT8), (WeightScale.TENSOR, (1, 1), INT8)]


def _block(kind, block, name):
    width, height = (HIDDEN, INTER) if name == "gate_up_proj" else (INTER, HIDDEN)
    rows = {
        WeightScale.BLOCK: block[0],
        WeightScale.TENSOR: min(height, INTER if width == HIDDEN else HIDDEN),
    }
    columns = {WeightScale.BLOCK: block[1], WeightScale.GROUP: block[1]}
    return rows.get(kind, 1), columns.get(kind, width)


def _meant(experts, kind, block, name):
    """[E, B, A] in float64."""
    weight, scale = meant(getattr(experts, name).data, getattr(experts, f"{name}_scale_inv").data)
    weight, block = weight.double(), _block(kind, block, name)
    zero = getattr(experts, f"{name}_zero_point", None)
    weight = weight if zero is None else weight + 8 - spread(zero.data, weight.shape, block)
    outer = of_parts(getattr(experts, f"{name}_global_scale", None), weight.shape)
    return weight * spread(scale, weight.shape, block) * outer


def _standard(stock, ours, kind, block):
    """The stock model with what the experts of `ours` stand for."""
    for name, experts in ours.named_modules():
        if hasattr(experts, "moe_ops_format"):
            original = stock.get_submodule(name)
            for weight in ("gate_up_proj", "down_proj"):
                dense = _meant(experts, kind, block, weight).float()
                found = getattr(original, weight).data
                found.copy_(dense.mT if getattr(original, "is_transposed", False) else dense)
    return stock


def _named(dtype):
    return {"dtype": torch.uint4, "zero_points": True} if dtype == FROM_ZEROS else {"dtype": dtype}


def _quantised(family, kind, block, dtype, rows="exact"):
    stock = tiny_model(family)
    ours = copy.deepcopy(stock)
    report = huggingface.patch(ours)
    assert huggingface.quantise_experts(ours, kind, block, **_named(dtype), rows=rows) == report.experts
    zeros = [name for name, _ in ours.named_parameters() if name.endswith("_zero_point")]
    assert len(zeros) == (2 * len(report.experts) if dtype == FROM_ZEROS else 0)
    return stock, ours


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "block", "dtype"), FORMATS)
def test_values(family, kind, block, dtype):
    stock, ours = _quantised(family, kind, block, dtype)
    before = stock(tokens(2, 7)).logits
    expected = _standard(stock, ours, kind, block)(tokens(2, 7)).logits
    actual = ours(tokens(2, 7)).logits
    assert relative_error(actual, expected) < 1e-5 < 1e-3 < relative_error(expected, before)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES[:2])
@pytest.mark.parametrize(("kind", "block", "dtype"), FORMATS)
def test_values_on_a_gpu(family, kind, block, dtype):
    """Quantised there; and experts in a CUDA graph, replayed with other tokens."""
    stock = tiny_model(family)
    ours = copy.deepcopy(stock).cuda()
    huggingface.patch(ours)
    huggingface.quantise_experts(ours, kind, block, **_named(dtype), rows="exact")
    expected = _standard(stock, ours, kind, block)(tokens(3, 7)).logits
    experts = ours.model.layers[0].mlp.experts
    hidden, weights = torch.randn(2, 9, HIDDEN, device="cuda"), torch.rand(9, 2, device="cuda")
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(9)]).cuda()
    with torch.no_grad():
        assert relative_error(ours(tokens(3, 7).cuda()).logits.cpu(), expected) < 1e-4
        wanted, given = experts(hidden[0], ids, weights), hidden[1].clone()
        experts(given, ids, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = experts(given, ids, weights)
        given.copy_(hidden[0])
        graph.replay()
    assert torch.equal(captured, wanted)


@pytest.mark.parametrize(("kind", "block", "dtype"), APART)
def test_values_of_blocks_with_several_rows(kind, block, dtype):
    stock, ours = _quantised("qwen3_moe", kind, block, dtype)
    expected = _standard(stock, ours, kind, block)(tokens(2, 7)).logits
    assert relative_error(ours(tokens(2, 7)).logits, expected) < 1e-5


def test_scales_take_a_block_to_the_largest_number():
    _, ours = _quantised("gpt_oss", *FORMATS[0])
    experts, original = ours.model.layers[1].mlp.experts, tiny_model("gpt_oss").model.layers[1].mlp.experts
    largest = original.gate_up_proj.data.mT.abs().amax(2, keepdim=True)
    torch.testing.assert_close(experts.gate_up_proj_scale_inv.data, largest / 127)
    error = (_meant(experts, *FORMATS[0][:2], "gate_up_proj") - original.gate_up_proj.data.mT).abs()
    assert (error <= 0.51 * largest / 127).all()


def test_tokens_are_rounded_where_rows_are():
    hidden, weights = torch.randn(5, HIDDEN), torch.rand(5, 2)
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(5)])
    found = []
    for rows in ("exact", "quantised"):
        _, ours = _quantised("qwen3_moe", *FORMATS[0], rows=rows)
        experts = ours.model.layers[0].mlp.experts
        assert (
            experts.moe_ops_options.activation == "silu"
        )  # one operator, not stages around the module's own code
        w13, w2 = (
            moe_ops.ScaledWeight(getattr(experts, name).data, getattr(experts, f"{name}_scale_inv").data)
            for name in ("gate_up_proj", "down_proj")
        )
        with torch.no_grad():
            found.append(experts(hidden, ids, weights))
            wanted = moe_ops.scaled_fused_experts(hidden, w13, w2, weights, ids, rows=rows)
        torch.testing.assert_close(found[-1], wanted)
    assert 1e-4 < relative_error(found[1], found[0]) < 3e-2


def test_weights_that_were_mxfp4_stay_what_they_were():
    model = tiny_model("gpt_oss").bfloat16()
    experts = model.model.layers[0].mlp.experts
    for weight in (experts.gate_up_proj, experts.down_proj):
        numbers = unpacked(torch.randint(256, (*weight.mT.shape[:2], weight.shape[1] // 2), dtype=PAIRS))
        numbers[..., ::32] = 6.0  # as in any block whose power is the least that will do
        weight.data.copy_(numbers.mT * 2.0 ** torch.randint(-9, -5, (1, 1, weight.shape[2])))
    wanted = copy.deepcopy(experts)
    huggingface.patch(model)
    huggingface.quantise_experts(model, *FORMATS[3][:2], dtype=PAIRS)
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(_meant(experts, *FORMATS[3][:2], name), getattr(wanted, name).data.mT.double())


@pytest.mark.parametrize("dtype", [INT8, PAIRS])
def test_gradients_go_through_to_tokens_and_biases(dtype):
    kind, block, _ = next(each for each in FORMATS if each[2] == dtype)
    stock, ours = _quantised("gpt_oss", kind, block, dtype, rows=None)
    _standard(stock, ours, kind, block)
    found = []
    for model in (stock, ours):
        embedded = model.get_input_embeddings()(tokens(1, 7)).detach().requires_grad_()
        model(inputs_embeds=embedded).logits.square().mean().backward()
        bias = model.model.layers[0].mlp.experts.gate_up_proj_bias.grad
        found.append((embedded.grad, bias))
    for actual, expected in zip(found[1], found[0], strict=True):
        assert relative_error(actual, expected) < 1e-4
    assert ours.model.layers[0].mlp.experts.down_proj.grad is None


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_compiled_in_one_graph(family):
    _, ours = _quantised(family, *FORMATS[3], rows=None)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert relative_error(compiled(tokens(2, 5)).logits, ours(tokens(2, 5)).logits) < 1e-6


def test_generation_copies_and_another_patch():
    _, ours = _quantised("qwen3_moe", *FORMATS[0])
    with torch.no_grad():
        wanted = ours(tokens(1, 6)).logits
        assert torch.equal(copy.deepcopy(ours)(tokens(1, 6)).logits, wanted)
        length = ours.generate(tokens(1, 6), max_new_tokens=3, do_sample=False).shape[1]
        assert length == 9
        report = huggingface.patch(ours, emit="stages")
        assert len(report.experts) == 2 and not report.left
        assert torch.equal(ours(tokens(1, 6)).logits, wanted)


def test_options_that_are_set_later_count():
    stock, ours = _quantised("gpt_oss", *FORMATS[0])
    _standard(stock, ours, *FORMATS[0][:2])
    before = ours(tokens(1, 6)).logits
    for model in (stock, ours):
        model.model.layers[0].mlp.experts.alpha = 0.5
    expected = stock(tokens(1, 6)).logits
    assert (
        relative_error(ours(tokens(1, 6)).logits, expected) < 1e-5 < 1e-3 < relative_error(before, expected)
    )


def test_what_the_weights_were_is_freed():
    model = tiny_model("qwen3_moe")
    huggingface.patch(model)
    was = [weakref.ref(layer.mlp.experts.gate_up_proj) for layer in model.model.layers]
    huggingface.quantise_experts(model, *FORMATS[1][:2], dtype=FLOAT8)
    assert all(each() is None for each in was)
    experts = model.model.layers[0].mlp.experts
    assert not experts.gate_up_proj.requires_grad and experts.moe_ops_format.rows == "quantised"


def _patched(family="qwen3_moe"):
    model = tiny_model(family)
    huggingface.patch(model)
    return model


def _adapted(model):
    huggingface.add_adapters(model, 1, 2, torch.zeros(8, dtype=torch.int32))


def _parametrised(model):
    experts = model.model.layers[1].mlp.experts
    nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())


@pytest.mark.parametrize(
    ("change", "named", "error", "words"),
    [
        (huggingface.unpatch, {}, ValueError, "no patched experts"),
        (_adapted, {}, ValueError, "experts is adapted"),
        (
            _parametrised,
            {},
            ValueError,
            "layers.1.mlp.experts.down_proj is sharded, offloaded or parametrised",
        ),
        (None, {"kind": "channel"}, TypeError, "kind="),
        (None, {"block": (0, 16)}, ValueError, "block rows=0"),
        (None, {"dtype": torch.float16}, TypeError, "dtype="),
        (None, {"rows": ""}, ValueError, "rows=''"),
        (None, {"block": (16,)}, ValueError, r"block=\(16,\)"),
        (None, {"kind": WeightScale.BLOCK, "block": (5, 16)}, ValueError, "multiple of the block's 5"),
        (None, {"dtype": PAIRS}, ValueError, "weights of 4 bits"),
        (None, {"zero_points": True}, ValueError, "zero_points=True with dtype"),
    ],
)
def test_refused_before_anything_changes(change, named, error, words):
    model = _patched()
    if change is not None:
        change(model)
    before = {name: each.data_ptr() for name, each in model.named_parameters()}
    given = {"kind": WeightScale.CHANNEL, "dtype": INT8} | named
    with pytest.raises(error, match=words):
        huggingface.quantise_experts(model, given.pop("kind"), given.pop("block", (128, 128)), **given)
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == before


def test_interleaved_rows_have_no_blocks():
    with pytest.raises(ValueError, match="gate and up rows in turns"):
        huggingface.quantise_experts(_patched("gpt_oss"), WeightScale.TENSOR, dtype=INT8)


@pytest.mark.parametrize(("dtype", "kind"), [(PAIRS, WeightScale.GROUP), (torch.uint4, WeightScale.CHANNEL)])
def test_odd_numbers_of_columns_are_no_whole_bytes(dtype, kind):
    model = _patched()
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INTER - 1))
    with pytest.raises(ValueError, match="intermediate_size of the shard is 31: expected an even number"):
        huggingface.quantise_experts(model, kind, (1, 32), dtype=dtype)
    assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.float32


def test_what_was_quantised_stays_so():
    model = _patched()
    huggingface.quantise_experts(model, *FORMATS[0][:2], dtype=INT8)
    with pytest.raises(ValueError, match="has quantised weights"):
        huggingface.quantise_experts(model, *FORMATS[0][:2], dtype=INT8)
    with pytest.raises(ValueError, match="is quantised"):
        huggingface.unpatch(model)


@pytest.mark.parametrize(("kind", "block", "dtype"), FORMATS)
def test_a_model_that_was_cast_says_so(kind, block, dtype):
    """Scales of integers would be rounded, in float16 to nothing. Exponents are not cast."""
    model = _patched()
    huggingface.quantise_experts(model, kind, block, **_named(dtype))
    model.half()
    if dtype == PAIRS:
        assert model(tokens(1, 4)).logits.isfinite().all()
        return
    with (
        pytest.raises(TypeError, match=r"scale_inv has dtype torch\.float16.*was the model cast"),
        torch.no_grad(),
    ):
        model(tokens(1, 4))


def test_experts_of_another_interface_are_refused():
    model = nn.ModuleDict({"mlp": nn.Linear(2, 2)})
    model["mlp"].moe_ops_options = object()
    with pytest.raises(ValueError, match="mlp is a Linear"):
        huggingface.quantise_experts(model, WeightScale.CHANNEL, dtype=INT8)


def test_what_nothing_could_load_is_not_saved(tmp_path):
    model = _patched()
    model.save_pretrained(tmp_path / "before")
    state = model.state_dict()
    huggingface.quantise_experts(model, WeightScale.CHANNEL, dtype=FLOAT8)
    with pytest.raises(ValueError, match=r"is quantised.*expected save_pretrained before"):
        model.save_pretrained(tmp_path / "behind")
    assert not (tmp_path / "behind").exists()
    model.save_pretrained(tmp_path / "given", state_dict=state)
    again = type(model).from_pretrained(tmp_path / "given").state_dict()
    assert all(torch.equal(again[name], value) for name, value in state.items())
