"""FuseGemmCombine: the second GEMM and the weighted sum over a token's experts become one operator.

expert_out = grouped_gemm(x, w2, expert_offsets, bias)
out        = combine(expert_out, topk_weights, inverse, shared)
->
out        = gemm_combine(x, w2, bias, expert_offsets, topk_weights, inverse, shared)
"""

from torch.fx import Graph, Node

from inductor_passes.base import PassLog
from inductor_passes.graph_tools import (
    arguments,
    erase_dead,
    expect_one_plan,
    expect_one_weight,
    expect_only_user,
    expect_op,
    find,
    replacement,
    rewrite_each,
)
from moe_ops.arguments import Combine, GemmCombine, GroupedGemm


class FuseGemmCombine:
    """grouped_gemm -> combine becomes gemm_combine."""

    name = "fuse_gemm_combine"
    requires: tuple[str, ...] = ("combine",)
    inference_only = True

    def run(self, graph: Graph, log: PassLog) -> None:
        """Fuses at every combine."""
        rewrite_each(graph, find(graph, "combine"), _rewrite, log)


def _rewrite(graph: Graph, combine: Node, log: PassLog) -> None:
    total: Combine = arguments(combine)
    gemm = expect_op(total.expert_out, "grouped_gemm", "expert_out", combine)
    expect_only_user(gemm, combine, "expert_out")
    product: GroupedGemm = arguments(gemm)
    expect_one_plan(combine, expert_offsets=product.expert_offsets, inverse=total.inverse)
    weight = expect_one_weight(product, combine)
    args = GemmCombine(
        product.x, weight, product.expert_offsets, total.topk_weights, total.inverse, *total[3:]
    )
    fused = replacement(graph, args, combine)
    log.fuse("gemm_combine", combine, (gemm, combine))
    combine.replace_all_uses_with(fused)
    erase_dead(graph, (combine, gemm))
