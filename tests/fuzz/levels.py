"""What is called at each level, and the same in float64: one function a level makes both from a case."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import moe_ops
from moe_ops import DispatchPlan
from moe_ops.arguments import Router
from moe_ops.reference import reference_routing
from tests.fuzz import oracle
from tests.fuzz.cases import Case
from tests.fuzz.problem import (
    Problem,
    Tensors,
    expect_equal,
    layer_bound,
    routing_bound,
    stage_bound,
    without_none,
)
from tests.fuzz.replicas import Recorded
from tests.fuzz.tensors import Maker
from tests.helpers import weights_of
from tests.kernels import oracles


def expert_tensors(make: Maker) -> Tensors:
    case = make.case
    return without_none(
        hidden_states=make.matrix(case.tokens, case.hidden),
        w13=make.w13(),
        w2=make.w2(),
        w13_bias=make.bias(case.columns),
        w2_bias=make.bias(case.hidden),
        shared=make.shared(),
    )


class Routed:
    """A router's inputs and, from the oracle, whom it must choose: nothing here asks an operator."""

    def __init__(self, make: Maker) -> None:
        self.routing, self.device = make.case.routing, make.device
        self.correction, self.expert_map = make.correction_bias(), make.expert_map()
        self.logits = make.logits(self.correction)
        bias = None if self.correction is None else self.correction.double().cpu()
        weights, ids = reference_routing(self.logits.double().cpu(), self.routing, bias)
        self.ids, self.valid = ids.to(self.device), (weights != 0).to(self.device)
        self.expert = local_experts(make, ids, self.expert_map)

    def weights(self, logits: Tensor, sizes: dict[str, float]) -> Tensor:
        """[T, K], differentiable. A gradient of logits is a difference of terms weight * gradient of weight."""
        weights = weights_of(logits, self.ids.long(), self.valid, self.routing)
        if weights.requires_grad:
            weights.register_hook(lambda grad: sizes.update(router_logits=(grad * weights).norm().item()))
        return weights


