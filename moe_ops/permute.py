"""permute: brings token rows into expert order.

    out[row] = hidden_states[sorted_slots[row] // K],   K = S / T

T tokens, H hidden size, K experts per token, S = T*K routed slots. `grouped_gemm` consumes the result. A gather:
static output shape, no host sync, capturable. Its gradient sums a token's K rows in slot order, so it is
deterministic.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ops import _autograd, _checks, _library
from moe_ops.errors import value_error


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
    return _library.call("permute", hidden_states, sorted_slots)


def _check(hidden_states: Tensor, sorted_slots: Tensor) -> None:
    _checks.expect_floating("hidden_states", hidden_states)
    _checks.expect_shape("hidden_states", hidden_states, ("T", "H"))
    check_slots(sorted_slots, hidden_states.shape[0])
    _checks.expect_same_device(hidden_states.device, "hidden_states", sorted_slots=sorted_slots)


def check_slots(sorted_slots: Tensor, num_tokens: int | torch.SymInt) -> None:
    """Checks a plan's sorted_slots [S] against the number of tokens."""
    _checks.expect_index("sorted_slots", sorted_slots, (torch.int32,))
    _checks.expect_shape("sorted_slots", sorted_slots, ("S",))
    num_slots = sorted_slots.shape[0]
    if isinstance(num_slots, int) and isinstance(num_tokens, int) and num_slots % max(num_tokens, 1):
        value_error("sorted_slots has {} rows: expected a multiple of the {} tokens", num_slots, num_tokens)


def _tokens(sorted_slots: Tensor, num_tokens: int) -> Tensor:
    return sorted_slots // max(sorted_slots.shape[0] // max(num_tokens, 1), 1)


def _reference(hidden_states: Tensor, sorted_slots: Tensor) -> Tensor:
    return hidden_states.index_select(0, _tokens(sorted_slots, hidden_states.shape[0]))


def _cuda(hidden_states: Tensor, sorted_slots: Tensor) -> Tensor:
    if sorted_slots.numel() == 0:
        return _fake(hidden_states, sorted_slots)
    from moe_ops.kernels import permute as kernels

    return kernels.launch(hidden_states, sorted_slots)


def _fake(hidden_states: Tensor, sorted_slots: Tensor) -> Tensor:
    return hidden_states.new_empty((sorted_slots.shape[0], hidden_states.shape[1]))


def _check_backward(grad: Tensor, sorted_slots: Tensor, num_tokens: int) -> None:
    check_slots(sorted_slots, num_tokens)
    _checks.expect_floating("grad", grad)
    _checks.expect_shape("grad", grad, (sorted_slots.shape[0], "H"))
    _checks.expect_same_device(grad.device, "grad", sorted_slots=sorted_slots)


def _reference_backward(grad: Tensor, sorted_slots: Tensor, num_tokens: int) -> Tensor:
    if grad.numel() == 0:
        return grad.new_zeros((num_tokens, grad.shape[1]))
    rows = torch.empty_like(sorted_slots)
    rows[sorted_slots] = torch.arange(rows.shape[0], dtype=rows.dtype, device=rows.device)
    # One pass over the rows, accumulated in float32 for half precision too.
    return F.embedding_bag(rows.view(num_tokens, -1), grad, mode="sum")


def _cuda_backward(grad: Tensor, sorted_slots: Tensor, num_tokens: int) -> Tensor:
    if num_tokens == 0:
        return _fake_backward(grad, sorted_slots, num_tokens)
    from moe_ops.kernels import permute as kernels

    return kernels.launch_backward(grad, sorted_slots, num_tokens)


def _fake_backward(grad: Tensor, sorted_slots: Tensor, num_tokens: int) -> Tensor:
    return grad.new_empty((num_tokens, grad.shape[1]))


_library.define(
    "permute(Tensor hidden_states, Tensor sorted_slots) -> Tensor",
    check=_check,
    cpu=_reference,
    cuda=_cuda,
    fake=_fake,
)
_library.define(
    "permute_backward(Tensor grad, Tensor sorted_slots, SymInt num_tokens) -> Tensor",
    check=_check_backward,
    cpu=_reference_backward,
    cuda=_cuda_backward,
    fake=_fake_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden_states, sorted_slots = inputs
    ctx.num_tokens = hidden_states.shape[0]
    ctx.save_for_backward(sorted_slots)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (sorted_slots,) = ctx.saved_tensors
    return permute_gradient(grad, sorted_slots, ctx.num_tokens), None


def permute_gradient(grad: Tensor, sorted_slots: Tensor, num_tokens: int) -> Tensor:
    """Gradient of `permute` to hidden_states: [S, H] to [T, H]."""
    return _library.call("permute_backward", grad, sorted_slots, num_tokens)


def _setup_context_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _double_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (sorted_slots,) = ctx.saved_tensors
    return permute(grad, sorted_slots), None, None


def _tangent(inputs: Sequence[Any], tangents: Sequence[Any]) -> _autograd.Tangents:
    return (permute(tangents[0], inputs[1]),)


def _tangent_backward(inputs: Sequence[Any], tangents: Sequence[Any]) -> _autograd.Tangents:
    return (permute_gradient(tangents[0], *inputs[1:]),)


_autograd.define_gradient("permute", _setup_context, _backward, _tangent)
_autograd.define_gradient("permute_backward", _setup_context_backward, _double_backward, _tangent_backward)
_library.define_vmap("permute")
_library.define_vmap("permute_backward")
