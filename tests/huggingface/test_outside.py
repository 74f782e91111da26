"""Families outside transformers' experts interface: other forwards where they are exact, else errors and reasons."""

import copy
import pickle

import pytest
import torch
from torch import nn

from layers import LowRank, huggingface
from layers.huggingface import blocks, outside
from layers.huggingface.recognise import Recogniser
from moe_ops import RoutingConfig
from tests.coverage.cases import is_installed, outputs, stock_model
from tests.helpers import relative_error

BLOCKS = ("llama4", "jetmoe", "dbrx")
# In older versions LongCat-Flash's router returns no logits, and keeps its own code.
COLLECTIONS = ("step3p7", "longcat_flash") if is_installed("flint") else ("step3p7",)
PLACES = {"llama4": "feed_forward", "dbrx": "ffn"}


def part(model, name):
    """The MoE block of the first layer, and its name."""
    return next(
        (path, each) for path, each in model.named_modules() if path.split(".")[-1] == PLACES.get(name, "mlp")
    )


@pytest.mark.parametrize("name", [*BLOCKS, *COLLECTIONS])
def test_a_patched_model_computes_the_same(name):
    stock = stock_model(name)
    ours = copy.deepcopy(stock)
    path, block = part(ours, name)
    report = huggingface.patch(ours)
    assert report.experts[0] == (path if name in BLOCKS else f"{path}.experts")
    assert report.routers[0].startswith(path)
    for model in (stock, ours):
        output = outputs(model, name)[0]
        (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(5))).sum().backward()
    torch.testing.assert_close(*(outputs(model, name)[0] for model in (ours, stock)), rtol=1e-5, atol=1e-5)
    for (parameter, expected), actual in zip(stock.named_parameters(), ours.parameters(), strict=True):
        if expected.grad is not None:
            assert relative_error(actual.grad, expected.grad) < 1e-4, parameter
    huggingface.unpatch(ours)
    assert type(block).forward.__code__ is block.forward.__code__
    assert torch.equal(*(outputs(model, name)[0] for model in (ours, stock)))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", COLLECTIONS)
@torch.no_grad()
def test_ids_are_left_as_experts_of_ours_take_them(name, compiled):
    """Not widened to what transformers' own experts count on; these have no config that could name them."""
    model = stock_model(name)
    report = huggingface.patch(model)
    router = model.get_submodule(report.routers[0])
    tokens = torch.randn(3, next(each for each in router.parameters() if each.dim() == 2).shape[1])
    run = torch.compile(router, backend="eager", fullgraph=True) if compiled else router
    assert run(tokens)[-1].dtype == torch.int32


@pytest.mark.parametrize("name", [*BLOCKS, *COLLECTIONS])
@torch.no_grad()
def test_copies_and_pickles(name):
    model = stock_model(name)
    report = huggingface.patch(model)
    expected = outputs(model, name)[0]
    assert torch.equal(outputs(copy.deepcopy(model), name)[0], expected)
    revived = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(outputs(revived, name)[0], expected)
    assert huggingface.patch(revived) == huggingface.patch(model) == report
    assert torch.equal(outputs(revived, name)[0], expected)


@pytest.mark.parametrize("name", COLLECTIONS)
@torch.no_grad()
def test_adapters(name):
    changed = stock_model(name)
    ours = copy.deepcopy(changed)
    huggingface.patch(ours)
    adapters = huggingface.add_adapters(ours, 1, 2, torch.zeros(22, dtype=torch.int32))
    assert len(adapters) == 2
    for path, adapter in adapters.items():
        gate_up, down = (
            LowRank(torch.randn(*linear.a.squeeze(1).shape) / 4, torch.randn(*linear.b.squeeze(1).shape) / 4)
            for linear in adapter.linears()
        )
        adapter.load_adapter(0, gate_up, down, scaling=0.5)
        experts = changed.get_submodule(path)
        experts.gate_up_proj[: len(gate_up.a)] += 0.5 * gate_up.b @ gate_up.a
        experts.down_proj += 0.5 * down.b @ down.a
    expected = outputs(changed, name)[0]
    torch.testing.assert_close(outputs(ours, name)[0], expected, rtol=1e-4, atol=1e-4)
    assert (outputs(stock_model(name), name)[0] - expected).abs().max() > 0.1


def test_blocks_that_are_patched_as_a_whole_have_no_adapters():
    model = stock_model("llama4")
    huggingface.patch(model)
    with pytest.raises(
        ValueError, match="feed_forward is a Llama4TextMoe, patched as a whole: adapters are for"
    ):
        huggingface.add_adapters(model, 1, 2, torch.zeros(22, dtype=torch.int32))


