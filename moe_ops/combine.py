"""combine: weighted sum of a token's expert outputs.

    out[t] = sum over k of topk_weights[t, k] * expert_out[inverse[t*K + k]]
             [+ shared[t]  or  + sigmoid(shared_gate[t]) * shared[t]]  [+ residual[t]]

T tokens, K experts per token, S = T*K slots, R rows, H hidden size. Accumulated in float32 (float64 for float64) in
slot order, so repeated runs agree bit for bit; rounded once. A slot with inverse -1 is skipped without reading.
What is added enters after the routed sum: the output of shared experts, which may be gated, and a residual. Static
shapes, no host sync.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_ops import _autograd, _checks, _library, records
from moe_ops.arguments import Combine, CombineBackward, Epilogue
from moe_ops.errors import value_error
from moe_ops.records import partial


def combine(
    expert_out: Tensor,
    topk_weights: Tensor,
    inverse: Tensor,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Brings expert outputs back to tokens.

    Args:
        expert_out: [R, H] rows, any floating dtype: [S, H] in expert order, or as many as there are.
        topk_weights: [T, K], any floating dtype, from `topk_routing`.
        inverse: [S] int32, the row of each slot, from `build_dispatch`: -1 drops the slot; no two have one row.
        shared: [T, H], dtype of expert_out, added in the compute dtype.
        shared_gate: [T, 1], dtype of expert_out: shared is multiplied by its sigmoid.
        residual: [T, H], dtype of expert_out, added too.

    Returns:
        [T, H], dtype of expert_out.

    Raises:
        ValueError: ranks, sizes or devices that do not fit.
        TypeError: wrong dtypes.

    Gradient: to every floating argument; twice differentiable.

    Example:
        >>> out = moe_ops.combine(expert_out, topk_weights, plan.inverse)
    """
    epilogue = Epilogue(shared_gate, residual)
    return _library.call(Combine(expert_out, topk_weights, inverse, shared, epilogue))


def _check(args: Combine) -> None:
    expert_out, topk_weights, inverse, *_ = args
    _checks.expect_floating("expert_out", expert_out)
    _checks.expect_shape("expert_out", expert_out, ("R", "H"))
    check_weights(topk_weights, inverse)
    check_joined(args, expert_out.shape[1], "expert_out", expert_out)
    _checks.expect_same_device(
        expert_out.device, "expert_out", expert_out=expert_out, topk_weights=topk_weights, inverse=inverse
    )


def check_weights(topk_weights: Tensor, inverse: Tensor) -> None:
    """Checks [T, K] weights against the [S] inverse of a plan."""
    _checks.expect_floating("topk_weights", topk_weights)
    _checks.expect_shape("topk_weights", topk_weights, ("T", "K"))
    _checks.expect_index("inverse", inverse, (torch.int32,))
    _checks.expect_shape("inverse", inverse, (topk_weights.shape[0] * topk_weights.shape[1],))


def check_joined(args: Any, hidden_size: int | torch.SymInt, reference: str, like: Tensor) -> None:
    """Checks what joins the sum against dtype and device of the argument called `reference`."""
    (gate, residual), num_tokens = args.epilogue, args.topk_weights.shape[0]
    if gate is not None and args.shared is None:
        value_error("shared_gate of shape {} without shared: expected both or neither", list(gate.shape))
    check_shared(args.shared, num_tokens, hidden_size, reference, like)
    _check_beside("shared_gate", gate, (num_tokens, 1), reference, like)
    _check_beside("residual", residual, (num_tokens, hidden_size), reference, like)


def check_shared(
    shared: Tensor | None,
    num_tokens: int | torch.SymInt,
    hidden_size: int | torch.SymInt,
    reference: str,
    like: Tensor,
) -> None:
    """Checks a shared-expert output [T, H] against dtype and device of the argument called `reference`."""
    _check_beside("shared", shared, (num_tokens, hidden_size), reference, like)


def _check_beside(
    name: str, tensor: Tensor | None, shape: tuple[int | torch.SymInt, ...], reference: str, like: Tensor
) -> None:
    if tensor is not None:
        _checks.expect_shape(name, tensor, shape)
        _checks.expect_same_dtype(like.dtype, reference, **{name: tensor})
        _checks.expect_same_device(like.device, reference, **{name: tensor})


