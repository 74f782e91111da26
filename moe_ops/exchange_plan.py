"""plan_exchange: which row every token has on every rank that holds one of its experts.

    wanted[t, r] = any over k of owners[topk_ids[t, k]] == r
    slots[t, r]  = how many tokens before t rank r wants, -1 where it does not want t

T tokens, K experts per token, E experts, W ranks, M rows that are set aside for each. A prefix sum, so rows are in the
order of tokens; static shapes, no host sync. `push_rows` and `pull_sums` follow the plan.
"""

import torch
from torch import Tensor

from moe_ops import _autograd, _checks, _library
from moe_ops.arguments import PlanExchange
from moe_ops.errors import value_error
from moe_ops.values import ExchangePlan


def plan_exchange(topk_ids: Tensor, owners: Tensor, num_ranks: int, max_tokens: int) -> ExchangePlan:
    """Plans which rows go to which rank.

    Args:
        topk_ids: [T, K] int32 or int64. An id outside [0, E) is on no rank.
        owners: [E] int32, the rank of each expert.
        num_ranks: W.
        max_tokens: M, at least T.

    Returns:
        slots [T, W], tokens [W, M] and sent [W], all int32.

    Raises:
        ValueError: wrong rank, more tokens than rows, tensors on different devices.
        TypeError: wrong dtype.
    """
    return ExchangePlan(*_library.call(PlanExchange(topk_ids, owners, num_ranks, max_tokens)))


def _check(args: PlanExchange) -> None:
    topk_ids, owners, num_ranks, max_tokens = args
    _checks.expect_index("topk_ids", topk_ids)
    _checks.expect_shape("topk_ids", topk_ids, ("T", "K"))
    _checks.expect_index("owners", owners, (torch.int32,))
    _checks.expect_shape("owners", owners, ("E",))
    _checks.expect_same_device(topk_ids.device, "topk_ids", owners=owners)
    for name, value in (("num_ranks", num_ranks), ("max_tokens", max_tokens)):
        if value < 1:
            value_error("{}={}: expected at least 1", name, value)
    if topk_ids.shape[0] > max_tokens:
        value_error("topk_ids has {} tokens: expected at most max_tokens={}", topk_ids.shape[0], max_tokens)


def _reference(args: PlanExchange) -> tuple[Tensor, Tensor, Tensor]:
    (owners, num_ranks, max_tokens), ids = args[1:], args.topk_ids.long()
    known = (ids >= 0) & (ids < owners.shape[0])
    owner = owners.new_full(ids.shape, -1)
    owner[known] = owners[ids[known]]
    wanted = (owner.unsqueeze(2) == torch.arange(num_ranks, device=ids.device)).any(1)  # [T, W]
    slots = (wanted.cumsum(0) - 1).masked_fill(~wanted, -1).to(torch.int32)
    tokens = slots.new_full((num_ranks, max_tokens), -1)
    token, rank = wanted.nonzero(as_tuple=True)
    tokens[rank, slots[token, rank].long()] = token.to(torch.int32)
    return slots, tokens, wanted.sum(0).to(torch.int32)


def _cuda(args: PlanExchange) -> tuple[Tensor, Tensor, Tensor]:
    return _library.launch(args)


def _fake(args: PlanExchange) -> tuple[Tensor, Tensor, Tensor]:
    ids, _, num_ranks, max_tokens = args
    return (
        ids.new_empty((ids.shape[0], num_ranks), dtype=torch.int32),
        ids.new_empty((num_ranks, max_tokens), dtype=torch.int32),
        ids.new_empty((num_ranks,), dtype=torch.int32),
    )


_library.define(
    PlanExchange,
    "(Tensor slots, Tensor tokens, Tensor sent)",
    check=_check,
    cpu=_reference,
    cuda=_cuda,
    fake=_fake,
)
_autograd.define_no_gradient(PlanExchange)
_library.define_vmap(PlanExchange)
