"""Layers that put tokens into buffers [E * C, H] by index: what finds no place gives zero, what is unclear stays."""

import pytest
import torch

from inductor_passes import _compat
from inductor_passes.pipeline import FUSIONS, RAISES, run_passes
from inductor_passes.raising import buffer_trials, place_trials
from tests.helpers import RELATIVE_NORM, mixed, nan_in_empty_memory, relative_error, usually
from tests.passes.buffers import STYLES
from tests.passes.buffers_in_parts import RIGHT, WRONG, cast_in_between, of, read
from tests.passes.capture import Rewritten, computed, rewrite
from tests.passes.stock import EXPERTS, HIDDEN, layer, swiglu
from tests.passes.test_before_autograd import check, exact
from tests.passes.test_raise_masks import TOKENS, crowded, kinds

PIPELINE = (*RAISES, *FUSIONS)


def error_of(function, args, out):
    return relative_error(out, function(*(each.double() for each in args)))


@pytest.mark.parametrize(("name", "dtype"), mixed(STYLES, [torch.float32, torch.bfloat16]))
def test_a_style(name, dtype):
    args = crowded(dtype)
    result, out = computed(STYLES[name], *args, passes=PIPELINE)
    assert kinds(result) == ["experts", "topk_routing"], result.reasons
    assert error_of(STYLES[name], args, out) <= RELATIVE_NORM[dtype]


@pytest.mark.parametrize(
    ("name", "tokens"),
    usually(
        [(name, tokens) for name in STYLES if name != "of_batches" for tokens in (1, 2, 7)],
        [("tutel", 7), ("drop_and_pad", 1)],
    ),
)
def test_few_tokens(name, tokens):
    args = layer(tokens, torch.float32)
    result, out = computed(STYLES[name], *args, passes=PIPELINE)
    assert kinds(result)[:1] == ["experts"], result.reasons
    assert error_of(STYLES[name], args, out) <= RELATIVE_NORM[torch.float32]


@pytest.mark.parametrize("name", usually(list(STYLES), ["tutel", "best_first", "sorted_into_buffers"]))
def test_an_open_number_of_tokens(name):
    args = crowded(torch.float32, dynamic=True)
    result, out = computed(STYLES[name], *args, passes=PIPELINE)
    assert kinds(result) == ["experts", "topk_routing"], result.reasons
    assert error_of(STYLES[name], args, out) <= RELATIVE_NORM[torch.float32]


@pytest.mark.parametrize("name", RIGHT)
def test_more(name):
    args = crowded(torch.float32)
    result, out = computed(RIGHT[name], *args, passes=PIPELINE)
    assert kinds(result)[:1] == ["experts"], result.reasons
    assert error_of(RIGHT[name], args, out) <= RELATIVE_NORM[torch.float32]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_put_otherwise_stays(name):
    function, reason = WRONG[name]
    args = crowded(torch.float32) if "bfloat16" not in name else layer(100, torch.float32)
    result, out = computed(function, *args, passes=PIPELINE)
    assert not result.ops() and any(reason in each for each in result.reasons), result.reasons
    if "memory" not in name and "indices" not in name:  # which hold anything, and any one of several rows
        assert error_of(function, args, out) <= RELATIVE_NORM[torch.float32]


@pytest.mark.parametrize(
    "name", usually(list(STYLES), ["tutel", "drop_and_pad", "with_trash_row", "with_biases"])
)
def test_gradients(name):
    """Before autograd; tokens that are dropped have none."""
    run = check(STYLES[name], crowded(torch.float32))
    assert run.raised[:1] == ["experts"] and run.graphs[0][-1].endswith("combine")


def test_gradients_where_memory_that_nobody_writes_is_nan():
    with nan_in_empty_memory():
        assert all(each.isfinite().all() for each in exact(STYLES["without_memory"], crowded(torch.float32)))


def test_gradients_of_weights_that_are_zero():
    """A scale that starts at zero learns from tokens that have a place, whatever they weigh there."""

    def scaled(scale):
        def weighed(out, x, ids, place, capacity, weights):
            return read(out, x, ids, place, capacity, weights * scale)

        return of(read=weighed)

    def function(x, router, w13, w2, scale):
        return scaled(scale)(x, router, w13, w2) + x + router.sum() + w13.sum() + w2.sum()

    assert check(function, (*crowded(torch.float32), torch.zeros(()))).raised == ["experts"]


