"""Programs over tensors whose strides are all large, one or more for every kernel there is."""

import torch

from moe_ops.arguments import PairedLinear, PullSums, PushRows, SharedExpert
from moe_ops.kernels import (
    activation,
    batched,
    combine,
    decode,
    decode_columns,
    decode_routed,
    dense,
    dequantise_weight,
    dispatch,
    exchange,
    exchange_planning,
    exchange_plans,
    gemm_generic,
    gemm_mixed,
    gemm_tma,
    pairs_decode,
    permute,
    placement,
    plans,
    quantise_rows,
    routing,
    scaled,
    scaled_decode,
    scaled_pairs,
    scaled_rows,
    tiles,
    weight_gradient,
)
from moe_ops.kernels.gemm import Gemm, Operand, operands
from moe_ops.kernels.gpu import H200, Gpu
from moe_ops.kernels.program import Program, describe
from moe_ops.peers import ExchangeLayout
from moe_ops.types import Activation, RoutingConfig
from moe_ops.values import ExchangePlan, SharedAlone
from tests.kernels.by_name import program_of

_MODULES = (
    activation,
    batched,
    combine,
    decode,
    decode_columns,
    decode_routed,
    dense,
    dequantise_weight,
    dispatch,
    exchange,
    exchange_planning,
    gemm_generic,
    gemm_mixed,
    gemm_tma,
    pairs_decode,
    permute,
    placement,
    quantise_rows,
    routing,
    scaled,
    scaled_decode,
    scaled_pairs,
    scaled_rows,
    tiles,
    weight_gradient,
)
_STRIDE = 48  # of the last dimension; the others follow, none is 1
HALVES, INTERLEAVED = Activation(), Activation(interleaved=True)
_ROUTING = RoutingConfig(top_k=2, num_groups=2)
BESIDE = (
    (8, 7168, 2048, 2048), (4, 2048, 1408, 5632), (10, 2048, 512, 512), (8, 3584, 2560, 8192), (3, 37, 64, 37)
)  # fmt: skip
"""K, H, I, and features of a shared expert in the same launches."""
TENSORS = {
    **dict.fromkeys(
        ("hidden_states", "w13", "w13_up", "w2", "w13_bias", "w13_up_bias", "w2_bias", "shared"),
        torch.bfloat16,
    ),
    **dict.fromkeys(("shared_gate", "residual"), torch.bfloat16),
    **dict.fromkeys(
        ("x", "weight", "bias", "grad", "gate_up", "expert_out", "router_logits"), torch.bfloat16
    ),
    **dict.fromkeys(("shared_w13", "shared_up", "shared_w2"), torch.bfloat16),
    "shared_weights": torch.float32,
    **dict.fromkeys(("topk_weights", "grad_weights", "correction_bias", "scale", "x_scale"), torch.float32),
    **dict.fromkeys(("input_scale", "w13_input_scale", "w2_input_scale"), torch.float32),
    **dict.fromkeys(("w13_scale", "w2_scale"), torch.float32),
    **dict.fromkeys(
        ("topk_ids", "expert_map", "expert_offsets", "sorted_slots", "inverse", "counts"), torch.int32
    ),
    **dict.fromkeys(("logical_to_physical", "replica_count", "load", "num_real_tokens"), torch.int32),
    **dict.fromkeys(("owners", "slots", "tokens", "sent", "received"), torch.int32),
    "extra": torch.uint8,
    **dict.fromkeys(("seed", "addresses", "turns"), torch.int64),
    "is_recording": torch.bool,
}


