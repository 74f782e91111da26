"""Every operator, any number of tokens: what is filled in is what is made, and code is shared where it may be."""

import copy
import pickle
import random
from collections import defaultdict
from functools import lru_cache

import pytest
import torch
import triton

from moe_ops import records
from moe_ops.arguments import BatchedGemm, DenseGemm, SharedAlone
from moe_ops.kernels import plans
from moe_ops.kernels.counts import Count, CountError
from moe_ops.kernels.gpu import H200
from moe_ops.kernels.loading import variant
from moe_ops.kernels.program import Buffer, Descriptor, Launch, Program, Ref, View
from moe_ops.kernels.templates import Templates, _apart
from tests.helpers import usually
from tests.kernels.any_count import LAYERS, arguments
from tests.kernels.plan_range import GPUS
from tests.kernels.test_templates import Kernel, of_rows, x_of

COUNTS = (
    *(*range(10), 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513),
    *(1000, 1023, 1024, 1025, 2047, 2048, 4095, 4096, 4097, 8191, 16384, 100_000, 1 << 27),
)
PLAIN = (int, float, str, bool, type(None), torch.dtype, Ref)


def expect_plain(value):
    if type(value) in (View, Descriptor):
        value = tuple(getattr(value, name) for name in value.__slots__)
    if isinstance(value, tuple | list):
        for each in value:
            expect_plain(each)
    else:
        assert type(value) in PLAIN, value


def shuffled(counts):
    counts = list(counts)
    random.Random(len(counts)).shuffle(counts)
    return counts


class Planner:
    """The plans of one operator, filled in and made."""

    def __init__(self, record, gpu):
        self.record, self.gpu, self.make = record, gpu, plans._PLANS[record].make.__wrapped__
        self.templates = Templates(self.make)

    def both(self, given):
        leaves = records.flatten(given)
        return self.templates.plan(self.gpu, *leaves), self.make(self.gpu, *leaves)

    def templates_for(self, given):
        return len(self.templates._known(self.gpu, _apart(records.flatten(given))[0]).templates)


def planned(layer, gpu, counts):
    """(planner, arguments, what is filled in, what is made) of each operator for each of these counts."""
    planners = {}
    for tokens in shuffled(counts):
        for index, given in enumerate(arguments(LAYERS[layer], tokens)):
            if type(given) in (DenseGemm, SharedAlone) and tokens > 8:
                continue  # for a library's product
            if index not in planners:
                planners[index] = Planner(type(given), gpu)
            yield planners[index], given, *planners[index].both(given)


@pytest.mark.parametrize(
    ("layer", "gpu"),
    usually(
        [(layer, gpu) for layer in LAYERS for gpu in GPUS],
        [*((layer, "sm_90") for layer in LAYERS), ("Mixtral-8x7B", "sm_120")],
    ),
)
def test_every_operator_is_filled_in_as_it_is_made(layer, gpu):
    last = {}
    for planner, given, filled, program in planned(layer, GPUS[gpu], COUNTS):
        wanted = program.filled
        assert (filled.buffers, filled.outputs) == (wanted.buffers, wanted.outputs), (planner.record, given)
        for step, expected in zip(filled.steps, wanted.steps, strict=True):
            expect_plain(step[1:7])
            assert step[:7] == expected[:7], (planner.record, given)
        expect_plain(tuple(map(tuple, filled.buffers)))
        last[planner] = given
    assert {planner.record for planner in last} == plans._PROGRAMS.keys()
    for planner, given in last.items():
        if planner.record is not BatchedGemm:  # as many rows are set aside in every step
            assert 1 <= planner.templates_for(given) <= 20, planner.record


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("layer", usually(LAYERS, ["Mixtral-8x7B", "in columns"]))
def test_code_is_shared_by_launches_that_triton_compiles_alike(layer):
    dtypes, kept, variants, steps = defaultdict(str), [], defaultdict(set), 0
    counts = [*range(1, 40), *range(60, 5000, 121), *range(64, 5000, 512)]
    for _, _, filled, program in planned(layer, H200, counts):
        kept.append(filled)
        for step, launch in zip(filled.steps, program.launches, strict=True):
            variants[id(step.codes), step.kinds].add(variant(launch, dtypes))
            steps += 1
    assert all(len(each) == 1 for each in variants.values())
    assert len(variants) * 4 < steps


