"""What layers that train keep for their backward when compiled with our passes, and what they launch on a GPU."""

import re
import sys

import pytest
import torch

import inductor_passes
import moe_ops
from inductor_passes import _compat
from inductor_passes.backend import moe_inductor
from inductor_passes.training import RaiseForTraining
from layers import MoEBlock, MoEConfig
from moe_ops import _autograd, records
from moe_ops.arguments import (
    ActGemmCombine,
    ExpertWeights,
    FusedExperts,
    GatherGemm,
    GroupedLinear,
    PairedLinear,
    Placement,
)
from moe_ops.fused_experts import run_halves
from tests.compile.fake_cuda import compile_for_h200
from tests.helpers import relative_error
from tests.huggingface.families import tiny_config

T, H, I, E, K = 64, 128, 48, 16, 8  # as in Qwen3-MoE, H is 8/3 of I
S = T * K
LIMIT = 2 * T * H + 4 * S * I
METADATA = 2 * T * E + 4 * S + 4 * S + 4 * S + 4 * (E + 1)  # logits, weights, ids, slots, offsets


def own_layer(save_for_backward="auto"):
    torch.manual_seed(0)
    config = MoEConfig(E, K, H, I, save_for_backward=save_for_backward)
    return MoEBlock(config, dtype=torch.bfloat16)


def patched_layer():
    import layers.huggingface

    block = stock_layer()
    layers.huggingface.patch(block)
    return block


def stock_layer():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    torch.manual_seed(0)
    config = tiny_config(
        "qwen3_moe", hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K
    )
    config._experts_implementation = "grouped_mm"
    block = Qwen3MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return block.to(torch.bfloat16)


LAYERS = {"own": own_layer, "patched": patched_layer, "stock": stock_layer}


def inputs():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(T, H, generator=generator).bfloat16()[None].requires_grad_()


def first(result):
    return result[0] if isinstance(result, tuple) else result


def kept_by_graphs(layer, before_autograd):
    """Bytes that the forward graph hands to the backward, its own inputs of weights aside, as AOTAutograd split it."""
    graphs = []
    torch._dynamo.reset()
    backend = _compat.post_grad_backend(lambda module, _: graphs.append(module.graph), before_autograd)
    out = first(torch.compile(layer, backend=backend, fullgraph=True)(inputs()))
    (forward,) = graphs
    weights = {tuple(parameter.shape) for parameter in layer.parameters()}
    outputs = dict.fromkeys(next(node for node in forward.nodes if node.op == "output").args[0])
    kept = [node.meta["val"] for node in outputs if isinstance(node, torch.fx.Node)]
    sizes = [
        value.nbytes
        for value in kept
        if isinstance(value, torch.Tensor) and tuple(value.shape) not in weights
    ]
    return sum(sizes) - out.nbytes