def reference(args: Combine) -> Tensor:
    """The definition of `combine`, in plain PyTorch."""
    weights = args.topk_weights.to(_checks.compute_dtype(args.expert_out.dtype))
    out = weighted_sum(args.expert_out, weights, args.inverse.view(weights.shape))
    return with_joined(out, args).to(args.expert_out.dtype)


def with_joined(total: Tensor, args: Any) -> Tensor:
    """A routed sum [T, H] and what joins it, in the dtype of the sum."""
    shared, (gate, residual) = args.shared, args.epilogue
    if shared is not None:
        total = total + (shared if gate is None else torch.sigmoid(gate.to(total.dtype)) * shared)
    return total if residual is None else total + residual


def joined_saved(args: Any) -> Any:
    """`args` with only so much of what joins the sum as its gradient needs."""
    gate = args.epilogue.shared_gate
    return args._replace(shared=None if gate is None else args.shared, epilogue=Epilogue(gate, None))


def with_joined_gradients(gradients: Any, grad: Tensor, args: Any, needs: Any) -> Any:
    """`gradients` and those of what joins the sum, of `joined_saved` arguments."""
    gate, to_shared, to_gate = args.epilogue.shared_gate, grad, None
    if gate is not None:
        share = torch.sigmoid(gate.to(_checks.compute_dtype(gate.dtype)))
        dots = (grad * args.shared.to(share.dtype)).sum(1, keepdim=True)
        to_shared = (grad * share).to(grad.dtype)
        to_gate = (dots * share * (1 - share)).to(gate.dtype)
    wanted = needs.epilogue
    to_epilogue = Epilogue(to_gate if wanted.shared_gate else None, grad if wanted.residual else None)
    return gradients._replace(shared=to_shared if needs.shared else None, epilogue=to_epilogue)


