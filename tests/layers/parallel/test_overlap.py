"""What runs while tokens are on their way."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import inductor_passes
from layers import MoERunner
from tests.helpers import assert_matches_oracle, assert_same, usually
from tests.layers import oracle
from tests.layers.parallel.test_styles import OPTIONS, H, make_block, parallel, tokens_of
from tests.layers.parallel.world import on_ranks


class Order(TorchDispatchMode):
    """Names of operators, as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name.split("::")[1])
        return function(*args, **(kwargs or {}))


@on_ranks(2)
@pytest.mark.parametrize(
    "style, collective",
    [("allgather_static", "all_gather_into_tensor_coalesced"), ("alltoall_static", "all_to_all_single")],
)
def test_shared_experts_run_between_start_and_wait(style, collective):
    block = parallel(make_block(**OPTIONS["plain"]), style)
    with Order() as order, torch.no_grad():
        block(torch.randn(9, H))
    started, shared, arrived = (
        order.names.index(name) for name in (collective, "gated_activation", "wait_tensor")
    )
    assert started < shared < arrived
    assert order.names.count("gated_activation") == 1


@on_ranks(2)
def test_experts_that_ranks_share_are_in_no_operator_with_others():
    block, hidden = parallel(make_block(**OPTIONS["plain"]), "allgather"), torch.randn(5, H)
    with pytest.raises(
        ValueError, match="shared is a shared expert, and ranks share the others: expected its"
    ):
        block.experts(hidden, block.gate(hidden), block.shared_experts.operand(hidden))
    with pytest.raises(
        ValueError, match="shared_order='beside' experts that ranks share: expected 'before' or"
    ):
        MoERunner(block.experts, shared_experts=block.shared_experts, shared_order="beside")


@on_ranks(2, timeout=300)
@pytest.mark.slow
@pytest.mark.parametrize("trains", usually([False, True], [False]))
def test_compiled(trains):
    """Values and gradients; `test_overlap_code.py` reads the order."""
    style = "alltoall_static"
    block = make_block(torch.float64, **OPTIONS["plain"])
    sharded = parallel(block, style)
    compiled = torch.compile(sharded, fullgraph=True, options=inductor_passes.options())
    hidden = tokens_of(0, style, torch.float64).requires_grad_(trains)
    with torch.set_grad_enabled(trains):
        outputs = [each(hidden) for each in (sharded, compiled)]
    assert_matches_oracle(outputs[1].detach(), oracle.block(block, hidden))
    if trains:
        assert_same(*(torch.autograd.grad(out.square().sum(), [hidden]) for out in outputs))
