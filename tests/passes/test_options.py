"""options() and what it makes of modes, unknown names and passes already in the slot."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters

import inductor_passes
from inductor_passes import _compat
from inductor_passes.backend import moe_inductor
from inductor_passes.cache_key import source_hash
from inductor_passes.pipeline import PIPELINE, MoEPasses
from inductor_passes.together import CompileTogether
from inductor_passes.training import RaiseForTraining
from tests.generated import codes_of, passes_alone
from tests.helpers import fresh_graphs
from tests.passes.moe import MANY_TOKENS, inputs, layer

SLOT, BEFORE_AUTOGRAD = "post_grad_custom_pre_pass", "pre_grad_custom_pass"
BEHIND_FUSION = "_post_fusion_custom_pass"
LEFT = ["grouped_gemm", "grouped_gemm"]  # what our passes leave of a layer on a CPU
TAKES_LISTS = hasattr(torch._inductor.custom_graph_pass, "CustomInferenceAwareGraphPass")  # torch 2.13


def _first(graph):
    pass


def _second(graph):
    pass


OURS = {SLOT: MoEPasses(), BEFORE_AUTOGRAD: RaiseForTraining(), BEHIND_FUSION: CompileTogether()}


def test_default_has_only_our_passes():
    assert inductor_passes.options() == OURS


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_expand_through_inductors_table(mode):
    expected = torch._inductor.list_mode_options(mode)
    assert inductor_passes.options(mode) == {**expected, **OURS}


def test_an_option_wins_over_its_mode():
    made = inductor_passes.options("max-autotune", max_autotune=False, **{"triton.cudagraphs": False})
    assert made["max_autotune"] is False and made["triton.cudagraphs"] is False


def test_unknown_mode_is_named():
    with pytest.raises(ValueError, match="mode='fastest': expected one of 'default'"):
        inductor_passes.options("fastest")


def test_unknown_option_is_named():
    with pytest.raises(ValueError, match="option 'max_autotunes'"):
        inductor_passes.options(max_autotunes=True)


@pytest.mark.parametrize(
    ("mode", "given", "told"),
    [
        (["default"], {}, r"mode=\['default'\]: expected None or a string"),
        (None, {"max_autotune": "x"}, "option max_autotune='x': expected bool, got str"),
        (None, {"triton.cudagraphs": 1}, "option triton.cudagraphs=1: expected bool, got int"),
        (None, {SLOT: 3}, f"option {SLOT}=3: expected a pass, which can be called"),
        (None, {BEFORE_AUTOGRAD: 3}, f"option {BEFORE_AUTOGRAD}=3: expected a pass, which can be called"),
    ],
)
def test_what_is_of_another_type_is_named(mode, given, told):
    with pytest.raises(TypeError, match=told):
        inductor_passes.options(mode, **given)


def test_a_users_pass_in_options_is_chained():
    assert inductor_passes.options(**{SLOT: _first})[SLOT] == MoEPasses((_first,))


def test_a_users_pass_in_the_global_config_is_chained():
    with inductor_config.patch({SLOT: _first}):
        assert inductor_passes.options()[SLOT] == MoEPasses((_first,))


def test_options_win_over_the_global_config_as_in_inductor():
    with inductor_config.patch({SLOT: _first}):
        assert inductor_passes.options(**{SLOT: _second})[SLOT] == MoEPasses((_second,))


def test_ours_is_never_wrapped_twice():
    once = inductor_passes.options(**{SLOT: _first})
    assert inductor_passes.options(**once) == once
    with inductor_config.patch(once):
        assert inductor_passes.options() == once


def test_several_passes_in_the_slot_are_all_chained():
    assert inductor_passes.options(**{SLOT: [_first, _second]})[SLOT] == MoEPasses((_first, _second))


def test_custom_passes_of_ours_in_the_slot_are_kept():
    class Mine:
        name, requires, inference_only = "mine", (), False

    own = MoEPasses(passes=(Mine(), *PIPELINE))
    assert inductor_passes.options(**{SLOT: own})[SLOT] == own != MoEPasses()
    beside = inductor_passes.options(**{SLOT: [own, MoEPasses(), _first]})[SLOT]
    assert (beside.passes, beside.chained) == (own.passes, (_first,))


def test_a_name_with_dashes_is_the_same_option():
    made = inductor_passes.options(**{SLOT.replace("_", "-"): _first, "max-autotune": False})
    assert made == {**OURS, SLOT: MoEPasses((_first,)), "max_autotune": False}


def test_a_users_pass_before_autograd_is_chained():
    made = inductor_passes.options(**{BEFORE_AUTOGRAD: _first})
    assert made == {**OURS, BEFORE_AUTOGRAD: RaiseForTraining((_first,))}
    assert inductor_passes.options(**made) == made
    assert inductor_passes.options(**OURS) == OURS


@pytest.mark.parametrize("where", ["options", "config", "config and ours"])
def test_a_users_pass_before_autograd_runs_once(where):
    observer = Observer()
    given = {BEFORE_AUTOGRAD: observer} if where == "options" else {}
    under = {} if where == "options" else {BEFORE_AUTOGRAD: observer}
    over = inductor_passes.options() if where == "config and ours" else {}
    with inductor_config.patch(under), inductor_config.patch(over):
        _run_passes(backend=moe_inductor, options=given)
    assert len(observer.seen) == 1


def test_the_key_before_autograd_covers_sources_and_the_users_passes():
    key = RaiseForTraining(()).uuid()
    assert source_hash() in key and key == RaiseForTraining(()).uuid()
    assert key != RaiseForTraining((Observer("one"),)).uuid() != RaiseForTraining((Observer("other"),)).uuid()
    assert RaiseForTraining((_first,)).uuid() is None
    with inductor_config.patch({BEFORE_AUTOGRAD: Observer("one")}):
        assert RaiseForTraining().uuid() == RaiseForTraining((Observer("one"),)).uuid()


def test_copies_are_equal():
    class Mine:
        name, requires, inference_only = "mine", (), False

        def __init__(self, size):
            self.size = size

    for made in (inductor_passes.options(), inductor_passes.options("max-autotune", **{SLOT: _first})):
        assert copy.deepcopy(made) == made
        assert pickle.loads(pickle.dumps(made)) == made
    held = MoEPasses(passes=(Mine(torch.ones(2)),))
    assert copy.deepcopy(held) is held == held
    assert MoEPasses(passes=(Mine(1),)) == MoEPasses(passes=(Mine(1),)) != MoEPasses(passes=(Mine(2),))
    assert MoEPasses(passes=(Mine(torch.ones(2)),)) != MoEPasses(passes=(Mine(torch.ones(2)),))


class Observer(_compat.CustomGraphPass):
    """A user's pass that notes which of our operators are in the graph it gets."""

    def __init__(self, key="observer"):
        self.key, self.seen = key, []

    def __call__(self, graph):
        self.seen.append(
            [str(n.target).split(".")[1] for n in graph.nodes if str(n.target).startswith("moe.")]
        )

    def uuid(self):
        return self.key


