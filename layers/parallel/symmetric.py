"""Each token to the ranks that hold its experts, written straight into their memory, and the ranks' sums read back.

What `PaddedAllToAllPrepareAndFinalize` does with collectives, our own kernels do over symmetric memory: GPUs of one
host that reach each other's. Two operators, `push_rows` and `pull_sums`, each other's gradient, in one graph for all
routings.

Letters: T tokens of a rank, M the most of any rank, W ranks, K experts per token.
"""

import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layers._checks import expect_finite, expect_positive, expect_type
from layers.carried import as_bytes
from layers.modular_parts import ExpertOutput, Prepared, TopKWeightAndReduce
from layers.parallel._compat import symmetric_memory
from layers.parallel.all_to_all import expect_owners
from layers.parallel.exchange import Exchange, Started, nothing
from layers.parallel.group import ExpertRanks, process_group, told_by_all
from layers.parallel.sizes import expect_at_most
from moe_ops.exchange_plan import plan_exchange
from moe_ops.peers import ExchangeLayout, Peers, aligned, fields_of, find_peers, new_turns
from moe_ops.pull_sums import pull_sums
from moe_ops.push_rows import push_rows
from moe_ops.values import ExchangePlan

_BYTES_OF_A_CHOICE = 8  # of a weight and an id, or a weight in float64


class _WayBack(NamedTuple):
    plan: ExchangePlan
    received: Tensor


