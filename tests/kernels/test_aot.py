"""Every kernel the five benchmark workloads launch compiles for an H200 without spilling. Needs no GPU."""

import itertools
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import triton

from moe_ops.arguments import PairedLinear
from moe_ops.kernels import (
    gemm_config,
)
from moe_ops.kernels.gemm import Gemm, Operand, operands
from moe_ops.kernels.gpu import H200
from moe_ops.kernels.grouped_gemm import plan
from moe_ops.kernels.program import Program, describe
from moe_ops.types import Activation, RoutingConfig
from tests.helpers import mixed, usually
from tests.kernels import aot, catalogue
from tests.kernels.by_name import program_of

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")

WORKLOADS = {  # E, K, H, I
    "W1": (8, 2, 4096, 14336),
    "W2": (128, 8, 2048, 768),
    "W3": (256, 8, 7168, 2048),
    "W4": (128, 4, 2880, 2880),
    "W5": (64, 8, 2048, 1024),
}
TOKENS = (1, 4, 64, 1024, 16384)
BF16 = {"hidden_states": torch.bfloat16, "router_logits": torch.float32}
BF16 |= {"w13": torch.bfloat16, "w2": torch.bfloat16, "w13_bias": torch.bfloat16, "w2_bias": torch.bfloat16}
GPT_OSS = Activation("swiglu_oai", interleaved=True)
SITU = Activation("situ", beta=4.0, linear_beta=25.0)
_GROUPED = {"num_groups": 8, "topk_groups": 4, "group_score": "top2_sum", "scale": 2.5}
DEEPSEEK = [RoutingConfig(8, score, **_GROUPED) for score in ("sigmoid", "sqrtsoftplus")]


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _assert_spill_free(compiled: list[aot.Compiled]) -> None:
    assert not [misfit for kernel in compiled if (misfit := kernel.misfit(H200))]


_OFTEN = [("W1", 1), ("W2", 4), ("W3", 64), ("W4", 1024)]


@pytest.mark.parametrize(("workload", "tokens"), usually(itertools.product(WORKLOADS, TOKENS), _OFTEN))
def test_fused_moe(workload: str, tokens: int) -> None:
    experts, top_k, hidden, features = WORKLOADS[workload]
    weights = _meta(experts, 2 * features, hidden), _meta(experts, hidden, features)
    args = _meta(tokens, hidden), _meta(tokens, experts, dtype=torch.float32), *weights
    program = program_of("fused_moe", *args, routing=RoutingConfig(top_k=top_k), activation=Activation())
    compiled = aot.compile_program(program, BF16)
    _assert_spill_free(compiled)
    gemms = [
        kernel
        for kernel in compiled
        if kernel.name in ("grouped_gemm_tma_kernel", "grouped_gemm_mixed_kernel")
    ]
    assert bool(gemms) != any("gemv" in kernel.name for kernel in compiled)
    for kernel in gemms:
        assert "cp.async.bulk.tensor" in kernel.ptx  # weights by TMA
        # Rows too, or gathered straight to shared memory, 16 bytes at a time.
        assert "cp.async.cg.shared" in kernel.ptx or "cp.async.bulk.tensor.2d" in kernel.ptx
        if tokens >= 1024:
            assert "wgmma.mma_async" in kernel.ptx


@pytest.mark.parametrize(
    ("tokens", "transposed"),
    usually(itertools.product(TOKENS, (False, True)), [(4, True), (64, True), (1024, False)]),
)
def test_gpt_oss_layout(tokens: int, transposed: bool) -> None:
    experts, top_k, hidden, features = WORKLOADS["W4"]
    weights = _meta(experts, 2 * features, hidden), _meta(experts, hidden, features)
    if transposed:
        weights = (
            _meta(experts, hidden, 2 * features).transpose(1, 2),
            _meta(experts, features, hidden).transpose(1, 2),
        )
    routing = RoutingConfig(top_k=top_k, order="topk_then_score", renormalize=False)
    biases = None, _meta(experts, 2 * features), None, None, _meta(experts, hidden), None
    args = _meta(tokens, hidden), _meta(tokens, experts), *weights, *biases
    program = program_of("fused_moe", *args, routing, GPT_OSS)
    _assert_spill_free(aot.compile_program(program, BF16 | {"router_logits": torch.bfloat16}))


