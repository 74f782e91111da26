"""Models that continuous batching cannot serve, told before anybody is answered."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.checkpoints import small_qwen3_moe
from layers.serve import trial
from layers.serve.server import _application, _described
from tests.coverage import cases


def test_a_model_that_makes_masks_of_its_own_mixes_requests_up():
    """Doge answered, and anybody's text was in everybody's answer."""
    model = cases.stock_model("doge", use_cache=True)
    with pytest.raises(RuntimeError, match="answers what it does not answer to each alone"):
        trial.expect_answers_alike(model)


@pytest.mark.parametrize("short", [(0.0, 0.0, 0.0, 0.0), (0.0, 5.0, 0.0, 0.9)])
def test_rounding_may_send_a_token_elsewhere(short, monkeypatch):
    model = small_qwen3_moe(vocab_size=64).eval()
    seen, told = [], iter(short)
    own = trial._short_of_the_likeliest

    def measured(*args):
        seen.append(own(*args))
        return next(told)

    monkeypatch.setattr(trial, "_short_of_the_likeliest", measured)
    trial.expect_answers_alike(model)
    assert seen == [0.0] * 4
    assert model.config._attn_implementation == "sdpa"


def test_how_far_a_token_is_below_the_likeliest():
    logits = torch.tensor([[0.0, 0.0, 9.0], [0.0, 3.0, 0.0], [6.0, 0.0, 0.0]])

    def model(input_ids, use_cache):
        assert input_ids.tolist() == [[7, 1]] and not use_cache
        return SimpleNamespace(logits=logits[None, 1:])

    model.device = "cpu"
    assert trial._short_of_the_likeliest(model, [7], [1, 0]) == 0.0
    assert trial._short_of_the_likeliest(model, [7], [1, 2]) == pytest.approx(6 / 12**0.5)


@pytest.mark.parametrize(
    ("family", "options", "told"),
    [
        (
            "qwen3_next",
            {"layer_types": ["linear_attention", "full_attention"]},
            "layers of full_attention, linear_att",
        ),
        (
            "deepseek_v3",
            {},
            "latents for keys and values is not served by continuous batching: the model did not",
        ),
        ("switch_transformers", {}, "an encoder is not served by continuous batching"),
    ],
)
def test_what_a_batch_has_no_cache_for(family, options, told):
    model = cases.stock_model(family, use_cache=True, **options)
    models = SimpleNamespace(process_model_name=str, load_model_and_processor=lambda name: (model, None))
    with pytest.raises(ValueError, match=told):
        _application(models, None, SimpleNamespace(model="model", greedy=True))


def test_a_model_with_nothing_unusual():
    assert _described(cases.families.tiny_config("mixtral")) == "a mixtral"
