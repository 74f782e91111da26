"""The fuzzer's levels of experts in 8 bits: what they draw, that right operators pass, and that wrong ones do not."""

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from unittest import mock

import pytest
import torch

import moe_ops
from moe_ops import int4, scaled_experts, weight_formats
from moe_ops.quantise_rows import quantised
from moe_ops.weight_formats import quantised_weight
from tests.fuzz import pool, quantised_cases, rounding
from tests.fuzz.cases import Case, draw
from tests.fuzz.check import check
from tests.fuzz.problem import Mismatch
from tests.fuzz.quantised import spread

DRAWN = [draw(0, quantised_cases.EVERY * number) for number in range(1, 2600)]
SMALL = 2**17  # multiplications
LEAKY = ("scaled_fused_experts", "quantised_layer")


def cases(level, count, **wanted):
    """The first small ones of a level that are not compiled, and `wanted` of how they are quantised."""
    small = (
        case
        for case in DRAWN
        if case.level == level and not case.is_compiled
        if case.tokens * case.top_k * case.hidden * case.intermediate <= SMALL
        if all(
            getattr(case.scaled, name, getattr(case, name, None)) == value for name, value in wanted.items()
        )
    )
    return list(islice(small, count))


def test_every_option_is_drawn():
    drawn = [case.scaled for case in DRAWN]
    values = lambda name: {getattr(scaled, name) for scaled in drawn}  # noqa: E731
    assert {case.level for case in DRAWN} == set(quantised_cases.LEVELS)
    assert values("stored") == set(quantised_cases.STORED)
    assert values("rows") == {"quantised", "exact"}
    assert values("kind") == {"", *quantised_cases.KINDS}
    assert values("scale_dtype") == set(quantised_cases.SCALE_DTYPES)
    assert values("scale_layout") == set(quantised_cases.SCALE_LAYOUTS)
    assert values("compiled") == {"", "aot_eager", "inductor"}
    for switch in ("is_said", "gathered", "widened", "faint", "strange", "zero_points"):
        assert values(switch) == {False, True}, switch


def test_blocks_of_all_kinds_are_drawn():
    """One scale and many, edges that divide nothing, and blocks larger than any matrix."""
    whole = [case for case in DRAWN if case.level == "scaled_fused_experts"]
    for name, sizes in (("w13_block", ("columns", "hidden")), ("w2_block", ("hidden", "intermediate"))):
        pairs = [(getattr(case.scaled, name), [getattr(case, size) for size in sizes]) for case in whole]
        assert any(edge == size for (edge, _), (size, _) in pairs)
        assert {edge > size for (edge, _), (size, _) in pairs} == {False, True}
        assert any(size % edge and edge < size for (_, edge), (_, size) in pairs)
        assert any(size % edge and 1 < edge < size for (edge, _), (size, _) in pairs)
        assert any(edge >= quantised_cases.FAR for (_, edge), _ in pairs)


@pytest.mark.parametrize("level", quantised_cases.LEVELS)
def test_cases_pass(level):
    for case in cases(level, 8 if level == "quantised_layer" else 16):
        assert check(case, "cpu").wrong == [], case.number


@pytest.mark.parametrize(
    ("stored", "rows"),
    [
        ("float8_e4m3fn", "quantised"),
        ("int8", "quantised"),
        ("mxfp4", "exact"),
        ("int4", "exact"),
        ("nvfp4", "exact"),
    ],
)
def test_layers_of_float32_pass(stored, rows):
    found = cases("scaled_fused_experts", 12, stored=stored, dtype="float32", rows=rows)
    assert len(found) >= 5
    for case in found:
        assert check(case, "cpu").wrong == [], case.number


@pytest.mark.parametrize("level", ["scaled_fused_experts", "scaled_grouped_gemm"])
def test_zero_points_pass_and_are_found_where_they_are_lost(level):
    found = cases(level, 4, zero_points=True)
    assert len(found) == 4 and not any(check(case, "cpu").wrong for case in found)
    with mock.patch.object(int4, "shifts", lambda zero, dtype: torch.zeros_like(zero, dtype=dtype)):
        assert any(check(case, "cpu").wrong for case in found)


def test_zero_points_of_a_layer_pass_and_are_found_where_they_are_lost():
    """Few layers are of whole groups: this is the number of a small one."""
    case = draw(0, 16304)
    assert case.level == "quantised_layer" and case.scaled.zero_points
    assert check(case, "cpu").wrong == []
    lost = mock.patch.object(int4, "shifts", lambda zero, dtype: torch.zeros_like(zero, dtype=dtype))
    with lost, pytest.raises(Mismatch, match="is not the nearest to what it was"):
        check(case, "cpu")