def local_experts(make: Maker, ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """[S] int64: the local expert of every slot, -1 where it is dropped."""
    places = None if expert_map is None else expert_map.cpu()
    found = oracles.local_experts(ids, places, make.case.local_experts)
    return torch.tensor(found, dtype=torch.int64, device=make.device)


def plan_of(make: Maker, expert: Tensor) -> DispatchPlan:
    """The plan for the local experts of all slots, by a plain stable sort."""
    parts = oracles.dispatch(expert.tolist(), make.case.local_experts)
    return DispatchPlan(*(torch.tensor(part, dtype=torch.int32, device=make.device) for part in parts))


def fused_moe(make: Maker) -> Problem:
    case, routed, sizes = make.case, Routed(make), {}

    def run(t: Tensors) -> Tensor:
        x, logits, w13, w2 = (t[name] for name in ("hidden_states", "router_logits", "w13", "w2"))
        rest = case.rest(t)
        options = {"correction_bias": routed.correction, "expert_map": routed.expert_map, "emit": case.emit}
        given = x, logits, case.given(w13), w2, case.routing, case.activation
        return moe_ops.fused_moe(*given, **rest, **options)

    return Problem(
        {**expert_tensors(make), "router_logits": routed.logits}, run, *_routed_layer(case, routed, sizes)
    )


def _routed_layer(
    case: Case, routed: Routed, sizes: dict[str, float]
) -> tuple[Callable[[Tensors], Tensor], float, dict[str, float]]:
    def expected(t: Tensors) -> Tensor:
        weights = routed.weights(t["router_logits"], sizes)
        return oracle.layer(t, weights, routed.expert, case.activation)

    return expected, max(layer_bound(case), routing_bound(case)), sizes


def module_of(make: Maker, routed: Routed) -> Any:
    """A `FusedMoE` for the case, whose weights have still to be set."""
    from layers import FusedMoE, MoEConfig
    from layers.config import RouterConfig

    case = make.case
    router = RouterConfig(has_correction_bias=routed.correction is not None)
    config = MoEConfig(
        case.experts, case.top_k, case.hidden, case.intermediate,
        case.routing, case.activation, case.bias, router=router,
    )  # fmt: skip
    module = FusedMoE(config, routed.expert_map, device=make.device, dtype=make.dtype)
    if routed.correction is not None:
        module.e_score_correction_bias.copy_(routed.correction)
    return module


def compiled(make: Maker) -> Problem:
    # Imported here: most workers compile nothing, and the compiler takes seconds to import.
    import inductor_passes

    case, routed, sizes = make.case, Routed(make), {}
    module = module_of(make, routed)
    names = {"w13": "w13_weight", "w2": "w2_weight", "w13_bias": "w13_bias", "w2_bias": "w2_bias"}

    @partial(torch.compile, fullgraph=True, options=inductor_passes.options())
    def run(t: Tensors) -> Tensor:
        parameters = {names[name]: tensor for name, tensor in t.items() if name in names}
        inputs = t["hidden_states"], t["router_logits"], t.get("shared")
        return torch.func.functional_call(module, parameters, inputs)

    tensors = {**expert_tensors(make), "router_logits": routed.logits}
    return Problem(tensors, run, *_routed_layer(case, routed, sizes))


def fused_experts(make: Maker) -> Problem:
    case, expert_map = make.case, make.expert_map()
    weights, ids = make.topk_weights(), make.topk_ids()
    expert = local_experts(make, ids, expert_map)

    def run(t: Tensors) -> Tensor:
        x, w13, w2, weights = (t[name] for name in ("hidden_states", "w13", "w2", "topk_weights"))
        rest = case.rest(t)
        options = {
            "apply_router_weight_on_input": case.weight_on_input,
            "emit": case.emit,
            "expert_map": expert_map,
        }
        return moe_ops.fused_experts(x, case.given(w13), w2, weights, ids, case.activation, **rest, **options)

    def expected(t: Tensors) -> Tensor:
        if not case.weight_on_input:
            return oracle.layer(t, t["topk_weights"], expert, case.activation)
        weighed = {**t, "hidden_states": oracle.stored(t["hidden_states"] * t["topk_weights"])}
        return oracle.layer(weighed, torch.ones_like(t["topk_weights"]), expert, case.activation)

    return Problem({**expert_tensors(make), "topk_weights": weights}, run, expected, layer_bound(case))


def topk_routing(make: Maker) -> Problem:
    """And route_and_record."""
    routed, sizes = Routed(make), {}
    recorded = Recorded(make, routed.ids)

    def run(t: Tensors) -> Tensor:
        weights, ids = moe_ops.topk_routing(t["router_logits"], make.case.routing, routed.correction)
        expect_equal("topk_ids", ids, routed.ids)
        router = Router(t["router_logits"], routed.correction, make.case.routing.spec)
        for name, pair in recorded.found_and_expected(router).items():
            expect_equal(name, *pair)
        return weights

    expected = lambda t: routed.weights(t["router_logits"], sizes)  # noqa: E731
    return Problem({"router_logits": routed.logits}, run, expected, routing_bound(make.case), sizes)


def routing_dispatch(make: Maker) -> Problem:
    case, routed, sizes = make.case, Routed(make), {}
    plan = plan_of(make, routed.expert)

    def run(t: Tensors) -> Tensor:
        weights, ids, found = moe_ops.routing_dispatch(
            t["router_logits"], case.routing, case.local_experts, routed.correction, routed.expert_map
        )
        expect_equal("topk_ids", ids, routed.ids)
        for name, actual, wanted in zip(plan._fields, found, plan, strict=True):
            expect_equal(name, actual, wanted)
        return weights

    expected = lambda t: routed.weights(t["router_logits"], sizes)  # noqa: E731
    return Problem({"router_logits": routed.logits}, run, expected, routing_bound(case), sizes)


def build_dispatch(make: Maker) -> Problem:
    expert_map, ids = make.expert_map(), make.topk_ids()
    plan = plan_of(make, local_experts(make, ids, expert_map))

    def run(t: Tensors) -> None:
        found = moe_ops.build_dispatch(ids, make.case.local_experts, expert_map)
        for name, actual, wanted in zip(plan._fields, found, plan, strict=True):
            expect_equal(name, actual, wanted)

    return Problem({}, run, lambda t: torch.zeros(0), 0.0)


class Dispatched:
    """A plan by plain sorting, with the expert of every row and the row of every slot."""

    def __init__(self, make: Maker) -> None:
        slots = local_experts(make, make.topk_ids(), make.expert_map())
        self.plan = plan_of(make, slots)
        self.order = self.plan.sorted_slots.long()
        self.row_experts, self.slot_experts = slots[self.order], slots
        self.rows = self.plan.inverse.long().clamp(min=0)

    def tokens(self, top_k: int) -> Tensor:
        """[S]: the token of every row."""
        return self.order // top_k


def permute(make: Maker) -> Problem:
    case, at = make.case, Dispatched(make)
    run = lambda t: moe_ops.permute(t["hidden_states"], at.plan.sorted_slots)  # noqa: E731
    expected = lambda t: t["hidden_states"][at.tokens(case.top_k)]  # noqa: E731
    return Problem({"hidden_states": make.matrix(case.tokens, case.hidden)}, run, expected, stage_bound(case))


def grouped_gemm(make: Maker) -> Problem:
    case, at = make.case, Dispatched(make)
    x = make.matrix(len(at.order), case.hidden)
    tensors = without_none(x=x, weight=make.w13(), bias=make.bias(case.columns))
    offsets = at.plan.expert_offsets
    given = lambda t: (case.given(t["weight"]), offsets, case.given(t.get("bias")))  # noqa: E731
    run = lambda t: moe_ops.grouped_gemm(t["x"], *given(t))  # noqa: E731
    expected = lambda t: oracle.linear(t["x"], t["weight"], t.get("bias"), at.row_experts)  # noqa: E731
    return Problem(tensors, run, expected, stage_bound(case))


def batched_gemm(make: Maker) -> Problem:
    """The rows of a plan among those set aside for each expert; what the others hold is NaN."""
    case, at = make.case, Dispatched(make)
    counts = at.plan.expert_offsets.diff()
    most = max(int(counts.max()), 1)
    is_row = torch.arange(most, device=make.device) < counts.unsqueeze(1)
    x = make.matrix(case.local_experts * most, case.hidden).unflatten(0, is_row.shape)
    tensors = without_none(x=x, weight=make.w13(), bias=make.bias(case.columns))
    expert = torch.arange(case.local_experts, device=make.device).unsqueeze(1).where(is_row, -1)

    def run(t: Tensors) -> Tensor:
        poisoned = t["x"].masked_fill(~is_row.unsqueeze(2), float("nan"))
        return moe_ops.batched_gemm(poisoned, t["weight"], counts, t.get("bias")).flatten(0, 1)

    expected = lambda t: oracle.linear(t["x"].flatten(0, 1), t["weight"], t.get("bias"), expert.flatten())  # noqa: E731
    return Problem(tensors, run, expected, stage_bound(case))


def gated_activation(make: Maker) -> Problem:
    case = make.case
    gate_up = make.matrix(case.tokens * case.top_k, case.columns)
    run = lambda t: moe_ops.gated_activation(t["gate_up"], case.activation)  # noqa: E731
    expected = lambda t: oracle.activate(t["gate_up"], case.activation)  # noqa: E731
    return Problem({"gate_up": gate_up}, run, expected, stage_bound(case))


def combine(make: Maker) -> Problem:
    case, at = make.case, Dispatched(make)
    expert_out = make.matrix(len(at.order), case.hidden)
    tensors = without_none(expert_out=expert_out, topk_weights=make.topk_weights(), shared=make.shared())
    inverse = at.plan.inverse
    run = lambda t: moe_ops.combine(t["expert_out"], t["topk_weights"], inverse, t.get("shared"))  # noqa: E731

    def expected(t: Tensors) -> Tensor:
        slots = t["expert_out"][at.rows]
        return oracle.weighted_sum(slots, t["topk_weights"], at.slot_experts, t.get("shared"))

    return Problem(tensors, run, expected, stage_bound(case))


def gather_gemm_act(make: Maker) -> Problem:
    case, at = make.case, Dispatched(make)
    hidden_states = make.matrix(case.tokens, case.hidden)
    tensors = without_none(hidden_states=hidden_states, w13=make.w13(), w13_bias=make.bias(case.columns))

    def run(t: Tensors) -> Tensor:
        w13, bias = case.given(t["w13"]), case.given(t.get("w13_bias"))
        return moe_ops.gather_gemm_act(t["hidden_states"], w13, at.plan, case.activation, bias)

    def expected(t: Tensors) -> Tensor:
        x = oracle.gathered(t["hidden_states"][at.tokens(case.top_k)])
        return oracle.up(x, t["w13"], t.get("w13_bias"), at.row_experts, case.activation)

    return Problem(tensors, run, expected, layer_bound(case))


def gemm_combine(make: Maker) -> Problem:
    case, at = make.case, Dispatched(make)
    x = make.matrix(len(at.order), case.intermediate)
    weights, bias = make.topk_weights(), make.bias(case.hidden)
    tensors = without_none(x=x, w2=make.w2(), topk_weights=weights, w2_bias=bias, shared=make.shared())

    def run(t: Tensors) -> Tensor:
        rest = t.get("w2_bias"), t.get("shared")
        return moe_ops.gemm_combine(t["x"], t["w2"], t["topk_weights"], at.plan, *rest)

    def expected(t: Tensors) -> Tensor:
        down = oracle.stored(oracle.linear(t["x"], t["w2"], t.get("w2_bias"), at.row_experts))
        return oracle.weighted_sum(down[at.rows], t["topk_weights"], at.slot_experts, t.get("shared"))

    return Problem(tensors, run, expected, layer_bound(case))


LEVELS: dict[str, Callable[[Maker], Problem]] = {
    level.__name__: level
    for level in (
        *(fused_moe, fused_experts, topk_routing, build_dispatch, permute, grouped_gemm, gated_activation),
        *(batched_gemm, combine, routing_dispatch, gather_gemm_act, gemm_combine, compiled),
    )
}