@pytest.mark.parametrize("tokens", usually([4, 64, 4096], [64, 4096]))
def test_transposed_halves(tokens: int) -> None:
    weights = _meta(128, 2048, 1536).mT, _meta(128, 768, 2048).mT
    routes = _meta(tokens, 8, dtype=torch.float32), _meta(tokens, 8, dtype=torch.int32)
    program = program_of("fused_experts", _meta(tokens, 2048), *weights, *routes, activation=Activation())
    dtypes = BF16 | {"topk_weights": torch.float32, "topk_ids": torch.int32}
    _assert_spill_free(aot.compile_program(program, dtypes))


@pytest.mark.parametrize(
    ("rows_per_tile", "apart"),
    usually(itertools.product((None, 64, 128), (False, True)), [(None, True), (64, False), (128, True)]),
)
def test_tiles_of_two_products_are_not_serialized(rows_per_tile: int | None, apart: bool) -> None:
    """Of columns gate first, and of gate and up rows as a tensor each, sorted: mixed heights, and persistent tiles."""
    weight = _meta(16, 1536, 2048) if apart else _meta(16, 2048, 3072).mT
    linear = operands("w13", PairedLinear(describe(weight), None, describe(weight) if apart else None))
    x = Operand("hidden_states", describe(_meta(4096, 2048)))
    gemm = Gemm(x, linear, "out", 16384, H200, 4, Activation(), rows_per_tile=rows_per_tile)
    dtypes = BF16 | {"w13_up": torch.bfloat16, "sorted_slots": torch.int32, "expert_offsets": torch.int32}
    *_, kernel = aot.compile_program(Program(*plan(gemm), ("out",)), dtypes)
    assert "wgmma.mma_async" in kernel.ptx and not kernel.is_serialized
    _assert_spill_free([kernel])


@pytest.mark.parametrize("layout", usually(["rows", "in turns", "columns", "apart"], ["rows", "columns"]))
def test_two_programs_of_low_tiles_share_a_multiprocessor(layout: str) -> None:
    """Tiles of 64, 32 and 16 rows: one's loads hide the other's start and end."""
    weight = _meta(128, 2880, 5760).mT if layout == "columns" else _meta(128, 5760, 2880)
    halves = (
        [describe(half) for half in weight.chunk(2, 1)] if layout == "apart" else [describe(weight), None]
    )
    linear = operands("w13", PairedLinear(halves[0], None, halves[1]))
    x, gate = (
        Operand("hidden_states", describe(_meta(512, 2880))),
        Activation(interleaved=layout == "in turns"),
    )
    dtypes = BF16 | {"w13_up": torch.bfloat16, "sorted_slots": torch.int32, "expert_offsets": torch.int32}
    program = Program(*plan(Gemm(x, linear, "out", 2048, H200, 4, gate)), ("out",))
    *_, kernel = aot.compile_program(program, dtypes)
    assert kernel.name == "grouped_gemm_mixed_kernel" and not kernel.is_serialized
    assert 2 * kernel.registers * 32 * kernel.num_warps <= aot.REGISTERS
    assert 2 * (kernel.shared + aot.RESERVED) <= aot.SHARED_OF_MULTIPROCESSOR
    assert "wgmma.mma_async" in kernel.ptx and "mma.sync" in kernel.ptx
    _assert_spill_free([kernel])


