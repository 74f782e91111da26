"""When the decode kernels run, from shapes alone, and their launches."""

from typing import Any

from moe_ops.kernels.activation import activation_args
from moe_ops.kernels.common import cdiv
from moe_ops.kernels.decode import gemv_activation_kernel, gemv_combine_kernel
from moe_ops.kernels.decode_args import (
    SHARED,
    output_args,
    route_args,
    shared_down_args,
    shared_up_args,
    weight_args,
)
from moe_ops.kernels.decode_blocks import MOST_ROWS, down_config, up_config
from moe_ops.kernels.decode_columns_plan import down_columns_launches, up_columns_launches
from moe_ops.kernels.formula import gate_of, operand_args, with_formula
from moe_ops.kernels.gemm import bias_args, operands, reference_to
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Buffer, Launch, Ref, TensorMeta
from moe_ops.kernels.tma import is_transposed
from moe_ops.values import SharedExpert

_MAX_TOKENS = 8
# Below this share of distinct experts, grouping the slots of an expert saves more weight traffic than sorting costs;
# and up to that one it saves some that slots take turns.
_DISTINCT_SHARE, _TURNS_SHARE = 0.85, 0.95
# Of a shared expert in the same launches that is no wider than a routed one, and of others (H200, five layers). Beyond
# so many features a program of the second launch would have no registers left.
MOST_TOKENS_BESIDE, _MOST_TOKENS_BESIDE_WIDE, _MOST_FEATURES_BESIDE = 4, 2, 8192


def prefers_gemv(num_tokens: int, top_k: int, num_experts: int) -> bool:
    """Whether so few slots share an expert that reading each slot's weights separately costs little."""
    if num_tokens > _MAX_TOKENS or top_k > MOST_ROWS:
        return False
    return _distinct_share(num_tokens, top_k, num_experts) >= _DISTINCT_SHARE


def _distinct_share(num_tokens: int, top_k: int, num_experts: int) -> float:
    """How many experts the slots of these tokens hit, by slots, if all are chosen alike; no slots share none."""
    distinct = num_experts * (1.0 - (1.0 - min(top_k / num_experts, 1.0)) ** num_tokens)
    return distinct / (num_tokens * top_k) if num_tokens else 1.0


def takes_turns(args: Any) -> bool:
    """Whether the slots of a `FusedExperts` take turns at blocks of columns.

    With rows that lie together it pays where slots share experts, and beside a shared expert, whose weights are read at
    the same time or just before; else neighbouring programs had better read neighbouring rows. All measured on an H200.
    """
    w13 = args.experts.w13.weight
    share = _distinct_share(*args.topk_ids.shape, args.placement.num_ids(w13.shape[0]))
    return not is_transposed(w13) and (args.shared is not None or share <= _TURNS_SHARE)


def joins_shared(args: Any, shared: SharedExpert) -> bool:
    """Whether launches for so few tokens can be those of a shared expert as well: weights in rows, one activation.

    More tokens than these read its weights from the L2 cache once each, which a product for all of them does not.
    """
    experts, (w13, w2, _, spec, up), features = args.experts, shared, shared.shared_w2.shape[1]
    is_narrow = features <= experts.w2.weight.shape[2]
    most = MOST_TOKENS_BESIDE if is_narrow else _MOST_TOKENS_BESIDE_WIDE
    if args.topk_ids.shape[0] > most or features > _MOST_FEATURES_BESIDE:
        return False
    halves_alike = up is None or (up.shape, up.strides) == (w13.shape, w13.strides)  # a graph may have any
    in_rows = halves_alike and w13.strides[1] == w2.strides[1] == 1
    is_alike = getattr(args, "activation", None) == spec
    return in_rows and is_alike and not any(is_transposed(each.weight) for each in experts)


