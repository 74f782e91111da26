"""What ranks tell each other before they exchange tokens whose number differs: sizes, as one small collective.

Reading them waits for the device, so nothing that does is captured in a CUDA graph.
"""

import torch
from torch import Tensor

from layers.parallel.collectives import start_all_gather
from layers.parallel.group import Group, expect_alike
from moe_ops.errors import value_error


def most_tokens(hidden_states: Tensor, beside: Tensor, name: str, group: Group) -> int:
    """The largest T of all ranks, of tokens [T, H] and what goes beside them, [T, `name`].

    Raises:
        ValueError: H or the size called `name` differs between ranks, which the message names. It is raised on all of
            them, before a token is sent; in compiled code, where sizes are part of the code, it is an assertion's
            RuntimeError.
    """
    tokens, *alike = hidden_states.shape[0], hidden_states.shape[1], beside.shape[1]
    mine = torch.tensor([[tokens, *alike]], dtype=torch.int64, device=hidden_states.device)
    told = start_all_gather(mine, group)()  # [W, 3]
    expect_same_sizes(told, alike, name)
    most = told[:, 0].max().item()
    torch._check(most >= tokens)
    return int(most)


def expect_same_sizes(told: Tensor, alike: list[int], name: str) -> None:
    """Raises unless columns from the second on hold, in every row, what this rank has: H and the size `name`."""
    if torch.compiler.is_compiling():
        differ = (told[:, 1:] != torch.tensor(alike, device=told.device)).sum().item()
        torch._check(
            differ == 0, lambda: "hidden size or top_k differs between ranks: expected the same on all"
        )
        return
    rows = told.tolist()
    for column, what in enumerate(("hidden size", name), start=1):
        expect_alike(what, {rank: row[column] for rank, row in enumerate(rows)})


def expect_at_most(num_tokens: int, max_tokens: int, group: Group) -> None:
    """Raises ValueError where this rank has more tokens than one may have."""
    if num_tokens > max_tokens:
        value_error(
            "hidden_states has {} tokens on rank {}: expected at most max_tokens={}",
            num_tokens,
            group.rank,
            max_tokens,
        )
