"""What the operators of `batch_invariant` take: records of the operators that they are named after."""

from moe_ops.arguments import FusedExperts, GroupedGemm, TopkRouting


class BatchInvariantRouting(TopkRouting):
    """Of `batch_invariant_routing`."""


class BatchInvariantGemm(GroupedGemm):
    """Of `batch_invariant_gemm`."""


class BatchInvariantExperts(FusedExperts):
    """Of `batch_invariant_experts`."""
