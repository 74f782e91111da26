"""Plans filled in from templates are those that are made, and `Count` says all that a plan was decided by."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from moe_ops.arguments import FusedExpertsWithShared, FusedMoe
from moe_ops.kernels import _compat, plans, program
from moe_ops.kernels.counts import Count
from moe_ops.kernels.gpu import H200
from moe_ops.kernels.packed import pack
from moe_ops.kernels.program import Buffer, Descriptor, Known, Launch, Program, Ref, TensorMeta
from moe_ops.kernels.templates import _MOST, Templates, _apart
from tests.helpers import usually
from tests.kernels import any_count
from tests.kernels.plan_range import GPUS

EXPRESSIONS = {
    "tiles": lambda t: -(-t // 16) * 3 + t % 5 - (7 - t) * 2,
    "power": lambda t: 1 << max(t - 1, 0).bit_length(),
    "other way round": lambda t: (100 // (t + 1), 1000 % (t + 3), 5 << (t % 4), 3 + t, 9 * t, 300 - t),
    "shifts": lambda t: (t << 2, t >> 1),
    "mean": lambda t: t * 8 / 128,
    "half": lambda t: 0.5 * t + 1e-3,
}
DECISIONS = {
    "thresholds": lambda t: 16 if t <= 20 else 32 if 3 * t < 100 else 64,
    "mean": lambda t: next((rows for rows, most in ((16, 8.0), (32, 20.0)) if t * 8 / 13 <= most), 128),
    "divides": lambda t: t % 8 == 0 and t != 16,
    "truth": lambda t: "some" if t else "none",
    "neither": lambda t: not t - 7,
    "clamped": lambda t: min(max(t, 5), 40) + 0,
    "any of": lambda t: t in (3, 4, 5),
    "sizes": lambda t: (t, 64) == (33, 64),
    "places": lambda t: list(range(300))[t],
    "ranges": lambda t: len(range(3, t, 2)),
    "repeats": lambda t: "x" * t,
    "text": lambda t: f"{t} rows, {t:3d}, {t!r}, {t!s}",
    "floats": lambda t: (math.ceil(t / 3), math.sqrt(t), float(t), 0.97**t, t**0.5, math.log2(t + 1)),
    "bits": lambda t: (t & 3, 3 | t, t ^ 5, ~t, abs(t), +t, divmod(t, 7), divmod(200, t + 1), round(t, -1)),
    "whole": lambda t: (int(t), t.__index__(), t.bit_count(), t**2, 2**t),
    "sorted": lambda t: sorted([t, 12, 30])[0] + 0,
    "products": lambda t: math.prod((t, 3)) > 50,
}


def value_of(result, given):
    """Numbers for what was computed with counts."""
    if isinstance(result, Count):
        return eval(result.text, {"t0": given})
    return tuple(value_of(each, given) for each in result) if isinstance(result, tuple) else result


@pytest.mark.parametrize(
    "compute", [*EXPRESSIONS.values(), *DECISIONS.values()], ids=[*EXPRESSIONS, *DECISIONS]
)
def test_what_was_decided_says_for_which_numbers_a_result_is_right(compute):
    for hint in (0, 1, 7, 16, 33, 64, 130):
        decided = {}
        result = compute(Count("t0", hint, decided))
        alike = [n for n in range(200) if all(eval(condition, {"t0": n}) for condition in decided)]
        assert hint in alike
        for number in alike:
            assert value_of(result, number) == compute(number)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_arithmetic_decides_nothing_that_it_need_not(name):
    decided = {}
    EXPRESSIONS[name](Count("t0", 37, decided))
    assert list(decided) == (["not ((t0-(1))<(0))"] if name == "power" else [])


def test_nothing_of_an_int_is_read_without_a_word():
    """Whatever can be called of a number gives an expression, or is written down."""
    assert not isinstance(Count("t0", 3, {}), int)
    given = {"to_bytes": (2, "big"), "__format__": ("",)}
    called = 0
    for name in vars(int):
        decided = {}
        method = getattr(Count("t0", 37, decided), name, None)
        if not callable(method) or name in (
            "__new__",
            "__getattribute__",
            "__sizeof__",
            "from_bytes",
            "__hash__",
        ):
            continue  # of the class, or there is none: an error
        is_binary = name.strip("_").removeprefix("r") in BINARY
        result = method(*given.get(name, (5,) if is_binary else ()))
        assert isinstance(result, Count) or decided, name
        called += 1
    assert called >= 50


BINARY = ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift", "shift", "truediv", "pow", "and", "or", "xor",
    "divmod", "lt", "le", "gt", "ge", "eq", "ne")  # fmt: skip


SWEEP = (
    4,
    33,
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    9,
    16,
    17,
    63,
    64,
    65,
    127,
    128,
    129,
    255,
    256,
    257,
    1000,
    1023,
    1024,
    4096,
    16384,
)


def assert_alike(filled, program):
    assert (filled.buffers, filled.outputs) == (program.filled.buffers, program.filled.outputs)
    assert len(filled.steps) == len(program.filled.steps)
    for step, planned in zip(filled.steps, program.filled.steps):
        assert step.kernel is planned.kernel
        assert step[1:7] == planned[1:7]
        numbers = (*step.grid, *step.template)
        assert not any(isinstance(each, Count) for each in numbers)
        assert [type(each) for each in numbers] == [type(each) for each in (*planned.grid, *planned.template)]


def leaves_of(arguments, gpu):
    plan = plans._PLANS[type(arguments)]
    return plan.make.__wrapped__, (gpu, *plan.flatten(arguments))


@pytest.mark.parametrize("gpu", usually(list(GPUS), ["sm_90"]))
@pytest.mark.parametrize("layer", any_count.LAYERS)
def test_filled_in_is_as_it_is_made(layer, gpu):
    """Of every operator that has plans."""
    templates, seen = {}, set()
    more = random.Random(0).sample(range(20000), 12)
    for tokens in (*SWEEP, *more, *SWEEP[:8]):
        for place, arguments in enumerate(any_count.arguments(any_count.LAYERS[layer], tokens)):
            make, leaves = leaves_of(arguments, GPUS[gpu])
            assert_alike(templates.setdefault(place, Templates(make)).plan(*leaves), make(*leaves))
            seen.add(type(arguments))
            if isinstance(arguments, FusedMoe):
                known = templates[place]._known(GPUS[gpu], _apart(leaves[1:])[0])
    in_columns = {FusedExpertsWithShared} if any_count.LAYERS[layer].transposed else set()
    assert seen == plans.PROGRAMS.keys() - in_columns
    assert 5 <= len(known.templates) <= 24


class Kernel:
    """Stands for a kernel of Triton: notes what is looked up and what is called directly."""

    __name__ = "kernel"
    arg_names = ("x_ptr", "rows_ptr", "n")
    params = ()

    def __init__(self):
        self.looked_up, self.direct = [], []

    def __getitem__(self, grid):
        def look_up(*args, **options):
            self.looked_up.append((grid, args[2]))
            return Code(self)

        return look_up


class Code:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.direct.append((grid, args[2]))


def of_rows(kernel, number=lambda rows: 3 * rows):
    """Plans of a launch that is told a number."""

    def make(gpu, x):
        rows = x.shape[0]
        launch = Launch(kernel, (rows + 1,), {"x_ptr": Ref("x"), "rows_ptr": Ref("x"), "n": number(rows)})
        return Program((Buffer("out", (rows, 2), torch.float32),), (launch,), ("out",))

    templates = Templates(make)
    templates.plan(H200, x_of(1000))  # from the second on
    return templates


def x_of(rows):
    return TensorMeta((rows, 4), (4, 1), torch.float32, True)


def run(templates, rows):
    (out,) = templates.plan(H200, x_of(rows)).run({"x": torch.empty(rows + 16, 4)})
    assert out.shape == (rows, 2)


def params_of(**of_the_last):
    """Of a kernel with three."""
    plain = {"is_constexpr": False, "do_not_specialize": False}
    return [SimpleNamespace(num=num, **plain | (of_the_last if num == 2 else {})) for num in range(3)]


def test_code_is_looked_up_once_for_numbers_that_are_compiled_alike():
    kernel = Kernel()
    templates = of_rows(kernel)
    for rows in (5, 6, 7):
        run(templates, rows)
    assert kernel.looked_up == [((6,), 15)]
    assert kernel.direct == [((7, 1, 1), 18), ((8, 1, 1), 21)]
    run(templates, 16)  # a multiple of 16
    run(templates, 32)
    assert kernel.looked_up[1:] == [((17,), 48)] and kernel.direct[2:] == [((33, 1, 1), 96)]


def test_one_and_numbers_beyond_32_bits_are_compiled_for_themselves():
    kernel = Kernel()
    templates = of_rows(kernel, number=lambda rows: rows)
    for rows in (5, 1, 6):
        run(templates, rows)
    assert kernel.looked_up == [((6,), 5), ((2,), 1)]
    kernel = Kernel()
    templates = of_rows(kernel, number=lambda rows: rows * (2**29 + 1))
    for rows in (3, 5, 7):
        run(templates, rows)
    assert [number for _, number in kernel.looked_up] == [3 * (2**29 + 1), 5 * (2**29 + 1)]


def test_numbers_that_are_passed_as_they_are_share_code():
    """Of arguments that a kernel is not specialised on, only the type counts."""

    class AsItIs(Kernel):
        params = params_of(do_not_specialize=True)

    kernel = AsItIs()
    templates = of_rows(kernel, number=lambda rows: rows * (2**26 + 1))
    for rows in (5, 16, 7, 33, 48):
        run(templates, rows)
    assert [number >> 26 for _, number in kernel.looked_up] == [5, 33]


def test_launches_by_address_are_those_of_the_plan():
    """Of numbers that are compiled alike, and of others."""
    templates, tensors = of_rows(Kernel(), number=lambda rows: rows), {}
    device, taken = torch.device("cpu"), 0
    for rows in (5, 6, 7, 16, 8, 32, 48, 1, 9):
        tensors["x"] = torch.empty(rows + 16, 4)
        known = templates._known(H200, _apart((x_of(rows),))[0]).templates
        packs = len(known[0].packs) if known else 0
        filled = templates.plan(H200, x_of(rows))
        (step,) = filled.steps
        step.codes[-1, step.kinds] = Known(None, _compat.Code(step.kinds, (1, 1, 1), None))
        packed = templates.packed(tensors, device, H200, x_of(rows))
        assert packed == pack(filled, tensors, device)
        (launch,) = packed.launches
        assert (launch.launch, launch.grid, launch.arguments[2]) == (step.kinds, (rows + 1, 1, 1), rows)
        taken += packs == len(known[0].packs) if known else 0
    assert taken == 6 and len(known[0].packs) == 3


def test_what_is_prepared_is_not_planned(monkeypatch):
    """From what was compiled for two numbers there are launches for others, of those kinds and on that device."""
    device, elsewhere, tensors = torch.device("cpu"), torch.device("cuda", 0), {"x": torch.empty(1)}
    monkeypatch.setattr(program, "code_of", lambda compiled: _compat.Code(compiled, (1, 1, 1), None))
    templates = Templates(of_rows(Kernel())._make)
    for rows, compiled in ((5, ["first"]), (6, ["code"]), (7, ["another"]), (16, ["of 16"])):
        templates.prepare(compiled, {"x": x_of(rows)}, device, H200, x_of(rows))
    monkeypatch.setattr(templates, "plan", lambda gpu, x: Planned())

    class Planned:
        pack = staticmethod(lambda *_: None)

    for rows, code in ((8, "code"), (5, "code"), (32, "of 16")):
        (launch,) = templates.packed(tensors, device, H200, x_of(rows)).launches
        assert (launch.launch, launch.arguments[2]) == (code, 3 * rows)
    assert templates.packed(tensors, device, H200, x_of(1)).launches[0].launch == "code"
    assert templates.packed(tensors, elsewhere, H200, x_of(8)) is None


def test_what_does_not_lie_row_by_row_is_no_count():
    templates = of_rows(Kernel())
    for rows in (5, 6):
        columns = TensorMeta((rows, 4), (1, rows), torch.float32, True)
        assert _apart((columns,)) == ((columns,), [])
        assert templates.plan(H200, columns).buffers[0].shape == (rows, 2)
    weight = TensorMeta((5, 4, 4), (16, 4, 1), torch.float32, True)
    assert _apart((weight, "silu", None, True)) == ((weight, "silu", None, True), [])


def test_there_are_templates_from_the_second_number_on():
    """Layouts whose strides tell the number, and layers that only meet one, are planned without."""
    templates = Templates(of_rows(Kernel())._make)
    for rows, expected in ((5, 0), (6, 1), (7, 1)):
        templates.plan(H200, x_of(rows))
        assert len(templates._known(H200, _apart((x_of(rows),))[0]).templates) == expected


def test_templates_do_not_grow_without_end():
    templates = of_rows(Kernel(), number=int)
    for rows in range(_MOST + 40):
        filled = templates.plan(H200, x_of(rows))
        assert (filled.steps[0].template[2], filled.buffers[0].shape) == (rows, (rows, 2))
    assert len(templates._known(H200, _apart((x_of(1),))[0]).templates) == _MOST


def test_constants_of_a_kernel_are_decided():
    class Compiled(Kernel):
        params = params_of(is_constexpr=True)

    def planned(number, warps, stages, block):
        def make(gpu, x):
            rows = x.shape[0]
            box = Descriptor("x", (rows, 4), (4, 1), (block(rows), 4))
            args = {"x_ptr": Ref("x"), "rows_ptr": box, "n": number(rows)}
            return Program((), (Launch(Compiled(), (rows,), args, warps(rows), stages(rows)),), ())

        templates = Templates(make)
        templates.plan(H200, x_of(1000))
        steps = [templates.plan(H200, x_of(rows)).steps[0] for rows in (5, 6)]
        assert len(templates._known(H200, _apart((x_of(1),))[0]).templates) == 2
        return [
            (step.template[2], step.num_warps, step.num_stages, step.descriptors[0][1].block[0])
            for step in steps
        ]

    same = lambda rows: 4  # noqa: E731
    rows_of = lambda rows: rows + 1  # noqa: E731
    assert planned(rows_of, same, same, same) == [(6, 4, 4, 4), (7, 4, 4, 4)]
    assert planned(same, rows_of, same, same) == [(4, 6, 4, 4), (4, 7, 4, 4)]
    assert planned(same, same, rows_of, same) == [(4, 4, 6, 4), (4, 4, 7, 4)]
    assert planned(same, same, same, rows_of) == [(4, 4, 4, 6), (4, 4, 4, 7)]
