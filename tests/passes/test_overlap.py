"""What runs during an exchange, as graphs: what moves in front of a wait, and what is held between start and wait."""

import re

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.overlap import exchanges_of, overlap_exchanges

sends = torch.ops._c10d_functional
GROUP = "any"


def start(x):
    return sends.all_gather_into_tensor(x, 2, GROUP)


def wait(x):
    return sends.wait_tensor(x)


def shared_experts(x, w):
    return torch.sigmoid(x @ w) @ w.t()


def rewritten(function, *more):
    """The graph before and after, and what was said. Nodes are those that compute, and what each is held behind."""
    x, w = torch.randn(6, 4), torch.randn(4, 8)
    module = make_fx(function, tracing_mode="fake")(x, w, *more)
    before = calls(module.graph)
    waits = overlap_exchanges(module.graph)
    module.graph.lint()
    return module, before, calls(module.graph), waits


def calls(graph):
    return [call for call in map(shown, graph.nodes) if call]


def shown(node):
    skipped = ("permute", "t_", "t", "getitem")
    if node.op != "call_function" or re.sub(r"_\d+$", "", node.name) in skipped:
        return None
    behind = node.args[0] if str(node.target) == "control_deps" else ()
    return " ".join((node.name, *(f"<{each.name}" for each in behind)))


def test_what_comes_later_moves_in_front_of_the_wait():
    def layer(x, w):
        received = wait(start(x)).sin()
        return received[:6] + shared_experts(x, w)

    _, before, after, waits = rewritten(layer)
    assert before == [
        *("all_gather_into_tensor", "wait_tensor", "sin", "slice_1"),
        *("mm", "sigmoid", "mm_1", "add"),
    ]
    assert after == [
        *("all_gather_into_tensor", "mm <all_gather_into_tensor", "sigmoid", "mm_1", "wait_tensor <mm_1"),
        *("sin", "slice_1", "add"),
    ]
    assert waits == 1


def test_what_stands_in_between_is_held():
    def layer(x, w):
        sent = start(x), start(x.cos())
        shared, other = shared_experts(x, w), x @ w
        return wait(sent[0]).sum() + wait(sent[1]).sum() + shared.sum() + other.sum()

    _, before, after, waits = rewritten(layer)
    starts = "<all_gather_into_tensor", "<all_gather_into_tensor_1"
    assert after[:8] == [
        *("all_gather_into_tensor", "cos", "all_gather_into_tensor_1"),
        " ".join(("mm", *starts)),
        "sigmoid",
        "mm_1",
        " ".join(("mm_2", *starts)),
        "wait_tensor <mm_2 <mm_1",
    ]
    assert "wait_tensor_1 <mm_2 <mm_1" in after and waits == 2
    assert [name.split()[0] for name in after] == before


def start_both(x, y):
    return sends.all_gather_into_tensor_coalesced([x, y], 2, GROUP)


def test_a_start_of_several_tensors_has_several_waits():
    def layer(x, w):
        sent = start_both(x, x.cos())
        received = [wait(each) for each in sent]
        return received[0].sum() + received[1].sum() + shared_experts(x, w).sum()

    module, _, after, waits = rewritten(layer)
    start = "all_gather_into_tensor_coalesced"
    assert after[1:6] == [start, "mm <getitem", "sigmoid", "mm_1", "wait_tensor <mm_1"]
    assert "wait_tensor_1 <mm_1" in after and waits == 2
    module = make_fx(layer, tracing_mode="fake")(torch.randn(6, 4), torch.randn(4, 8))
    (told,) = exchanges_of(module.graph)
    assert (told.kind, told.during) == (start, ("mm", "mm"))


def test_two_halves_take_turns():
    def halves(x, w):
        first, second = start(x), start(x.cos())
        back = start(shared_experts(wait(first), w))
        other = start(shared_experts(wait(second), w))
        return wait(back) + wait(other)

    _, before, after, waits = rewritten(halves)
    assert [name.split()[0] for name in after] == before
    second, back, other = (f"all_gather_into_tensor_{number}" for number in (1, 2, 3))
    held = [name for name in after if "<" in name]
    assert held == [f"mm <{second}", "wait_tensor_1 <mm_1", f"mm_2 <{back}", "wait_tensor_2 <mm_3"]
    assert waits == 2 and other in after


def reads_what_was_sent(x, w):
    received = wait(start(x))[:6]
    return received + shared_experts(received, w)


def reads_it_elsewhere(x, w):
    received = wait(start(x))[:6]
    return received + shared_experts(x * received.mean(), w)


def needs_no_kernel(x, w):
    return wait(start(x))[:6] + torch.sigmoid(x).cos()


def changes_what_it_reads(x, w):
    seen = w.t()
    received = wait(start(x))[:6]
    w.mul_(2)
    return received + torch.sigmoid(x @ seen.t()) @ seen


def draws(x, w):
    return wait(start(x))[:6] + torch.rand_like(x) @ w @ w.t()


def sends_nothing(x, w):
    return x + shared_experts(x, w)


@pytest.mark.parametrize(
    "function",
    [
        *(reads_what_was_sent, reads_it_elsewhere, needs_no_kernel),
        *(changes_what_it_reads, draws, sends_nothing),
    ],
)
def test_what_stays(function):
    _, before, after, waits = rewritten(function)
    assert after == before and waits == 0


def test_nothing_moves_over_the_next_start():
    def layer(x, w):
        received = wait(start(x)).sin()
        again = wait(start(received))
        return again.sum() + shared_experts(x, w).sum()

    _, _, after, waits = rewritten(layer)
    second = after.index("all_gather_into_tensor_1")
    assert after[second + 1 :][:3] == ["mm <all_gather_into_tensor_1", "sigmoid", "mm_1"]
    assert after[:second] == ["all_gather_into_tensor", "wait_tensor", "sin"] and waits == 1


def test_what_nobody_reads_is_not_held():
    def layer(x, w):
        sent = start(x)
        unread = x @ w
        return wait(sent), unread

    module = make_fx(layer, tracing_mode="fake")(torch.randn(6, 4), torch.randn(4, 8))
    output = module.graph.output_node()
    output.args = (output.args[0][0],)
    assert overlap_exchanges(module.graph) == 0
    assert calls(module.graph) == ["all_gather_into_tensor", "mm", "wait_tensor"]


def test_a_second_run_finds_nothing():
    def layer(x, w):
        return wait(start(x))[:6] + shared_experts(x, w)

    module, _, after, _ = rewritten(layer)
    assert overlap_exchanges(module.graph) == 0
    assert calls(module.graph) == after


def ends(x, w):
    return wait(start(x)).sin()


def ends_at_a_change(x, w):
    received = wait(start(x)).sin()
    return x.mul_(2), received @ w


def needs_what_was_sent(x, w):
    received = wait(start(x))[:6] @ w
    return wait(start(received))


@pytest.mark.parametrize(
    "function, reason",
    [
        (ends, "no call stands between it and the end"),
        (ends_at_a_change, "no call stands between it and mul_, which writes in place"),
        (needs_what_was_sent, "every call behind it, up to the next exchange, needs what ranks have sent"),
    ],
)
def test_why_nothing_runs_meanwhile(function, reason):
    module = make_fx(function, tracing_mode="fake")(torch.randn(6, 4), torch.randn(4, 8))
    told = exchanges_of(module.graph)[0]
    assert (told.kind, told.during, told.reason) == ("all_gather_into_tensor", (), reason)