class SymmetricPrepareAndFinalize(Exchange):
    """A token to each rank that has experts for it, once, by kernels that write into that rank's memory.

    Buffers are made here, once for all exchanges of the same sizes in a group, and nothing in a forward makes any or
    asks the host: for CUDA graphs, whose replays may route otherwise. Sums are float32, in the order of ranks. Ranks of
    one host whose GPUs reach each other; a single rank needs neither GPU nor buffers.

    Args:
        group: ranks with tokens and experts of their own.
        owners: which rank holds which expert.
        max_tokens: M. Rows for each pair of ranks are set aside in memory, and experts see W*M rows.
        hidden_size: H.
        top_k: K.
        dtype: of hidden states; what takes fewer bytes fits as well.
        extra_bytes: most bytes of all extra tensors of a token, each a multiple of 16.
        timeout: seconds that a rank waits for the others, in an exchange, before the device raises an error.

    Raises:
        TypeError, ValueError: an argument is not as described, or not the same on all ranks; the ranks cannot reach
            each other's memory, for which the message says what to take instead; later, a rank has more tokens than
            `max_tokens`, or larger ones than these.

    Example:
        >>> sizes = {"max_tokens": 256, "hidden_size": 7168, "top_k": 8}
        >>> exchange = SymmetricPrepareAndFinalize(group, ExpertRanks(num_experts=256, num_ranks=2), **sizes)
        >>> kernel = ModularKernel(exchange, StandardExperts(FusedMoE(config, owners.expert_map(rank))))
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh,
        owners: ExpertRanks,
        *,
        max_tokens: int,
        hidden_size: int,
        top_k: int,
        dtype: torch.dtype = torch.bfloat16,
        extra_bytes: int = 256,
        timeout: float = 600.0,
    ) -> None:
        expect_type("dtype", dtype, torch.dtype)
        sizes = {
            "max_tokens": max_tokens,
            "hidden_size": hidden_size,
            "top_k": top_k,
            "extra_bytes": extra_bytes,
        }
        for name, value in sizes.items():
            expect_positive(name, value)
        expect_finite("timeout", timeout)
        if timeout <= 0:
            raise ValueError(f"timeout={timeout}: expected more than 0 seconds")
        expect_owners(owners, group)
        super().__init__(group, owners=owners, dtype=dtype, timeout=timeout, **sizes)
        self.owners, self.max_tokens, self._most = owners, max_tokens, max_tokens
        layout = _layout(self.group.size, sizes, dtype)
        self.peers = None if self.group.size == 1 else _peers(group, layout, timeout)
        self._name = "" if self.peers is None else self.peers.name
        self._owners = None if self.peers is None else self._owners_on(self.peers.addresses.device)

    def prepare_async(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Started:
        """Tokens [W*M, H], those of rank 0 first; rows without one are zeros with the ids -1."""
        expect_at_most(hidden_states.shape[0], self._most, self.group)
        owners = self._owners_on(topk_ids.device) if self._owners is None else self._owners
        plan = plan_exchange(topk_ids, owners, self.group.size, self._most)
        with_gradient = [each for each in extra_tensors if has_gradient(each)]
        packed = _Packed.of([each for each in extra_tensors if not has_gradient(each)])
        given = hidden_states, topk_weights, topk_ids, packed.rows
        rows, weights, ids, extra, received = push_rows(*given, plan, self._name)
        moved = [push_rows(_flat(each), None, None, None, plan, self._name)[0] for each in with_gradient]
        extras = _in_order(extra_tensors, packed.unpacked(extra), moved)
        way_back = _WayBack(plan, received)
        return nothing, lambda: Prepared(rows, weights, ids, way_back=way_back, extra_tensors=extras)

    def _owners_on(self, device: torch.device) -> Tensor:
        return self.owners.of(torch.arange(self.owners.num_experts, dtype=torch.int32, device=device))

    def finalize_async(
        self,
        output: ExpertOutput,
        prepared: Prepared,
        weigh_and_reduce: TopKWeightAndReduce,
        shared: Tensor | None,
    ) -> Started:
        """Sums [T, H] of what the ranks have summed, in their order; `shared` joins before they are rounded."""
        way: _WayBack = prepared.way_back
        sums = weigh_and_reduce.apply(output, prepared.topk_weights, None)
        out = pull_sums(sums, way.plan, way.received, shared, self._name)
        return nothing, lambda: out


def _layout(num_ranks: int, sizes: dict[str, int], dtype: torch.dtype) -> ExchangeLayout:
    row, choices = sizes["hidden_size"] * dtype.itemsize, sizes["top_k"] * _BYTES_OF_A_CHOICE
    row_bytes = fields_of(row, choices, choices, sizes["extra_bytes"]).num_bytes
    return ExchangeLayout(num_ranks, sizes["max_tokens"], row_bytes, aligned(max(row, choices)))


def _peers(group: dist.ProcessGroup | DeviceMesh, layout: ExchangeLayout, timeout: float) -> Peers:
    """Buffers of this layout in this group, those of another exchange if there are any."""
    processes = process_group(group)
    name = f"{processes.group_name} {layout.max_tokens} {layout.row_bytes} {layout.sum_bytes}"
    known = find_peers(name)
    # One rank may still hold, in a cycle not collected yet, what another has no more.
    if all(told_by_all(group, known is not None)) and known is not None:
        return known
    fault = fault_of_symmetric_memory(group)
    if fault is not None:
        raise ValueError(f"dispatcher='symmetric': {fault}; expected GPUs of one host, or 'allgather'")
    device = torch.device("cuda", torch.cuda.current_device())
    memory = symmetric_memory(layout.num_bytes, processes, device, timeout)
    return Peers(name, processes.rank(), layout, memory.addresses, new_turns(timeout, device), memory)


def fault_of_symmetric_memory(group: dist.ProcessGroup | DeviceMesh) -> str | None:
    """What keeps these ranks from reaching each other's memory, None if nothing does. All ranks have to ask.

    The same on all of them, so that all take the same exchange.
    """
    faults = told_by_all(group, _fault(told_by_all(group, _place(group))))
    return next((fault for fault in faults if fault is not None), None)


def _place(group: dist.ProcessGroup | DeviceMesh) -> tuple[str, str | None, int]:
    """Host, GPU and its number, None for a rank that computes on a CPU."""
    if not torch.cuda.is_available() or not _is_of_gpus(group):
        return socket.gethostname(), None, -1
    index = torch.cuda.current_device()
    return socket.gethostname(), str(torch.cuda.get_device_properties(index).uuid), index


def _is_of_gpus(group: dist.ProcessGroup | DeviceMesh) -> bool:
    if isinstance(group, DeviceMesh):
        return group.device_type == "cuda"
    return "nccl" in dist.get_backend_config(group)


def _fault(places: Sequence[tuple[str, str | None, int]]) -> str | None:
    hosts, gpus, indices = zip(*places, strict=True)
    if None in gpus:
        return f"rank {gpus.index(None)} computes on a CPU"
    if len(set(hosts)) > 1:
        return f"the ranks are on {len(set(hosts))} hosts"
    if len(set(gpus)) < len(gpus):
        return f"{len(gpus)} ranks share {len(set(gpus))} GPUs"
    mine, visible = torch.cuda.current_device(), range(torch.cuda.device_count())
    for index in set(indices) & set(visible) - {mine}:  # what is not visible here is not known
        if not torch.cuda.can_device_access_peer(mine, index):
            return f"GPU {mine} does not reach the memory of GPU {index}"
    return None


def has_gradient(extra: Tensor) -> bool:
    """Whether a tensor that goes with tokens may need a gradient; one of 8 bits or of integers has none."""
    return extra.requires_grad and torch.is_grad_enabled()


class _Packed(NamedTuple):
    """Tensors [T, ...] as bytes [T, C] beside each other, each in a multiple of 16; None without any."""

    rows: Tensor | None
    shapes: list[tuple[Any, torch.dtype]]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "_Packed":
        flat = [_in_sixteens(as_bytes(each)) for each in tensors]
        rows = torch.cat(flat, 1) if flat else None
        return cls(rows, [(each.shape[1:], each.dtype) for each in tensors])

    def unpacked(self, rows: Tensor) -> list[Tensor]:
        """The same, of rows [R, C]."""
        found, start = [], 0
        for shape, dtype in self.shapes:
            size = shape.numel() * dtype.itemsize
            part = rows[:, start : start + size].contiguous().view(dtype)
            found.append(part.reshape(rows.shape[0], *shape))
            start += aligned(size)
        return found


def _in_sixteens(rows: Tensor) -> Tensor:
    return torch.nn.functional.pad(rows, (0, aligned(rows.shape[1]) - rows.shape[1]))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], tensor.shape[1:].numel())


def _in_order(
    extra_tensors: Sequence[Tensor], packed: list[Tensor], moved: list[Tensor]
) -> tuple[Tensor, ...]:
    """What arrived, as it was given."""
    packs, moves = iter(packed), iter(moved)
    return tuple(_shaped(next(moves), each) if has_gradient(each) else next(packs) for each in extra_tensors)


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    return rows.reshape(rows.shape[0], *like.shape[1:])
