"""A user's passes in the slots of ours, behind fusion above all: they run once, and are in the key."""

import pickle

import pytest
import torch
import torch._inductor.config as inductor_config

import inductor_passes
from inductor_passes import _compat_kernels
from inductor_passes.backend import moe_inductor
from inductor_passes.cache_key import source_hash
from inductor_passes.together import CompileTogether
from tests.helpers import fresh_graphs
from tests.passes.moe import inputs, layer

BEFORE_AUTOGRAD, BEHIND_FUSION = "pre_grad_custom_pass", "_post_fusion_custom_pass"


def _first(graph):
    pass


class Schedule(_compat_kernels.SchedulerPass):
    """A user's pass behind fusion that counts its runs."""

    def __init__(self, key="schedule"):
        self.key, self.runs = key, 0

    def __call__(self, nodes):
        self.runs += 1
        return [*nodes]

    def uuid(self):
        return self.key


@pytest.mark.parametrize("where", ["options", "config", "config and ours"])
def test_a_users_pass_behind_fusion_runs_once(where):
    torch._dynamo.reset()
    schedule = Schedule()
    given = {BEHIND_FUSION: schedule} if where == "options" else {}
    under = {} if where == "options" else {BEHIND_FUSION: schedule}
    over = inductor_passes.options() if where == "config and ours" else {}
    with inductor_config.patch(under), inductor_config.patch(over), fresh_graphs(), torch.no_grad():
        run = torch.compile(layer, backend=moe_inductor, options=given)
        torch.testing.assert_close(run(*inputs()), layer(*inputs()))
    assert schedule.runs == 1


@pytest.mark.parametrize("slot", [BEFORE_AUTOGRAD, BEHIND_FUSION])
def test_no_pass_in_options_wins_over_one_in_the_global_config(slot):
    with inductor_config.patch({slot: _first}):
        assert inductor_passes.options()[slot].users() == (_first,)
        assert inductor_passes.options(**{slot: None})[slot].users() == ()


def test_the_key_behind_fusion_covers_sources_and_the_users_passes():
    keys = [pickle.dumps(CompileTogether((Schedule(key),))) for key in ("one", "one", "other")]
    assert keys[0] == keys[1] != keys[2] and source_hash().encode() in keys[0]
    assert CompileTogether((Schedule("one"),)).uuid() == CompileTogether((Schedule("one"),)).uuid()
    with pytest.raises(TypeError, match="no uuid"):
        pickle.dumps(CompileTogether((_first,)))
