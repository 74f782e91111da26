"""Each token once to every node that holds an expert of it, and there to the ranks that do: an exchange in two steps.

Links between nodes are slower than those within. Of a token that several ranks of a node want, one copy goes there; and
it goes to the rank at the same place in its node, so all links between two nodes carry an equal part. The way back is
the other way round: a node's ranks sum up what they have for a token before it crosses.

Letters: T tokens of a rank, R rows that a rank gets, N nodes, E experts over all of them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layers._checks import expect_type
from layers.modular_parts import ActivationFormat, ExpertOutput, Prepared, TopKWeightAndReduce
from layers.parallel.exchange import Exchange, Started, TwoSteps
from layers.parallel.group import ExpertRanks
from layers.weigh_and_reduce import TopKWeightAndReduceNoOp
from moe_ops._checks import expect_shape


class _WayBack(NamedTuple):
    across: Prepared
    within: Any


class HierarchicalPrepareAndFinalize(TwoSteps):
    """An exchange between nodes, and behind it one between the ranks of each.

    Args:
        across: between ranks at the same place in their nodes; one with `owners`, which say of E experts on which of N
            nodes they are: E / N in a row on each.
        within: between the ranks of a node, whose experts it numbers from 0 on. With `max_tokens` it has to take N
            times those of `across`.

    Raises:
        TypeError, ValueError: an argument is not as described, among these `within` for other experts, with too few
            rows, or over more than one rank of `across`; later, as the two do.

    Example:
        >>> mesh = init_device_mesh("cuda", (N, L), mesh_dim_names=("node", "local"))
        >>> across = PaddedAllToAllPrepareAndFinalize(mesh["node"], ExpertRanks(E, N), max_tokens=256)
        >>> of_node = ExpertRanks(E // N, L)
        >>> within = PaddedAllToAllPrepareAndFinalize(mesh["local"], of_node, max_tokens=N * 256)
        >>> exchange = HierarchicalPrepareAndFinalize(across, within)
        >>> experts = FusedMoE(config, exchange.expert_map(of_node.expert_map(mesh["local"].get_local_rank())))
        >>> kernel = ModularKernel(exchange, StandardExperts(experts))
    """

    activation_format = ActivationFormat.Standard

    def __init__(self, across: Exchange, within: Exchange) -> None:
        expect_type("across", across, Exchange)
        expect_type("within", within, Exchange)
        across.expect_apart("within", within)
        owners: Any = getattr(across, "owners", None)
        expect_type("across.owners", owners, ExpertRanks)
        if owners.num_experts % owners.num_ranks or owners.strategy == "round_robin":
            raise ValueError(f"across.owners={owners}: expected as many experts on each node, in a row")
        self.across, self.within = across, within
        self.num_experts = owners.num_experts
        self.experts_of_node = owners.num_experts // owners.num_ranks
        self._expect_room()
        self.first_expert = across.group.rank * self.experts_of_node

    def _expect_room(self) -> None:
        """Raises ValueError unless the exchange within nodes has a place for their experts and for what arrives."""
        owners: Any = getattr(self.within, "owners", None)
        if owners is not None and owners.num_experts != self.experts_of_node:
            raise ValueError(
                f"within.owners={owners}: expected {self.experts_of_node} experts, those of a node"
            )
        given, taken = self.across.max_tokens, self.within.max_tokens
        if given is not None and taken is not None and taken < (arriving := given * self.across.group.size):
            raise ValueError(
                f"within.max_tokens={taken}: expected at least {arriving}, those that nodes send"
            )

    def expert_map(self, of_node: Tensor | None) -> Tensor:
        """[E] int32 of this rank, from that of its node [E / N], None for all of them; see `ExpertRanks.expert_map`.

        Raises:
            TypeError, ValueError: it is no tensor [E / N].
        """
        if of_node is None:
            of_node = torch.arange(self.experts_of_node, dtype=torch.int32)
        expect_shape("of_node", of_node, (self.experts_of_node,))
        whole = torch.full((self.num_experts,), -1, dtype=torch.int32, device=of_node.device)
        whole[self.first_expert : self.first_expert + self.experts_of_node] = of_node
        return whole

    def expect_experts(self, num_experts: int, expert_map: Tensor | None) -> None:
        """Raises ValueError unless the experts of this rank are those of both exchanges, where `within` says which."""
        of_node: Any = getattr(self.within, "owners", None)
        if of_node is not None:
            expected = self.expert_map(of_node.expert_map(self.within.group.rank))
            of_node.expect_held(expected, num_experts, expert_map)

    @property
    def weigh_and_reduce(self) -> TopKWeightAndReduce:
        """That of the exchange within nodes, which experts stand behind."""
        return self.within.weigh_and_reduce

    @property
    def num_dispatchers(self) -> int:
        """The ranks of all nodes."""
        return self.across.num_dispatchers * self.within.num_dispatchers

    @property
    def max_num_tokens_per_rank(self) -> int | None:
        """The most tokens that one rank sends another of its node; None for any number."""
        return self.within.max_num_tokens_per_rank

    @property
    def output_is_reduced(self) -> bool:
        """Whether `finalize` returns sums over all ranks."""
        return True

    def prepare_async(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        extra_tensors: Sequence[Tensor] = (),
    ) -> Started:
        """Tokens [R, H]. The exchange between nodes is started, that within follows as the receiver is called."""
        hook, receiver = self.across.prepare_async(
            hidden_states, topk_weights, topk_ids, num_experts, None, extra_tensors
        )

        def received() -> Prepared:
            came = receiver()
            # Of other nodes they are out of range, which an exchange asks nobody for.
            given = came.hidden_states, came.topk_weights, came.topk_ids - self.first_expert
            prepared = self.within.prepare(*given, num_experts, None, came.extra_tensors)
            ids = prepared.topk_ids
            ids = (ids + self.first_expert).masked_fill(ids < 0, -1)
            return prepared._replace(topk_ids=ids, way_back=_WayBack(came, prepared.way_back))

        return hook, received

    def finalize_async(
        self,
        output: ExpertOutput,
        prepared: Prepared,
        weigh_and_reduce: TopKWeightAndReduce,
        shared: Tensor | None,
    ) -> Started:
        """Sums [T, H]: within nodes, which is started, then over them; `shared` joins last."""
        way: _WayBack = prepared.way_back
        inner = prepared._replace(way_back=way.within)
        hook, receiver = self.within.finalize_async(output, inner, weigh_and_reduce, None)

        def received() -> Tensor:
            sums = ExpertOutput(receiver())
            return self.across.finalize(sums, way.across, TopKWeightAndReduceNoOp(), shared)

        return hook, received
