"""The fuzzer of raising itself: what it draws, that it finds a wrong value, and a few of its layers."""

from dataclasses import replace

import torch
from torch.nn import functional as F

from tests.fuzz.raising import __main__, check
from tests.fuzz.raising.grammar import AXES, draw
from tests.fuzz.raising.mutations import MUTATIONS
from tests.fuzz.raising.shrink import shrunk
from tests.fuzz.raising.source import PARAMETERS, model_of, source
from tests.fuzz.raising.tensors import KINDS, inputs

DRAWN = [draw(0, index) for index in range(1500)]


class Broken:
    """In the place of what is compiled, a model that gives a little more."""

    raised: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    def __init__(self, case, model):
        self.run = lambda *given: model(*given) * (1.001 if case["activation"] == "relu" else 1.0)


def test_a_number_is_a_case():
    assert draw(3, 17) == draw(3, 17)
    assert draw(3, 17) != draw(4, 17)
    for one, other in zip(inputs(DRAWN[0], "plain", 5), inputs(DRAWN[0], "plain", 5), strict=True):
        assert torch.equal(one, other)


def test_every_option_is_drawn():
    for axis, options in AXES.items():
        assert {case[axis] for case in DRAWN} == {*options}, axis
    assert {each for case in DRAWN for each in case.mutations} == {*MUTATIONS}
    for name in ("is_training", "is_dynamic", "is_lowered"):
        assert {getattr(case, name) for case in DRAWN} == {True, False}


def test_every_layer_is_python():
    for case in DRAWN[:300]:
        assert model_of(source(case), "layer")


def test_a_wrong_value_is_found_and_its_layer_shrunk(monkeypatch):
    monkeypatch.setattr(check, "Compiled", Broken)
    drawn = (each for each in DRAWN if each["activation"] == "relu" and not each.mutations)
    case = replace(next(each for each in drawn if each.dtype == "float32"), mutations=("total more",))
    verdict = check.check(case)
    assert verdict.kind == "wrong" and "output is off by 1.0" in verdict.text
    simplest = shrunk(case, "wrong")
    others = {axis for axis, options in AXES.items() if simplest[axis] != options[0]}
    assert others <= {"activation", "form"} and not simplest.mutations and not simplest.is_training


def of_one_weight(more):
    """A layer's weight that is alone is divided by itself, or nearly; no gradient is as large as what cancels."""

    def model(x, router, *rest):
        weight = 1e-6 * F.linear(x, router).exp()
        return (weight / weight + more(weight)) * x + 0 * sum(each.sum() for each in rest)

    return model


def test_gradients_of_rounding_alone_are_no_finding():
    case = next(each for each in DRAWN if each.is_training and each.dtype == "float32")
    given = [torch.randn(5, 8), torch.randn(1, 8), *(torch.zeros(1) for _ in PARAMETERS[1:])]
    exact = of_one_weight(lambda weight: 0)
    for share, found in ((3e-5, False), (3e-4, True), (1.0, True)):
        ours = of_one_weight(lambda weight, share=share: share * (weight / weight.detach() - 1))
        wrong = check._differences(case, (ours, exact, exact), given)
        assert bool(wrong) == found, (share, wrong)


def test_a_layer_that_pytorch_does_not_run_is_no_finding():
    sizes = DRAWN[0].sizes
    assert check.check(replace(DRAWN[0], sizes=replace(sizes, top_k=sizes.experts + 2))).kind == "void"


def test_a_few_layers():
    """Most of which are raised."""
    small = [case for case in DRAWN if case.sizes.experts < 6 and case["model"] == "one"]
    verdicts = [check.check(case) for case in small[:5]]
    assert [each.text for each in verdicts if each.kind in ("wrong", "refused")] == []
    assert sum("experts" in each.raised for each in verdicts) >= 3


def test_a_case_alone_is_printed_as_python(capsys, monkeypatch):
    monkeypatch.setattr(check, "Compiled", Broken)
    number = next(each.number for each in DRAWN if each["activation"] == "silu")
    assert __main__.run_one(number).kind == "ok"
    assert source(draw(*map(int, number.split(":")))) in capsys.readouterr().out


def test_kinds_of_inputs_differ():
    assert len({tuple(inputs(DRAWN[1], kind, 4)[0].flatten().tolist()) for kind in KINDS}) == len(KINDS)
