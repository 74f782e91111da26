"""Low-rank adapters of experts, several at once. Each token says which is its own, or none.

    gate_up[row]    += scaling[n] * b13[e, n] @ a13[e, n] @ x[row]            before the gate
    expert_out[row] += scaling[n] * b2[e, n] @ a2[e, n] @ activated[row]      before it is weighed and summed

for the expert e of a row and the adapter n of its token. A plan of their own brings rows in the order of (expert,
adapter), so both products are grouped ones over E*N groups, and rows without an adapter are in none of them: they are
what they would be without adapters, to the bit, whatever the adapters hold. With one adapter rows stay as they are.

Letters: T tokens, R rows in expert order, E experts held here, N adapters, r rank, H hidden, I intermediate size.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from layers._checks import expect_count, expect_finite, expect_positive, expect_type
from layers.adapted_experts import AdaptedExperts
from layers.expert_parameters import ExpertParameters
from layers.low_rank import LowRank, expect_low_rank
from layers.weights.expert_loader import is_distributed
from moe_ops import DispatchPlan, build_dispatch, gated_activation, gather_gemm, grouped_gemm, permute
from moe_ops._checks import FLOATING_DTYPES, expect_index, expect_shape
from moe_ops._library import autocasts
from moe_ops.arguments import ExpertWeights, FusedExperts
from moe_ops.errors import type_error, value_error
from moe_ops.gate import expert_of_rows
from moe_ops.scaled import STORED

if TYPE_CHECKING:
    from layers.parallel.rank_experts import RankExperts


def _expect_number(name: str, value: object) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_meta:
            described = f"{list(value.shape)} on {value.device}"
            raise ValueError(f"{name} has shape {described}: expected one number with a value")
        value = value.item()
    expect_finite(name, value)


class ExpertLora(nn.Module):
    """Adapters of one layer: `layer.lora = ExpertLora(layer, ...)`, None to do without.

    Its tensors are those of the experts, and of the part of each, that this rank holds when it is built.

    Args:
        layer: whose experts they change. `layers.huggingface.add_adapters` is for those of a patched model.
        num_adapters: N.
        rank: r, the most of any adapter.
        adapter_ids: [M] int32 or int64, of the tokens that come next: a tensor that all layers may share, changed in
            place before a forward, which reads its first T. An id outside [0, N), such as -1, is no adapter. It is
            kept as it is given, until a move to another device.
        gate_up_rank: that of w13; `rank` if None. Adapters of `join_gate_up` need 2r.
        dtype: of the adapters, that of tokens. None: the weights', or torch's default beside quantised ones.

    Attributes:
        a13: [E, N, r, H], b13: [E, N, 2I, r] ([E, N, I, r] without a gate), a2: [E, N, r, I], b2: [E, N, H, r]. At
            first `a` is drawn as by `nn.Linear`, `b` is zero, so nothing changes. Of a layer that a style has sharded
            they are DTensors, of all experts; under `ExpertTensorParallel` b13 is [E, N, 2, I, r]. Ranks that hold
            parts of the same experts without one have to draw a13 alike.
        experts: the `AdaptedExperts`.
        scaling: [N] float32 buffer, ones; it stays float32 when the module is cast.

    Raises:
        TypeError, ValueError: an argument is not as described, or sizes differ between ranks that share the layer, all
            of which have to make adapters. In a forward: more than M tokens, tokens of another dtype than adapters
            outside of autocast, or gradients where rows are quantised, which `rows="exact"` of `quantise_experts` has.

    Example:
        >>> adapter_ids = torch.full((max_tokens,), -1, dtype=torch.int32)
        >>> for block in blocks:
        ...     block.experts.lora = ExpertLora(block.experts, num_adapters=4, rank=16, adapter_ids=adapter_ids)
    """

    a13: Tensor
    b13: Tensor
    a2: Tensor
    b2: Tensor
    scaling: Tensor
    adapter_ids: Tensor

    def __init__(
        self,
        layer: ExpertParameters | AdaptedExperts,
        num_adapters: int,
        rank: int,
        adapter_ids: Tensor,
        *,
        gate_up_rank: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        expect_type("layer", layer, (ExpertParameters, AdaptedExperts))
        gate_up_rank = rank if gate_up_rank is None else gate_up_rank
        for name, size in {"num_adapters": num_adapters, "rank": rank, "gate_up_rank": gate_up_rank}.items():
            expect_positive(name, size)
        expect_index("adapter_ids", adapter_ids)
        expect_shape("adapter_ids", adapter_ids, ("max_tokens",))
        self.experts = layer if isinstance(layer, AdaptedExperts) else AdaptedExperts.of(layer)
        self.num_experts, self.num_adapters = len(self.experts.held), num_adapters
        device, dtype = self.experts.weight.device, _dtype_of(self.experts.weight, dtype)
        for suffix, size, (E, B, A) in zip(("13", "2"), (gate_up_rank, rank), self.experts.shapes_here):
            a = torch.empty(E, num_adapters, size, A, device=device, dtype=dtype)
            b = torch.empty(E, num_adapters, B, size, device=device, dtype=dtype)
            self.register_parameter(f"a{suffix}", nn.Parameter(a))
            self.register_parameter(f"b{suffix}", nn.Parameter(b))
        self.register_buffer("scaling", torch.empty(num_adapters, device=device, dtype=torch.float32))
        self.register_buffer("adapter_ids", adapter_ids, persistent=False)
        if self.experts.parallel is not None:
            self.experts.parallel.share_adapters(self, self.experts)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws `a` in ±1/sqrt(fan_in), clears `b`, and sets `scaling` to 1."""
        with torch.no_grad():
            for linear in self.linears():
                bound = 1 / math.sqrt(linear.a.shape[-1])
                nn.init.uniform_(linear.a, -bound, bound)
                linear.b.zero_()
            self.scaling.fill_(1)
            if (ranks := self._ranks_with_parts()) is not None:
                a13 = self.linears()[0].a
                a13.copy_(ranks.of_first_rank(a13))

    def linears(self) -> tuple[LowRank, LowRank]:
        """The changes of w13 and of w2, or what is here of them."""
        a13, b13, a2, b2 = self.a13, self.b13, self.a2, self.b2
        if (parallel := self.experts.parallel) is not None:
            a13, b13, a2, b2 = (parallel.adapters_here(each) for each in (a13, b13, a2, b2))
        return LowRank(a13, b13), LowRank(a2, b2)

    def shared_linears(self) -> tuple[LowRank, LowRank]:
        """`linears` for a forward: of what all ranks have whole, gradients are summed."""
        linears, ranks = self.linears(), self._ranks_with_parts()
        return linears if ranks is None else ranks.adapters_of_parts(linears)

    def _ranks_with_parts(self) -> "RankExperts | None":
        return self.experts.parallel if self.experts.shard.size > 1 else None

    def load_adapter(self, adapter: int, gate_up: LowRank, down: LowRank, scaling: float = 1.0) -> None:
        """Copies what this rank holds of an adapter into its place; compiled code sees it from then on.

        Args:
            adapter: its number, below N.
            gate_up: a [E, r, H] and b [E, 2I, r] of all E experts over all ranks, wherever they are; or of P places,
                where the layer has replicas. A smaller r is filled up with zeros.
            down: a [E, r, I] and b [E, H, r], or of P places as well.
            scaling: what the changes are multiplied by, such as alpha / r.

        Raises:
            TypeError, ValueError: a number or a shape does not fit, matrices are none of floating point or on the meta
                device, or `fully_shard` has cut these adapters already. Nothing has changed then.
        """
        expect_count("adapter", adapter)
        if adapter >= self.num_adapters:
            raise ValueError(f"adapter={adapter}: expected a number below num_adapters={self.num_adapters}")
        _expect_number("scaling", scaling)
        named = ("gate_up", gate_up), ("down", down)
        for name, given in named:
            expect_low_rank(name, given)
            if given.a.is_meta or given.b.is_meta:
                raise ValueError(f"{name} is on the meta device: expected matrices with values")
        _expect_loadable(self.linears()[0].a, self.num_experts)
        count = self.experts.num_given(gate_up.a.shape[0])
        for (name, given), into, (_, B, A) in zip(named, self.linears(), self.experts.shapes):
            rank, most = given.a.shape[1], into.a.shape[2]
            expect_shape(f"{name}.a", given.a, (count, "r", A))
            expect_shape(f"{name}.b", given.b, (count, B, rank))
            if rank > most:
                raise ValueError(f"{name} has rank {rank}: expected at most {most}")
        with torch.no_grad():
            self._copy(adapter, gate_up, down)
            self.scaling[adapter] = scaling

    def _copy(self, adapter: int, gate_up: LowRank, down: LowRank) -> None:
        here, shard, ours = self.experts.given_here(gate_up.a.shape[0]), self.experts.shard, self.linears()
        b13 = gate_up.b[here]
        if self.experts.has_blocks:
            rows = torch.cat([shard.of(half, 1) for half in b13.chunk(2, dim=1)], dim=1)
        else:
            rows = shard.of(b13, 1)
        parts = gate_up.a[here], rows, shard.of(down.a[here], 2), down.b[here]
        for part, into in zip(parts, (*ours[0], *ours[1])):
            into[:, adapter] = 0
            into[:, adapter, : part.shape[1], : part.shape[2]] = part

    def ids_of_tokens(self, num_tokens: int) -> Tensor:
        """[T]: the adapters of the tokens that a forward begins with."""
        if num_tokens > self.adapter_ids.shape[0]:
            value_error(
                "adapter_ids has shape {}: expected at least {}", list(self.adapter_ids.shape), num_tokens
            )
        return self.adapter_ids[:num_tokens]

    def expect_experts(self, num_experts: int) -> None:
        """Raises ValueError unless the layer holds as many experts as these adapters are for."""
        if self.num_experts != num_experts:
            value_error("lora has adapters of {} experts: expected {}", self.num_experts, num_experts)

    def rows_of_plan(self, expert_offsets: Tensor, adapter_ids: Tensor) -> "AdapterRows | RowsOfOneAdapter":
        """Of rows in expert order [R], with the adapter of each."""
        if self.num_adapters == 1:
            return RowsOfOneAdapter(expert_offsets, (adapter_ids == 0).unsqueeze(1), self.scaling)
        return self.rows_of(expert_of_rows(expert_offsets, adapter_ids.shape[0]), adapter_ids)

    def rows_of(self, experts: Tensor, adapter_ids: Tensor) -> "AdapterRows":
        """Of rows in any order [R], with the expert of each, E for none, and its token's adapter."""
        N = self.num_adapters
        has_adapter = (experts < self.num_experts) & (adapter_ids >= 0) & (adapter_ids < N)
        groups = torch.where(has_adapter, experts * N + adapter_ids, -1)
        plan = build_dispatch(groups.unsqueeze(1), self.num_experts * N)
        slots = plan.sorted_slots.long()
        scaling = self.scaling[adapter_ids.clamp(0, N - 1)[slots]].unsqueeze(1)
        rows = torch.arange(slots.shape[0], dtype=torch.int32, device=slots.device)
        return AdapterRows(plan, torch.zeros_like(rows).scatter(0, slots, rows), scaling)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ExpertLora":
        scaling, adapter_ids = self.scaling, self.adapter_ids
        super()._apply(fn, recurse)
        if self.scaling.dtype != scaling.dtype:
            self.scaling = scaling.to(self.scaling.device)
        if not adapter_ids.is_meta:  # `to_empty` would part them from those of other layers
            self.adapter_ids = adapter_ids.to(self.adapter_ids.device)
        return self

    def extra_repr(self) -> str:
        sizes = f"num_adapters={self.num_adapters}, rank={self.a2.shape[2]}"
        return f"{sizes}, gate_up_rank={self.a13.shape[2]}"


