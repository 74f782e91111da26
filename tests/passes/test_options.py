"""options() and what it makes of modes, unknown names and passes already in the slot."""

import pytest
import torch
import torch._inductor.config as inductor_config

import inductor_passes
from inductor_passes.pipeline import MoEPasses

SLOT = "post_grad_custom_pre_pass"


def _first(graph):
    pass


def _second(graph):
    pass


def test_default_has_only_our_pass():
    assert inductor_passes.options() == {SLOT: MoEPasses()}


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_expand_through_inductors_table(mode):
    expected = torch._inductor.list_mode_options(mode)
    assert inductor_passes.options(mode) == {**expected, SLOT: MoEPasses()}


def test_an_option_wins_over_its_mode():
    made = inductor_passes.options("max-autotune", max_autotune=False, **{"triton.cudagraphs": False})
    assert made["max_autotune"] is False and made["triton.cudagraphs"] is False


def test_unknown_mode_is_named():
    with pytest.raises(ValueError, match="mode='fastest': expected one of 'default'"):
        inductor_passes.options("fastest")


def test_unknown_option_is_named():
    with pytest.raises(ValueError, match="option 'max_autotunes'"):
        inductor_passes.options(max_autotunes=True)


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
