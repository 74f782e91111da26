"""What counts write down is right, nothing keeps one, and launches share code where Triton compiles them alike."""

import copy
import pickle
import random
from collections import defaultdict
from functools import lru_cache

import pytest
import triton

from moe_ops import records
from moe_ops.arguments import DenseGemm
from moe_ops.kernels import plans
from moe_ops.kernels.counts import Count, CountError
from moe_ops.kernels.gpu import H200
from moe_ops.kernels.loading import variant
from moe_ops.kernels.templates import Templates, _apart
from moe_ops.values import SharedAlone
from tests.helpers import usually
from tests.kernels.any_count import LAYERS, arguments
from tests.kernels.test_templates import Kernel, of_rows, x_of


def shuffled(counts):
    counts = list(counts)
    random.Random(len(counts)).shuffle(counts)
    return counts


def both_of_each_operator(layer, counts):
    """What is filled in and what is made, of each operator for each of these counts."""
    templates = {}
    for tokens in shuffled(counts):
        for place, given in enumerate(arguments(LAYERS[layer], tokens)):
            if type(given) in (DenseGemm, SharedAlone) and tokens > 8:
                continue  # for a library's product
            make, leaves = plans._PLANS[type(given)].make.__wrapped__, (H200, *records.flatten(given))
            yield templates.setdefault(place, Templates(make)).plan(*leaves), make(*leaves)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("layer", usually(LAYERS, ["Mixtral-8x7B", "in columns"]))
def test_code_is_shared_by_launches_that_triton_compiles_alike(layer):
    dtypes, kept, variants, steps = defaultdict(str), [], defaultdict(set), 0
    counts = [*range(1, 40), *range(60, 5000, 121), *range(64, 5000, 512)]
    for filled, program in both_of_each_operator(layer, counts):
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


def test_what_is_no_int_is_decided():
    templates = of_rows(Kernel(), number=lambda rows: rows // 32 / 2)
    for rows in (*range(60, 70), *range(125, 130)):
        (step,) = templates.plan(H200, x_of(rows)).steps
        assert step.template[2] == rows // 32 / 2 and type(step.template[2]) is float
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
