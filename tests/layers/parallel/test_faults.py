"""Ranks that die or stay away: the others raise, at once or when the group's time is over."""

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from layers import ModularKernel, StandardExperts
from layers.parallel import (
    AllGatherPrepareAndFinalize,
    AllReducePrepareAndFinalize,
    AllToAllPrepareAndFinalize,
)
from tests.helpers import mixed
from tests.layers.parallel.exchanges import config, make_layer, owners, part_of_experts, tokens_of
from tests.layers.parallel.world import RankError, world

LIMIT = 2.0
KINDS = ("gather", "reduce", "all_to_all")


def make_kernel(kind: str) -> ModularKernel:
    group, layer = dist.new_group(timeout=timedelta(seconds=LIMIT)), make_layer(config())
    ranks = owners(layer.config)
    exchange = {
        "gather": lambda: AllGatherPrepareAndFinalize(group),
        "reduce": lambda: AllReducePrepareAndFinalize(group),
        "all_to_all": lambda: AllToAllPrepareAndFinalize(group, ranks),
    }[kind]()
    return ModularKernel(exchange, StandardExperts(part_of_experts(layer, ranks)))


class Raised(Exception):
    pass


def one_is_killed(kind: str) -> None:
    kernel = make_kernel(kind)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    run_alone(kernel)


def one_stays_away(kind: str) -> None:
    kernel = make_kernel(kind)
    if dist.get_rank() == 1:
        time.sleep(60)
    run_alone(kernel)


def run_alone(kernel: ModularKernel) -> None:
    started = time.monotonic()
    try:
        kernel(*tokens_of(0, "all_reduce"))
    except RuntimeError as error:
        waited = time.monotonic() - started
        raise Raised(f"after {'at most' if waited < LIMIT + 5 else 'more than'} the limit") from error


@pytest.mark.parametrize(
    ("kind", "fault"),
    mixed(KINDS, (one_is_killed, one_stays_away)),
    ids=lambda each: getattr(each, "__name__", each),
)
def test_the_others_raise(fault, kind):
    with pytest.raises(RankError, match=r"(?s)rank 0 of 2.*Raised: after at most the limit"):
        world(2).run(__name__, fault.__name__, {"kind": kind}, timeout=30)