def _expect_loadable(a13: Tensor, num_experts: int) -> None:
    """Raises TypeError unless all adapters of this rank's experts are here, as rows that can be written to."""
    if is_distributed(a13) or a13.shape[0] != num_experts:
        raise TypeError(
            "a13 is a DTensor as fully_shard makes: expected adapters that are loaded before fully_shard"
        )


def _dtype_of(weight: Tensor, given: torch.dtype | None) -> torch.dtype:
    usual = torch.get_default_dtype() if weight.dtype in STORED else weight.dtype
    dtype = usual if given is None else given
    if dtype not in FLOATING_DTYPES:
        raise TypeError(f"dtype={dtype!r}: expected a floating point dtype of 16 bits or more")
    return dtype


def _expect_dtype(linear: LowRank, rows: Tensor) -> None:
    """What the products would say of a weight of their own."""
    if linear.a.dtype != rows.dtype and not autocasts(rows):
        dtypes = linear.a.dtype, rows.dtype
        type_error("lora has dtype {}: expected {}, the dtype of hidden_states (or autocast)", *dtypes)


class AdapterRows(NamedTuple):
    """Rows that have an adapter, in the order of (expert, adapter).

    Attributes:
        plan: of the rows, over E*N groups.
        way_back: [R] int32, where each row lies in that order; those without an adapter lie last.
        scaling: [R, 1], in that order.
    """

    plan: DispatchPlan
    way_back: Tensor
    scaling: Tensor

    def change(self, rows: Tensor, linear: LowRank) -> Tensor:
        """[R, A] to [R, B], zero for rows without an adapter."""
        _expect_dtype(linear, rows)
        low = gather_gemm(rows, linear.a.flatten(0, 1), self.plan)
        low = (low * self.scaling).to(low.dtype)
        return permute(grouped_gemm(low, linear.b.flatten(0, 1), self.plan.expert_offsets), self.way_back)