def all_kernels() -> set[str]:
    """Names of the kernels of `moe_ops.kernels`."""
    return {name for module in _MODULES for name in vars(module) if name.endswith("_kernel")}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A contiguous tensor by description."""
    return torch.empty(shape, dtype=dtype, device="meta")


def product(
    weight: torch.Tensor, rows: int = 64, activation: Activation | None = None, gpu: Gpu = H200
) -> Gemm:
    """A product of `rows` contiguous rows, in order, with `weight` [E, B, A]."""
    x = torch.empty(rows, weight.shape[2], dtype=weight.dtype, device="meta")
    linear = operands("weight", PairedLinear(describe(weight)))
    return Gemm(Operand("x", describe(x)), linear, "out", rows, gpu, activation=activation)


def strided(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    strides = [_STRIDE]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _index(size: int) -> torch.Tensor:
    return meta(size, dtype=torch.int32)


def replicas(ids: torch.Tensor, experts: int, most: int, physical: int) -> list[torch.Tensor]:
    """Arguments of `map_and_record`."""
    load = strided(physical, dtype=torch.int32)
    scalars = (meta(dtype=dtype) for dtype in (torch.int64, torch.int32, torch.bool))
    return [ids, strided(experts, most, dtype=torch.int32), _index(experts), load, *scalars]


def shared_alone(
    x: torch.Tensor, *weights: torch.Tensor | None, activation: Activation = HALVES, gpu: Gpu = H200
) -> Program:
    """What runs a shared expert beside routed ones."""
    return plans.program(SharedAlone(x, SharedExpert(*weights, activation.spec)), gpu)


def _scaled(weight: torch.Tensor, block: tuple[int, int]) -> Program:
    """Rows of 16 bits times weights whose dtype the tests take for theirs: none is compiled with others."""
    blocks = -(-128 // block[0]), -(-64 // block[1])
    scale = strided(8, *blocks, dtype=torch.float32)
    named = {"sorted_slots": _index(1024), "bias": strided(8, 128), "dtype": torch.bfloat16}
    named |= {"block_rows": block[0], "block_columns": block[1]}
    return program_of("scaled_grouped_gemm", strided(512, 64), weight, scale, _index(9), **named)


def _scaled_rows(block: tuple[int, int]) -> Program:
    """The same with rows of 8 bits on the left."""
    blocks, stored = (-(-128 // block[0]), -(-64 // block[1])), {"dtype": torch.int8}
    scale, x_scale = (strided(*sizes, dtype=torch.float32) for sizes in ((8, *blocks), (512, blocks[1])))
    named = {"sorted_slots": _index(1024), "bias": strided(8, 128), "dtype": torch.bfloat16}
    named |= {"x_scale": x_scale, "block_rows": block[0], "block_columns": block[1]}
    return program_of(
        "scaled_grouped_gemm", meta(512, 64, **stored), meta(8, 128, 64, **stored), scale, _index(9), **named
    )


def _scaled_token(rows: str = "quantised", **given: torch.Tensor) -> Program:
    """A token's layer in float8."""
    named = {
        "hidden_states": strided(1, 64),
        "topk_weights": strided(1, 2),
        "topk_ids": meta(1, 2, dtype=torch.int32),
    }
    for name, features, columns in (("w13", 256, 64), ("w2", 64, 128)):
        weight = strided(8, features, columns, dtype=torch.float8_e4m3fn)
        if rows == "exact":  # columns of these lie side by side
            weight = meta(8, features, columns + 16, dtype=torch.float8_e4m3fn)[:, :, :columns]
        scale = strided(8, features // 8, columns // 32, dtype=torch.float32)
        named |= {name: weight, f"{name}_scale": scale, f"{name}_bias": strided(8, features)}
        named |= {f"{name}_block_rows": 8, f"{name}_block_columns": 32}
    return program_of("scaled_fused_experts", activation="silu", rows=rows, **named, **given)


def _gemms(act: Activation) -> list[Program]:
    """gather_gemm_act with weights for the TMA kernel, both ways round, and with weights of any strides."""
    x, bias = strided(512, 64), strided(8, 128)
    weights = meta(8, 128, 64), meta(8, 64, 128).transpose(1, 2), strided(8, 128, 64)
    plans = [_index(1024), _index(9), bias]
    return [program_of("gather_gemm_act", x, weight, *plans, activation=act) for weight in weights]


def _mixed() -> Program:
    """A product wide enough for tiles of mixed heights."""
    x, weight = meta(128, 2064)[:, :2048], meta(2, 2048, 2064)[:, :, :2048]
    return program_of("grouped_gemm", x, weight, _index(3), strided(2, 2048))


def _decode(*weights: torch.Tensor) -> Program:
    routes = strided(1, 2, dtype=torch.float32), strided(1, 2, dtype=torch.int32)
    biases = strided(8, 128), None, None, strided(8, 64)
    inputs = strided(1, 64), *weights, *routes, *biases
    return program_of("fused_experts", *inputs, _index(16), strided(1, 64), *_beside(1), HALVES)


def _decode_from_logits(w13: torch.Tensor, w2: torch.Tensor) -> Program:
    tensors = {
        "hidden_states": strided(1, 64), "router_logits": strided(1, 8), "w13": w13, "w2": w2,
        "correction_bias": strided(8, dtype=torch.float32), "expert_map": _index(8),
        "w13_bias": strided(8, 128), "w2_bias": strided(8, 64),
    }  # fmt: skip
    return program_of("fused_moe", **tensors, routing=RoutingConfig(top_k=2), activation=HALVES)


def _beside(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A shared expert's gate, and a residual."""
    return strided(tokens, 1), strided(tokens, 64)


def exchanges(dtype: torch.dtype, sizes: tuple[int, int, int], gpu: Gpu = H200) -> list[Program]:
    """A push of integers as long as `dtype`, with all that goes with tokens, and a pull; sizes are W, M and H."""
    num_ranks, most, columns = sizes
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    row_bytes = 16 * (columns * dtype.itemsize // 16 + 20)
    layout = ExchangeLayout(num_ranks, most, row_bytes, row_bytes)
    plan = ExchangePlan(
        *(meta(*shape, dtype=torch.int32) for shape in ((9, num_ranks), (num_ranks, most), (num_ranks,)))
    )
    weights, ids = meta(9, 8, dtype=torch.int32), meta(9, 8, dtype=torch.int32)
    pushed = meta(9, columns, dtype=integers), weights, ids, meta(9, 5, dtype=torch.uint8)
    pulled = (
        meta(num_ranks * most, columns, dtype=dtype),
        plan,
        _index(num_ranks),
        meta(9, columns, dtype=dtype),
    )
    given = PushRows(*pushed, plan, ""), PullSums(*pulled, "")
    return [exchange_plans.program(each, layout, 1, gpu) for each in given]


def exchange_dtypes(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Of the tensors that both of these name."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    moved = {"hidden_states": integers, "topk_weights": torch.int32}
    return {**TENSORS, **moved, **dict.fromkeys(("shared", "rows"), dtype)}


def programs() -> list[Program]:
    """Programs that together launch every kernel, each with every stride a caller's tensor can bring."""
    rows, weights = strided(1024, 64), strided(512, 2, dtype=torch.float32)
    logits, ids = strided(512, 8), strided(512, 2, dtype=torch.int32)
    return [
        program_of("permute", strided(512, 64), _index(1024)),
        program_of("permute_backward", rows, _index(1024), 512),
        program_of("combine", rows, weights, _index(1024), strided(512, 64), *_beside(512)),
        program_of("combine_backward", strided(512, 64), rows, weights, _index(1024)),
        program_of("gated_activation", strided(1024, 128), HALVES),
        program_of("gated_activation_backward", rows, strided(1024, 128), INTERLEAVED),
        program_of(
            "weighted_activation_backward",
            rows,
            strided(1024, 128),
            strided(1024, dtype=torch.float32),
            INTERLEAVED,
        ),
        program_of("topk_routing", logits, strided(8, dtype=torch.float32), _ROUTING),
        program_of("topk_routing_backward", weights, logits, weights, ids, _ROUTING),
        program_of("build_dispatch", strided(4096, 2, dtype=torch.int32), _index(16), 8),
        program_of("build_dispatch", strided(8, 2, dtype=torch.int32), None, 8),
        program_of("plan_exchange", ids, _index(8), 2, 512),
        program_of("plan_exchange", ids, _index(8), 2, 4096),
        program_of("map_and_record", *replicas(strided(512, 2, dtype=torch.int32), 16, 3, 24)),
        program_of("route_and_record", logits, *replicas(ids, 8, 3, 24)[1:4], routing=_ROUTING),
        shared_alone(
            strided(2, 64), meta(96, 96)[:, :64], meta(64, 96)[:, :48], strided(2, 1, dtype=torch.float32)
        ),
        program_of("grouped_gemm_weight_backward", strided(1024, 128), rows, _index(9)),
        program_of(
            "grouped_gemm_weight_backward", meta(1024, 136)[:, :128], meta(1024, 72)[:, :64], _index(9)
        ),
        program_of("dense_gemm", strided(8, 64), meta(16, 96)[:, :64], strided(16), torch.float32),
        program_of("quantise_rows", strided(512, 64), None, 24, torch.int8),
        program_of("quantise_rows", strided(8, 9000), None, 9000, torch.int8),
        program_of("quantise_rows", strided(8, 96), strided(16, dtype=torch.float32), 32, torch.int8),
        program_of(
            "dequantise_weight",
            strided(8, 128, 64, dtype=torch.int8),
            strided(8, 19, 7, dtype=torch.float32),
            None,
            None,
            7,
            10,
            torch.bfloat16,
        ),
        _scaled(strided(8, 128, 64, dtype=torch.int8), (7, 10)),
        _scaled(meta(8, 128, 64, dtype=torch.int8), (1, 64)),
        _scaled_rows((1, 64)),
        _scaled_rows((128, 32)),
        _scaled_token(),
        _scaled_token("exact"),
        _scaled_token(
            **dict.fromkeys(("w13_input_scale", "w2_input_scale"), strided(8, dtype=torch.float32))
        ),
        program_of("batched_gemm", strided(8, 64, 64), meta(8, 128, 64), _index(8), strided(8, 128)),
        *_gemms(HALVES),
        _mixed(),
        *_gemms(INTERLEAVED),
        *_gemms(Activation("relu2")),
        *(decode(strided(8, 128, 64), strided(8, 64, 64)) for decode in (_decode, _decode_from_logits)),
        *(
            decode(meta(8, 128, 96)[:, :, :64], meta(8, 64, 96)[:, :, :64])
            for decode in (_decode, _decode_from_logits)
        ),
    ]
