"""pull_sums: rows that ranks have computed back to the tokens they came from, and summed there.

    out[t] = sum over r of rows[this * M + slots[t, r]] of rank r      (in the order of ranks; slots of -1 add nothing)

T tokens, H hidden size, W ranks, M rows set aside for each pair. The other way round than `push_rows`, whose plan it
takes. Rows for other ranks are written into their symmetric memory, a signal behind each, and each rank sums up what
is its own as it comes. Sums are float32 (float64 for float64) in one order, so they are repeatable to the bit, and are
rounded once. The gradient goes by `push_rows`.
"""

from typing import Any

from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.arguments import PullSums, PushRows
from moe_ops.errors import value_error
from moe_ops.peers import ExchangeLayout, aligned, peers_named
from moe_ops.push_rows import check_plan, expect_one_rank
from moe_ops.records import partial
from moe_ops.values import ExchangePlan


def pull_sums(
    rows: Tensor, plan: ExchangePlan, received: Tensor, shared: Tensor | None, peers: str
) -> Tensor:
    """Sums what all ranks have computed for the tokens of this one.

    Args:
        rows: [W*M, H] floating, those for tokens of rank 0 first.
        plan: that of the `push_rows` which brought the tokens.
        received: [W] int32, what that returned.
        shared: [T, H] in the dtype of rows, joins the sums before they are rounded; or None.
        peers: the name of a `Peers`.

    Returns:
        [T, H], dtype of rows.

    Raises:
        ValueError: wrong rank or size, rows that do not fit in the buffers, tensors on different devices, several ranks
            on a CPU.
        TypeError: wrong dtype.
    """
    return _library.call(PullSums(rows, plan, received, shared, peers))


def _check(args: PullSums) -> None:
    rows, plan, received, shared, _ = args
    _checks.expect_floating("rows", rows)
    check_plan(plan, "T")
    num_ranks, max_tokens = plan.tokens.shape
    _checks.expect_shape("rows", rows, (num_ranks * max_tokens, "H"))
    _checks.expect_index("received", received, (plan.sent.dtype,))
    _checks.expect_shape("received", received, (num_ranks,))
    if shared is not None:
        _checks.expect_shape("shared", shared, (plan.slots.shape[0], rows.shape[1]))
        _checks.expect_same_dtype(rows.dtype, "rows", shared=shared)
    _checks.expect_same_device(rows.device, "rows", received=received, shared=shared, **plan._asdict())


def _reference(args: PullSums) -> Tensor:
    expect_one_rank(args.plan)
    return _of_one_rank(args)


def _of_one_rank(args: PullSums) -> Tensor:
    rows, plan, _, shared, _ = args
    slot = plan.slots[:, 0].long()
    found = rows[slot.clamp(min=0)].masked_fill((slot < 0).unsqueeze(1), 0)
    return found if shared is None else found + shared


def _cuda(args: PullSums) -> Tensor:
    if args.plan.tokens.shape[0] == 1:
        return _of_one_rank(args)
    peers = peers_named(args.peers)
    check_fits(args, peers.layout)
    return _library.exchange(contiguous(args), peers)["sums"]


def contiguous(args: PullSums) -> PullSums:
    """As kernels take them."""
    rows, plan, received, shared, peers = args
    plan = ExchangePlan(*(each.contiguous() for each in plan))
    shared = None if shared is None else shared.contiguous()
    return PullSums(rows.contiguous(), plan, received.contiguous(), shared, peers)


def check_fits(args: PullSums, layout: ExchangeLayout) -> None:
    """Raises ValueError where the buffers were made for other sizes."""
    wanted, of_plan = aligned(args.rows.shape[1] * args.rows.dtype.itemsize), list(args.plan.tokens.shape)
    if wanted > layout.sum_bytes:
        value_error(
            "rows has {} bytes a row: expected at most {}, for which the exchange was made (hidden_size, dtype)",
            wanted,
            layout.sum_bytes,
        )
    if of_plan != [layout.num_ranks, layout.max_tokens]:
        value_error("tokens has shape {}: expected {}", of_plan, [layout.num_ranks, layout.max_tokens])


def _fake(args: PullSums) -> Tensor:
    return args.rows.new_empty((args.plan.slots.shape[0], args.rows.shape[1]))


_library.define(PullSums, "Tensor", check=_check, cpu=_reference, cuda=_cuda, fake=_fake)


def _save(args: PullSums, output: Tensor) -> Any:
    return args.plan, args.peers


def _backward(saved: Any, needs: PullSums, grad: Tensor) -> PullSums:
    plan, peers = saved
    rows = _library.call(PushRows(grad, None, None, None, plan, peers))[0] if needs.rows else None
    return partial(PullSums, rows=rows, shared=grad if needs.shared else None)


def _tangent(args: PullSums, tangents: PullSums) -> _autograd.Tangents:
    rows = _autograd.or_zeros(tangents.rows, args.rows)
    return (pull_sums(rows, args.plan, args.received, tangents.shared, args.peers),)


_autograd.define_gradient(PullSums, _save, _backward, _tangent)
_library.define_vmap(PullSums)
