"""The layer in plain PyTorch, in the dtype it is given (float64), differentiable, one expert at a time.

Vectorised over an expert's slots where `moe_ops.reference` goes token by token; tests compare the two.
"""

import torch
from torch import Tensor

from moe_ops import Activation
from tests.kernels.oracles import activate


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
    return activate(linear(x, w13, bias, expert), activation)


def weighted_sum(slots: Tensor, weights: Tensor, expert: Tensor, shared: Tensor | None) -> Tensor:
    """[S, H] in slot order and [T, K] weights to [T, H]; a slot whose expert is -1 counts nothing."""
    kept = torch.where(expert.unsqueeze(1) >= 0, slots, 0.0)
    out = (kept * weights.flatten().unsqueeze(1)).view(*weights.shape, slots.shape[1]).sum(1)
    return out if shared is None else out + shared


def layer(t: dict[str, Tensor], weights: Tensor, expert: Tensor, activation: Activation) -> Tensor:
    """[T, H] from the tensors of a layer by name, [T, K] weights and the local expert of every slot."""
    top_k = weights.shape[1]
    hidden_states = t["hidden_states"].repeat_interleave(top_k, 0)
    activated = up(hidden_states, t["w13"], t.get("w13_bias"), expert, activation)
    down = linear(activated, t["w2"], t.get("w2_bias"), expert)
    return weighted_sum(down, weights, expert, t.get("shared"))
