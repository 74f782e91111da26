"""A patched model computes what the stock model computes: logits, tokens, recorded router logits, gradients."""

import copy

import pytest
import torch

from layers import huggingface
from tests.huggingface.families import FAMILIES, HIDDEN, ROUTER_LOGITS, pair, tiny_model, tokens


def relative_error(actual, expected) -> float:
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


def moe_block(model):
    return model.model.layers[1].mlp


def router_of(block):
    return block.router if hasattr(block, "router") else block.gate


def first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_float32_logits(family):
    stock, ours = pair(family)
    report = huggingface.patch(ours)
    assert len(report.experts) == len(report.routers) == 2
    assert report.left == ()
    for batch, length in ((2, 12), (1, 1)):
        expected, actual = stock(tokens(batch, length)).logits, ours(tokens(batch, length)).logits
        assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_registration_alone(family):
    huggingface.register()
    stock, ours = pair(family)
    ours.set_experts_implementation("moe_ops")
    expected, actual = stock(tokens(2, 12)).logits, ours(tokens(2, 12)).logits
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_bfloat16_error_is_at_most_twice_the_stock_error(family):
    stock, ours = pair(family, torch.bfloat16)
    huggingface.patch(ours)
    exact = copy.deepcopy(moe_block(stock)).double()
    hidden = torch.randn(1, 200, HIDDEN, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    # Rounded logits may choose another expert than exact ones; such a token says nothing about arithmetic.
    chosen = [router_of(block)(x[0])[2].sort(-1)[0] for block, x in blocks_and_inputs(stock, exact, hidden)]
    same = (chosen[0] == chosen[1]).all(-1)
    assert same.sum() > 100
    expected = first(exact(hidden.double()))[:, same]
    error_stock = relative_error(first(moe_block(stock)(hidden))[:, same], expected)
    error_ours = relative_error(first(moe_block(ours)(hidden))[:, same], expected)
    assert error_ours <= 2 * error_stock


def blocks_and_inputs(stock, exact, hidden):
    return [(moe_block(stock), hidden), (exact, hidden.double())]


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_the_same_tokens(family):
    stock, ours = pair(family)
    huggingface.patch(ours)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = stock.generate(tokens(2, 5), **options)
    assert expected.shape == (2, 13)
    assert torch.equal(ours.generate(tokens(2, 5), **options), expected)


def test_generate_with_a_static_cache():
    stock, ours = pair("mixtral")
    huggingface.patch(ours)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = stock.generate(tokens(2, 5), **options)
    assert torch.equal(ours.generate(tokens(2, 5), cache_implementation="static", **options), expected)


@pytest.mark.parametrize("family", ROUTER_LOGITS)
@torch.no_grad()
def test_router_logits_and_auxiliary_loss_are_unchanged(family):
    stock, ours = pair(family)
    huggingface.patch(ours)
    ids = tokens(2, 12)
    want = stock(ids, labels=ids, output_router_logits=True)
    got = ours(ids, labels=ids, output_router_logits=True)
    assert len(got.router_logits) == len(want.router_logits) == 2
    for actual, expected in zip(got.router_logits, want.router_logits, strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert want.aux_loss > 0
    torch.testing.assert_close(got.aux_loss, want.aux_loss)
    torch.testing.assert_close(got.loss, want.loss)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_routers_return_their_family_s_tuple(family):
    stock, ours = pair(family)
    huggingface.patch(ours)
    hidden = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(5))
    logits, weights, ids = router_of(moe_block(stock))(hidden)
    our_logits, our_weights, our_ids = router_of(moe_block(ours))(hidden)
    torch.testing.assert_close(our_logits, logits)
    assert our_ids.dtype == torch.int32
    assert our_weights.dtype == torch.float32
    expected = torch.zeros_like(logits).scatter(1, ids, weights)
    torch.testing.assert_close(torch.zeros_like(logits).scatter(1, our_ids.long(), our_weights), expected)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_gradients(family):
    stock, ours = pair(family)
    huggingface.patch(ours)
    ids = tokens(2, 16)
    for model in (stock, ours):
        model(ids, labels=ids).loss.backward()
    expected = {
        name: parameter.grad for name, parameter in stock.named_parameters() if parameter.grad is not None
    }
    assert any(".experts." in name for name in expected)
    assert any(".gate.weight" in name or ".router.weight" in name for name in expected)
    for name, parameter in ours.named_parameters():
        if name in expected:
            assert relative_error(parameter.grad, expected[name]) < 1e-4, name


def test_continuous_batching_matches_generate():
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = tiny_model("mixtral")
    huggingface.patch(model)
    prompts = [tokens(1, length, seed=length)[0].tolist() for length in (5, 3, 9)]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, pad_token_id=0)[
            0, len(prompt) :
        ]
        for prompt in prompts
    ]
    model.set_attn_implementation("paged|eager")  # as 5.17 and 5.24 call it; of "paged|sdpa" 5.24 warns
    page_size = "page_size"
    if not hasattr(
        ContinuousBatchingConfig, page_size
    ):  # before 5.23 it also cannot size its cache without psutil
        pytest.importorskip("psutil")
        page_size = "block_size"
    results = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=16, max_batch_tokens=64, use_cuda_graph=False, **{page_size: 32}
        ),
    )
    got = sorted(results.values(), key=lambda result: result.request_id)
    assert [list(result.generated_tokens) for result in got] == [tensor.tolist() for tensor in expected]