def test_gradients_that_weights_of_the_same_value_do_not_have():
    """What is read is weighed by ones, whose gradients are those of shares."""

    def straight_through(out, x, ids, place, capacity, weights):
        return read(out, x, ids, place, capacity, torch.ones_like(weights) + weights - weights.detach())

    assert check(of(read=straight_through), crowded(torch.float32)).raised[:1] == ["experts"]


def test_what_is_dropped_is_zero_whatever_experts_make_of_it():
    """Its logits are those of tokens that crowd; the rest is too large for experts."""
    args = crowded(torch.float32)
    dropped = STYLES["switch_by_index"](*args).eq(0).all(1)
    args.hidden_states[dropped, EXPERTS:] = 1e30
    result, out = computed(STYLES["switch_by_index"], *args, passes=PIPELINE)
    assert kinds(result) == ["experts", "topk_routing"]
    assert dropped.any() and not out[dropped].any() and out.isfinite().all()


def test_numbers_of_tokens_are_not_rounded():
    """Beyond 256 bfloat16 has not all of them."""
    args = layer(300, torch.bfloat16)
    result, out = computed(of(cast_in_between), *args, passes=PIPELINE)
    assert kinds(result) == ["experts", "topk_routing"]
    assert error_of(of(cast_in_between), args, out) <= RELATIVE_NORM[torch.bfloat16]


def test_a_layer_that_is_found_and_not_written_is_as_it_was():
    """Somebody else reads a product, so that it would be computed twice."""

    def function(*args):
        seen = []

        def run(rows, w13, w2):
            seen.append(torch.bmm(rows, w13.mT))
            return torch.bmm(swiglu(seen[0]), w2.mT)

        return of(run=run)(*args), seen[0].sum()

    result = rewrite(function, *crowded(torch.float32), passes=PIPELINE)
    assert any("is also read by" in each for each in result.reasons), result.reasons
    assert result.after == result.before


def test_alike_layers_are_tried_once(monkeypatch):
    tried = []
    draws = buffer_trials.draws
    monkeypatch.setattr(buffer_trials, "draws", lambda *args: tried.append(args) or draws(*args))

    def layers(x, *weights):
        for _ in range(3):
            x = STYLES["with_trash_row"](x, *weights) + x
        return STYLES["drop_and_pad"](x, *weights)

    result = rewrite(layers, *crowded(torch.float32), passes=PIPELINE)
    assert kinds(result) == ["experts"] * 4 + ["topk_routing"] * 4 and len(tried) == 2


def test_more_numbers_than_are_tried(monkeypatch):
    monkeypatch.setattr(place_trials, "_MOST_NUMBERS", 1000)
    result = rewrite(STYLES["with_trash_row"], *crowded(torch.float32), passes=PIPELINE)
    assert not result.ops() and any("too many to be tried out" in each for each in result.reasons)


def test_indices_that_are_repeated_along_columns_are_no_more_numbers(monkeypatch):
    monkeypatch.setattr(place_trials, "_MOST_NUMBERS", TOKENS * HIDDEN)
    result = rewrite(STYLES["drop_and_pad"], *crowded(torch.float32), passes=PIPELINE)
    assert kinds(result) == ["experts", "topk_routing"], result.reasons


def test_other_numbers_of_tokens():
    """One graph for all."""
    results = []

    def rewritten(module, _):
        results.append(Rewritten(module, ""))
        run_passes(module.graph, PIPELINE, results[-1].log)
        module.recompile()

    torch._dynamo.reset()
    compiled = torch.compile(STYLES["tutel"], backend=_compat.post_grad_backend(rewritten), fullgraph=True)
    for tokens in (44, 8, 33, 100):
        args = layer(tokens, torch.float32, dynamic=True)
        with torch.no_grad():
            assert error_of(STYLES["tutel"], args, compiled(*args)) <= RELATIVE_NORM[torch.float32]
    assert len(results) == 1 and kinds(results[0]) == ["experts", "topk_routing"]
