"""When a layer of few tokens is multiplied slot by slot, in which order, and what runs beside it. Needs no GPU."""

import pytest
import torch

from moe_ops.arguments import ExpertWeights, FusedExperts, GroupedLinear, PairedLinear, Placement
from moe_ops.kernels.decode_plan import prefers_gemv, takes_turns
from moe_ops.kernels.fused import is_gemv, leaves_room
from moe_ops.kernels.program import describe
from tests.kernels.catalogue import meta


def test_decode_path_is_chosen_where_experts_are_distinct() -> None:
    assert prefers_gemv(1, 2, 8) and prefers_gemv(4, 8, 128) and prefers_gemv(8, 8, 256)
    assert not prefers_gemv(4, 2, 8)  # Mixtral: four tokens already share experts
    assert not prefers_gemv(16, 8, 256)


@pytest.mark.parametrize(
    ("tokens", "size", "room"),
    [(1, 2048, True), (2, 2048, True), (4, 2048, False), (8, 512, True), (16, 512, False)],
)
def test_where_another_stream_gets_in_between(tokens: int, size: int, room: bool) -> None:
    """Few tokens of any layer, but not gigabytes of weights: at a hidden size of 7168 four tokens read 2.8 GB."""
    hidden = 7168 if size == 2048 else 2048
    experts = ExpertWeights(PairedLinear(meta(256, 2 * size, hidden)), GroupedLinear(meta(256, hidden, size)))
    routed = meta(tokens, 8, dtype=torch.float32), meta(tokens, 8, dtype=torch.int32)
    args = FusedExperts(meta(tokens, hidden), experts, *routed, Placement(), None, "silu")
    assert leaves_room(args) == room


@pytest.mark.parametrize(
    ("tokens", "intermediate", "gemv"), [(1, 20160, True), (6, 2880, True), (7, 2880, False), (7, 360, True)]
)
def test_of_columns_that_lie_together_few_bytes_are_multiplied_row_by_row(tokens, intermediate, gemv) -> None:
    """Of rows eight tokens are: gpt-oss of 120 billion parameters has 50 MB an expert."""
    for transposed in (True, False):
        w13 = meta(128, 2880, 2 * intermediate).mT if transposed else meta(128, 2 * intermediate, 2880)
        experts = ExpertWeights(PairedLinear(w13), GroupedLinear(meta(128, 2880, intermediate)))
        routed = meta(tokens, 4, dtype=torch.float32), meta(tokens, 4, dtype=torch.int32)
        args = FusedExperts(meta(tokens, 2880), experts, *routed, Placement(), None, "silu")
        assert is_gemv(args) == (gemv or not transposed)


@pytest.mark.parametrize(
    ("tokens", "parts", "size", "gemv"),
    [
        (3, 2, 768, True),
        (8, 2, 768, False),
        (3, 4, 768, True),
        (4, 4, 768, False),
        (1, 2, 2048, True),
        (2, 2, 2048, False),
    ],
)
def test_many_slots_with_experts_elsewhere_are_multiplied_as_tiles(tokens, parts, size, gemv) -> None:
    """Each of them costs programs that have nothing to do, the more the larger an expert is."""
    hidden = 7168 if size == 2048 else 2048
    here = 128 // parts
    experts = ExpertWeights(
        PairedLinear(meta(here, 2 * size, hidden)), GroupedLinear(meta(here, hidden, size))
    )
    routed = meta(tokens, 8, dtype=torch.float32), meta(tokens, 8, dtype=torch.int32)
    given = meta(tokens, hidden), experts, *routed
    assert is_gemv(FusedExperts(*given, Placement(meta(128, dtype=torch.int32)), None, "silu")) == gemv
    assert is_gemv(FusedExperts(*given, Placement(meta(here, dtype=torch.int32)), None, "silu")) == (
        prefers_gemv(tokens, 8, here)
    )


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "turns"),
    [(1, 128, 8, False), (2, 128, 8, False), (4, 128, 8, True), (4, 128, 4, False), (2, 8, 2, True)],
)
def test_slots_take_turns_where_they_share_experts(
    tokens: int, experts: int, top_k: int, turns: bool
) -> None:
    """Or beside a shared expert; and never where columns lie together."""

    def args(w13: torch.Tensor, shared: bool) -> FusedExperts:
        weights = ExpertWeights(PairedLinear(describe(w13)), GroupedLinear(describe(meta(experts, 64, 48))))
        routed = meta(tokens, top_k, dtype=torch.float32), describe(meta(tokens, top_k, dtype=torch.int32))
        x = meta(tokens, 64)
        return FusedExperts(x, weights, *routed, Placement(), x if shared else None, "silu")

    plain, columns = meta(experts, 96, 64), meta(experts, 64, 96).transpose(1, 2)
    assert takes_turns(args(plain, False)) == turns and takes_turns(args(plain, True))
    assert not takes_turns(args(columns, False)) and not takes_turns(args(columns, True))
