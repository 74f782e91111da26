"""What a parallel style puts into a layer of experts: their exchange, and which part of each parameter is here."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from layers._checks import expect_multiplied
from layers.adapted_experts import AdaptedExperts
from layers.lora import ExpertLora
from layers.low_rank import LowRank
from layers.modular_kernel import Pending
from layers.modular_parts import ExpertOutput, Prepared
from layers.parallel.collectives import shared_by_all, start_broadcast
from layers.parallel.exchange import Exchange, of_rows
from layers.parallel.group import Group, expect_agreement
from layers.parallel.portions import ALL_ROWS, WHOLE, Portions, Rows
from layers.parallel.sharding import adapter_splits
from layers.parallel.sizes import expect_at_most, most_tokens
from layers.weigh_and_reduce import TopKWeightAndReduceNoOp
from moe_ops._checks import expect_tensor
from moe_ops._library import autocast
from moe_ops.arguments import ExpertWeights, FusedExperts, GroupedLinear, PairedLinear
from moe_ops.combine import check_shared
from moe_ops.errors import describe, type_error, value_error
from moe_ops.fused_experts import check_routed


class RankExperts:
    """Runs a layer's experts behind an exchange, on the local parts of parameters that are DTensors.

    Args:
        exchange: brings tokens here and sums back.
        group: the ranks that hold the parameters.
        portions: of the tokens, each exchanged on its own.
    """

    def __init__(self, exchange: Exchange, group: Group, portions: Portions = WHOLE) -> None:
        self.exchange, self.group, self.portions = exchange, group, portions

    def run(
        self,
        args: FusedExperts,
        num_experts: int,
        run: Callable[..., Tensor],
        shared: Callable[[], Tensor] | None = None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Tensor:
        """The output [T, H] for tokens of this rank.

        Args:
            args: tokens [T, H], how they are routed, and `shared` [T, H] or None.
            num_experts: E_local.
            run: what this rank computes of any tokens, given to it in the place of these, without `shared`, and of
                what came with them.
            shared: computes `shared` while tokens are on their way, where `args` has none.
            extra_tensors: [T, ...] that go with the tokens.

        Raises:
            TypeError: a dtype does not fit.
            ValueError: a shape or a device does not fit; this rank has more tokens than it may have; or, in compiled
                code, there are chunks of which only the ranks can tell how many.
        """
        local = _checked(args._replace(experts=self.local_weights(args.experts)))
        tokens = args.hidden_states, args.topk_weights, args.topk_ids
        given = Prepared(*tokens, extra_tensors=tuple(extra_tensors))
        later = None if shared is None else lambda: _checked_shared(shared(), args.hidden_states)
        if self.portions.chunk_tokens is None:
            return self._run(given, local, num_experts, run, later)
        num_rows = self._most_tokens(given)
        if local.shared is not None:
            local = local._replace(shared=of_rows(local.shared, num_rows))
        filled = None if later is None else lambda: of_rows(later(), num_rows)
        output = self._run(_filled_up(given, num_rows), local, num_experts, run, filled)
        return output[: args.hidden_states.shape[0]]

    def _run(
        self,
        given: Prepared,
        local: FusedExperts,
        num_experts: int,
        run: Callable[..., Tensor],
        shared: Callable[[], Tensor] | None,
    ) -> Tensor:
        """The output for tokens that are `given`, portion by portion."""
        outputs: list[Tensor] = []
        for chunk in self.portions.rows(given.hidden_states.shape[0]):
            started = [self._start(_portion(given, rows), local, num_experts) for rows in chunk]
            if shared is not None:
                local, shared = local._replace(shared=shared()), None
            batches = [local._replace(shared=_rows_of(local.shared, rows)) for rows in chunk]
            sent_back = [self._finish(*each, run) for each in zip(batches, started, strict=True)]
            outputs += [each.wait() for each in sent_back]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _most_tokens(self, given: Prepared) -> int:
        """Of any rank, so that all have as many chunks."""
        most = self.portions.max_tokens
        if most is None:
            if torch.compiler.is_compiling():
                value_error("max_tokens=None with chunk_tokens: expected a number in compiled code")
            most = most_tokens(given, "top_k", self.group)
        expect_at_most(given.hidden_states.shape[0], most, self.group)
        return most

    def _start(self, batch: Prepared, local: FusedExperts, num_experts: int) -> Pending[Prepared]:
        tokens, expert_map = (
            (batch.hidden_states, batch.topk_weights, batch.topk_ids),
            local.placement.expert_map,
        )
        return Pending(*self.exchange.prepare_async(*tokens, num_experts, expert_map, batch.extra_tensors))

    def _finish(
        self, batch: FusedExperts, started: Pending[Prepared], run: Callable[..., Tensor]
    ) -> Pending[Tensor]:
        prepared = started.wait()
        received = batch._replace(
            hidden_states=prepared.hidden_states,
            topk_weights=prepared.topk_weights,
            topk_ids=prepared.topk_ids,
            shared=None,
        )
        output, summed = ExpertOutput(run(received, *prepared.extra_tensors)), TopKWeightAndReduceNoOp()
        return Pending(*self.exchange.finalize_async(output, prepared, summed, batch.shared))

    def adapters_of_parts(self, linears: tuple[LowRank, LowRank]) -> tuple[LowRank, LowRank]:
        """Of experts in parts, what every rank has whole: gradients of the parts of the output are summed."""
        w13, w2 = linears
        a13, b2 = shared_by_all(w13.a, self.group), shared_by_all(w2.b, self.group)
        return w13._replace(a=a13), w2._replace(b=b2)

    def share_adapters(self, lora: ExpertLora, experts: AdaptedExperts) -> None:
        """Makes its parameters DTensors, each as the weight that it changes. Raises ValueError where sizes differ."""
        mesh: Any = experts.weight.device_mesh  # type: ignore[attr-defined]
        expect_agreement(mesh, _facts_of_adapters(lora))
        for name, (placement, blocks) in adapter_splits(experts).items():
            part = lora.get_parameter(name).data
            part = part if blocks is None else part.unflatten(blocks, (2, -1))
            distributed = DTensor.from_local(part, mesh, [placement], run_check=False)
            lora.register_parameter(name, nn.Parameter(distributed))

    @staticmethod
    def adapters_here(parameter: Any) -> Tensor:
        """[E_local, N, ., .]: what is here of an adapters' parameter, gate rows followed by up rows."""
        if not isinstance(parameter, DTensor):  # `load_state_dict(assign=True)` sets what it is given
            type_error("lora has a {}: expected a DTensor, for ranks share its experts", describe(parameter))
        local = parameter.to_local()
        return local if local.dim() == 4 else local.flatten(2, 3)

    def of_first_rank(self, tensor: Tensor) -> Tensor:
        """What the first rank has in the place of this one."""
        return start_broadcast(tensor, self.group)()

    def make_alike(self, parameter: Any) -> None:
        """What all ranks have whole becomes what the first has."""
        here = self.stored_part(parameter)
        here.copy_(self.of_first_rank(here))

    def local_weights(self, experts: ExpertWeights) -> ExpertWeights:
        """Their parts that are here."""
        w13, w2 = experts
        return ExpertWeights(
            PairedLinear(self.local_part(w13.weight, 3), self.local_part(w13.bias, 2)),
            GroupedLinear(self.local_part(w2.weight, 3), self.local_part(w2.bias, 2)),
        )

    @staticmethod
    def stored_part(parameter: Any) -> Tensor:
        """The memory of a DTensor that is here: what is written to it is written to the parameter."""
        return parameter.detach().to_local()

    def local_part(self, parameter: Any, num_dims: int, split_dim: int = 1) -> Any:
        """The part of a DTensor that is here. What all ranks have whole counts on the first, for outputs are summed.

        Args:
            parameter: a DTensor; anything else is returned as it is.
            num_dims: of what is returned. A parameter with more has gate rows and up rows apart, in `split_dim`.
        """
        if not isinstance(parameter, DTensor):
            return parameter
        local = parameter.to_local()
        if all(placement.is_replicate() for placement in parameter.placements):
            return shared_by_all(local, self.group) * float(self.group.rank == 0)
        return local if local.dim() == num_dims else local.flatten(split_dim, split_dim + 1)


