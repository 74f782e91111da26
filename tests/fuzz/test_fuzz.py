"""The fuzzer itself, on a CPU: what it draws, that it passes right operators and names wrong ones."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from unittest import mock

import pytest
import torch

import moe_ops
from moe_ops._compat import CLAMP_PASSES_ITS_LIMIT
from moe_ops.reference import reference_experts, reference_routing
from moe_ops.types import ActivationName, GroupScore, RoutingOrder, ScoreFn
from tests.fuzz import cases, faults, levels, oracle, pool, quantised_cases, worker
from tests.fuzz.__main__ import run_one
from tests.fuzz.cases import Case, draw, first
from tests.fuzz.check import check
from tests.fuzz.summary import Summary
from tests.fuzz.tensors import MATRIX_LAYOUTS, WEIGHT_LAYOUTS, Maker, hangs_on_rounding
from tests.layers.parallel.world import fork_server

ROOT = Path(__file__).parents[2]
LEAKY = ("fused_moe", "fused_experts", "halves")
DRAWN = [draw(0, index) for index in range(2000)]


@pytest.fixture(autouse=True, scope="module")
def ranks_of_other_tests_start_as_fast():
    """The server that ranks are forked from is one for all, and the fuzzer's has not imported the compiler."""
    fork_server()


def values(name):
    return {getattr(case, name) for case in DRAWN}


def fuzz(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_a_number_is_a_case():
    assert draw(3, 17) == draw(3, 17)
    assert draw(3, 17) != draw(4, 17)
    case = first("fused_moe", dtype="bfloat16")
    problems = [levels.LEVELS[case.level](Maker(case, "cpu")) for _ in range(2)]
    for name, tensor in problems[0].tensors.items():
        assert torch.equal(tensor, problems[1].tensors[name]), name
        assert tensor.stride() == problems[1].tensors[name].stride(), name


def test_every_case_is_run_once_and_those_that_compile_first():
    for count in (0, 13, 9001):
        assert sorted(pool._in_order(count)) == [*range(count)]
    order = [*pool._in_order(9001)]
    slow = [index for index in range(4000) if draw(0, index).level == "compiled"]
    assert order[: len(slow)] == slow and sorted(order[:4000]) == [*range(4000)]


def test_a_gate_rounded_to_its_limit_is_no_finding():
    """A clamp passes its limit: if it is 2, derivatives at -2.0016 and 2.0013 are 0, of what is rounded they are not.

    Where it does not pass it, the other way round: what is rounded comes from within.
    """
    verdict = check(draw(41, 1425 if CLAMP_PASSES_ITS_LIMIT else 10535), "cpu")
    assert verdict.wrong == [] and {"w13", "hidden_states"} <= {*verdict.cancelled}


def test_every_option_is_drawn():
    assert values("level") == set(cases.LEVELS) == set(levels.LEVELS)
    assert values("w13_layout") == values("w2_layout") == set(WEIGHT_LAYOUTS)
    assert values("hidden_layout") == values("small_layout") == set(MATRIX_LAYOUTS)
    assert values("dtype") == values("logits_dtype") == set(cases.DTYPES)
    assert values("activation") == set(cases.ACTIVATIONS)
    assert {activation.name for activation in values("activation")} == set(ActivationName.__args__)
    assert values("tokens") == set(cases.TOKENS)
    assert values("experts") == set(cases.EXPERTS)
    assert values("hidden") | values("intermediate") == {*cases.SIZES, *cases.LARGE_SIZES}
    assert values("top_k") >= set(range(1, 9)) | {11, 16}
    for switch in ("dropped", "bias", "shared", "weight_on_input", "backward", "poisoned", "mapped", "apart"):
        assert values(switch) == {False, True}, switch


def test_every_routing_option_is_drawn():
    drawn = {
        option.name: {getattr(case.routing, option.name) for case in DRAWN}
        for option in fields(moe_ops.RoutingConfig)
    }
    assert drawn["score_fn"] == set(ScoreFn.__args__)
    assert drawn["order"] == set(RoutingOrder.__args__)
    assert drawn["group_score"] == set(GroupScore.__args__)
    assert drawn["renormalize"] == {False, True}
    assert drawn["num_groups"] >= {1, 2, 3, 4, 5, 8, 16}
    assert all(len(drawn[name]) > 1 for name in ("renorm_eps", "topk_groups", "group_fill", "scale"))
    assert values("logits") == {"separate", "ties", "not finite"}
    assert values("correction") == {"none", "finite", "not finite"}
    assert values("skew") == set(cases.SKEWS)


@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS)
@pytest.mark.parametrize("weight", ["w13", "w2"])
@pytest.mark.parametrize("size", ["hidden", "intermediate"])
def test_every_weight_layout_meets_sizes_that_are_no_multiples(size, weight, layout):
    """Of 8, and of 8 but not of 16, in whole layers of every dtype."""
    drawn = [case for case in DRAWN if case.level in (*cases.LAYERS, "halves")]
    those = [case for case in drawn if getattr(case, f"{weight}_layout") == layout]
    assert {case.dtype for case in those if getattr(case, size) % 8} == set(cases.DTYPES)
    assert any(getattr(case, size) % 16 == 8 for case in those)


