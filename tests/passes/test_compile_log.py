"""One line per compile at INFO, whether the passes ran or a cache answered."""

import logging
import os
from functools import partial
from pathlib import Path

import pytest
import torch

import inductor_passes
from inductor_passes import compile_log
from inductor_passes.backend import moe_inductor
from inductor_passes.base import Fusion, PassLog, Refused
from inductor_passes.pipeline import MoEPasses
from tests.forked import run_python
from tests.generated import codes_of
from tests.helpers import fresh_graphs, usually
from tests.passes.capture import post_grad
from tests.passes.moe import inputs, layer
from tests.passes.test_explain import Model

ROOT = Path(inductor_passes.__file__).parents[1]
CACHED = "from cache, compiled before with the same passes"


@pytest.fixture
def lines(caplog):
    """Runs a call as the first compile of a process, and gives what it logged."""

    def after(function, *args):
        caplog.set_level(logging.INFO, "inductor_passes")
        torch._dynamo.reset()
        caplog.clear()
        function(*args)
        assert not compile_log._RUNNING
        told = [record.getMessage() for record in caplog.records if record.name == "inductor_passes"]
        return [line.partition(": ")[2] for line in told]

    return after


@pytest.mark.parametrize("how", usually(["backend", "options"], ["backend"]))
@torch.no_grad()
def test_a_compile_is_one_line_cached_or_not(lines, how):
    how = {"backend": {"backend": moe_inductor}, "options": {"options": inductor_passes.options()}}[how]
    model, hidden = Model(), inputs().hidden_states
    with fresh_graphs():
        assert lines(torch.compile(model, **how), hidden) == ["2 MoE layers (layers.0-1): 2 fused_moe"]
        assert lines(torch.compile(model, **how), hidden) == [CACHED]
        assert lines(torch.compile(torch.sin, **how), hidden) == ["no MoE operator"]


def test_forward_and_backward_are_a_line_each(lines):
    def step():
        torch.compile(Model(), options=inductor_passes.options())(inputs().hidden_states).sum().backward()

    with fresh_graphs():
        assert lines(step) == [
            "2 MoE layers (layers.0-1): 2 act_gemm_combine",
            "MoE operators of no layer, as in a backward graph",
        ]
        assert set(lines(step)) == {CACHED}


@torch.no_grad()
def test_subgraphs_are_told_in_the_line_of_their_graph(lines):
    def branches(*given):
        return torch.cond(given[0].sum() > 0, layer, lambda *given: layer(*given) * 2, given)

    compiled = torch.compile(branches, options=inductor_passes.options())
    found = lines(codes_of, partial(compiled, *inputs()))
    hazard = "1 capture hazard: cond: the host reads its condition"
    assert found == [f"2 MoE layers (moe_0): 2 fused_moe; {hazard}"]


@torch.no_grad()
def test_what_cannot_be_cached_says_why(lines):
    options = inductor_passes.options(post_grad_custom_pre_pass=_does_nothing)
    with fresh_graphs():
        for _ in range(2):
            (line,) = lines(torch.compile(layer, options=options), *inputs())
            assert line.startswith(
                "1 MoE layer (moe_0): 1 fused_moe; not cached: the pass <function _does_nothing"
            )


def _does_nothing(graph): ...


@torch.no_grad()
def test_a_compile_that_fails_is_no_cache_hit(lines):
    class Failing:
        name, requires, inference_only = "failing", ("combine",), False

        def run(self, graph, log):
            raise ArithmeticError

    options = {"post_grad_custom_pre_pass": MoEPasses(passes=(Failing(),))}

    def fail():
        with pytest.raises(Exception, match="ArithmeticError"):
            torch.compile(layer, options=options)(*inputs())

    with fresh_graphs():
        assert lines(fail) == []


@torch.no_grad()
def test_outside_a_compile_the_line_comes_at_once(caplog):
    (module,) = post_grad(layer, *inputs())
    caplog.set_level(logging.INFO, "inductor_passes")
    MoEPasses(())(module.graph)
    assert [record.getMessage() for record in caplog.records] == ["1 MoE layer (moe_0): 1 fused_moe"]


def test_what_was_raised_and_kept_is_told(caplog):
    caplog.set_level(logging.INFO, "inductor_passes")
    log = PassLog(dict.fromkeys(("l.0", "l.1")))
    log.raised += [Fusion(f"l.{i}", kind, ()) for i in range(2) for kind in ("experts", "topk_routing")]
    log.fused += [Fusion(f"l.{i}", "fused_moe", ()) for i in range(2)]
    log.kept += [Refused(f"l.{i}", "fused_moe", "symbolic") for i in range(2)]
    log.refused += [Refused("l.1", "add", "no"), Refused("?", "mul", "of no layer")]
    log.untimed += [Refused("l.0", "fused_moe", "no GPU")]
    compile_log.passes_ran(log, torch.fx.Graph())
    assert [record.getMessage() for record in caplog.records] == [
        "2 MoE layers (l.0-1): 2 fused_moe; 2 raised from plain PyTorch; refused 1 time: no; "
        "kept as a call 2 times: symbolic; not timed 1 time: no GPU"
    ]


@torch.no_grad()
def test_nothing_is_registered_when_nobody_listens():
    from torch._dynamo.callback import callback_handler

    torch._dynamo.reset()
    with fresh_graphs():
        torch.compile(layer, options=inductor_passes.options())(*inputs())
    assert not callback_handler.end_callbacks and not compile_log._RUNNING


SCRIPT = """
import torch
torch._logging._init_logs()  # what an import of torch does: a forked process has imported it
import inductor_passes
from tests.passes.moe import inputs, layer
for _ in range(2):
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(layer, options=inductor_passes.options())(*inputs())
"""


@pytest.mark.parametrize("setting", usually(["inductor_passes", "+inductor_passes"], ["+inductor_passes"]))
def test_torch_logs_shows_the_lines(setting, tmp_path):
    environment = {**os.environ, "TORCH_LOGS": setting, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = str(ROOT)
    done = run_python(SCRIPT, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    told = [line.partition("] compile ")[2] for line in done.stderr.splitlines() if "] compile " in line]
    assert told == ["0/0: 1 MoE layer (moe_0): 1 fused_moe", f"0/0: {CACHED}"]
    assert ("fused: Fusion(" in done.stderr) == setting.startswith("+")
