"""Tokens of other ranks in the format of batched experts: an exchange, and behind it M rows for each expert."""

from collections.abc import Sequence

from torch import Tensor

from layers._checks import expect_type
from layers.modular_parts import ExpertOutput, Prepared, TopKWeightAndReduce
from layers.parallel.exchange import Exchange, Started, TwoSteps
from layers.parallel.hierarchical import HierarchicalPrepareAndFinalize
from layers.prepare_finalize import BatchedPrepareAndFinalize
from layers.weigh_and_reduce import TopKWeightAndReduceNoOp


class BatchedExchange(TwoSteps):
    """What an exchange brings, copied to [E, M, H] with counts, for `BatchedExperts`; and their sums back.

    An `AsyncPrepareAndFinalize`. Of static shapes where those of the exchange are: `PaddedAllToAllPrepareAndFinalize`,
    or any with `max_tokens`.

    Args:
        exchange: brings tokens [R, H] to this rank.
        max_tokens: M, as in `BatchedPrepareAndFinalize`: None sets aside R rows for each expert, which is always
            enough; with less, slots that find their expert full are dropped.

    Attributes:
        num_dispatchers, max_num_tokens_per_rank, output_is_reduced: those of the exchange.

    Raises:
        TypeError, ValueError: `exchange` is none, or `max_tokens` is not None or an int of at least 1.

    Example:
        >>> exchange = PaddedAllToAllPrepareAndFinalize(group, owners, max_tokens=256)
        >>> kernel = ModularKernel(BatchedExchange(exchange, max_tokens=512), BatchedExperts(layer))
    """

    activation_format = BatchedPrepareAndFinalize.activation_format
    weigh_and_reduce = BatchedPrepareAndFinalize.weigh_and_reduce

    def __init__(
        self, exchange: Exchange | HierarchicalPrepareAndFinalize, max_tokens: int | None = None
    ) -> None:
        expect_type("exchange", exchange, (Exchange, HierarchicalPrepareAndFinalize))
        self.exchange, self._here = exchange, BatchedPrepareAndFinalize(max_tokens)
        self.output_is_reduced = exchange.output_is_reduced
        self.expect_experts = exchange.expect_experts
        self.num_dispatchers = exchange.num_dispatchers
        self.max_num_tokens_per_rank = exchange.max_num_tokens_per_rank

    def prepare_async(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Started:
        """The exchange, started. Its receiver returns tokens [E, M, H], counts [E] and the row of every slot."""
        args = hidden_states, topk_weights, topk_ids, num_experts, expert_map, extra_tensors
        hook, receive = self.exchange.prepare_async(*args)

        def receive_batched() -> Prepared:
            received: Prepared = receive()
            tokens = received.hidden_states, received.topk_weights, received.topk_ids
            batched = self._here.prepare(*tokens, num_experts, expert_map, received.extra_tensors)
            return batched._replace(way_back=received)

        return hook, receive_batched

    def finalize_async(
        self,
        output: ExpertOutput,
        prepared: Prepared,
        weigh_and_reduce: TopKWeightAndReduce,
        shared: Tensor | None,
    ) -> Started:
        """Rows [E, M, H] weighed and summed to [R, H] here, and these on their way back."""
        sums = ExpertOutput(weigh_and_reduce.apply(output, prepared.topk_weights, None))
        return self.exchange.finalize_async(sums, prepared.way_back, TopKWeightAndReduceNoOp(), shared)
