"""trust_library: guards on this library's modules go, all others stay and do their work."""

import sys

import pytest
import torch

import inductor_passes
from layers import MoEBlock, MoEConfig
from tests.passes.moe import inputs, layer

SCALE = 2.0


def scaled(*args):
    return layer(*args) * SCALE


@pytest.fixture
def asked():
    """A compiled layer, and what its filter was asked and answered."""
    torch._dynamo.reset()
    answers: dict[str, bool] = {}

    def spy(guards):
        kept = inductor_passes.trust_library(guards)
        answers.update(zip((guard.name for guard in guards), kept, strict=True))
        return kept

    compiled = torch.compile(scaled, backend="eager", dynamic=False, options={"guard_filter_fn": spy})
    return compiled, answers


@torch.no_grad()
def test_guards_on_our_modules_go(asked):
    compiled, answers = asked
    compiled(*inputs())
    dropped = {name for name, is_kept in answers.items() if not is_kept}
    kept = set(answers) - dropped
    assert len(dropped) > 40 and all("G['__import_moe_ops" in name for name in dropped)
    assert not any("G['__import_moe_ops" in name for name in kept)
    assert any("hidden" in name or "args" in name for name in kept) and any("SCALE" in name for name in kept)


@torch.no_grad()
def test_what_may_change_is_still_guarded(asked, monkeypatch):
    compiled, _ = asked
    given = inputs()
    for args in (given, (given[0][:3], given[1][:3], *given[2:])):
        torch.testing.assert_close(compiled(*args), layer(*args) * 2)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    torch.testing.assert_close(compiled(*given), layer(*given) * 3)


@torch.no_grad()
def test_torch_compile_finds_it_in_options(monkeypatch):
    """And nobody else: to Inductor it is no option. A filter of the user's comes first."""
    asked = []

    def spy(name):
        return lambda guards: (asked.append(name), inductor_passes.trust_library(guards))[1]

    monkeypatch.setattr(sys.modules["inductor_passes.guards"], "trust_library", spy("ours"))
    options = inductor_passes.options()
    assert "guard_filter_fn" not in options and "guard_filter_fn" not in dict(options)
    with pytest.raises(KeyError):
        options.pop("max_autotune")
    given = inputs()
    for changed in ({}, {"guard_filter_fn": spy("the user's")}):
        torch._dynamo.reset()
        options.update(changed)
        torch.testing.assert_close(torch.compile(layer, options=options)(*given), layer(*given))
    assert asked == ["ours", "the user's"]


@pytest.mark.skipif(torch.__version__ < "2.12", reason="has no aot_compile")
@torch.no_grad()
def test_what_is_compiled_for_a_file_has_guards_that_can_be_written(tmp_path):
    """A filter takes the place of torch's own, which leaves out guards on global names and objects."""
    block = MoEBlock(MoEConfig(num_experts=4, top_k=2, hidden_size=8, intermediate_size=6)).eval()
    hidden_states = torch.randn(5, 8)
    compiled = torch.compile(block, fullgraph=True, options=inductor_passes.options()).forward
    compiled.aot_compile(((hidden_states,), {})).save_compiled_function(tmp_path / "layer")
    with open(tmp_path / "layer", "rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    torch.testing.assert_close(loaded(block, hidden_states), block(hidden_states))
    with pytest.raises(RuntimeError, match="GuardManager"):
        loaded(block, hidden_states[:3])


def test_a_package_of_the_users_with_a_name_like_ours_is_not_trusted():
    class Guard:
        def __init__(self, name):
            self.name = name

    ours = ["G['__import_moe_ops'].fused_moe", "G['__import_moe_ops_dot_types'].x"]
    ours.append("G['__import_layers_dot_huggingface_dot_routers'].NAME")
    others = [
        "G['__import_moe_ops_of_mine'].x",
        "G['__import_layers_dot_mine'].x",
        "L['moe_ops']",
        "G['layers']",
    ]
    assert not any(inductor_passes.trust_library([Guard(name) for name in ours]))
    assert all(inductor_passes.trust_library([Guard(name) for name in others]))
