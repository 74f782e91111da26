"""scaled_fused_experts: the experts of a whole MoE layer with weights of 8 or 4 bits, from expert ids.

    out[t] = sum over k of topk_weights[t, k] * w2[e] @ act(w13[e] @ hidden_states[t])  [+ shared[t]]
    e      = topk_ids[t, k],  w13[e] and w2[e] times their scales

It is one operator, but where gradients come through exact rows: then it is stage operators, eagerly and traced, which
keep what is between them. `scaled_grouped_gemm` has both products and takes tokens where they lie.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _compat, _library
from moe_ops.activation import activation_spec, gated_activation, out_features
from moe_ops.arguments import FusedExperts, GatherGemmAct, GemmCombine
from moe_ops.combine import combine
from moe_ops.dispatch import build_dispatch
from moe_ops.errors import value_error
from moe_ops.fused_experts import check_routed, expect_routed, fake, weigh_input
from moe_ops.pairs import PAIRS
from moe_ops.quantise_rows import check_input_scale
from moe_ops.scaled import check_scaled, expect_stored, expect_unpacked, scaled_linear
from moe_ops.scaled_arguments import QuantiseRows, ScaledFusedExperts, ScaledGroupedGemm, without_scales
from moe_ops.slabs import halves_in
from moe_ops.types import Activation, DispatchPlan, InputScales, ScaledWeight, is_gated_spec
from moe_ops.values import Epilogue, GroupedLinear, PairedLinear, Placement, ScaledLinear
from moe_ops.weight_copies import by_slabs
from moe_ops.weight_formats import IN_4_BITS

RowKind = Literal["quantised", "exact"]
Rows = RowKind | InputScales


def scaled_fused_experts(
    hidden_states: Tensor,
    w13: ScaledWeight,
    w2: ScaledWeight,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str | Activation = "silu",
    *,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    shared: Tensor | None = None,
    rows: Rows | None = None,
) -> Tensor:
    """`fused_experts` with quantised weights, which are read as they are stored.

    But with exact rows a copy of one after the other is there in their dtype for a while where that is faster: on an
    H200, from 448 rows an expert on (4 bits: 256). None takes more than 2 GiB: of larger weights there is one of some
    features at a time, from 512 rows on (4 bits: 384). On GPUs with slower memory, such as H100s, from 1.75 times as
    many on.

    Args:
        hidden_states: [T, H], any floating dtype.
        w13: of weights [E, 2I, H] ([E, I, H] for an ungated activation), w2: of [E, H, I], and their scales.
        topk_weights, topk_ids, expert_map, apply_router_weight_on_input, shared: see `fused_experts`.
        activation: a name or an `Activation`.
        w13_bias: [E, 2I], w2_bias: [E, H], dtype of hidden_states.
        rows: what is multiplied with weights: "quantised" rows, of the weights' dtype, with a scale for each block of
            the weights' columns, or "exact" ones, of the dtype of hidden_states. Exact rows are for accuracy and few
            tokens; on tensor cores weights then have to be converted. `InputScales`: quantised ones whose scales are
            given. None: "exact" with weights of 4 bits, which know nothing else, and "quantised" with ones of 8.

    Returns:
        [T, H], dtype of hidden_states.

    Raises:
        ValueError, TypeError: the message names argument, value and expectation.

    Gradient: with exact rows to hidden_states, topk_weights, biases and shared, not to weights and scales. With
    quantised rows there is none to hidden_states and w13_bias, which then must not ask for one. Calls of exact rows
    that record gradients run stages, which round before the gate where others may not: their bits may differ.

    Example:
        >>> w13 = moe_ops.ScaledWeight(w13_int8, w13_scale)  # [E, 2I, H] and [E, 2I, 1]
        >>> out = moe_ops.scaled_fused_experts(hidden_states, w13, w2, topk_weights, topk_ids)
    """
    up, down = scaled_linear("w13", w13, w13_bias), scaled_linear("w2", w2, w2_bias)
    spec = activation_spec(activation)
    args = FusedExperts(
        hidden_states, without_scales(up, down), topk_weights, topk_ids, Placement(expert_map), shared, spec
    )
    rows = rows_for(up.weight.dtype) if rows is None else rows
    return run(weigh_input(args) if apply_router_weight_on_input else args, up, down, rows)


def rows_for(stored: torch.dtype) -> RowKind:
    """What is multiplied with weights of a dtype where nothing is said."""
    return "exact" if stored in IN_4_BITS else "quantised"


def run(args: FusedExperts, w13: ScaledLinear, w2: ScaledLinear, rows: Rows) -> Tensor:
    """`scaled_fused_experts` of its arguments as values; these weights stand in the place of those of `args`."""
    layer = _checked(args, w13, w2, rows)
    if layer.rows == "quantised" or not _has_gradients(layer):
        return _library.call(layer)
    return run_stages(layer)


def run_around(
    activate: Callable[[Tensor], Tensor], args: FusedExperts, w13: ScaledLinear, w2: ScaledLinear, rows: Rows
) -> Tensor:
    """The same with a function of [S, 2I] between the products, and sizes that fit."""
    layer = _cast(args, w13, w2, rows)
    return _summed(layer, *_rows_of(activate, layer))


def expert_rows(
    args: FusedExperts, w13: ScaledLinear, w2: ScaledLinear, rows: Rows
) -> tuple[Tensor, DispatchPlan]:
    """What the experts return [S, H], before it is weighed and summed, and where it belongs."""
    layer = _checked(args, w13, w2, rows)
    return _rows_of(_gate(layer), layer)


def _checked(args: FusedExperts, w13: ScaledLinear, w2: ScaledLinear, rows: Rows) -> ScaledFusedExperts:
    _check_sizes(args, w13, w2)
    return _cast(args, w13, w2, rows)


def _cast(args: FusedExperts, w13: ScaledLinear, w2: ScaledLinear, rows: Rows) -> ScaledFusedExperts:
    x, _, weights, ids, placement, shared, activation, epilogue = args
    x, up_bias, down_bias, shared = _library.autocast((x, w13.bias, w2.bias, shared))
    kind, scales = _kind_of(rows)
    _expect_kind(kind, w13, w2)
    if kind == "quantised":
        _expect_no_gradients(hidden_states=x, w13_bias=up_bias)
    up, down = w13._replace(bias=up_bias), w2._replace(bias=down_bias)
    return ScaledFusedExperts(
        x, up, down, weights, ids, placement, shared, activation, epilogue, kind, *scales
    )


def _has_gradients(args: ScaledFusedExperts) -> bool:
    """Whether there may be any: of what a vmap gives, nothing is known while a graph is traced."""
    tensors = args.hidden_states, args.w13.bias, args.w2.bias, args.topk_weights, args.shared
    given = (tensor for tensor in tensors if tensor is not None)
    return _compat.is_in_vmap() or any(map(is_differentiated, given))


def _gate(args: ScaledFusedExperts) -> Callable[[Tensor], Tensor]:
    return lambda gate_up: gated_activation(gate_up, args.activation)


def _rows_of(activate: Callable[[Tensor], Tensor], args: ScaledFusedExperts) -> tuple[Tensor, DispatchPlan]:
    x, up, down, kind = *args[:3], args.rows
    plan = build_dispatch(args.topk_ids, up.weight.shape[0], args.placement.expert_map)
    slots, _, offsets = plan
    gate_up = _product(_rows(x, up, kind, args.w13_input_scale), up, offsets, slots, x.dtype)
    activated = _rows(activate(gate_up), down, kind, args.w2_input_scale)
    return _product(activated, down, offsets, None, x.dtype), plan


def _summed(args: ScaledFusedExperts, expert_out: Tensor, plan: DispatchPlan) -> Tensor:
    return combine(expert_out, args.topk_weights, plan.inverse, args.shared, *args.epilogue)


def _kind_of(rows: Rows) -> tuple[RowKind, InputScales]:
    return ("quantised", rows) if isinstance(rows, InputScales) else (rows, InputScales())


_Product = Callable[[Tensor, Tensor], Tensor]


def products(w13: ScaledLinear, w2: ScaledLinear, rows: Rows) -> tuple[_Product, _Product]:
    """Both products of the layer by themselves, each of rows [S, A] in expert order and the experts' offsets."""
    kind, scales = _kind_of(rows)
    return (
        lambda x, offsets: _alone(x, w13, offsets, kind, scales.w13),
        lambda x, offsets: _alone(x, w2, offsets, kind, scales.w2),
    )