@pytest.mark.parametrize(
    ("tokens", "activation"),
    usually(
        itertools.product(TOKENS, (SITU, Activation("silu_no_mul"))),
        [(1, SITU), (4, Activation("silu_no_mul"))],
    ),
    ids=str,
)
def test_other_activations(tokens: int, activation: Activation) -> None:
    experts, top_k, hidden, features = WORKLOADS["W5"]
    rows = 2 * features if activation.is_gated else features
    args = _meta(tokens, hidden), _meta(tokens, experts), _meta(experts, rows, hidden)
    routing, w2 = RoutingConfig(top_k, "sqrtsoftplus"), _meta(experts, hidden, features)
    program = program_of("fused_moe", *args, w2, routing=routing, activation=activation)
    _assert_spill_free(aot.compile_program(program, BF16 | {"router_logits": torch.bfloat16}))


@pytest.mark.parametrize(("tokens", "routing"), mixed((1, 4096), DEEPSEEK), ids=str)
def test_deepseek_router(tokens: int, routing: RoutingConfig) -> None:
    logits, bias = _meta(tokens, 256, dtype=torch.float32), _meta(256, dtype=torch.float32)
    program = program_of("routing_dispatch", logits, bias, _meta(256, dtype=torch.int32), 32, routing)
    dtypes = {"router_logits": torch.float32, "correction_bias": torch.float32, "expert_map": torch.int32}
    _assert_spill_free(aot.compile_program(program, dtypes))