def weighted_sum(expert_out: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """[T, H], the dtype of weights: sum over k of weights[t, k] * expert_out[rows[t, k]]; row -1 is skipped."""
    least, most = (int(each) for each in rows.aminmax()) if rows.numel() else (-1, -1)
    if most >= expert_out.shape[0]:
        value_error("inverse holds {}: expected at most {}, the last row", most, expert_out.shape[0] - 1)
    if expert_out.shape[1] == 0 or least < 0:
        return _sum_kept_slots(expert_out, weights, rows)
    # A weighted sum of rows is an embedding bag: one pass, no temporaries, slot order.
    return F.embedding_bag(rows, expert_out.to(weights.dtype), per_sample_weights=weights, mode="sum")


def _sum_kept_slots(expert_out: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    out = weights.new_zeros((weights.shape[0], expert_out.shape[1]))
    for k in range(weights.shape[1] if out.numel() and expert_out.shape[0] else 0):
        values = expert_out.index_select(0, rows[:, k].clamp(min=0)).to(out.dtype)
        # Before weighing: a dropped slot must not bring in row 0, which may be NaN.
        out += values.masked_fill_(rows[:, k, None] < 0, 0.0) * weights[:, k, None]
    return out


def _cuda(args: Combine) -> Tensor:
    return _fake(args) if args.topk_weights.numel() == 0 else _library.launch(args)


def _fake(args: Combine) -> Tensor:
    return args.expert_out.new_empty((args.topk_weights.shape[0], args.expert_out.shape[1]))


def _check_backward(args: CombineBackward) -> None:
    grad, expert_out, topk_weights, inverse = args
    _check(Combine(expert_out, topk_weights, inverse, None))
    _checks.expect_shape("grad", grad, (topk_weights.shape[0], expert_out.shape[1]))
    _checks.expect_same_dtype(expert_out.dtype, "expert_out", grad=grad)
    _checks.expect_same_device(expert_out.device, "expert_out", grad=grad)


def _reference_backward(args: CombineBackward) -> tuple[Tensor, Tensor]:
    grad, expert_out, topk_weights, inverse = args
    dtype = _checks.compute_dtype(expert_out.dtype)
    kept = (inverse >= 0).nonzero().squeeze(1)
    rows = inverse.index_select(0, kept)
    grad_rows = grad.index_select(0, kept // topk_weights.shape[1]).to(dtype)
    grad_out = torch.zeros_like(expert_out, memory_format=torch.contiguous_format)
    weights = topk_weights.flatten().index_select(0, kept).to(dtype)
    grad_out[rows] = (grad_rows * weights.unsqueeze(1)).to(expert_out.dtype)
    grad_weights = topk_weights.new_zeros(topk_weights.numel())
    dots = (grad_rows * expert_out.index_select(0, rows).to(dtype)).sum(1)
    grad_weights[kept] = dots.to(topk_weights.dtype)
    return grad_out, grad_weights.view(topk_weights.shape)


def _cuda_backward(args: CombineBackward) -> tuple[Tensor, Tensor]:
    if args.topk_weights.numel() == 0:
        to_out, to_weights = _fake_backward(args)
        return to_out.zero_(), to_weights
    return _library.launch(args)


def _fake_backward(args: CombineBackward) -> tuple[Tensor, Tensor]:
    expert_out, topk_weights = args.expert_out, args.topk_weights
    return expert_out.new_empty(expert_out.shape), topk_weights.new_empty(topk_weights.shape)


_library.define(Combine, "Tensor", check=_check, cpu=reference, cuda=_cuda, fake=_fake)
_library.define(
    CombineBackward,
    "(Tensor grad_expert_out, Tensor grad_topk_weights)",
    check=_check_backward,
    cpu=_reference_backward,
    cuda=_cuda_backward,
    fake=_fake_backward,
)


def combine_gradient(
    grad: Tensor, expert_out: Tensor, topk_weights: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of `combine` to expert_out [R, H] and topk_weights [T, K]."""
    return _library.call(CombineBackward(grad.contiguous(), expert_out, topk_weights, inverse))


def _save(args: Combine, output: Tensor) -> Any:
    return joined_saved(args)


def _backward(args: Combine, needs: Combine, grad: Tensor) -> Combine:
    to_out, to_weights = combine_gradient(grad, *args[:3])
    to_sum = partial(Combine, expert_out=to_out, topk_weights=to_weights)
    return with_joined_gradients(to_sum, grad, args, needs)


def _save_backward(args: CombineBackward, output: tuple[Tensor, Tensor]) -> Any:
    return args


def _double_backward(
    args: CombineBackward, needs: CombineBackward, to_out: Tensor, to_weights: Tensor
) -> CombineBackward:
    grad, expert_out, topk_weights, inverse = args
    to_grad = combine(to_out, topk_weights, inverse) + combine(expert_out, to_weights, inverse)
    to_expert_out, _ = combine_gradient(grad, expert_out, to_weights, inverse)
    _, to_topk_weights = combine_gradient(grad, to_out, topk_weights, inverse)
    return partial(CombineBackward, grad=to_grad, expert_out=to_expert_out, topk_weights=to_topk_weights)


def _tangent(args: Combine, tangents: Combine) -> _autograd.Tangents:
    expert_out, topk_weights, inverse, *_ = args
    to_out = _autograd.or_zeros(tangents.expert_out, expert_out)
    through_out = combine(to_out, topk_weights, inverse, _tangent_of_joined(args, tangents))
    if tangents.topk_weights is None:
        return (through_out,)
    return (through_out + combine(expert_out, tangents.topk_weights, inverse),)


class _Joined(NamedTuple):
    """What joins a sum."""

    shared: Tensor | None
    epilogue: Epilogue


def _tangent_of_joined(args: Combine, tangents: Combine) -> Tensor | None:
    """[T, H], or None for zero."""
    joined = _Joined(args.shared, args.epilogue), _Joined(tangents.shared, tangents.epilogue)
    if all(tangent is None for tangent in records.flatten(joined[1])):
        return None
    dtype = args.expert_out.dtype
    zero = torch.zeros((), dtype=_checks.compute_dtype(dtype), device=args.expert_out.device)
    (tangent,) = _autograd.tangent_of(lambda alone: with_joined(zero, alone).to(dtype))(*joined)
    return tangent


def _tangent_backward(args: CombineBackward, tangents: CombineBackward) -> _autograd.Tangents:
    grad, expert_out, topk_weights, inverse = args
    to_grad, to_out, to_weights = map(_autograd.or_zeros, tangents[:3], args[:3])
    out_by_grad, weights_by_grad = combine_gradient(to_grad, expert_out, topk_weights, inverse)
    out_by_weights, weights_by_out = combine_gradient(grad, to_out, to_weights, inverse)
    return out_by_grad + out_by_weights, weights_by_grad + weights_by_out


_autograd.define_gradient(Combine, _save, _backward, _tangent)
_autograd.define_gradient(CombineBackward, _save_backward, _double_backward, _tangent_backward)
_library.define_vmap(Combine)
_library.define_vmap(CombineBackward)