def _alone(x: Tensor, linear: ScaledLinear, offsets: Tensor, kind: str, input_scale: Tensor | None) -> Tensor:
    x, bias = _library.autocast((x, linear.bias))
    if kind == "quantised":
        _expect_no_gradients(**{"tokens, biases or adapters": x})
    rows = _rows(x, linear, kind, input_scale)
    return _product(rows, linear._replace(bias=bias), offsets, None, x.dtype)


def _rows(
    x: Tensor, linear: ScaledLinear, kind: str, input_scale: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What is multiplied with the weight, and its scales."""
    if kind == "exact":
        return x, None
    return _library.call(QuantiseRows(x, linear.block_columns, linear.weight.dtype, input_scale))


def _product(
    rows: tuple[Tensor, Tensor | None],
    linear: ScaledLinear,
    offsets: Tensor,
    slots: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return _library.call(ScaledGroupedGemm(*rows, linear, offsets, slots, dtype))


def _expect_kind(rows: str, w13: ScaledLinear, w2: ScaledLinear) -> None:
    if rows not in get_args(RowKind):
        value_error("rows={!r}: expected 'quantised', 'exact' or InputScales", rows)
    if rows == "quantised" and PAIRS in (w13.weight.dtype, w2.weight.dtype):
        value_error("rows='quantised' with weights of 4 bits: expected 'exact'")


def _expect_no_gradients(**before: Tensor | None) -> None:
    """Of what is rounded, or comes into what is rounded, a gradient would be missing without a word."""
    for name, tensor in before.items():
        if tensor is not None and is_differentiated(tensor):
            value_error("rows='quantised' and {} with a gradient: expected 'exact' or torch.no_grad()", name)


def is_differentiated(tensor: Tensor) -> bool:
    """Whether a gradient or a tangent of `tensor` is wanted."""
    if not torch.compiler.is_compiling():
        tensor = _compat.unbatched(tensor)
    if torch.is_grad_enabled() and tensor.requires_grad:
        return True
    is_dual = _compat.is_in_jvp() if torch.compiler.is_compiling() else _compat.may_be_dual((tensor,))
    if not is_dual:
        return False
    return _compat.unpack_dual(tensor)[1] is not None


def _check_sizes(args: FusedExperts | ScaledFusedExperts, w13: ScaledLinear, w2: ScaledLinear) -> None:
    """What the stages' own checks would say of `x` and `weight`. Dynamo traces it, so it stays plain."""
    _checks.expect_floating("hidden_states", args.hidden_states)
    _checks.expect_shape("hidden_states", args.hidden_states, ("T", "H"))
    expect_stored("w13", w13.weight)
    expect_stored("w2", w2.weight)
    num_experts, columns, _ = w13.weight.shape
    hidden_size = args.hidden_states.shape[1]
    expect_unpacked("w13", w13.weight, ("E", "2I", hidden_size))
    gated = is_gated_spec(args.activation)
    if gated and columns % 2:
        value_error(
            "w13 has {} gate and up features: expected an even number for {!r}", columns, args.activation
        )
    features = columns // 2 if gated else columns
    expect_unpacked("w2", w2.weight, (num_experts, hidden_size, features))
    for name, linear in (("w13_bias", w13), ("w2_bias", w2)):
        if linear.bias is not None:
            _checks.expect_shape(name, linear.bias, linear.weight.shape[:2])
    expect_routed(args)


def _check(args: ScaledFusedExperts) -> None:
    for name, linear in (("w13", args.w13), ("w2", args.w2)):
        check_scaled(name, linear, "hidden_states", args.hidden_states)
    _expect_kind(args.rows, args.w13, args.w2)
    _check_input_scales(args)
    out_features(args.w13.weight.shape[1], Activation.from_spec(args.activation), "w13")
    _check_sizes(args, args.w13, args.w2)
    check_routed(args)


def _check_input_scales(args: ScaledFusedExperts) -> None:
    for name in ("w13_input_scale", "w2_input_scale"):
        scale = getattr(args, name)
        check_input_scale(name, scale, "hidden_states", args.hidden_states)
        if scale is not None and args.rows == "exact":
            value_error("{} with rows='exact': expected None", name)


def run_stages(args: ScaledFusedExperts) -> Tensor:
    """The definition of the operator: its stages, one after the other."""
    return _summed(args, *_rows_of(_gate(args), args))


def _cuda(args: ScaledFusedExperts) -> Tensor:
    if args.hidden_states.shape[0] == 0:
        return fake(args)
    if _library.has_launches(args):
        return _library.launch(args)
    parts = args.topk_ids, args.w13.weight, args.w2.weight
    return (
        _of_copies(args) if args.rows == "exact" and all(part.numel() for part in parts) else run_stages(args)
    )


def _of_copies(args: ScaledFusedExperts) -> Tensor:
    """With weights in the dtype of tokens, of which one is there at a time, or a slab of one.

    The gate reads sums that are not rounded, as in `fused_experts`, where stages round them.
    """
    x, up, down = args[:3]
    num_experts, expert_map = up.weight.shape[0], args.placement.expert_map
    slots, inverse, offsets = build_dispatch(args.topk_ids, num_experts, expert_map)

    def first(slab: PairedLinear, _: slice) -> Tensor:
        return _library.call(GatherGemmAct(x, slab, slots, offsets, args.activation))

    activated = by_slabs(up, x.dtype, halves_in(args.activation), first)

    def second(slab: PairedLinear, part: slice) -> Tensor:
        shared, (gate, residual) = args.shared, args.epilogue
        joined = Epilogue(gate, None if residual is None else residual[:, part])
        shared = None if shared is None else shared[:, part]
        linear = GroupedLinear(slab.weight, slab.bias)
        return _library.call(
            GemmCombine(activated, linear, offsets, args.topk_weights, inverse, shared, joined)
        )

    return by_slabs(down, x.dtype, 1, second)


def _flops(shapes: Any) -> int:
    """By the columns of rows: those of a weight may be two in an element."""
    (_, hidden_size), columns = shapes.hidden_states, shapes.w13.weight[1]
    features = out_features(columns, Activation.from_spec(shapes.activation))
    return 2 * shapes.topk_ids[0] * shapes.topk_ids[1] * hidden_size * (columns + features)


_library.define(ScaledFusedExperts, "Tensor", check=_check, cpu=run_stages, cuda=_cuda, fake=fake)
_autograd.define_gradient_of_formula(ScaledFusedExperts, run_stages)
_library.define_flops(ScaledFusedExperts, _flops)
_library.define_vmap_over_tokens(ScaledFusedExperts)
