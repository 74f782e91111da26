"""Products with gate and up in two tensors: both read where they lie, in one launch. Interpreted, or on a GPU."""

import itertools

import pytest
import torch
import triton

from moe_ops.kernels import gemm_config
from moe_ops.kernels.program import Descriptor, Ref
from moe_ops.types import Activation, RoutingConfig
from tests.helpers import mixed, usually
from tests.kernels import aot, oracles
from tests.kernels.by_name import launch, program_of
from tests.kernels.catalogue import meta
from tests.kernels.oracles import assert_close
from tests.kernels.test_fused import SIZES, _experts

ACTIVATIONS = (
    Activation("silu"),
    Activation("gelu_tanh", limit=None),
    Activation("silu", limit=0.5),
    Activation("swiglu_oai"),
    Activation("situ", beta=1.5, linear_beta=2.0),
)
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def turned(weight):
    return weight.transpose(1, 2).contiguous().transpose(1, 2)


LAYOUTS = {"apart": torch.clone, "halves of one": lambda half: half, "columns": turned}


def taken_apart(tensors, layout="apart"):
    """The same arguments with w13 as a pair."""
    w13, bias = tensors["w13"], tensors.get("w13_bias")
    gate, up = map(LAYOUTS[layout], w13.chunk(2, 1))
    biases = (None, None) if bias is None else bias.chunk(2, 1)
    w2 = (
        {} if "w2" not in tensors else {"w2": turned(tensors["w2"]) if layout == "columns" else tensors["w2"]}
    )
    return {**tensors, **w2, "w13": gate, "w13_up": up, "w13_bias": biases[0], "w13_up_bias": biases[1]}


def on(device, tensors):
    return {name: None if tensor is None else tensor.to(device) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("size", "dtype", "layout", "activation", "biased"),
    mixed(SIZES, DTYPES, LAYOUTS, ACTIVATIONS, (True, False), rounds=2),
    ids=str,
)
def test_a_layer(size, dtype, layout, activation, biased, device):
    tensors = _experts(size, dtype, activation, biased=biased)
    out = launch("fused_experts", **on(device, taken_apart(tensors, layout)), activation=activation)
    assert_close(out, oracles.experts(**tensors, activation=activation))