@torch.no_grad()
def _compile(**how):
    torch._dynamo.reset()
    given = inputs(MANY_TOKENS)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, **how)(*given), layer(*given))


def _run_passes(**how):
    """`_compile` without code and numbers."""
    with passes_alone():
        _compile(**how)


def test_copied_and_fresh_options_share_a_compiled_graph():
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for made in (
            inductor_passes.options(),
            copy.deepcopy(inductor_passes.options()),
            inductor_passes.options(),
        ):
            codes_of(partial(torch.compile(layer, options=made), *inputs()))
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.parametrize("form", ["options", "backend", "backend with options"])
def test_a_global_pass_set_after_options_runs_once_after_ours(form):
    made = inductor_passes.options()
    how = {"options": made} if "options" in form else {}
    how |= {"backend": moe_inductor} if "backend" in form else {}
    observer = Observer()
    with inductor_config.patch({SLOT: observer}):
        _run_passes(**how)
    assert observer.seen == [LEFT]
    _run_passes(**how)
    assert observer.seen == [LEFT], "it is not in the slot any more"


def test_a_global_pass_set_after_options_sees_the_backward_too():
    made, observer = inductor_passes.options(), Observer()
    torch._dynamo.reset()
    with inductor_config.patch({SLOT: observer}):
        given = [tensor.requires_grad_() for tensor in inputs()]
        codes_of(partial(torch.compile(layer, options=made), *given))
    assert len(observer.seen) == 2 and "grouped_gemm_weight_backward" in observer.seen[1]


def test_a_global_pass_enters_the_key():
    made, with_uuid, without = inductor_passes.options(), Observer(), lambda graph: None
    keys = [made[SLOT].uuid()]
    for user_pass in (with_uuid, Observer("other"), without):
        with inductor_config.patch({SLOT: user_pass}):
            keys.append(made[SLOT].uuid())
    assert keys[-1] is None and len(set(keys)) == 4 and made[SLOT].uuid() == keys[0]


