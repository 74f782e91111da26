"""The level of the two operators that a layer is where a backward follows."""

from torch import Tensor

import moe_ops
from tests.fuzz import oracle
from tests.fuzz.levels import LEVELS, Dispatched
from tests.fuzz.problem import Problem, Tensors, layer_bound, without_none
from tests.fuzz.tensors import Maker


def halves(make: Maker) -> Problem:
    case, at = make.case, Dispatched(make)
    weights, bias13, bias2 = make.topk_weights(), make.bias(case.columns), make.bias(case.hidden)
    tensors = without_none(
        hidden_states=make.matrix(case.tokens, case.hidden), w13=make.w13(), w2=make.w2(), topk_weights=weights,
        w13_bias=bias13, w2_bias=bias2, shared=make.shared(),
    )  # fmt: skip

    def run(t: Tensors) -> Tensor:
        gate_up = moe_ops.gather_gemm(t["hidden_states"], t["w13"], at.plan, t.get("w13_bias"))
        rest = t.get("w2_bias"), t.get("shared")
        return moe_ops.act_gemm_combine(gate_up, t["w2"], t["topk_weights"], at.plan, case.activation, *rest)

    def expected(t: Tensors) -> Tensor:
        x = oracle.gathered(t["hidden_states"][at.tokens(case.top_k)])
        up = oracle.up(x, t["w13"], t.get("w13_bias"), at.row_experts, case.activation)
        down = oracle.stored(oracle.linear(up, t["w2"], t.get("w2_bias"), at.row_experts))
        return oracle.weighted_sum(down[at.rows], t["topk_weights"], at.slot_experts, t.get("shared"))

    return Problem(tensors, run, expected, layer_bound(case))


LEVELS["halves"] = halves