def test_a_count_is_no_key_and_not_copied():
    count = Count("t0", 16, {})
    for function in (hash, lambda each: hash((each, 2)), copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(CountError):
            function(count)


@pytest.mark.parametrize("remembers", [True, False])
def test_a_plan_that_remembers_by_a_count_is_made_for_each(remembers):
    """Else a cache would give a plan of plain numbers what it had kept of a count."""
    seen = []

    def tripled(gpu, rows):
        seen.append(rows)
        return 3 * rows

    tripled = lru_cache(tripled) if remembers else tripled
    templates = of_rows(Kernel(), number=lambda rows: tripled(H200, rows))
    for rows in (5, 6, 7, 6):
        (step,) = templates.plan(H200, x_of(rows)).steps
        assert step.template[2] == 3 * rows and type(step.template[2]) is int
    assert len(templates._known(H200, _apart((x_of(1),))[0]).templates) == (not remembers)
    assert all(type(rows) is int for rows in seen) is remembers


def test_options_and_what_is_no_int_are_decided():
    def make(gpu, x):
        rows = x.shape[0]
        args = {"x_ptr": Ref("x"), "rows_ptr": rows // 16 / 2, "n": 5}
        launch = Launch(Kernel(), (rows,), args, rows // 32 + 1, rows // 64 + 1)
        return Program((Buffer("out", (rows, 2), torch.float32),), (launch,), ("out",))

    templates = Templates(make)
    for rows in (1000, *range(60, 70), *range(125, 130)):
        (step,) = templates.plan(H200, x_of(rows)).steps
        assert step[1:7] == make(H200, x_of(rows)).filled.steps[0][1:7]
        expect_plain(step[1:7])
    assert len(templates._known(H200, _apart((x_of(1),))[0]).templates) == 4


def _random_plan(draw):
    """Source of a function of two counts, with branches."""
    names, lines = ["v", "w"], []
    for index in range(draw.randint(3, 8)):
        left, right = draw.choice(names), draw.choice((*names, str(draw.randint(1, 130))))
        lines.append(
            draw.choice(
                (
                    f"a{index} = {left} {draw.choice('+-*&|^')} {right}",
                    f"a{index} = {left} {draw.choice(('//', '%'))} max({right}, 1)",
                    f"a{index} = {draw.choice(('min', 'max'))}({left}, {right})",
                    f"a{index} = {left} if {left} {draw.choice(('<', '<=', '==', '!=', '>'))} {right} else {right}",
                    f"a{index} = 1 << max({left}, 0).bit_length() % 20",
                    f"a{index} = {left} if {left} / {draw.randint(1, 9)} <= {draw.random() * 40!r} else -{right}",
                    f"a{index} = (3, 5, 8, 13)[{left} % 4]",
                )
            )
        )
        names.append(f"a{index}")
    known = {}
    body = "\n".join(f"    {line}" for line in lines)
    exec(f"def function(v, w):\n{body}\n    return {', '.join(names)}", known)
    return known["function"]


def test_random_plans_are_right_wherever_their_conditions_hold():
    draw, served = random.Random(5), 0
    sizes = (*range(20), 31, 32, 33, 64, 127, 128, 255, 1000, 4096, 4097)
    for _ in range(100):
        function, decided = _random_plan(draw), {}
        pairs = [(draw.choice(sizes), draw.choice(sizes)) for _ in range(15)]
        counts = (Count(f"t{index}", size, decided) for index, size in enumerate(pairs[0]))
        results = function(*counts)
        text = ",".join(each.text if isinstance(each, Count) else repr(each) for each in results)
        again = eval(f"lambda t0, t1: ({text},) if {' and '.join(decided) or True} else None")
        assert again(*pairs[0]) == function(*pairs[0])
        for pair in pairs:
            assert again(*pair) in (None, function(*pair))
            served += again(*pair) is not None
    assert served > 250
