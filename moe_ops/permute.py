"""permute: brings token rows into expert order.

    out[row] = hidden_states[sorted_slots[row] // K],   K = S / T

T tokens, H hidden size, K experts per token, S = T*K routed slots. `grouped_gemm` consumes the result. A gather:
static output shape, no host sync, capturable. Its gradient sums a token's K rows in slot order, so it is
deterministic.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ops import _autograd, _checks, _library
from moe_ops.arguments import Permute, PermuteBackward
from moe_ops.errors import value_error
from moe_ops.records import partial


def permute(hidden_states: Tensor, sorted_slots: Tensor) -> Tensor:
    """Gathers the rows of `hidden_states` in the order of `sorted_slots`.

    Args:
        hidden_states: [T, H], any floating dtype.
        sorted_slots: [S] int32, from `build_dispatch`; S a multiple of T.

    Returns:
        [S, H], dtype of hidden_states. Rows of dropped slots are gathered too; nothing reads them.

    Raises:
        ValueError: wrong rank, S not a multiple of T, tensors on different devices.
        TypeError: wrong dtype.

    Example:
        >>> plan = moe_ops.build_dispatch(topk_ids, num_experts)
        >>> rows = moe_ops.permute(hidden_states, plan.sorted_slots)
    """
    return _library.call(Permute(hidden_states, sorted_slots))


def _check(args: Permute) -> None:
    hidden_states, sorted_slots = args
    _checks.expect_floating("hidden_states", hidden_states)
    _checks.expect_shape("hidden_states", hidden_states, ("T", "H"))
    check_slots(sorted_slots, hidden_states.shape[0])
    _checks.expect_same_device(hidden_states.device, "hidden_states", sorted_slots=sorted_slots)


def check_slots(sorted_slots: Tensor, num_tokens: int | torch.SymInt) -> None:
    """Checks a plan's sorted_slots [S] against the number of tokens."""
    _checks.expect_index("sorted_slots", sorted_slots, (torch.int32,))
    _checks.expect_shape("sorted_slots", sorted_slots, ("S",))
    num_slots = sorted_slots.shape[0]
    if not (isinstance(num_slots, int) and isinstance(num_tokens, int)):
        return
    if num_slots % num_tokens if num_tokens else num_slots:
        value_error("sorted_slots has {} rows: expected a multiple of the {} tokens", num_slots, num_tokens)


def _tokens(sorted_slots: Tensor, num_tokens: int) -> Tensor:
    return sorted_slots // max(sorted_slots.shape[0] // max(num_tokens, 1), 1)


def _reference(args: Permute) -> Tensor:
    tokens = _tokens(args.sorted_slots, args.hidden_states.shape[0])
    try:
        return args.hidden_states.index_select(0, tokens)
    except IndexError:
        _refuse(args, tokens)


def _refuse(args: Permute, tokens: Tensor) -> NoReturn:
    num_tokens = args.hidden_states.shape[0]
    strange = args.sorted_slots[(tokens < 0) | (tokens >= num_tokens)]
    value_error("sorted_slots holds {}: expected slots of {} tokens", int(strange[0]), num_tokens)


def _cuda(args: Permute) -> Tensor:
    return _fake(args) if args.sorted_slots.numel() == 0 else _library.launch(args)


def _fake(args: Permute) -> Tensor:
    return args.hidden_states.new_empty((args.sorted_slots.shape[0], args.hidden_states.shape[1]))


def _check_backward(args: PermuteBackward) -> None:
    check_slots(args.sorted_slots, args.num_tokens)
    _checks.expect_floating("grad", args.grad)
    _checks.expect_shape("grad", args.grad, (args.sorted_slots.shape[0], "H"))
    _checks.expect_same_device(args.grad.device, "grad", sorted_slots=args.sorted_slots)


def _reference_backward(args: PermuteBackward) -> Tensor:
    grad, slots, num_tokens = args
    if grad.numel() == 0:
        return grad.new_zeros((num_tokens, grad.shape[1]))
    rows = torch.empty_like(slots)
    rows[slots] = torch.arange(rows.shape[0], dtype=rows.dtype, device=rows.device)
    # One pass over the rows, accumulated in float32 for half precision too.
    return F.embedding_bag(rows.view(num_tokens, -1), grad, mode="sum")


def _cuda_backward(args: PermuteBackward) -> Tensor:
    return _fake_backward(args) if args.num_tokens == 0 else _library.launch(args)


def _fake_backward(args: PermuteBackward) -> Tensor:
    return args.grad.new_empty((args.num_tokens, args.grad.shape[1]))


_library.define(Permute, "Tensor", check=_check, cpu=_reference, cuda=_cuda, fake=_fake)
_library.define(
    PermuteBackward,
    "Tensor",
    check=_check_backward,
    cpu=_reference_backward,
    cuda=_cuda_backward,
    fake=_fake_backward,
)


def permute_gradient(grad: Tensor, sorted_slots: Tensor, num_tokens: int) -> Tensor:
    """Gradient of `permute` to hidden_states: [S, H] to [T, H]."""
    return _library.call(PermuteBackward(grad, sorted_slots, num_tokens))


def _save(args: Permute, output: Tensor) -> Any:
    return args.sorted_slots, args.hidden_states.shape[0]


def _backward(saved: Any, needs: Permute, grad: Tensor) -> Permute:
    return partial(Permute, hidden_states=permute_gradient(grad, *saved))


def _save_backward(args: PermuteBackward, output: Tensor) -> Any:
    return args.sorted_slots


def _double_backward(sorted_slots: Any, needs: PermuteBackward, grad: Tensor) -> PermuteBackward:
    return partial(PermuteBackward, grad=permute(grad, sorted_slots))


def _tangent(args: Permute, tangents: Permute) -> _autograd.Tangents:
    return (permute(tangents.hidden_states, args.sorted_slots),)


def _tangent_backward(args: PermuteBackward, tangents: PermuteBackward) -> _autograd.Tangents:
    return (permute_gradient(tangents.grad, args.sorted_slots, args.num_tokens),)


_autograd.define_gradient(Permute, _save, _backward, _tangent)
_autograd.define_gradient(PermuteBackward, _save_backward, _double_backward, _tangent_backward)
_library.define_vmap(Permute)
_library.define_vmap(PermuteBackward)
