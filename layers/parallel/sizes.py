"""What ranks tell each other before they exchange tokens whose number differs: sizes, as one small collective.

Reading them waits for the device, so nothing that does is captured in a CUDA graph.
"""

from typing import Any

import torch
from torch import Tensor

from layers.carried import bytes_per_token
from layers.modular_parts import Prepared
from layers.parallel.collectives import start_all_gather
from layers.parallel.group import Group, expect_alike
from moe_ops.errors import value_error


def most_tokens(given: Prepared, name: str, group: Group) -> int:
    """The largest T of all ranks, of tokens [T, H] and how they are routed, [T, `name`].

    Raises:
        ValueError: a size of `sizes_of_tokens` differs between ranks, which the message names. It is raised on all of
            them, before a token is sent; in compiled code, where sizes are part of the code, it is an assertion's
            RuntimeError.
    """
    told = _told_sizes(given, group)
    expect_same_sizes(told, sizes_of_tokens(given), name)
    most: Any = told[:, 0].max().item()  # a symbol where it is traced, of which int() would ask the value
    torch._check(most >= given.hidden_states.shape[0])
    return most


def expect_same_tokens(given: Prepared, group: Group) -> None:
    """Raises ValueError, on all ranks, unless each has as many tokens of the same sizes; nobody looks at their values.

    Only in eager forwards on CPUs: on a GPU the host would wait for the answer, which nothing that is captured does.
    """
    if torch.compiler.is_compiling() or given.hidden_states.device.type != "cpu":
        return
    told = _told_sizes(given, group)
    expect_same_sizes(told, sizes_of_tokens(given), "top_k")
    expect_alike("number of tokens", dict(enumerate(told[:, 0].tolist())))


def _told_sizes(given: Prepared, group: Group) -> Tensor:
    """[W, 4]: T of each rank, and its `sizes_of_tokens`."""
    mine = [[given.hidden_states.shape[0], *sizes_of_tokens(given)]]
    return start_all_gather(torch.tensor(mine, device=given.hidden_states.device), group)()


def sizes_of_tokens(given: Prepared) -> list[int]:
    """What ranks have to have alike: H, K, and the bytes of a token, which dtypes decide about as well."""
    rows = given.hidden_states, given.topk_weights, given.topk_ids, *given.extra_tensors
    return [given.hidden_states.shape[1], given.topk_ids.shape[1], bytes_per_token(rows)]


def expect_same_sizes(told: Tensor, alike: list[int], name: str) -> None:
    """Raises unless columns from the second on hold, in every row, what `sizes_of_tokens` says here; K is `name`."""
    if torch.compiler.is_compiling():
        differ = (told[:, 1:] != torch.tensor(alike, device=told.device)).sum().item()
        torch._check(
            differ == 0,
            lambda: (
                "hidden size, top_k, dtypes or extra_tensors differ between ranks: expected the same on all"
            ),
        )
        return
    rows = told.tolist()
    bytes_of_all = "bytes of a token, its weights, ids and extra_tensors"
    for column, what in enumerate(("hidden size", name, bytes_of_all), start=1):
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
