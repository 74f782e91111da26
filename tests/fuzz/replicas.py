"""What a router's choices become where experts have replicas: drawn maps, and the count of a plain loop."""

import torch
from torch import Tensor

from moe_ops.arguments import LoadRecord, Replicas, Router
from moe_ops.route_and_record import route_and_record
from tests.fuzz.tensors import Maker
from tests.kernels import oracles


class Recorded:
    """Maps of up to four replicas per expert, some of them of nobody, and a record of the first half of the tokens."""

    def __init__(self, make: Maker, ids: Tensor) -> None:
        """`ids` [T, K] are what the router must choose."""
        experts, num_physical, real = make.case.experts, make.case.experts + 3, ids.shape[0] // 2
        drawn = (make.uniform(experts, 4) * (num_physical + 2)).int() - 1, (make.uniform(experts) * 6).int()
        self.replicas = Replicas(*(each.to(make.device) for each in drawn))
        self.num_real_tokens = torch.tensor(real, device=make.device)
        physical = oracles.replicas(ids.cpu(), *drawn, None)
        self.physical = torch.tensor(physical, dtype=torch.int32).view(ids.shape)
        self.load = torch.tensor(oracles.load_of(physical[:real], num_physical), dtype=torch.int32)

    def found_and_expected(self, router: Router) -> dict[str, tuple[Tensor, Tensor]]:
        """By name, what `route_and_record` gives and what it must."""
        record = LoadRecord(
            torch.zeros_like(self.load, device=self.num_real_tokens.device), self.num_real_tokens
        )
        *_, physical = route_and_record(router, self.replicas, record)
        return {
            "physical_ids": (physical.cpu(), self.physical),
            "load": (record.load.cpu(), self.load),
        }
