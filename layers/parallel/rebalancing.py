"""Experts that move between ranks while a model runs, so that each rank has as much to do (EPLB).

What was recorded is summed over the ranks, the first of them plans in a thread, and between two forwards the weights of
one layer change places, in their own memory, with its maps. Compiled code and captured graphs go on.

Letters: L layers, E experts of a layer, P its physical ones (places), W ranks.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from layers._checks import expect_choice, expect_type
from layers.balancing import EplbState, ExpertBalancing, balancing_of_layer
from layers.carried import as_bytes, of_bytes
from layers.expert_parameters import plain_parameters
from layers.fused_moe import FusedMoE
from layers.parallel.collectives import start_all_reduce, start_all_to_all
from layers.parallel.group import Group, expect_agreement, process_group
from layers.parallel.matching import kept_in_place
from layers.parallel.rank_experts import RankExperts
from layers.parallel.transfers import RankTransfers, transfers_between
from layers.placement import ExpertPlacement, rebalance_experts, spread_experts

_THINKING, _FAILED = -1, -2  # in the place of a plan


class ExpertRebalancer:
    """Balances all experts of a model that `ExpertParallel` sharded. Each method is called by all ranks, or by none.

    Layers without balancing state get one; those with `set_eplb_state` keep theirs. Of the ranks only the first plans,
    from the load of all, so no two can follow different plans.

    Args:
        model: with layers of experts, `FusedMoE` or of a patched model, sharded over one mesh.
        num_groups, num_nodes: see `layers.rebalance_experts`.
        num_real_tokens, is_recording, seed: of an `ExpertBalancing`, for layers without state.

    Raises:
        TypeError, ValueError: there are no such layers, they are sharded in another way or over several meshes, or an
            option is not as described; layers or options differ between ranks, which the message names.

    Example:
        >>> rebalancer = ExpertRebalancer(model)
        >>> for number, batch in enumerate(batches):
        ...     if number % 1000 == 999:
        ...         rebalancer.start()
        ...     model(batch)
        ...     rebalancer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_groups: int = 1,
        num_nodes: int = 1,
        num_real_tokens: Tensor | None = None,
        is_recording: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> None:
        expect_type("model", model, nn.Module)
        self._model = model
        self._layers = {name: each for name, each in model.named_modules() if _parallel(each) is not None}
        if not self._layers:
            raise ValueError("model has no experts that are sharded: expected some, by ExpertParallel")
        self._processes = _processes_of(model, self._layers)
        self.group = Group.of(self._processes)
        self._counts = num_groups, num_nodes, self.group.size
        sizes = [_sizes(module) for module in self._layers.values()]
        facts = {"layers": dict(zip(self._layers, sizes)), "num_groups": num_groups, "num_nodes": num_nodes}
        expect_agreement(self._processes, facts)
        for num_experts, num_places in sizes:
            rebalance_experts(torch.ones(num_experts), num_places, *self._counts)
        options = {"num_real_tokens": num_real_tokens, "is_recording": is_recording, "seed": seed}
        for name, given in options.items():
            expect_type(name, given, (Tensor, type(None)))
        for module in self._layers.values():
            _make_balanced(module, options)
        self._planned: Future[Tensor] | None = None
        self._awaits_plan = False
        self._moving: deque[tuple[nn.Module, Tensor]] = deque()

    @property
    def is_moving(self) -> bool:
        """Whether something is planned or moved: `step` has to be called."""
        return self._awaits_plan or bool(self._moving)

    def start(self) -> None:
        """Sums up the load that was recorded since experts moved last, and plans by it in a thread of the first rank.

        Raises:
            RuntimeError: what was started last is under way.
            ValueError: places differ between ranks, a load that was recorded overflowed, or `fully_shard` has gone
                around experts.
        """
        self._expect_rest()
        self._expect_agreement()
        mine = [balancing.load_per_expert() for balancing in self._balancings()]
        load = start_all_reduce(torch.cat(mine), self.group)().cpu()
        if load.min() < 0:
            raise ValueError("load overflowed: expected a start() before, or int64 in expert_load_view")
        if self.group.rank == 0:
            thread = ThreadPoolExecutor(1, thread_name_prefix="expert rebalancer")
            held = [balancing.held().tolist() for balancing in self._balancings()]
            self._planned = thread.submit(self._plan, load, held)
            thread.shutdown(wait=False)
        self._awaits_plan = True

    def step(self) -> bool:
        """Between two forwards: moves the next layer, if there is a plan. Returns whether there is more to do.

        Raises:
            RuntimeError: planning failed on the first rank. Nothing has moved.
        """
        if self._awaits_plan:
            self._receive_plan()
        if self._moving:
            self._move(*self._moving.popleft())
        return self.is_moving

    def finish(self) -> None:
        """Waits for the plan and moves all layers that are left. Raises as `step` does."""
        if self._planned is not None:
            wait([self._planned])
        while self.step():
            pass

    def place(self, strategy: Literal["linear", "round_robin"]) -> None:
        """Moves experts to where they are before any load is known: see `layers.spread_experts`.

        Without redundant experts "linear" is where they were in the beginning, so a state dict has them in order.

        Raises:
            RuntimeError: what was started last is under way.
            ValueError: `strategy` is none, it or places differ between ranks, or `fully_shard` has gone around experts.
        """
        expect_choice("strategy", strategy, Literal["linear", "round_robin"])
        self._expect_rest()
        self._expect_agreement(strategy=strategy)
        for module in self._layers.values():
            spread = spread_experts(*_sizes(module), self.group.size, strategy)
            self._moving.append((module, spread.physical_to_logical))
        self.finish()

    def forget_load(self) -> None:
        """From here on load is counted anew, as it is whenever experts have moved."""
        for balancing in self._balancings():
            balancing.load.zero_()

    def load_per_rank(self) -> Tensor:
        """[L, W] int64, on the CPU: slots that each rank's experts got since they moved last, of all ranks' tokens.

        Tokens that several ranks have count on each of them.
        """
        loads = [balancing.load.view(self.group.size, -1).sum(1) for balancing in self._balancings()]
        return start_all_reduce(torch.stack(loads).long(), self.group)().cpu()

    def imbalance(self) -> Tensor:
        """[L] float64: the load of the busiest rank over the mean, 1 where all have the same, or none."""
        load = self.load_per_rank().double()
        return (load.amax(1) / load.mean(1)).nan_to_num(nan=1.0)

    def _plan(self, load: Tensor, held: list[list[int]]) -> Tensor:
        """[P] of all layers, one after another. Ranks keep what they hold of it, where the load leaves a choice."""
        sizes = [_sizes(module) for module in self._layers.values()]
        loads = load.split([num_experts for num_experts, _ in sizes])
        plans = [rebalance_experts(each, P, *self._counts) for each, (_, P) in zip(loads, sizes)]
        _, num_nodes, num_ranks = self._counts
        kept = (
            kept_in_place(before, plan.physical_to_logical.flatten().tolist(), num_ranks, num_nodes)
            for before, plan in zip(held, plans, strict=True)
        )
        return torch.tensor([expert for places in kept for expert in places])

    def _receive_plan(self) -> None:
        sizes = [_sizes(module)[1] for module in self._layers.values()]
        told, failure = torch.full((sum(sizes),), _THINKING), None
        if self._planned is not None and self._planned.done():
            failure = self._planned.exception()
            told = torch.full_like(told, _FAILED) if failure is not None else self._planned.result()
        told = self._from_first_rank(told)
        if told[0] == _THINKING:
            return
        self._awaits_plan, self._planned = False, None
        if told[0] == _FAILED:
            raise RuntimeError("planning failed on rank 0, the first of the mesh") from failure
        self._moving.extend(zip(self._layers.values(), told.split(sizes)))

    def _from_first_rank(self, told: Tensor) -> Tensor:
        sent = told.to(self._balancings()[0].load.device)
        dist.broadcast(sent, group=self._processes, group_src=0)
        return sent.cpu()

    @torch.no_grad()
    def _move(self, module: nn.Module, after: Tensor) -> None:
        balancing, (num_experts, num_places) = _balancing(module), _sizes(module)
        placement = balancing.checked(ExpertPlacement.of(after, num_experts))
        transfers = transfers_between(balancing.held().tolist(), after.tolist(), self.group.size)
        each = num_places // self.group.size
        mine = RankTransfers.of(self.group.rank, transfers, each, self.group.size)
        if transfers:
            move_experts(_stored_parts(module), mine, self.group)
        balancing.commit(placement)

    def _balancings(self) -> list[ExpertBalancing]:
        return [_balancing(module) for module in self._layers.values()]

    def _expect_rest(self) -> None:
        if self.is_moving:
            raise RuntimeError("experts are being moved: expected step() until it returns False, or finish()")

    def _expect_agreement(self, **facts: Any) -> None:
        """Before anything is sent: ranks that have other maps would send each other other experts.

        Raises ValueError too where `fully_shard` has gone around experts since.
        """
        _processes_of(self._model, self._layers)
        places = {
            f"placement of {name}": _balancing(each).held().tolist() for name, each in self._layers.items()
        }
        expect_agreement(self._processes, {**facts, **places})


