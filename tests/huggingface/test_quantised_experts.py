"""Experts that transformers keeps in float8. The standard is its own loop over them, with products in plain PyTorch."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import FineGrainedFP8Config
from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import use_experts_implementation

import moe_ops
from layers import huggingface
from layers.huggingface.experts import NAME
from tests.helpers import assert_same, relative_error
from tests.huggingface.families import EXPERTS, HIDDEN, TOP_K, tiny_model, tokens

ALL_BUT_EXPERTS = [r"(?!.*\.experts$).*"]
MOST = torch.finfo(torch.float8_e4m3fn).max
BLOCKS = [(16, 32), (32, 16), (64, 32), (24, 48), None]


def _spread(scale, matrix, size):
    """The scale of each element."""
    (rows, columns), (height, width) = size, matrix.shape[-2:]
    return scale.repeat_interleave(rows, -2)[..., :height, :].repeat_interleave(columns, -1)[..., :width]


def _size_of(weight, scale, block):
    """transformers has two scales at least for gate and up rows."""
    height, width = weight.shape[-2:]
    rows, columns = block or (height, width)
    return (rows if rows < height else height // scale.shape[-2]), columns


def _scales(matrix, size, dtype=torch.float32):
    (rows, columns), (height, width) = size, matrix.shape[-2:]
    padded = F.pad(matrix.float().abs(), (0, -width % columns, 0, -height % rows))
    scale = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)).amax((-3, -1)) / MOST
    return scale if dtype == torch.float32 else scale.log2().ceil().exp2().to(dtype)


def _rounded(matrix, scale, size):
    return (matrix.float() / _spread(scale.float(), matrix, size)).to(torch.float8_e4m3fn)


def _rounded_to_most(matrix, scale, size):
    return (matrix.float() / _spread(scale.float(), matrix, size)).clamp(-MOST, MOST).to(torch.float8_e4m3fn)


def _meant(stored, scale, size):
    return stored.double() * _spread(scale.double(), stored, size)


def _plain_linear(input, weight, scale, block_size, bias=None, activation_scale=None, *_, **__):
    """What stock's kernels compute: rows are quantised by blocks of the weight's columns."""
    assert bias is None
    size = _size_of(weight, scale, block_size)
    if activation_scale is not None:
        of_rows, size_of_rows = activation_scale.reshape(1, 1), (len(input), input.shape[1])
        rows = _meant(_rounded_to_most(input, of_rows, size_of_rows), of_rows, size_of_rows)
        return F.linear(rows, _meant(weight, scale, size)).to(input.dtype)
    of_rows = _scales(input, (1, size[1]))
    rows = _meant(_rounded(input, of_rows, (1, size[1])), of_rows, (1, size[1]))
    return F.linear(rows, _meant(weight, scale, size)).to(input.dtype)


def _quantised(model, block=(16, 32), scale_fmt="float", **options):
    """The model with its experts in float8, as transformers builds it; anything else stays."""
    originals = {
        name: copy.deepcopy(each) for name, each in model.named_modules() if name.endswith(".experts")
    }
    config = FineGrainedFP8Config(weight_block_size=block, scale_fmt=scale_fmt, **options)
    finegrained_fp8.replace_with_fp8_linear(model, ALL_BUT_EXPERTS, config)
    for name, original in originals.items():
        _fill(model.get_submodule(name).to_empty(device="cpu"), original, block)
    return model


def _fill(experts, original, block):
    for name, weight in original.named_parameters():
        stored, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
        size = _size_of(weight, scale, block)
        scale.data.copy_(_scales(weight.data, size, scale.dtype))
        stored.data.copy_(_rounded(weight.data, scale.data, size))
    experts.requires_grad_(False)


@pytest.fixture
def plain_kernels(monkeypatch):
    """transformers' own are downloaded."""
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", _plain_linear)


def _routed(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, HIDDEN, generator=generator)
    weights, ids = torch.randn(count, EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    return hidden, ids, weights


def _pair(family="qwen3_moe", **options):
    """Experts of the first layer, stock and patched."""
    model = _quantised(tiny_model(family), **options)
    patched = copy.deepcopy(model)
    report = huggingface.patch(patched)
    assert report.experts, str(report)
    model.config._experts_implementation = "eager"
    return model.model.layers[0].mlp.experts, patched.model.layers[0].mlp.experts


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 33])
def test_values(plain_kernels, block, count):
    stock, ours = _pair(block=block)
    given = _routed(count)
    actual, expected = ours(*given), stock(*given)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert count == 0 or relative_error(actual, expected) < 2e-3


def test_scales_of_both_halves_differ_without_blocks():
    stock, _ = _pair(block=None)
    assert stock.gate_up_proj_scale_inv.shape == (EXPERTS, 2, 1)
    assert (stock.gate_up_proj_scale_inv[:, 0] != stock.gate_up_proj_scale_inv[:, 1]).all()


