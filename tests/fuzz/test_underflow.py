"""The fuzzer's bound below a dtype's smallest normal number: right layers pass, and wrong ones are still found."""

from unittest import mock

import moe_ops
from tests.fuzz.cases import Case, draw, first
from tests.fuzz.check import check
from tests.fuzz.tensors import Maker


def test_sums_of_terms_below_the_normal_numbers_are_no_finding():
    """A weight of 5e-6: the gradients that are multiplied with w13 and summed are a step of float16 or two each."""
    verdict = check(draw(42, 9787), "cpu")
    assert verdict.wrong == [] and verdict.cancelled == ["hidden_states"]


def test_a_slightly_wrong_gradient_below_the_normal_numbers_is_found():
    """Gradients of some sixty steps of float16: w13's, a sum, is still known to a few percent."""
    drawn = first("fused_experts", backward=True, dtype="float16", tokens=7, apart=False, emit="stages")
    sizes = {"experts": 4, "local_experts": 4, "top_k": 2, "hidden": 65, "intermediate": 48}
    case = Case(**{**vars(drawn), **sizes, "activation": moe_ops.Activation("silu")})
    original, original_grad = moe_ops.fused_experts, Maker.grad

    def broken(hidden_states, w13, *args, **kwargs):
        return original(hidden_states, 1.1 * w13 - 0.1 * w13.detach(), *args, **kwargs)

    with mock.patch.object(Maker, "grad", lambda *args: original_grad(*args) * 2.0**-18):
        assert check(case, "cpu").wrong == []
        with mock.patch.object(moe_ops, "fused_experts", broken):
            (line,) = check(case, "cpu").wrong
    assert line.startswith("w13 ")


def test_a_copy_below_the_normal_numbers_is_right_to_half_a_step():
    case = first("permute", backward=True, dtype="float16", tokens=7)
    original, original_grad = moe_ops.permute, Maker.grad

    def broken(hidden_states, sorted_slots):
        return original(2 * hidden_states - hidden_states.detach(), sorted_slots)

    with mock.patch.object(Maker, "grad", lambda *args: original_grad(*args) * 2.0**-24):
        assert check(case, "cpu").wrong == []
        with mock.patch.object(moe_ops, "permute", broken):
            assert check(case, "cpu").wrong
