"""What a layer does with routed tokens besides the experts' products. Plain PyTorch that a compiler sees through."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from layers.router import RouterOutput
from moe_ops import build_dispatch, combine, gated_activation, grouped_gemm, permute
from moe_ops._library import autocast
from moe_ops.arguments import FusedExperts
from moe_ops.errors import value_error
from moe_ops.fused_experts import expect_routed


def in_chunks(run: Callable[..., Tensor], size: int | None, tokens: Tensor, *others: Any) -> Tensor:
    """`run(tokens, *others)`, at most `size` tokens at a time: one chunk's workspace, and the output [T, H].

    `others` are what else has a row per token: tensors, a `RouterOutput`, None; another number of rows raises
    ValueError. How many chunks there are is part of a compiled graph, as T is when it is static; a T that the graph
    computes, as exchanges without `max_tokens` do, raises ValueError.
    """
    if size is None or _fits(tokens.shape[0], size):
        return run(tokens, *others)
    for other in others:
        _expect_rows(other, tokens.shape[0])
    output = _in_place_of_its_first_rows(run(*_rows_of((tokens, *others), 0, size)), tokens.shape[0])
    for start in range(size, tokens.shape[0], size):
        output[start : start + size] = run(*_rows_of((tokens, *others), start, size))
    return output


def _fits(num_tokens: int, size: int) -> bool:
    if not torch.compiler.is_compiling():
        return num_tokens <= size
    # Imported where something may be symbolic: it takes 0.4 s.
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    fits = guard_or_true(num_tokens <= size)
    if fits and not guard_or_false(num_tokens <= size):
        value_error(
            "chunk_size={} of tokens whose number only the run can tell: expected a known one in compiled code, as by "
            "max_tokens of an exchange",
            size,
        )
    return fits


def _in_place_of_its_first_rows(first: Tensor, num_rows: int) -> Tensor:
    output = first.new_empty(num_rows, *first.shape[1:])
    output[: first.shape[0]] = first
    return output


def _rows_of(values: Sequence[Any], start: int, size: int) -> Iterator[Any]:
    return (_rows(each, slice(start, start + size)) for each in values)


def _rows(value: Any, rows: slice) -> Any:
    if isinstance(value, RouterOutput):
        return RouterOutput(*(_rows(each, rows) for each in value))
    return None if value is None else value[rows]


def _expect_rows(value: Any, num_tokens: int) -> None:
    for tensor in value if isinstance(value, tuple) else (value,):
        if tensor is not None and tensor.shape[0] != num_tokens:
            value_error("{} rows beside {} tokens: expected one each", tensor.shape[0], num_tokens)


def zero_experts(tokens: Tensor, routed: RouterOutput, num_experts: int) -> Tensor:
    """What the experts from number `num_experts` on return, weighed: a multiple of each token [T, H].

    An id beyond these, which no logit belongs to, is dropped as everywhere.
    """
    ids = routed.topk_ids
    is_zero = (ids >= num_experts) & (ids < routed.router_logits.shape[1])
    weights = routed.topk_weights.masked_fill(~is_zero, 0)
    return (tokens * weights.sum(1, keepdim=True)).to(tokens.dtype)


def run_with_norm(args: FusedExperts, weight: Tensor, eps: float) -> Tensor:
    """`moe_ops.fused_experts` with an RMS norm of every expert's output [S, H] before it is weighed."""
    expect_routed(args)
    w13, w2 = args.experts
    plan = build_dispatch(args.topk_ids, w13.weight.shape[0], args.placement.expert_map)
    rows = permute(args.hidden_states, plan.sorted_slots)
    gate_up = grouped_gemm(rows, w13.weight, plan.expert_offsets, w13.bias)
    expert_out = grouped_gemm(
        gated_activation(gate_up, args.activation), w2.weight, plan.expert_offsets, w2.bias
    )
    normed = F.rms_norm(expert_out, weight.shape, weight, eps)
    rows, shared = autocast((normed, args.shared))
    return combine(rows, args.topk_weights, plan.inverse, shared)


def scaled(weights: Tensor, ids: Tensor, expert_scale: Tensor) -> Tensor:
    """Routed weights [T, K] times the scale of their expert, in their own dtype; of an id out of range, any scale."""
    return weights * expert_scale.to(weights.dtype)[ids.long().clamp(0, expert_scale.shape[0] - 1)]


def expect_overlap(layer: Any) -> None:
    """Raises ValueError where a shared expert cannot run beside the experts of `layer` in one operator."""
    layer.config.expect_overlap()
    if layer.lora is not None or layer.quantisation is not None:
        value_error(
            "a shared expert beside lora or quantised experts: expected shared_experts.overlap=False, or the "
            "shared_order 'before' of a MoERunner"
        )
    if layer.parallel is not None:
        value_error(
            "shared is a shared expert, and ranks share the others: expected its output or a function"
        )


def expect_none(layer: Any, *names: str) -> None:
    """Raises ValueError where a layer whose tokens must not depend on each other has something that could undo it."""
    for name in names:
        if getattr(layer, name) is not None:
            value_error("{} with emit='batch_invariant': expected None", name)
