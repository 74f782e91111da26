"""Tensors that change where nobody can look: in operators of others', through `data`; and copies that torch asks."""

import pytest
import torch

from inductor_passes import _compat, _compat_tracing
from tests.passes import stock
from tests.passes.test_before_autograd import RAISED, Run, check, float32

LIBRARY = torch.library.Library("test_changed_unseen", "FRAGMENT")
LIBRARY.define("twice_(Tensor(a!) x) -> ()")
LIBRARY.impl("twice_", lambda x: (x.mul_(2), None)[1], "CompositeExplicitAutograd")
LIBRARY.impl("twice_", lambda x: None, "Meta")


@torch.library.custom_op("test_changed_unseen::thrice_", mutates_args={"x"})
def thrice_(factor: float, x: torch.Tensor) -> None:
    x.mul_(3)


def by_data(x):
    x.data.mul_(2)


CHANGES = {
    "operator": torch.ops.test_changed_unseen.twice_,
    "overload": torch.ops.test_changed_unseen.twice_.default,
    "named": lambda x: torch.ops.test_changed_unseen.thrice_(1.0, x=x),
    "data": by_data,
}
"""Each multiplies a tensor by a number."""


@pytest.fixture(params=CHANGES)
def change(request):
    def changed(x):
        with torch.no_grad():
            CHANGES[request.param](x)
        return x

    return changed


def changing(change, where):
    """A layer that changes its rows, or what comes out of its products, on the way."""

    def function(x, router, w13, w2):
        weights, ids = stock.softmax_router(x @ router.T)
        experts = ids.reshape(-1)
        rows = x.unsqueeze(1).expand(-1, stock.TOP_K, -1).reshape(-1, stock.HIDDEN)
        if where == "rows":
            change(rows)
        activated = stock.swiglu(torch.bmm(w13[experts], rows.unsqueeze(-1)).squeeze(-1))
        if where == "activated":
            change(activated)
        out = torch.bmm(w2[experts], activated.unsqueeze(-1)).squeeze(-1)
        if where == "weights":
            change(weights)
        return (out * weights.reshape(-1, 1)).view(-1, stock.TOP_K, stock.HIDDEN).sum(1)

    return function


@pytest.mark.parametrize("where", ["rows", "activated", "weights"])
def test_inside_a_layer(change, where):
    assert not check(changing(change, where), float32()).raised


def test_before_the_layer(change):
    def function(x, *rest):
        return stock.batched(change(x * 1), *rest)

    assert check(function, float32()).raised == RAISED


def test_behind_the_layer(change):
    def function(x, *rest):
        hidden = x * 1
        with torch.no_grad():  # a layer's gradient wants its tokens as they were
            out = stock.batched(hidden, *rest)
        return out * hidden.sum() + change(hidden)

    assert not check(function, float32()).raised


def test_its_output(change):
    def function(*args):
        out = stock.batched(*args)
        more = out.sum(1, keepdim=True)
        return change(out.clone()) + change(out) + more

    run = check(function, float32())
    assert not run.raised and "is changed in place later" in run.refused[0]


def test_what_an_operator_only_reads_has_not_changed():
    @torch.library.custom_op("test_changed_unseen::sum_of", mutates_args=())
    def sum_of(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    sum_of.register_fake(lambda x: x.new_empty(()))

    def function(x, *rest):
        out = stock.batched(x, *rest)
        with torch.no_grad():
            total = torch.ops.test_changed_unseen.sum_of(x) + torch.ops.test_changed_unseen.sum_of(out)
        return out + total

    assert check(function, float32()).raised == RAISED


def test_arguments_by_name():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(torch.ops.test_changed_unseen.thrice_.default, (1.0,), {"x": x})
    assert _compat_tracing.changed_by(call) == [x]


def test_a_kernel_of_tritons_may_change_all_it_is_given():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(
        _compat.triton_launch_in_place(), kwargs={"kernel_idx": 0, "kwargs": {"out": x}}
    )
    assert _compat_tracing.changed_by(call) == [x]


@pytest.mark.parametrize("calls", [1, 2])
def test_regions_called_again_have_gradients(calls):
    region = torch.compiler.nested_compile_region(stock.batched)

    def function(x, *rest):
        for _ in range(calls):
            x = region(x, *rest)
        return x

    run = check(function, float32())
    assert len(run.raised) in (2, 2 * calls)


def test_what_has_no_gradient_in_a_region_has_none_behind_it():
    def layer(x, router, *experts):
        weights, ids = stock.softmax_router(x.detach() @ router.detach().T)
        return stock.batched_experts(x, weights, ids, *experts), weights

    region = torch.compiler.nested_compile_region(layer)

    def function(x, *rest):
        hidden, first = region(x, *rest)
        return *region(hidden, *rest), first

    run, args = Run(), [each.requires_grad_() for each in float32()]
    theirs = torch.compile(function, backend="aot_eager")(*args)  # with torch 2.11 all, else the first alone
    torch.compiler.reset()
    ours = run.compile(function)(*args)
    assert [each.requires_grad for each in ours] == [each.requires_grad for each in theirs]
    assert run.raised == RAISED


def test_weights_turned_around():
    def function(x, router, *experts):
        weights, ids = stock.softmax_router(x @ router.T)
        return stock.batched_experts(x, weights.flip(-1), ids, *experts)

    assert "experts" in check(function, float32()).raised