def gemv_launches(
    args: Any, gpu: Gpu, shared: SharedExpert | None = None
) -> tuple[tuple[Buffer, ...], tuple[Launch, ...]]:
    """Launches from `hidden_states`, `topk_ids` and `topk_weights` to the buffer `combined` [T, H].

    With a `shared` expert, which `takes_shared` allows, what it makes of each token joins the sum.
    """
    (num_tokens, top_k), dtype = args.topk_ids.shape, args.hidden_states.dtype
    hidden_size, features = args.experts.w2.weight.shape[1:]
    activated = Buffer("activated", (num_tokens * top_k, features), dtype)
    combined = Buffer("combined", (num_tokens, hidden_size), dtype)
    beside = () if shared is None else (Buffer(SHARED, (num_tokens, shared.shared_w2.shape[1]), dtype),)
    up_buffers, up = _up_launches(args, gpu, shared)
    down_buffers, down = _down_launches(args, activated, gpu, shared)
    return (activated, *beside, combined, *up_buffers, *down_buffers), (*up, *down)


def first_launch(args: Any, gpu: Gpu) -> Launch:
    """The first of `gemv_launches`."""
    return _up_launches(args, gpu, None)[1][0]


def _up_launches(
    args: Any, gpu: Gpu, shared: SharedExpert | None
) -> tuple[tuple[Buffer, ...], tuple[Launch, ...]]:
    if not is_transposed(args.experts.w13.weight):
        return (), (_up_launch(args, gpu, shared),)
    products, launches = up_columns_launches(args, gpu)
    return (products,), launches


def _down_launches(
    args: Any, activated: Buffer, gpu: Gpu, shared: SharedExpert | None
) -> tuple[tuple[Buffer, ...], tuple[Launch, ...]]:
    if not is_transposed(args.experts.w2.weight):
        return (), (_down_launch(args, gpu, shared),)
    partial, launches = down_columns_launches(args, activated, gpu)
    return (partial,), launches


def _up_launch(args: Any, gpu: Gpu, shared: SharedExpert | None) -> Launch:
    (num_tokens, top_k), x = args.topk_ids.shape, args.hidden_states
    w13, gate = operands("w13", args.experts.w13), gate_of(args)
    features = args.experts.w2.weight.shape[2]
    config = up_config(_as_one(args.experts.w13), gate, gpu)
    given = {
        **route_args(args),
        **weight_args(w13.weight, config),
        **bias_args(w13.bias),
        "up_ptr": reference_to(w13.up),
        "up_bias_ptr": reference_to(w13.up_bias),
        **activation_args(gate),
        **operand_args(gate),
        **shared_up_args(shared),
        "x_ptr": Ref("hidden_states"),
        "out_ptr": Ref("activated"),
        "top_k": top_k,
        "num_tokens": num_tokens,
        "features": features,
        "x_stride_m": x.strides[0],
        "x_stride_k": x.strides[1],
        "STAGES": config.stages,
        "TAKE_TURNS": shared is not None or takes_turns(args),
    }
    beside = 0 if shared is None else num_tokens * cdiv(shared.shared_w2.shape[1], config.block_n)
    grid = (num_tokens * top_k * cdiv(features, config.block_n) + beside,)
    return Launch(with_formula(gemv_activation_kernel, gate), grid, given, config.num_warps, 4)


def _as_one(w13: Any) -> TensorMeta:
    """A pair as the one weight that would take the same blocks."""
    weight, _, up, _ = w13
    if up is None:
        return weight
    num_experts, rows, depth = weight.shape
    return TensorMeta(
        (num_experts, 2 * rows, depth), weight.strides, weight.dtype, weight.aligned and up.aligned
    )


def _down_launch(args: Any, gpu: Gpu, shared: SharedExpert | None) -> Launch:
    top_k, w2 = args.topk_ids.shape[1], operands("w2", args.experts.w2).weight
    config = down_config(w2.meta, top_k, gpu, 0 if shared is None else shared.shared_w2.shape[1])
    given = {
        **route_args(args),
        **weight_args(w2, config),
        **output_args(args),
        **shared_down_args(shared, config),
        "x_ptr": Ref("activated"),
        "STAGES": config.stages,
        "TAKE_TURNS": shared is not None or takes_turns(args),
    }
    grid = (args.topk_ids.shape[0] * cdiv(w2.meta.shape[1], config.block_n),)
    return Launch(gemv_combine_kernel, grid, given, config.num_warps, 4)