def move_experts(weights: Sequence[Tensor], transfers: RankTransfers, group: Group) -> None:
    """Changes places of experts, in place. All ranks of the group call it with parts of the same transfers.

    Args:
        weights: [P / W, ...] each, in any dtype, one after another, so that only one is in memory twice.
        transfers: of this rank.
        group: the ranks.
    """
    for stored in weights:
        weight = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored  # some cannot be indexed
        sources, targets, rows = (
            torch.tensor(places, dtype=torch.int64, device=weight.device)
            for places in (transfers.sources, transfers.targets, transfers.rows)
        )
        leaving = as_bytes(weight[sources])  # gloo sends few dtypes
        arrived = start_all_to_all(leaving, transfers.received, transfers.sent, group)()
        weight[targets] = of_bytes(arrived, weight)[rows]


def _parallel(module: nn.Module) -> RankExperts | None:
    name = "parallel" if isinstance(module, FusedMoE) else "moe_ops_parallel"
    return getattr(module, name, None)


def _balancing(module: nn.Module) -> Any:
    return getattr(module, "balancing" if isinstance(module, FusedMoE) else "moe_ops_balancing", None)


def _sizes(module: Any) -> tuple[int, int]:
    """E and P."""
    if isinstance(module, FusedMoE):
        return module.config.num_experts, module.config.num_physical_experts
    return module.down_proj.shape[0], module.down_proj.shape[0]