def kept_by_autograd(layer, compiled):
    """Bytes of what autograd holds after a forward, weights aside."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = first(compiled(inputs()))
    return sum(tensor.nbytes for tensor in kept.values()), out


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_keeps_its_tokens_and_gate_up(kind):
    kept = kept_by_graphs(LAYERS[kind](), RaiseForTraining())
    assert LIMIT <= kept <= LIMIT + 2 * METADATA  # logits and ids may be kept in four and eight bytes


@pytest.mark.parametrize("kind", LAYERS)
def test_that_is_a_third_of_what_its_stages_keep(kind):
    kept = kept_by_graphs(LAYERS[kind](), RaiseForTraining())
    stages = own_layer("activations") if kind == "own" else stock_layer()
    assert 3 * (kept - METADATA) <= kept_by_graphs(stages, None)


def test_saved_inputs_and_activations_stay_what_they_were():
    inputs_only, everything = (
        kept_by_graphs(own_layer(each), RaiseForTraining()) for each in ("inputs", "activations")
    )
    assert inputs_only <= 2 * T * H + METADATA
    assert everything >= 2 * T * H + (2 * H + 4 * I + 2 * I + 2 * H) * S


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        pytest.param("backend", None, marks=pytest.mark.exhaustive),
        pytest.param("options", None, marks=pytest.mark.exhaustive),
        ("options", "max-autotune"),
    ],
)
def test_compiled_code_keeps_no_more_and_gradients_are_right(mode, how):
    layer, exact = own_layer(), own_layer().double()
    options = (
        {"backend": moe_inductor, "mode": mode}
        if how == "backend"
        else {"options": inductor_passes.options(mode)}
    )
    kept, out = kept_by_autograd(layer, torch.compile(layer, fullgraph=True, **options))
    assert LIMIT <= kept <= LIMIT + 2 * METADATA
    weights = torch.linspace(0.5, 1.5, out.numel()).view(out.shape)
    (out * weights).sum().backward()
    (exact(inputs().detach().double()) * weights).sum().backward()
    for ours, expected in zip(layer.parameters(), exact.parameters(), strict=True):
        assert relative_error(ours.grad, expected.grad) <= 8 * torch.finfo(torch.bfloat16).eps


def halves(hidden_states, w13, w2, weights, ids):
    experts = ExpertWeights(PairedLinear(w13), GroupedLinear(w2))
    return run_halves(FusedExperts(hidden_states, experts, weights, ids, Placement(), None, "silu"))


def backward(hidden_states, w13, w2, weights, ids, grad):
    """What autograd runs behind the two halves; on tensors that only claim to be on a GPU it cannot run itself."""
    slots, inverse, offsets = moe_ops.build_dispatch(ids, w13.shape[0])
    gate_up = grad.new_empty(ids.numel(), w13.shape[1])
    up = GatherGemm(hidden_states, PairedLinear(w13), slots, offsets)
    down = ActGemmCombine(gate_up, GroupedLinear(w2), offsets, weights, slots, inverse, None, "silu")
    weight = GroupedLinear(True, None)
    needs = records.partial(ActGemmCombine, gate_up=True, w2=weight)
    to_down = formulas(ActGemmCombine).backward(down, needs, grad)
    needs = records.partial(GatherGemm, hidden_states=True, w13=PairedLinear(*weight))
    to_up = formulas(GatherGemm).backward(up, needs, to_down.gate_up)
    return to_up.hidden_states, to_up.w13.weight, to_down.w2.weight


def formulas(record):
    return _autograd._FORMULAS[record]


def arguments(tokens):
    def made(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="cuda")

    return (
        made(tokens, 256), made(8, 512, 256), made(8, 256, 256), made(tokens, 2, dtype=torch.float32),
        made(tokens, 2, dtype=torch.int32), made(tokens, 256),
    )  # fmt: skip


GEMM = "grouped_gemm_tma_kernel"


def names(launches):
    return [name.rstrip("_0123456789") for name in launches]


def test_on_a_gpu_the_forward_launches_two_products():
    compiled = compile_for_h200(lambda *args: halves(*args[:5]), arguments, tokens=512)
    launched = names(compiled.launches)
    assert launched == [
        "_rank_kernel",
        "_tile_map_kernel",
        GEMM,
        "_activation_kernel",
        "_tile_map_kernel",
        GEMM,
        "_combine_kernel",
    ]
    assert "= torch.ops.moe." not in compiled.code


def test_on_a_gpu_the_backward_runs_no_product_again(monkeypatch):
    """Two products to what went in and two to weights; none of those of the forward."""
    module = sys.modules["moe_ops.act_gemm_combine"]
    monkeypatch.setattr(module, "_scale", lambda args: args.topk_weights.new_empty(args.gate_up.shape[0]))
    compiled = compile_for_h200(backward, arguments, tokens=512)
    assert "= torch.ops.moe." not in compiled.code
    launches = [name for name in names(compiled.launches) if not name.startswith(("triton_", "_tile_map"))]
    assert launches == [
        "_rank_kernel",
        "_permute_kernel",  # gradients of tokens, read by two products and written once
        GEMM,
        "_weighted_activation_backward_kernel",
        GEMM,
        "_invert_kernel",
        "_permute_backward_kernel",
        "_permute_kernel",
        "weight_gradient_tma_kernel",
        "weight_gradient_tma_kernel",
    ]


def test_on_a_gpu_a_backward_of_open_tokens_is_calls(monkeypatch):
    monkeypatch.setattr(
        sys.modules["moe_ops.act_gemm_combine"],
        "_scale",
        lambda args: args.topk_weights.new_empty(args.gate_up.shape[0]),
    )
    compiled = compile_for_h200(backward, arguments, tokens=512, symbolic=True)
    assert {name for name in names(compiled.launches) if not name.startswith("triton_")} == set()
    called = re.findall(r"= torch\.ops\.moe\.(\w+)\.default\(", compiled.code)
    assert called.count("grouped_gemm_weight_backward") == 2 and "permute_backward" in called