class RowsOfOneAdapter(NamedTuple):
    """Rows in expert order of a layer with one adapter: they stay where they are, and those without it are left out.

    Several adapters of an expert could be one product too, of N*r columns, but of that the columns of others would have
    to be taken as zero times what these hold, which may not be finite.

    Attributes:
        expert_offsets: [E+1].
        has_adapter: [R, 1] bool.
        scaling: [1].
    """

    expert_offsets: Tensor
    has_adapter: Tensor
    scaling: Tensor

    def change(self, rows: Tensor, linear: LowRank) -> Tensor:
        """[R, A] to [R, B], zero for rows without the adapter."""
        _expect_dtype(linear, rows)
        low = grouped_gemm(rows, linear.a.flatten(0, 1), self.expert_offsets)
        low = (low * self.scaling).to(low.dtype)
        change = grouped_gemm(low, linear.b.flatten(0, 1), self.expert_offsets)
        return torch.where(self.has_adapter, change, 0)


Product = Callable[[Tensor, Tensor], Tensor]
"""Of rows [R, A] in expert order and the offsets of experts [E + 1]."""


def run_with_lora(
    args: FusedExperts, lora: ExpertLora, adapter_ids: Tensor, products: tuple[Product, Product] | None = None
) -> tuple[Tensor, DispatchPlan]:
    """What experts return before it is weighed and summed: rows [S, H] in expert order, and their plan.

    Args:
        args: tokens [T, H], `topk_ids` [T, K] and the experts' weights.
        lora: their adapters.
        adapter_ids: [T].
        products: with w13 and w2, where weights are quantised.
    """
    top_k, linears, num_experts = (
        args.topk_ids.shape[1],
        lora.shared_linears(),
        args.experts.w2.weight.shape[0],
    )
    up, down = _products(args.experts) if products is None else products
    lora.expect_experts(num_experts)
    plan = build_dispatch(args.topk_ids, num_experts, args.placement.expert_map)
    rows, offsets = permute(args.hidden_states, plan.sorted_slots), plan.expert_offsets
    adapted = lora.rows_of_plan(offsets, adapter_ids[plan.sorted_slots.long() // max(top_k, 1)])
    gate_up = up(rows, offsets) + adapted.change(rows, linears[0])
    activated = gated_activation(gate_up, args.activation)
    return down(activated, offsets) + adapted.change(activated, linears[1]), plan


def _products(experts: ExpertWeights) -> tuple[Product, Product]:
    w13, w2 = experts
    return (
        lambda rows, offsets: grouped_gemm(rows, w13.weight, offsets, w13.bias),
        lambda rows, offsets: grouped_gemm(rows, w2.weight, offsets, w2.bias),
    )