def _facts_of_adapters(lora: ExpertLora) -> dict[str, Any]:
    """Their sizes: what is drawn on the first rank is sent to others, and what is gathered has that of all."""
    sizes = {"num_adapters": lora.num_adapters, "rank of adapters": lora.a2.shape[2]}
    return {**sizes, "gate_up_rank": lora.a13.shape[2], "dtype of adapters": lora.a13.dtype}


def _checked(args: FusedExperts) -> FusedExperts:
    """With the checks of one device, before an exchange cuts or fills up what does not fit."""
    expect_multiplied(args.hidden_states, args.experts.w13.weight)
    hidden, shared = autocast((args.hidden_states, args.shared))
    check_routed(args._replace(hidden_states=hidden, shared=shared))
    return args._replace(shared=shared)


def _checked_shared(shared: Any, tokens: Tensor) -> Tensor:
    """With the cast and the checks of one that is there already: a portion would be cut of any rows."""
    expect_tensor("shared", shared)
    hidden, addend = autocast((tokens, shared))
    check_shared(addend, hidden.shape[0], hidden.shape[1], "hidden_states", hidden)
    return addend


def _filled_up(given: Prepared, num_rows: int) -> Prepared:
    """With rows behind the tokens that have no expert: in a graph for any T, chunks have a size that is no symbol."""
    filled = _each(given, lambda tensor: of_rows(tensor, num_rows))
    return filled._replace(topk_ids=of_rows(given.topk_ids, num_rows, -1))


def _portion(given: Prepared, rows: Rows) -> Prepared:
    return _each(given, lambda tensor: _rows_of(tensor, rows))


def _each(given: Prepared, function: Callable[[Tensor], Tensor]) -> Prepared:
    """With what `function` makes of each tensor that has a row for each token."""
    return given._replace(
        hidden_states=function(given.hidden_states),
        topk_weights=function(given.topk_weights),
        topk_ids=function(given.topk_ids),
        extra_tensors=tuple(map(function, given.extra_tensors)),
    )


def _rows_of(tensor: Any, rows: Rows) -> Any:
    return tensor if tensor is None or rows is ALL_ROWS else tensor[rows.start : rows.stop]