def _make_balanced(module: Any, options: dict[str, Tensor | None]) -> None:
    if _balancing(module) is not None:
        return
    num_experts, num_places = _sizes(module)
    device = _stored_parts(module)[0].device
    state = EplbState.initial(1, num_experts, num_places - num_experts, device)
    state = state._replace(expert_load_view=state.expert_load_view.long())
    if isinstance(module, FusedMoE):
        module.set_eplb_state(0, *state, **options)
    else:
        module.moe_ops_balancing = balancing_of_layer((num_experts, num_places), 0, state, **options)


def _sharded(module: nn.Module) -> list[DTensor]:
    """What belongs to its experts, their adapters too."""
    is_ours = isinstance(module, FusedMoE)
    lora = getattr(module, "lora" if is_ours else "moe_ops_lora", None)
    own = plain_parameters(module).values() if is_ours else module.parameters(recurse=False)
    adapters = () if lora is None else lora.parameters()
    return [each for each in chain(own, adapters) if isinstance(each, DTensor)]


def _stored_parts(module: nn.Module) -> list[Tensor]:
    return [RankExperts.stored_part(parameter) for parameter in _sharded(module)]


def _processes_of(model: nn.Module, layers: dict[str, nn.Module]) -> dist.ProcessGroup:
    """The ranks that share the experts of all layers."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what a forward has gathered looks like what a style made, and is a copy
    meshes = []
    for name, module in layers.items():
        for parameter in _sharded(module):
            if parameter.placements != (Shard(0),):
                raise ValueError(
                    f"{name or 'model'} has parameters placed {parameter.placements}: expected (Shard(dim=0),), by "
                    "ExpertParallel alone, for experts move before fully_shard"
                )
            meshes.append(parameter.device_mesh)
    if len({mesh.get_group().group_name for mesh in meshes}) > 1:
        raise ValueError("model has experts on several meshes: expected one ExpertRebalancer for each mesh")
    return process_group(meshes[0])