@pytest.mark.parametrize("block", [(16, 32), (1, 32)], ids=str)
def test_scales_that_are_powers_of_two(plain_kernels, block):
    stock, ours = _pair(block=block, scale_fmt="ue8m0")
    assert ours.down_proj_scale_inv.dtype.itemsize == 1
    given = _routed(7)
    assert relative_error(ours(*given), stock(*given)) < 2e-3


def test_experts_that_are_elsewhere_contribute_nothing(plain_kernels):
    """transformers' id for them is the number of experts."""
    stock, ours = _pair()
    hidden, ids, weights = _routed(7)
    ids[::2, 1] = EXPERTS
    assert relative_error(ours(hidden, ids, weights), stock(hidden, ids, weights)) < 2e-3
    ids[:] = -1
    assert not ours(hidden, ids, weights).any()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"])
def test_models(plain_kernels, family):
    stock = _quantised(tiny_model(family))
    patched = copy.deepcopy(stock)
    report = huggingface.patch(patched)
    assert len(report.experts) == len(report.routers) == 2 and not report.left
    given = tokens(2, 9)
    with torch.no_grad():
        expected, actual = stock(given).logits, patched(given).logits
        assert relative_error(actual, expected) < 5e-3
        assert relative_error(tiny_model(family)(given).logits, expected) > 1e-2, "quantised at all"


def _own_gate(self, gate_up):
    gate, up = gate_up.chunk(2, -1)
    return torch.tanh(gate) * (up + 0.5)


def test_gates_of_their_own(plain_kernels, monkeypatch):
    monkeypatch.setattr(finegrained_fp8.FP8Experts, "_apply_gate", _own_gate)
    stock, _ = _pair()
    model = _quantised(tiny_model("qwen3_moe"))
    report, given = huggingface.patch(model), _routed(7)
    assert report.experts and "model.layers.0.mlp.experts" not in dict(report.computed)
    assert relative_error(model.model.layers[0].mlp.experts(*given), stock(*given)) < 2e-3


def test_gates_that_change_afterwards(plain_kernels):
    stock, ours = _pair()
    for each in (stock, ours):
        each.swiglu_limit = each.limit = 0.05
    given = _routed(7)
    assert relative_error(ours(*given), stock(*given)) < 2e-3


def test_experts_without_a_gate(plain_kernels):
    own = type("Ungated", (finegrained_fp8.FP8Experts,), {})
    interface = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    ungated = use_experts_implementation(own, experts_interface=interface, has_gate=False)
    original = nn.Module()
    for name, shape in (("up_proj", (EXPERTS, 32, HIDDEN)), ("down_proj", (EXPERTS, HIDDEN, 32))):
        original.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.1))
    config = tiny_model("qwen3_moe").config
    stock = ungated(config, block_size=(16, 32), has_gate=False)
    _fill(stock, original, (16, 32))
    ours = copy.deepcopy(stock)
    assert huggingface.patch(ours).computed == (("", "silu_no_mul"),)
    given = _routed(7)
    assert relative_error(ours(*given), stock(*given)) < 2e-3


