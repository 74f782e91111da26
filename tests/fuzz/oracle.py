"""The layer in plain PyTorch, in the dtype it is given (float64), differentiable, one expert at a time.

Vectorised over an expert's slots where `moe_ops.reference` goes token by token; tests compare the two.

Within `underflow`, what a layer stores on its way, values and their gradients, is rounded as a dtype rounds below its
smallest normal number: to multiples of one step, however small a number is. Twice that step, as the dtype's own is the
least that rounding takes: what fuses stages or takes other products in between meets other steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from moe_ops import Activation
from tests.kernels.oracles import activate

_storage: ContextVar[torch.dtype | None] = ContextVar("storage", default=None)


@contextmanager
def underflow(dtype: torch.dtype) -> Iterator[None]:
    """Within it a layer stores its numbers in `dtype`, as far as they are below the smallest normal one."""
    token = _storage.set(dtype)
    try:
        yield
    finally:
        _storage.reset(token)


def stored(values: Tensor) -> Tensor:
    """Values that are computed and stored, and so is their gradient."""
    dtype = _storage.get()
    return values if dtype is None else _coarse(gathered(values), dtype)


def gathered(values: Tensor) -> Tensor:
    """Values that are copies of an input, so that rounding meets their gradient alone."""
    dtype = _storage.get()
    if dtype is not None and values.requires_grad:
        values.register_hook(lambda grad: _coarse(grad, dtype))
    return values


def _coarse(values: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = 2 * (values.detach() / 2).to(dtype).to(values.dtype)
    is_small = values.detach().abs() < torch.finfo(dtype).smallest_normal
    return values + torch.where(is_small, rounded - values.detach(), 0.0)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: Tensor) -> Tensor:
    """[S, A] and [E, B, A] to [S, B]: each row by the weight of its expert [S]; zero for a row whose expert is -1."""
    rows, values = [], []
    for index in expert.unique().tolist():
        if index >= 0:
            rows.append((expert == index).nonzero().squeeze(1))
            value = x[rows[-1]] @ weight[index].T
            values.append(value if bias is None else value + bias[index])
    out = x.new_zeros((x.shape[0], weight.shape[1]))
    return out.index_copy(0, torch.cat(rows), torch.cat(values)) if rows else out


def up(x: Tensor, w13: Tensor, bias: Tensor | None, expert: Tensor, activation: Activation) -> Tensor:
    """[S, H] to [S, I]: an expert's first half."""
    return stored(activate(stored(linear(x, w13, bias, expert)), activation))


def weighted_sum(slots: Tensor, weights: Tensor, expert: Tensor, shared: Tensor | None) -> Tensor:
    """[S, H] in slot order and [T, K] weights to [T, H]; a slot whose expert is -1 counts nothing."""
    kept = torch.where(expert.unsqueeze(1) >= 0, slots, 0.0)
    out = (kept * weights.flatten().unsqueeze(1)).view(*weights.shape, slots.shape[1]).sum(1)
    return out if shared is None else out + shared


def layer(t: dict[str, Tensor], weights: Tensor, expert: Tensor, activation: Activation) -> Tensor:
    """[T, H] from the tensors of a layer by name, [T, K] weights and the local expert of every slot."""
    top_k = weights.shape[1]
    hidden_states = gathered(t["hidden_states"].repeat_interleave(top_k, 0))
    activated = up(hidden_states, t["w13"], t.get("w13_bias"), expert, activation)
    down = stored(linear(activated, t["w2"], t.get("w2_bias"), expert))
    return weighted_sum(down, weights, expert, t.get("shared"))