@torch.no_grad()
def test_experts_that_return_their_input_count():
    """More experts are chosen than have weights, so some tokens are kept."""
    if "longcat_flash" not in COLLECTIONS:
        pytest.skip("its router keeps its own code")
    _, block = part(stock_model("longcat_flash"), "longcat_flash")
    own = copy.deepcopy(block)
    assert huggingface.patch(block).left == ()
    tokens = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(0))
    _, _, ids = own.router(tokens)
    assert (ids >= own.experts.down_proj.shape[0]).any() and (ids < own.experts.down_proj.shape[0]).any()
    torch.testing.assert_close(block(tokens), own(tokens))


def times(output):
    return 1.01 * output


def steeper(output):
    """The same values, another gradient."""
    return output + 0.5 * (output - output.detach())


@pytest.mark.parametrize("name", [*BLOCKS, *COLLECTIONS])
@pytest.mark.parametrize("change", [times, steeper])
def test_blocks_that_compute_something_else_are_left_alone(name, change):
    _, block = part(stock_model(name), name)
    target = block.experts if name in COLLECTIONS else block

    own = type(target).forward

    def changed(output):
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    class OtherMoE(type(target)):
        def forward(self, hidden_states):
            return changed(own(self, hidden_states))

    class OtherExperts(type(target)):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return changed(own(self, hidden_states, top_k_index, top_k_weights))

    target.__class__ = OtherExperts if name in COLLECTIONS else OtherMoE
    if name in COLLECTIONS:
        assert Recogniser().collection(target) is None
    else:
        assert Recogniser().block(target) is None
    report = huggingface.patch(block)
    assert report.experts == () and len(report.left) == 1


def test_what_blocks_compute():
    for name, routing in (
        ("llama4", RoutingConfig(2, "sigmoid", "topk_then_score", renormalize=False)),
        ("jetmoe", RoutingConfig(2, order="topk_then_score", renormalize=False)),
        ("dbrx", RoutingConfig(2)),
    ):
        found = blocks.known_block(part(stock_model(name), name)[1])
        assert (found.routing, found.activation) == (routing, "silu")


def test_dbrx_with_another_norm_is_left_alone():
    _, block = part(stock_model("dbrx"), "dbrx")
    block.moe_normalize_expert_weights = 2
    assert huggingface.patch(block).experts == ()


def test_a_collection_with_a_limit():
    _, block = part(stock_model("step3p7"), "step3p7")
    block.experts.limit = 0.5
    assert outside.collection_activation(block.experts) == "swiglustep;limit=0.5"


def test_no_generator_of_a_gpu_is_seeded(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(1)
    assert seeds == [1]
    _, block = part(stock_model("step3p7"), "step3p7")
    del seeds[:]
    assert outside.collection_activation(block.experts) is not None
    assert seeds == []


@pytest.mark.parametrize(
    "name", [*BLOCKS, *COLLECTIONS, "doge", "switch_transformers", "nllb_moe", "dots3_note.vision"]
)
def test_an_implementation_that_would_do_nothing_is_refused(name):
    if not is_installed(name):
        pytest.skip("not in this transformers")
    huggingface.register()
    model = stock_model(name)
    with pytest.raises(
        ValueError, match=r"outside transformers' experts interface.*layers\.huggingface\.patch"
    ):
        model.set_experts_implementation("moe_ops")
    configs = [each.config for each in model.modules() if hasattr(each, "config")]
    assert {getattr(config, "_experts_implementation", "eager") for config in configs} == {"eager"}
    if name != "dots3_note.vision":  # its layers have configs of their own, made from the model's
        model.config._experts_implementation = "moe_ops"
        with pytest.raises(ValueError, match="outside transformers' experts interface"):
            type(model)(model.config)


def test_where_it_does_something_it_is_accepted():
    huggingface.register()
    model = stock_model("mixtral")
    model.set_experts_implementation("moe_ops")
    assert model.config._experts_implementation == "moe_ops"
    assert type(model)(model.config).config._experts_implementation == "moe_ops"


def test_shared_experts_are_no_experts_left_alone():
    assert huggingface.patch(stock_model("inkling")).left == ()


def test_reasons():
    for name, reason in (
        ("doge", "doge's experts are single rows of two embeddings, retrieved by product keys"),
        ("jetmoe", "jetmoe's mixture of attention heads is not a mixture of feed-forward experts"),
    ):
        assert {why for _, why in huggingface.patch(stock_model(name)).left} == {reason}


def test_a_quantised_block_is_left_alone():
    _, block = part(stock_model("llama4"), "llama4")
    down = block.experts.down_proj
    block.experts.down_proj = nn.Parameter(down.data.to(torch.float8_e4m3fn), requires_grad=False)
    assert "float8_e4m3fn" in dict(huggingface.patch(block).left)[""]
