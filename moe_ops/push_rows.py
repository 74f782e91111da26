"""push_rows: token rows to the ranks that a plan names, once to each, with what goes with them.

    rows[r * M + slots[t, this]] = hidden_states[t] of rank r          (slots of rank r's plan; zeros in empty rows)

T tokens, H hidden size, K experts per token, C bytes of extra tensors, W ranks, M rows set aside for each pair. Every
rank calls it as often as the others. Peers write into symmetric memory, a signal behind each row, and rows are copied
out as they come: outputs are memory of their own, so nothing else has to know of the buffers. Static shapes, no host
sync, capturable. The gradient goes back by `pull_sums`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.arguments import PullSums, PushRows
from moe_ops.errors import value_error
from moe_ops.peers import ExchangeLayout, Fields, fields_of, peers_named
from moe_ops.records import partial
from moe_ops.values import ExchangePlan

Pushed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def push_rows(
    hidden_states: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    extra: Tensor | None,
    plan: ExchangePlan,
    peers: str,
) -> Pushed:
    """Sends rows to other ranks, and returns those that came here.

    Args:
        hidden_states: [T, H], any dtype.
        topk_weights: [T, K] floating, or None.
        topk_ids: [T, K] int32 or int64, or None.
        extra: [T, C] uint8, or None.
        plan: from `plan_exchange`.
        peers: the name of a `Peers`. With one rank it is not looked at.

    Returns:
        rows [W*M, H], those of rank 0 first; weights [W*M, K], ids [W*M, K] int32 and extra [W*M, C], without columns
        where they are None; received [W] int32, how many rows came from each rank. Rows without a token are zeros, with
        ids of -1.

    Raises:
        ValueError: wrong rank or size, rows that do not fit in the buffers, tensors on different devices, several ranks
            on a CPU.
        TypeError: wrong dtype.
    """
    return _library.call(PushRows(hidden_states, topk_weights, topk_ids, extra, plan, peers))


def _check(args: PushRows) -> None:
    hidden, weights, ids, extra, plan, _ = args
    _checks.expect_tensor("hidden_states", hidden)
    _checks.expect_shape("hidden_states", hidden, ("T", "H"))
    num_tokens = hidden.shape[0]
    check_plan(plan, num_tokens)
    if weights is not None:
        _checks.expect_floating("topk_weights", weights)
        _checks.expect_shape("topk_weights", weights, (num_tokens, "K"))
    if ids is not None:
        _checks.expect_index("topk_ids", ids)
        top_k = "K" if weights is None else weights.shape[1]
        _checks.expect_shape("topk_ids", ids, (num_tokens, top_k))
    if extra is not None:
        _checks.expect_index("extra", extra, (torch.uint8,))
        _checks.expect_shape("extra", extra, (num_tokens, "C"))
    tensors = {"topk_weights": weights, "topk_ids": ids, "extra": extra, **plan._asdict()}
    _checks.expect_same_device(hidden.device, "hidden_states", **tensors)


def check_plan(plan: ExchangePlan, num_tokens: int | torch.SymInt | str) -> None:
    """Checks the shapes of a plan for so many tokens."""
    for name, tensor in plan._asdict().items():
        _checks.expect_index(name, tensor, (torch.int32,))
    _checks.expect_shape("slots", plan.slots, (num_tokens, "W"))
    num_ranks = plan.slots.shape[1]
    _checks.expect_shape("tokens", plan.tokens, (num_ranks, "M"))
    _checks.expect_shape("sent", plan.sent, (num_ranks,))


def expect_one_rank(plan: ExchangePlan) -> None:
    """Raises ValueError where several ranks compute on a CPU."""
    if plan.tokens.shape[0] > 1:
        value_error("tokens has {} rows, of as many ranks, on a CPU: expected one", plan.tokens.shape[0])


def _reference(args: PushRows) -> Pushed:
    """Of one rank."""
    expect_one_rank(args.plan)
    return _of_one_rank(args)


def _of_one_rank(args: PushRows) -> Pushed:
    hidden, weights, ids, extra, plan, _ = args
    token = plan.tokens[0].long()
    taken = token >= 0

    def moved(x: Tensor | None, dtype: torch.dtype, fill: int = 0) -> Tensor:
        if x is None or x.shape[0] == 0:
            columns = 0 if x is None else x.shape[1]
            return torch.full((token.shape[0], columns), fill, dtype=dtype, device=hidden.device)
        return x[token.clamp(min=0)].masked_fill(~taken.unsqueeze(1), fill).to(dtype)

    weight_dtype = torch.float32 if weights is None else weights.dtype
    rows, row_weights = moved(hidden, hidden.dtype), moved(weights, weight_dtype)
    return (
        rows,
        row_weights,
        moved(narrow(ids), torch.int32, -1),
        moved(extra, torch.uint8),
        plan.sent.new_empty((1,)).copy_(plan.sent),
    )


def narrow(ids: Tensor | None) -> Tensor | None:
    """Ids as int32, -1 for those that are none."""
    if ids is None or ids.dtype == torch.int32:
        return ids
    return ids.masked_fill((ids < 0) | (ids > torch.iinfo(torch.int32).max), -1).to(torch.int32)


def _cuda(args: PushRows) -> Pushed:
    if args.plan.tokens.shape[0] == 1:
        return _of_one_rank(args)
    peers = peers_named(args.peers)
    check_fits(args, peers.layout)
    return as_pushed(args, _library.exchange(as_integers(args), peers))


def as_pushed(args: PushRows, moved: Mapping[str, Tensor]) -> Pushed:
    """What launches have written, as outputs: in the dtypes of the arguments, without columns where there is none."""
    rows, weights = moved["rows"].view(args.hidden_states.dtype), args.topk_weights

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return moved[name].view(dtype) if name in moved else rows.new_empty((rows.shape[0], 0), dtype=dtype)

    row_weights = column("row_weights", torch.float32 if weights is None else weights.dtype)
    row_ids, row_extra = column("row_ids", torch.int32), column("row_extra", torch.uint8)
    return rows, row_weights, row_ids, row_extra, moved["received"]


def as_integers(args: PushRows) -> PushRows:
    """Contiguous, and integers of the same size: rows are moved, not computed with."""
    hidden, weights, ids, extra, plan, peers = args
    plan = ExchangePlan(*(each.contiguous() for each in plan))
    return PushRows(_bits(hidden), _bits(weights), _bits(narrow(ids)), _bits(extra), plan, peers)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Any) -> Any:
    return None if x is None else x.contiguous().view(_INTEGERS[x.dtype.itemsize])


def fields(args: PushRows) -> Fields:
    """Where in a row of the buffer lies what."""
    hidden, weights, ids, extra, *_ = args

    def row_bytes(x: Tensor | None, item: int) -> int:
        return 0 if x is None else x.shape[1] * item

    weight_bytes = row_bytes(weights, 0 if weights is None else weights.dtype.itemsize)
    return fields_of(
        row_bytes(hidden, hidden.dtype.itemsize), weight_bytes, row_bytes(ids, 4), row_bytes(extra, 1)
    )


def check_fits(args: PushRows, layout: ExchangeLayout) -> None:
    """Raises ValueError where the buffers were made for other sizes."""
    wanted, of_plan = fields(args).num_bytes, tuple(args.plan.tokens.shape)
    if wanted > layout.row_bytes:
        value_error(
            "hidden_states has {} bytes a token with what goes with it: expected at most {}, for which the "
            "exchange was made (hidden_size, top_k, dtype, extra_bytes)",
            wanted,
            layout.row_bytes,
        )
    if of_plan != (layout.num_ranks, layout.max_tokens):
        value_error("tokens has shape {}: expected {}", list(of_plan), [layout.num_ranks, layout.max_tokens])


def _fake(args: PushRows) -> Pushed:
    hidden, weights, ids, extra, plan, _ = args
    num_ranks, max_tokens = plan.tokens.shape
    num_rows = num_ranks * max_tokens

    def columns(x: Tensor | None) -> int | torch.SymInt:
        return 0 if x is None else x.shape[1]

    weight_dtype = torch.float32 if weights is None else weights.dtype
    return (
        hidden.new_empty((num_rows, hidden.shape[1])),
        hidden.new_empty((num_rows, columns(weights)), dtype=weight_dtype),
        hidden.new_empty((num_rows, columns(ids)), dtype=torch.int32),
        hidden.new_empty((num_rows, columns(extra)), dtype=torch.uint8),
        hidden.new_empty((num_ranks,), dtype=torch.int32),
    )


_library.define(
    PushRows,
    "(Tensor rows, Tensor row_weights, Tensor row_ids, Tensor row_extra, Tensor received)",
    check=_check,
    cpu=_reference,
    cuda=_cuda,
    fake=_fake,
)


def _save(args: PushRows, outputs: Pushed) -> Any:
    return args.plan, outputs[-1], args.peers


def _backward(saved: Any, needs: PushRows, *grads: Tensor) -> PushRows:
    plan, received, peers = saved

    def back(grad: Tensor) -> Tensor:
        return _library.call(PullSums(grad, plan, received, None, peers))

    return partial(
        PushRows,
        hidden_states=back(grads[0]) if needs.hidden_states else None,
        topk_weights=back(grads[1]) if needs.topk_weights else None,
    )


def _tangent(args: PushRows, tangents: PushRows) -> _autograd.Tangents:
    hidden = _autograd.or_zeros(tangents.hidden_states, args.hidden_states)
    weights = args.topk_weights
    weights = None if weights is None else _autograd.or_zeros(tangents.topk_weights, weights)
    rows, row_weights, *_ = push_rows(hidden, weights, None, None, args.plan, args.peers)
    return rows, row_weights, None, None, None


_autograd.define_gradient(PushRows, _save, _backward, _tangent)
_library.define_vmap(PushRows)
