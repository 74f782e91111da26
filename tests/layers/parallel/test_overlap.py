"""What runs while tokens are on their way."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.layers.parallel.test_styles import OPTIONS, H, make_block, parallel
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
    [("allgather_static", "all_gather_into_tensor"), ("alltoall_static", "all_to_all_single")],
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