@pytest.mark.parametrize("level", ["scaled_fused_experts", "scaled_grouped_gemm"])
def test_global_scales_pass_and_are_found_where_they_are_lost(level):
    found = [case for case in cases(level, 8, stored="nvfp4") if any(case.scaled.parts)]
    assert len(found) >= 4 and not any(check(case, "cpu").wrong for case in found)
    with mock.patch.object(
        weight_formats, "of_rows", lambda outer, rows: torch.ones(*outer.shape[:-1], rows)
    ):
        assert any(check(case, "cpu").wrong for case in found)


def test_given_scales_pass_and_are_found_where_they_are_others():
    found = [case for case in cases("scaled_fused_experts", 40, rows="quantised") if case.scaled.given]
    assert len(found) >= 6 and not any(check(case, "cpu").wrong for case in found)
    module = sys.modules["moe_ops.quantise_rows"]  # the package has a function of this name
    known = module._with_scale
    others = mock.patch.object(module, "_with_scale", lambda *args: known(*args[:3], 1.5 * args[3]))
    with others:
        assert sum(bool(check(case, "cpu").wrong) for case in found) >= 4


EVEN = {"skew": "even", "dropped": False, "backward": False, "poisoned": False}


def test_layers_with_a_scale_for_each_matrix_pass():
    """Gate and up rows have one each."""
    for case in cases("quantised_layer", 6, kind="tensor", rows="exact"):
        assert check(case, "cpu").wrong == [], case.number


def _found(broken, rows, in_4_bits=False, **changed):
    """How many of some layers in float32 fail with another function in the place of ours, and how many there are."""
    drawn = [
        case
        for case in cases("scaled_fused_experts", 60, rows=rows, dtype="float32")
        if case.tokens > 2 and (case.scaled.stored in quantised_cases.IN_4_BITS) == in_4_bits
    ]
    few = drawn[
        : 3 if rows == "exact" else 8
    ]  # the oracle moves all inputs of what is wrong there, which takes a while
    chosen = [Case(**{**vars(case), **EVEN, **changed}) for case in few]
    with mock.patch.object(moe_ops, "scaled_fused_experts", broken):
        return sum(bool(check(case, "cpu").wrong) for case in chosen), len(chosen)


@pytest.mark.parametrize("lost", ["w13_bias", "w2_bias", "shared"])
@pytest.mark.parametrize("rows", ["quantised", "exact"])
def test_what_is_lost_is_found(lost, rows):
    original = moe_ops.scaled_fused_experts

    def broken(*args, **named):
        return original(*args, **named | {lost: None})

    found, count = _found(broken, rows, **{"shared" if lost == "shared" else "bias": True})
    assert found >= count - 1 and count >= 3  # of a case all slots may be elsewhere


@pytest.mark.parametrize("rows", ["quantised", "exact"])
def test_a_scale_that_is_off_by_some_percent_is_found(rows):
    """By one, and by ten where each product of the layer is of numbers that were rounded to 8 bits."""
    original, factor = moe_ops.scaled_fused_experts, 1.01 if rows == "exact" else 1.1

    def broken(x, w13, *args, **named):
        other = moe_ops.ScaledWeight(w13.weight, w13.scale.double() * factor, w13.block)
        return original(x, other, *args, **named)

    found, count = _found(broken, rows, bias=False, shared=False)
    assert found >= count - 2 and count >= 3


@pytest.mark.parametrize("lost", ["halves", "scales"])
def test_numbers_of_4_bits_that_are_others_are_found(lost):
    """Bytes whose halves change places, and scales that are too large."""
    original = moe_ops.scaled_fused_experts

    def broken(x, w13, w2, *args, **named):
        pairs, scale = w2.weight, w2.scale
        if lost == "halves":
            pairs = (pairs << 4) | (pairs >> 4)
        else:
            scale = scale.view(torch.uint8) + 1 if scale.dtype.itemsize == 1 else scale * 1.02
        return original(x, w13, moe_ops.ScaledWeight(pairs, scale, w2.block), *args, **named)

    found, count = _found(broken, "exact", in_4_bits=True, bias=False, shared=False)
    assert found >= count - 1 and count >= 3


def _poisoned(level):
    """A case with tokens that are NaN, and others."""
    drawn = next(case for case in cases(level, 400, rows="quantised", dtype="float32") if case.tokens > 2)
    changed = {"poisoned": True, "hidden_layout": "dense", "local_experts": drawn.experts, "bias": False}
    return Case(**{**vars(drawn), **EVEN, **changed})


@pytest.mark.parametrize("level", LEAKY)
def test_a_token_that_reaches_others_is_found(level):
    """As by a scale that tokens share."""
    case, original = _poisoned(level), scaled_experts._rows_of

    def broken(activate, args):
        leak = 0.0 * args.hidden_states.sum()
        out, plan = original(activate, args)
        return torch.where(leak == 0, out, out + 2**-10), plan

    assert check(case, "cpu").wrong == []
    with mock.patch.object(scaled_experts, "_rows_of", broken):
        assert any("other tokens changed" in line for line in check(case, "cpu").wrong)