@pytest.mark.parametrize(
    ("dtype", "rows"),
    mixed((torch.bfloat16, torch.float16, torch.float32, torch.float64), (64, 1024, 16384)),
    ids=str,
)
def test_generic_gemm(dtype: torch.dtype, rows: int) -> None:
    weight, bias = _meta(16, 1022, 511, dtype=dtype), _meta(16, 1022, dtype=dtype)
    hidden = _meta(rows // 2, 511, dtype=dtype)
    metas = hidden, weight, _meta(rows, dtype=torch.int32), _meta(17, dtype=torch.int32), bias
    program = program_of("gather_gemm_act", *metas, activation=Activation())
    dtypes = {"hidden_states": dtype, "w13": dtype, "w13_bias": dtype}
    dtypes |= {"sorted_slots": torch.int32, "expert_offsets": torch.int32}
    _assert_spill_free(aot.compile_program(program, dtypes))


@pytest.mark.parametrize(
    "dtype", usually([torch.bfloat16, torch.float32, torch.float64], [torch.bfloat16, torch.float64])
)
def test_backward_kernels(dtype: torch.dtype) -> None:
    rows, gate_up = _meta(4096, 512, dtype=dtype), _meta(4096, 1024, dtype=dtype)
    slots, weights = _meta(4096, dtype=torch.int32), _meta(1024, 4, dtype=torch.float32)
    tokens, logits = _meta(1024, 512, dtype=dtype), _meta(1024, 64, dtype=dtype)
    ids = _meta(1024, 4, dtype=torch.int32)
    programs = [
        program_of("grouped_gemm_weight_backward", gate_up, rows, _meta(17, dtype=torch.int32)),
        program_of("grouped_gemm_weight_backward", gate_up, _meta(4096, 1, dtype=dtype), _meta(17)),
        program_of("permute", tokens, slots),
        program_of("permute_backward", rows, slots, 1024),
        program_of("combine_backward", tokens, rows, weights, slots),
        program_of("gated_activation", gate_up, Activation()),
        program_of("gated_activation_backward", rows, gate_up, GPT_OSS),
        program_of(
            "weighted_activation_backward", rows, gate_up, _meta(4096, dtype=torch.float32), Activation()
        ),
        *(
            program_of("topk_routing_backward", weights, logits, weights, ids, RoutingConfig(4, score))
            for score in ("softmax", "sqrtsoftplus")
        ),
    ]
    floating = ("grad", "x", "hidden_states", "expert_out", "gate_up", "router_logits")
    dtypes = dict.fromkeys(floating, dtype)
    dtypes |= dict.fromkeys(("topk_weights", "grad_weights", "scale"), torch.float32)
    dtypes |= dict.fromkeys(("expert_offsets", "sorted_slots", "inverse", "topk_ids"), torch.int32)
    for program in programs:
        _assert_spill_free(aot.compile_program(program, dtypes))


def _assert_signals_order_memory(ptx: str) -> None:
    """Other GPUs see what all threads have written before a signal, and all threads what they wrote before theirs."""
    steps = re.findall(r"atom\.global\.\S*exch|ld\.global\.\S*acquire|[sl][td]\.global|bar\.sync", ptx)
    told = [step for step in steps if step.endswith("exch")]
    read = [step for step in steps if step.endswith("acquire")]
    assert len(told) >= 2 and set(told) == {"atom.global.sys.release.exch"}
    assert len(read) >= 2 and set(read) == {"ld.global.sys.acquire"}
    for before, step in pairwise(steps):
        assert before == "bar.sync" or not step.endswith("exch")
    for step, after in pairwise(steps):
        assert after == "bar.sync" or not step.endswith("acquire")


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    mixed([(2, 128, 7168), (4, 4096, 7168), (8, 33, 511)], [torch.bfloat16, torch.float32, torch.float64]),
    ids=str,
)
def test_exchanges(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    for program in catalogue.exchanges(dtype, sizes):
        (kernel,) = aot.compile_program(program, catalogue.exchange_dtypes(dtype))
        _assert_spill_free([kernel])
        # Rows of whole 16 bytes go 16 bytes at a time.
        assert ("st.global.v4" in kernel.ptx or "st.global.v2.b64" in kernel.ptx) == (sizes[2] != 511)
        _assert_signals_order_memory(kernel.ptx)
    ids, owners = _meta(9, 8, dtype=torch.int32), _meta(256, dtype=torch.int32)
    plan = program_of("plan_exchange", ids, owners, sizes[0], sizes[1])
    _assert_spill_free(aot.compile_program(plan, {"topk_ids": torch.int32, "owners": torch.int32}))


@pytest.mark.parametrize(
    ("act", "part"), usually(itertools.product([Activation(), None], [0, 1]), [(Activation(), 0)]), ids=str
)
def test_alternatives_worth_timing(act: Activation | None, part: int) -> None:
    hidden, weight = _meta(4096, 2048), _meta(64, 2048, 2048)
    given = Operand("hidden_states", describe(hidden)), operands("w13", PairedLinear(describe(weight)))
    dtypes = BF16 | {"sorted_slots": torch.int32, "expert_offsets": torch.int32}
    gemm = Gemm(*given, "out", 8192, H200, 2, act)
    for config in gemm_config.candidates(gemm)[part::2]:
        program = Program(*plan(gemm, config), ("out",))
        _assert_spill_free(aot.compile_program(program, dtypes))


@pytest.mark.parametrize(("rows", "is_loaded_at_once"), [(4, True), (50, True), (100, False)])
@pytest.mark.parametrize("scale", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_high_tiles_load_scales_one_by_one(scale, rows, is_loaded_at_once):
    """They have no registers for more: the same code, whether or not one load would do."""
    columns = 16 if scale == torch.float8_e4m3fn else 32
    weight, scales = _meta(8, 256, 128, dtype=torch.uint8), _meta(8, 256, 256 // columns, dtype=scale)
    given = _meta(8 * rows, 256), weight, scales, _meta(9, dtype=torch.int32), *(None,) * 5, 1, columns
    program = program_of("scaled_grouped_gemm", *given, torch.bfloat16, gpu=H200)
    dtypes = aot.known(program, catalogue.TENSORS | {"weight": torch.uint8, "scale": scale})
    launch = program.launches[-1]
    others = replace(launch, args={**launch.args, "TOGETHER": False})
    code = [re.sub(r" loc\(.*|#loc.*", "", aot.ttir_of(each, dtypes)) for each in (launch, others)]
    assert launch.args["TOGETHER"] and (code[0] != code[1]) == is_loaded_at_once