@pytest.mark.parametrize("save_for_backward", ["auto", "inputs"])
def test_gradients_are_those_of_what_the_weights_stand_for(save_for_backward):
    """Tokens that have a gradient are not rounded."""
    model = _quantised(tiny_model("qwen3_moe"))
    huggingface.patch(model, save_for_backward=save_for_backward)
    experts = model.model.layers[0].mlp.experts
    hidden, ids, weights = (each.double() if each.is_floating_point() else each for each in _routed(7))
    hidden.requires_grad_(), weights.requires_grad_()
    up, down = (_meant(weight, scale, (16, 32)) for weight, scale in _stored(experts))
    gate, rows = torch.einsum("th,ekh->tek", hidden, up).chunk(2, -1)
    outputs = torch.einsum("tei,ehi->teh", F.silu(gate) * rows, down)
    chosen = outputs.gather(1, ids[..., None].expand(-1, -1, HIDDEN))
    expected = (chosen * weights[..., None]).sum(1)
    actual = experts(hidden, ids, weights)
    towards = torch.randn(actual.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_same(actual, expected)
    for ours, theirs in zip(
        torch.autograd.grad(actual, (hidden, weights), towards),
        torch.autograd.grad(expected, (hidden, weights), towards),
    ):
        assert_same(ours, theirs)


def _stored(experts):
    names = ("gate_up_proj", "down_proj")
    return [(getattr(experts, name), getattr(experts, f"{name}_scale_inv")) for name in names]


def test_weights_that_ask_for_a_gradient_get_none():
    """As transformers leaves them outside of `from_pretrained`; adapters elsewhere train beside them."""
    _, ours = _pair()
    ours.requires_grad_(True)
    hidden, ids, weights = _routed(7)
    expected = ours(hidden, ids, weights).detach()
    hidden.requires_grad_()
    ours(hidden, ids, weights).sum().backward()
    assert hidden.grad.abs().sum() > 0 and all(each.grad is None for each in ours.parameters())
    assert not torch.equal(ours(hidden, ids, weights), expected), "tokens with a gradient are not rounded"


def test_biases_count():
    _, ours = _pair()
    up, down = (moe_ops.ScaledWeight(*each, (16, 32)) for each in _stored(ours))
    biases = {"w13_bias": torch.randn(EXPERTS, 64), "w2_bias": torch.randn(EXPERTS, HIDDEN)}
    ours.has_bias = True
    ours.gate_up_proj_bias, ours.down_proj_bias = (nn.Parameter(each) for each in biases.values())
    hidden, ids, weights = _routed(7)
    expected = moe_ops.scaled_fused_experts(hidden, up, down, weights, ids, **biases)
    with torch.no_grad():
        torch.testing.assert_close(ours(hidden, ids, weights), expected)


def test_a_bias_alone_has_a_gradient():
    """Of the first product: tokens are exact then, as where they have one."""
    _, ours = _pair()
    up, down = (
        moe_ops.dequantise_weight(moe_ops.ScaledWeight(*each, (16, 32)), torch.float64)
        for each in _stored(ours)
    )
    bias = torch.randn(EXPERTS, 64, dtype=torch.float64, requires_grad=True)
    ours.has_bias = True
    ours.gate_up_proj_bias = nn.Parameter(bias.detach().float())
    ours.down_proj_bias = nn.Parameter(torch.zeros(EXPERTS, HIDDEN), requires_grad=False)
    hidden, ids, weights = _routed(7)
    expected = moe_ops.fused_experts(hidden.double(), up, down, weights.double(), ids, w13_bias=bias)
    actual = ours(hidden, ids, weights)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)
    actual.square().sum().backward(), expected.square().sum().backward()
    assert relative_error(ours.gate_up_proj_bias.grad, bias.grad) < 1e-5


def test_compiled_whole(plain_kernels):
    stock, ours = _pair()
    given = _routed(7)
    with torch.no_grad():
        compiled = torch.compile(ours, backend="moe_inductor", fullgraph=True)
        assert relative_error(compiled(*given), stock(*given)) < 2e-3
        more = _routed(12, seed=1)
        assert relative_error(compiled(*more), stock(*more)) < 2e-3


def test_unpatched_they_are_stock_again(plain_kernels):
    model = _quantised(tiny_model("qwen3_moe"))
    given = tokens(1, 5)
    expected, names = model(given).logits, list(model.state_dict())
    huggingface.patch(model)
    assert list(model.state_dict()) == names
    huggingface.unpatch(model)
    assert torch.equal(model(given).logits, expected)


def test_by_name_alone():
    model, patched = _quantised(tiny_model("qwen3_moe")), _quantised(tiny_model("qwen3_moe"))
    huggingface.patch(patched)
    model.set_experts_implementation(NAME)
    given = _routed(7)
    experts = model.model.layers[0].mlp.experts
    assert relative_error(experts(*given), patched.model.layers[0].mlp.experts(*given)) < 1e-6


@pytest.mark.parametrize("cast", ["bfloat16", "half"])
def test_weights_cast_to_16_bits_are_not_multiplied_without_their_scales(cast):
    """Stock multiplies with them as if every scale were 1."""
    _, ours = _pair()
    wanted = r"gate_up_proj has dtype torch\.\w+: expected torch\.float8_e4m3fn of quantised experts: was the model"
    with pytest.raises(TypeError, match=wanted):
        getattr(ours, cast)()(*_routed(3))


def _unknown(experts):
    experts.activation_scheme = "per_head"


def _transposed(experts):
    experts.is_transposed = True


def _packed(experts):
    experts.down_proj = nn.Parameter(experts.down_proj.data.view(torch.int8), requires_grad=False)


def _other_grid(experts):
    experts.gate_up_proj_scale_inv = nn.Parameter(torch.ones(EXPERTS, 3, 2), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_unknown, "activation_scheme='per_head'"),
        (_transposed, "whose weights are transposed"),
        (_packed, "torch.int8"),
        (_other_grid, "gate_up_proj_scale_inv has shape [8, 3, 2]: expected [8, 4, 2]"),
    ],
)
def test_others_are_left_alone(change, reason):
    model = _quantised(tiny_model("qwen3_moe"))
    change(model.model.layers[1].mlp.experts)
    report = huggingface.patch(model)
    assert reason in dict(report.left)["model.layers.1.mlp.experts"]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 7, 200])
def test_on_a_gpu(plain_kernels, count):
    stock, ours = _pair()
    ours, given = ours.cuda(), _routed(count)
    actual = ours(*(each.cuda() for each in given))
    assert relative_error(actual.cpu(), stock(*given)) < 5e-3