def test_a_nan_that_is_lost_is_found():
    case = Case(**{**vars(_poisoned("scaled_fused_experts")), "poisoned": True})
    original = moe_ops.scaled_fused_experts

    def broken(*args, **named):
        return original(*args, **named).nan_to_num(0.0)

    assert check(case, "cpu").wrong == []
    with mock.patch.object(moe_ops, "scaled_fused_experts", broken):
        assert "output: numbers of tokens that are NaN" in check(case, "cpu").wrong


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("columns", [1, 5, 13, 64])
def test_the_oracle_quantises_as_documented(columns, stored):
    """In float64, with an error of nothing: what the operator gives in float32, or what its last bit can turn."""
    x = torch.randn(40, 13)
    x[3], x[4] = 0.0, 1e-38
    known = rounding.quantised(rounding.exact(x), columns, stored)
    rows, scale = quantised(x, 1, columns, stored)
    off = (rows.double() * spread(scale, x.shape, (1, columns)) - known.value).abs()
    assert (off <= known.error).all()
    assert (known.error <= 1e-6 * known.value.abs() + 1e-30).double().mean() > 0.99


def test_the_oracle_knows_how_far_a_number_may_turn():
    """Half of what a step is, where what is rounded is that uncertain; nothing where it is no tie."""
    x = torch.tensor([[127.0, 10.5, 20.25]])
    known = rounding.quantised(rounding.Known(x.double(), torch.full((1, 3), 0.1).double()), 3, torch.int8)
    assert known.error[0, 1] > 0.9 and known.error[0, 2] < 0.1


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh_no_mul"])
def test_the_oracle_knows_what_cancels(name):
    """torch adds 1 to tanh and erf, whose digits are lost where gates are negative; a sigmoid keeps them."""
    gate_up = torch.linspace(-6.0, 6.0, 98, dtype=torch.float64).reshape(-1, 2)
    gate_up[:, 1] = gate_up[:, 0] if "no_mul" in name else 1.0
    eps = torch.finfo(torch.float64).eps
    known = rounding.Arithmetic(torch.float64, eps).activated(
        rounding.exact(gate_up), moe_ops.Activation(name)
    )
    gate = gate_up[:, 0]
    if name == "gelu":
        other = gate * torch.special.erfc(-gate / 2**0.5) / 2
    else:
        other = gate * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))
    off = (known.value[:, 0] - other).abs()
    assert (off <= known.error[:, 0]).all() and (off > 100 * eps * other.abs()).any()
    assert (known.error[:, 0] <= 20 * eps * (1 + gate.abs())).all()


def test_weights_the_oracle_is_given_are_those_of_the_library():
    weight = torch.randn(2, 10, 9)
    made = quantised_weight(weight, (4, 4), torch.int8)
    dense = made.weight.double() * spread(made.scale, made.weight.shape, (4, 4))
    assert (dense - weight.double()).abs().max() <= 0.51 * made.scale.max()


def test_only_some_levels():
    run = pool.Run(0, 5, 1.0, "cpu", 1, levels="quantise_rows|permute")
    indices = list(pool._of_levels(run))
    assert len(indices) == 5 and {draw(0, index).level for index in indices} == {"quantise_rows", "permute"}


@pytest.mark.slow
def test_interpreted_kernels_pass():
    """The hook that runs kernels in the place of the CPU's implementations."""
    pytest.importorskip("triton")
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        "--levels",
        "scaled_.*|quanti.*",
        "--cases",
        "8",
        "--processes",
        "1",
    ]
    result = subprocess.run(
        [*command, "--hook", "tests.fuzz.interpreted:install"], cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert "8 ok" in result.stdout


def test_a_case_says_how_it_is_quantised():
    case = cases("scaled_fused_experts", 1)[0]
    assert f"stored='{case.scaled.stored}'" in str(case) and isinstance(case, Case)


@pytest.mark.parametrize("off_by", [(0.0, 0.0), (1e-6, 1e-6), (1e-6, 2e-6), (0.5, 0.5)])
def test_calls_without_gradients_may_round_elsewhere_but_alike(off_by):
    """The first and second of them: as much off, and by no more than rounding explains."""
    (case,) = cases("scaled_fused_experts", 1, rows="exact", dtype="float32", backward=True, poisoned=False)
    original, left = moe_ops.scaled_fused_experts, list(off_by)

    def elsewhere(*args, **kwargs):
        out = original(*args, **kwargs)
        return out if torch.is_grad_enabled() else out * (1 + left.pop(0))

    with mock.patch.object(moe_ops, "scaled_fused_experts", elsewhere):
        wrong = check(case, "cpu").wrong
    assert not left and (wrong == []) is (off_by[0] == off_by[1] < 0.1)