def test_a_global_pass_set_between_two_compiles_misses_the_cache():
    made, observer = inductor_passes.options(), Observer()
    with fresh_graphs():
        _compile(options=made)
        with inductor_config.patch({SLOT: observer}):
            _compile(options=made)
            assert len(observer.seen) == 1
            _compile(options=made)
    assert len(observer.seen) == 1, "the second time it comes from the cache"


def test_a_pass_given_to_options_wins_over_the_global_one():
    given, globally = Observer(), Observer()
    with inductor_config.patch({SLOT: globally}):
        _run_passes(options=inductor_passes.options(**{SLOT: given}))
        _run_passes(backend=moe_inductor, options=inductor_passes.options(**{SLOT: given}))
    assert given.seen == [LEFT, LEFT] and globally.seen == []


@pytest.mark.parametrize("in_options", [None, MoEPasses(), MoEPasses(passes=PIPELINE[:1])])
def test_ours_globally_and_in_options_runs_once_with_the_users(in_options):
    observer, runs = Observer(), []

    class Counted:
        name, requires, inference_only = "counted", (), False

        def run(self, graph, log):
            runs.append(graph)

    options = {SLOT: in_options} if in_options else inductor_passes.options()
    ours = {SLOT: MoEPasses(passes=(*PIPELINE, Counted()))}
    with inductor_config.patch({SLOT: observer}), inductor_config.patch(ours):
        _run_passes(options=options)
    assert len(observer.seen) == len(runs) == 1


def test_a_pass_taken_out_of_the_slot_does_not_run():
    observer = Observer()
    before = inductor_config.post_grad_custom_pre_pass
    try:
        inductor_config.post_grad_custom_pre_pass = observer
        inductor_config.post_grad_custom_pre_pass = None
        _run_passes(options=inductor_passes.options())
        with inductor_config.patch({SLOT: observer}), inductor_config.patch({SLOT: MoEPasses(())}):
            _run_passes(options=inductor_passes.options())
    finally:
        inductor_config.post_grad_custom_pre_pass = before
    assert observer.seen == []


def test_what_a_patch_inside_another_left_behind_does_not_run():
    observer, gone = Observer(), Observer()
    with inductor_config.patch({SLOT: observer}), inductor_config.patch(inductor_passes.options()):
        with inductor_config.patch({SLOT: gone}):
            pass
        _run_passes()
    assert (len(observer.seen), len(gone.seen)) == (1, 0)


@pytest.mark.skipif(not TAKES_LISTS, reason="torch 2.11 takes one pass per slot")
def test_sequences_in_the_slot():
    first, second = Observer(), Observer("second")
    with inductor_config.patch({SLOT: [first, second]}):
        _run_passes(options=inductor_passes.options())
    _run_passes(options={SLOT: [MoEPasses(), first]})
    with inductor_config.patch({SLOT: second}):
        _run_passes(options={SLOT: [MoEPasses(), first]})
    assert (len(first.seen), len(second.seen)) == (3, 1)


@pytest.mark.skipif(not TAKES_LISTS, reason="torch 2.11 takes one pass per slot")
def test_ours_twice_in_a_sequence():
    with inductor_config.patch({SLOT: [MoEPasses(), MoEPasses(), Observer()]}):
        assert MoEPasses() == MoEPasses()
        _run_passes(options=inductor_passes.options())


@pytest.mark.skipif(not TAKES_LISTS, reason="torch 2.11 has no passes that are told")
@pytest.mark.parametrize("training", [False, True])
def test_a_users_pass_is_told_the_kind_of_graph_in_subgraphs_too(training):
    told = []

    class Aware(_compat.InferenceAwareGraphPass):
        def __call__(self, graph, is_inference):
            told.append(is_inference)

        def uuid(self):
            return None

    def model(*given):
        return torch.cond(given[0].sum() > 0, layer, lambda *given: layer(*given) * 2, given)

    torch._dynamo.reset()
    with passes_alone(), torch.set_grad_enabled(training):
        given = [tensor.requires_grad_(training) for tensor in inputs()]
        torch.compile(model, options=inductor_passes.options(**{SLOT: Aware()}))(*given)
    assert len(told) >= 3 and set(told) == {not training}


@pytest.mark.skipif(not TAKES_LISTS, reason="torch 2.11 takes one pass per slot")
def test_a_sequence_with_a_plain_function_is_not_cached():
    with inductor_config.patch({SLOT: [Observer(), lambda graph: None]}):
        assert inductor_passes.options()[SLOT].uuid() is None
