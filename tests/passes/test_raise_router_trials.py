"""How often a router is tried: for many tokens at once, and each kind once."""

import pytest

from inductor_passes.raising import router_trials, routers
from tests.passes.test_raise_routers import logits, renormalized, routed, scaled


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(routers, "_KNOWN", {})


@pytest.fixture
def runs(monkeypatch):
    """The calls of what runs a router, and of what looks for its config."""
    calls = {"evaluate": 0, "_config": 0}

    def counted(module, name):
        function = getattr(module, name)

        def call(*args):
            calls[name] += 1
            return function(*args)

        monkeypatch.setattr(module, name, call)

    counted(router_trials, "evaluate")
    counted(routers, "_config")
    return calls


def spec(router, *args):
    nodes = routed(router, *args).graph.nodes
    (call,) = (node for node in nodes if str(node.target).startswith("moe.topk_routing"))
    return call.args[-1]


@pytest.mark.parametrize("tokens", [1, 5])
def test_many_batches_are_one_run(runs, tokens):
    assert "scale=2.5" in spec(scaled, logits(tokens))
    assert runs["evaluate"] < 30


def test_what_takes_one_batch_alone_is_run_for_one_after_the_other(runs, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no rule")

    monkeypatch.setattr(router_trials, "at_once", refuse)
    assert "scale=2.5" in spec(scaled, logits(1))
    assert runs["evaluate"] > 1000


def test_each_kind_is_tried_once_in_all_graphs(runs):
    assert spec(renormalized, logits()) == spec(renormalized, logits())
    assert runs["_config"] == 1
    assert spec(scaled, logits()) != spec(renormalized, logits())
    assert runs["_config"] == 2
    spec(scaled, logits(8))
    assert runs["_config"] == 3


def test_sizes_that_are_open_are_of_one_graph(runs):
    for _ in range(2):
        spec(scaled, logits(dynamic=True))
    assert runs["_config"] == 2 and not routers._KNOWN


def test_not_more_kinds_are_kept_than_there_is_room_for(runs, monkeypatch):
    monkeypatch.setattr(routers, "_MOST", 2)
    for tokens in (5, 6, 7, 6, 7, 5):
        spec(scaled, logits(tokens))
    assert runs["_config"] == 4 and len(routers._KNOWN) == 2