def _gathered(dtype=torch.bfloat16, depth=48, features=40, biased=True):
    """Arguments of `gather_gemm` and the rows in float64: one expert without any, two dropped slots."""
    offsets = [0, 5, 5, 17, 22]
    tensors = {
        "hidden_states": torch.randn(12, depth).to(dtype),
        "w13": (torch.randn(4, 2 * features, depth) / depth**0.5).to(dtype),
        "w13_bias": torch.randn(4, 2 * features).to(dtype) if biased else None,
        "sorted_slots": torch.randperm(24).int(),
        "expert_offsets": torch.tensor(offsets, dtype=torch.int32),
    }
    rows = tensors["hidden_states"][tensors["sorted_slots"].long() // 2]
    return tensors, oracles.grouped_gemm(rows, tensors["w13"], offsets, tensors["w13_bias"])


@pytest.mark.parametrize(("layout", "dtype", "depth"), mixed(LAYOUTS, DTYPES, (48, 31)), ids=str)
def test_without_an_activation_both_halves_are_stored(layout, dtype, depth, device):
    tensors, expected = _gathered(dtype, depth)
    given = on(device, taken_apart(tensors, layout))
    assert_close(launch("gather_gemm", **given), expected)
    rows = given.pop("hidden_states")[given.pop("sorted_slots").long() // 2]
    named = {name.removeprefix("w13_").replace("w13", "weight"): tensor for name, tensor in given.items()}
    assert_close(launch("grouped_gemm", x=rows, **named), expected)
    assert_close(launch("batch_invariant_gemm", x=rows, **named)[:22], expected[:22])


@pytest.mark.parametrize(("layout", "activation"), mixed(LAYOUTS, ACTIVATIONS), ids=str)
def test_dropped_rows_are_zeros(layout, activation, device):
    tensors, gate_up = _gathered()
    out = launch("gather_gemm_act", **on(device, taken_apart(tensors, layout)), activation=activation)
    expected = oracles.activate(gate_up, activation)
    expected[22:] = 0
    assert_close(out, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_formula_reads_both(layout, device):
    tensors, gate_up = _gathered()
    spec = "halves|t0=tanh(gate)|t1=add(up,1.0)|t2=mul(t0,t1)|t2"
    out = launch("gather_gemm_formula", **on(device, taken_apart(tensors, layout)), formula=spec)
    gate, up = gate_up.chunk(2, 1)
    expected = gate.tanh() * (up + 1)
    expected[22:] = 0
    assert_close(out, expected)


@pytest.mark.parametrize("tokens", [7, 33])
def test_tiles_of_mixed_heights(tokens, device, monkeypatch):
    """And one operator of the whole layer, router included."""

    def mixed(gemm):
        return None if gemm.activation is None else gemm_config.BY_TMA.h200[128]

    monkeypatch.setattr(gemm_config, "mixed_config", mixed)
    tensors = _experts("T33", torch.bfloat16, Activation(), biased=True)
    for name in ("hidden_states", "topk_weights", "topk_ids", "shared", "shared_gate", "residual"):
        tensors[name] = tensors[name][:tokens]
    out = launch("fused_experts", **on(device, taken_apart(tensors)), activation=Activation())
    assert_close(out, oracles.experts(**tensors, activation=Activation()))


# Plans


def _layer(tokens, layout=torch.clone, experts=64, top_k=8, hidden=2048, inner=1024):
    def weight(*shape):
        return meta(shape[0], shape[2], shape[1]).transpose(1, 2) if layout is turned else meta(*shape)

    return {
        "hidden_states": meta(tokens, hidden),
        "w13": weight(experts, inner, hidden),
        "w13_up": weight(experts, inner, hidden),
        "w2": weight(experts, hidden, inner),
        "topk_weights": meta(tokens, top_k, dtype=torch.float32),
        "topk_ids": meta(tokens, top_k, dtype=torch.int32),
    }


def _reading(program, name):
    """Launches that are given the tensor `name`."""
    sources = [
        {
            getattr(arg, "name", getattr(arg, "source", None))
            for arg in each.args.values()
            if isinstance(arg, Ref | Descriptor)
        }
        for each in program.launches
    ]
    return [launch for launch, given in zip(program.launches, sources, strict=True) if name in given]


@pytest.mark.parametrize(
    ("tokens", "layout"), [(1, torch.clone), (64, torch.clone), (1, turned), (64, turned), (4096, turned)]
)
def test_one_launch_reads_both(tokens, layout):
    program = program_of("fused_experts", **_layer(tokens, layout), activation=Activation())
    (first,) = _reading(program, "w13")
    assert _reading(program, "w13_up") == [first]
    packed = {**_layer(tokens, layout)}
    up = packed.pop("w13_up")
    packed["w13"] = meta(64, 2048, 2048).transpose(1, 2) if layout is turned else meta(64, 2048, 2048)
    assert up.shape == (64, 1024, 2048)
    whole = program_of("fused_experts", **packed, activation=Activation())
    assert [(each.kernel, each.grid, each.num_warps) for each in program.launches] == [
        (each.kernel, each.grid, each.num_warps) for each in whole.launches
    ]


def _padded(*shape):
    """Rows eight numbers apart, so that none but every other begins where pieces of 16 do."""
    experts, rows, depth = shape
    return meta(experts, rows, depth + 8)[..., :depth]


def test_a_pair_with_padded_rows_takes_the_blocks_of_one_weight():
    """Rows of a token's program load number by number there, whatever the stride of experts."""
    apart = {**_layer(1), "w13": _padded(64, 1024, 2048), "w13_up": _padded(64, 1024, 2048)}
    packed = {**apart, "w13": _padded(64, 2048, 2048)}
    del packed["w13_up"]
    dense = program_of("fused_experts", **_layer(1), activation=Activation())
    blocks = []
    for given in (apart, packed):
        program = program_of("fused_experts", **given, activation=Activation())
        (first,) = _reading(program, "w13")
        blocks.append((first.args["BLOCK_N"], first.args["BLOCK_K"], first.num_warps, first.grid))
    (first,) = _reading(dense, "w13")
    assert (
        blocks[0] == blocks[1] != (first.args["BLOCK_N"], first.args["BLOCK_K"], first.num_warps, first.grid)
    )


def test_an_up_half_that_starts_elsewhere_is_no_tensor_for_tma():
    given, shape = _layer(64), (64, 1024, 2048)
    elsewhere = torch.empty(64 * 1024 * 2048 + 1, dtype=torch.bfloat16, device="meta")[1:].view(shape)
    for up, kernel in ((given["w13_up"], "mixed"), (elsewhere, "generic")):
        program = program_of("fused_experts", **{**given, "w13_up": up}, activation=Activation())
        assert [each.kernel.__name__ for each in _reading(program, "w13")] == [
            f"grouped_gemm_{kernel}_kernel"
        ]


# Machine code

BF16 = dict.fromkeys(
    ("hidden_states", "w13", "w13_up", "w2", "w13_bias", "w13_up_bias", "bias"), torch.bfloat16
)
BF16 |= {"topk_weights": torch.float32, "topk_ids": torch.int32, "router_logits": torch.float32}
WORKLOADS = {
    "Qwen3-30B": (128, 8, 2048, 768),
    "Mixtral": (8, 2, 4096, 14336),
    "DeepSeek-V3": (256, 8, 7168, 2048),
}
SITU = Activation("situ", beta=4.0, linear_beta=25.0)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    ("workload", "tokens", "layout", "act"),
    usually(
        itertools.product(WORKLOADS, (1, 4, 64, 1024, 16384), (torch.clone, turned), (Activation(), SITU)),
        [
            ("Qwen3-30B", 1, torch.clone, Activation()),
            ("Mixtral", 4, turned, SITU),
            ("DeepSeek-V3", 64, torch.clone, Activation()),
        ],
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_no_kernel_spills(workload, tokens, layout, act):
    experts, top_k, hidden, inner = WORKLOADS[workload]
    given = _layer(tokens, layout, experts, top_k, hidden, inner)
    given |= {"w13_bias": meta(experts, inner), "w13_up_bias": meta(experts, inner)}
    for name in ("topk_weights", "topk_ids"):
        given.pop(name)
    logits = meta(tokens, experts, dtype=torch.float32)
    program = program_of(
        "fused_moe", router_logits=logits, **given, routing=RoutingConfig(top_k), activation=act
    )
    compiled = aot.compile_program(program, BF16)
    assert not [misfit for kernel in compiled if (misfit := kernel.misfit(aot.H200))]
    gemms = [kernel for kernel in compiled if "grouped_gemm" in kernel.name]
    assert all("cp.async.bulk.tensor" in kernel.ptx for kernel in gemms)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("dtype", "rows"), mixed((*DTYPES, torch.float16), (64, 16384)), ids=str)
def test_no_kernel_of_any_strides_spills(dtype, rows):
    halves = {name: meta(16, 511, 511, dtype=dtype) for name in ("w13", "w13_up")}
    biases = {name: meta(16, 511, dtype=dtype) for name in ("w13_bias", "w13_up_bias")}
    index = {"sorted_slots": meta(rows, dtype=torch.int32), "expert_offsets": meta(17, dtype=torch.int32)}
    given = {"hidden_states": meta(rows // 2, 511, dtype=dtype), **halves, **biases, **index}
    program = program_of("gather_gemm_act", **given, activation=Activation())
    compiled = aot.compile_program(program, {name: tensor.dtype for name, tensor in given.items()})
    assert not [misfit for kernel in compiled if (misfit := kernel.misfit(aot.H200))]