def test_ids_may_all_be_out_of_range():
    case = first("fused_experts", skew="nobody", tokens=7)
    ids = Maker(case, "cpu").topk_ids()
    assert ((ids < 0) | (ids >= case.experts)).all() and (ids >= case.experts).any()


def test_cases_stay_within_their_budget():
    for case in DRAWN:
        assert case.local_experts * (case.columns + case.intermediate) * case.hidden <= cases.MAX_WEIGHTS
        assert case.top_k <= case.routing.topk_groups * (case.experts // case.routing.num_groups)


@pytest.mark.parametrize("name", WEIGHT_LAYOUTS)
def test_weight_layouts_keep_values_and_one_dimension_of_stride_one(name):
    weight = torch.randn(3, 4, 5)
    laid_out = WEIGHT_LAYOUTS[name](weight)
    assert laid_out.shape == weight.shape
    assert 1 in laid_out.stride()[1:]
    if "expanded" not in name:
        assert torch.equal(laid_out, weight)
    assert name == "dense" or not laid_out.is_contiguous() or laid_out.data_ptr() % 16


def test_what_lies_between_padded_rows_is_nan():
    padded = WEIGHT_LAYOUTS["padded"](torch.randn(3, 4, 5))
    assert torch.as_strided(padded, (3, 4, 6), padded.stride())[..., 5].isnan().all()


def test_the_oracle_is_the_reference():
    case = Case(**{**vars(first("fused_moe", emit="fused")), "tokens": 5, "dtype": "float64", "bias": True})
    make = Maker(case, "cpu")
    tensors = {name: tensor.double() for name, tensor in levels.expert_tensors(make).items()}
    routed = levels.Routed(make)
    weights, ids = reference_routing(routed.logits.double(), case.routing, routed.correction)
    actual = oracle.layer(tensors, routed.weights(routed.logits.double(), {}), routed.expert, case.activation)
    shared = tensors.pop("shared", 0.0)
    expected = reference_experts(
        *(tensors[name] for name in ("hidden_states", "w13", "w2")), weights, ids, case.activation,
        w13_bias=tensors["w13_bias"], w2_bias=tensors["w2_bias"], expert_map=routed.expert_map,
    )  # fmt: skip
    torch.testing.assert_close(actual, expected + shared, rtol=1e-12, atol=1e-13)


def test_choices_do_not_hang_on_rounding():
    for case in [each for each in DRAWN[:400] if each.level == "topk_routing"]:
        make = Maker(case, "cpu")
        bias = make.correction_bias()
        logits = make.logits(bias).double()
        assert not hangs_on_rounding(logits, None if bias is None else bias.double(), case).any(), case.number
    near = torch.tensor([[1.0, 1.0 + 1e-7, 0.0, -1.0], [2.0, 1.0, 0.0, -1.0]]).double()
    case = Case(**{**vars(DRAWN[0]), "routing": moe_ops.RoutingConfig(1), "top_k": 1})
    near[0, 1] = 1.0 + 1e-9
    assert hangs_on_rounding(near, None, case).tolist() == [True, False]


@pytest.mark.parametrize(
    "level", [level for level in cases.LEVELS if level not in ("compiled", *quantised_cases.LEVELS)]
)
def test_a_slightly_wrong_operator_is_found(level):
    case = first(level, emit="fused", tokens=7, dtype="float32")
    assert check(case, "cpu").wrong == []
    with faults.spoilt(level):
        assert check(case, "cpu").wrong


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_a_slightly_wrong_gradient_is_found(dtype):
    """By ten percent in one input of many; of a clamp in half precision less can be known."""
    drawn = first("fused_experts", backward=True, dtype=dtype, tokens=7, apart=False, skew="even")
    case = Case(**{**vars(drawn), "activation": moe_ops.Activation("silu")})
    original = moe_ops.fused_experts

    def broken(hidden_states, w13, *args, **kwargs):
        return original(hidden_states, 1.1 * w13 - 0.1 * w13.detach(), *args, **kwargs)

    assert check(case, "cpu").wrong == []
    with mock.patch.object(moe_ops, "fused_experts", broken):
        (line,) = check(case, "cpu").wrong
    assert line.startswith("w13 ")


def test_columns_that_are_forgotten_at_odd_sizes_are_found():
    """As by a kernel that loads eight numbers at a time and has no mask."""
    drawn = first("fused_experts", dtype="float32", tokens=7, backward=False)
    case = Case(**{**vars(drawn), "hidden": 65, "weight_on_input": False})
    original = moe_ops.fused_experts

    def broken(hidden_states, *args, **kwargs):
        whole = hidden_states.shape[1] // 8 * 8
        return original(hidden_states.index_fill(1, torch.tensor(whole), 0.0), *args, **kwargs)

    assert check(case, "cpu").wrong == []
    with mock.patch.object(moe_ops, "fused_experts", broken):
        assert check(case, "cpu").wrong


@pytest.mark.parametrize("layout", [name for name in WEIGHT_LAYOUTS if "expanded" not in name])
def test_a_layout_that_is_misread_is_found(layout):
    """As by a kernel that takes a weight for dense, from its first address on."""
    drawn = first("grouped_gemm", dtype="float32", tokens=7, backward=False)
    sizes = {"experts": 4, "local_experts": 4, "top_k": 2, "hidden": 17, "intermediate": 12}
    case = Case(**{**vars(drawn), **sizes, "w13_layout": layout, "skew": "even"})
    original = moe_ops.grouped_gemm

    def broken(x, weight, *args, **kwargs):
        _, rows, columns = weight.shape
        dense = weight.as_strided(weight.shape, (rows * columns, columns, 1))
        return original(x, dense, *args, **kwargs)

    assert check(case, "cpu").wrong == []
    with mock.patch.object(moe_ops, "grouped_gemm", broken):
        assert bool(check(case, "cpu").wrong) == (layout not in ("dense", "offset"))


@pytest.mark.parametrize("level", LEAKY)
def test_a_token_that_reaches_others_is_found(level):
    drawn = first(level, emit="fused", tokens=7, dtype="float32", hidden_layout="dense", backward=True)
    case = Case(**{**vars(drawn), "poisoned": True, "skew": "even"})
    name = faults.LAST_OPERATOR.get(level, level)
    original = getattr(moe_ops, name)

    def broken(hidden_states, *args, **kwargs):
        leak = 0.0 * hidden_states.detach().sum()
        return original(hidden_states, *args, **kwargs) + torch.where(leak == 0, 0.0, 2**-20)

    assert check(case, "cpu").wrong == []
    with mock.patch.object(moe_ops, name, broken):
        assert "other tokens changed" in check(case, "cpu").wrong[0]


def test_a_gradient_that_reaches_others_is_found():
    drawn = first("fused_experts", tokens=7, dtype="float32", hidden_layout="dense", backward=True)
    case = Case(**{**vars(drawn), "poisoned": True, "skew": "even"})
    original = moe_ops.fused_experts

    def broken(hidden_states, *args, **kwargs):
        out = original(hidden_states, *args, **kwargs)
        is_finite = bool(hidden_states.isfinite().all())
        if out.requires_grad:
            out.register_hook(lambda grad: grad if is_finite else grad * (1 + 2**-20))
        return out

    with mock.patch.object(moe_ops, "fused_experts", broken):
        wrong = check(case, "cpu").wrong
    assert wrong and all("other tokens changed" in line for line in wrong)
    assert not any(line.startswith("output") for line in wrong)


@pytest.mark.parametrize("lost", ["gradients", "a bit"])
def test_calls_that_are_others_after_calls_without_gradients_are_found(lost):
    case = first("fused_experts", dtype="float32", tokens=7, backward=True, poisoned=False, skew="even")
    original, unrecorded = moe_ops.fused_experts, []

    def broken(*args, **kwargs):
        out = original(*args, **kwargs)
        if not torch.is_grad_enabled():
            unrecorded.append(out)
        elif unrecorded:
            return out.detach() if lost == "gradients" else out + 2**-20
        return out

    assert check(case, "cpu").wrong == []
    with mock.patch.object(moe_ops, "fused_experts", broken):
        wrong = check(case, "cpu").wrong
    assert wrong and all(line.endswith("others than in the first call") for line in wrong)
    assert any(line.startswith("output") for line in wrong) is (lost == "a bit")
    assert any(line.startswith("hidden_states") for line in wrong) is (lost == "gradients")


def test_wrong_compiled_code_is_found(monkeypatch):
    """The compiler's place is taken by one that computes what it is given, but for the last number."""
    drawn = Case(**{**vars(first("fused_moe", dtype="float32", tokens=7)), "level": "compiled"})

    for is_right in (True, False):
        taken = (lambda f, **_: f) if is_right else (lambda f, **_: lambda t: faults.off_by_one(f(t)))
        monkeypatch.setattr(torch, "compile", taken)
        assert (check(drawn, "cpu").wrong == []) is is_right


def test_an_input_that_is_changed_is_found():
    case = first("permute", dtype="float32", tokens=7)
    original = moe_ops.permute

    def broken(hidden_states, slots):
        out = original(hidden_states, slots)
        with torch.no_grad():
            hidden_states[-1, -1] += 1
        return out

    with mock.patch.object(moe_ops, "permute", broken):
        assert "hidden_states was changed by the call" in check(case, "cpu").wrong


@pytest.mark.slow
def test_a_run_on_the_cpu_finds_nothing_and_says_so(tmp_path):
    out = tmp_path / "summary.json"
    result = fuzz("--cases", "16", "--processes", "2", "--out", str(out))
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads(out.read_text())
    assert summary["counts"]["outcome"] == {"ok": 16}
    assert summary["cases"] == 16
    assert summary["findings"] == []
    assert {"torch", "sources", "python"} <= set(summary["versions"])
    assert all(0 <= worst["share"] <= 1 for worst in summary["worst_share_of_bound"].values())


@pytest.mark.slow
def test_findings_are_named_and_the_run_goes_on(capsys):
    run = pool.Run(0, 8, 5.0, "cpu", 1, "tests.fuzz.faults:install", hang_seconds=5)
    summary = Summary(run)
    pool.outcomes(run, summary.add)
    found = summary.as_dict()
    assert {int(finding["case"].removeprefix("0:")): finding["kind"] for finding in found["findings"]} == {
        faults.WRONG: "wrong",
        faults.RAISED: "raised",
        faults.CRASHED: "crashed",
        faults.HUNG: "hung",
    }
    assert found["counts"]["outcome"]["ok"] == 4
    texts = {finding["kind"]: finding["text"] for finding in found["findings"]}
    assert "hidden_states: not today" in texts["raised"]
    assert "exit code 7" in texts["crashed"]
    printed = capsys.readouterr().out
    assert all(finding["again"] in printed for finding in found["findings"])


def test_one_case_by_its_number(monkeypatch, capsys):
    monkeypatch.setattr(worker, "check", worker.check)  # the hook replaces it
    number = f"0:{faults.WRONG}"
    assert run_one(number, "cpu", None) == 0
    assert run_one(number, "cpu", "tests.fuzz.faults:install") == 1
    printed = capsys.readouterr().out
    assert "wrong output" in printed
    assert "of what is allowed" in printed
    assert str(draw(0, faults.WRONG)) in printed
