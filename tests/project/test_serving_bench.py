"""`python -m benchmarks serving`: what it replays, what it counts, what it refuses to time, and all of it once."""

import argparse
import json
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations import flash_paged

from benchmarks import serving_attention, serving_bench
from benchmarks.checkpoints import small_qwen3_moe
from benchmarks.serving_gate import agreement
from benchmarks.serving_run import Answer, Engine, Replay, _answer, _Padding, figures
from benchmarks.serving_trace import Mix, Request, at_rate, make_trace, percentile
from layers.serve.options import ServeOptions

MIX = Mix(((0.75, 2, 5), (0.25, 50, 60)), (3, 9))


def test_a_trace_has_the_lengths_and_the_rate_it_was_asked_for():
    trace = make_trace(2000, MIX, 11, seed=0)
    assert trace == make_trace(2000, MIX, 11, seed=0) != make_trace(2000, MIX, 11, seed=1)
    lengths = [len(request.prompt) for request in trace]
    assert {length for length in lengths if length < 50} == {2, 3, 4, 5}
    assert 0.2 < sum(length >= 50 for length in lengths) / 2000 < 0.3
    assert {request.answer for request in trace} == set(range(3, 10))
    assert {token for request in trace for token in request.prompt} == set(range(11))
    assert MIX.longest == 69 >= max(length + request.answer for length, request in zip(lengths, trace))
    gaps = [later.arrival - sooner.arrival for sooner, later in zip(trace, trace[1:])]
    assert trace[0].arrival == 0 and min(gaps) > 0
    # Of a Poisson process: the gaps' mean is their deviation.
    assert statistics.mean(gaps) == pytest.approx(1, abs=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1, abs=0.1)
    faster = at_rate(trace, 4.0)
    assert faster[-1].arrival == pytest.approx(trace[-1].arrival / 4)
    assert {request.arrival for request in at_rate(trace, math.inf)} == {0}


@pytest.mark.parametrize(("percent", "value"), [(50, 5), (99, 10), (90, 9), (91, 10), (1, 1), (100, 10)])
def test_percentiles(percent, value):
    assert percentile([10, 1, 9, 2, 8, 3, 7, 4, 6, 5], percent) == value


def test_figures_of_replays():
    result = SimpleNamespace(timestamps=[10.5, 10.6, 10.9], generated_tokens=[1, 2, 3])
    answer = _answer(result, arrival=10.0)
    assert (answer.tokens, answer.first) == ((1, 2, 3), 0.5)
    assert answer.between == pytest.approx((0.1, 0.3))
    replays = [Replay((answer, answer), seconds, 30, 120, 2) for seconds in (1.0, 2.0, 30.0)]
    found = figures(replays)
    assert found["tokens/s"] == 3.0  # the median
    assert (found["first p50"], found["captured"], found["padding %"]) == (500.0, 6, 75.0)
    assert (found["between p50"], found["between p99"]) == pytest.approx((100.0, 300.0))


def test_padding_is_counted_and_left_as_it_is():
    padding = _Padding(lambda tokens, cache, fast: (64, cache))
    assert [padding(tokens, 7, False) for tokens in (3, 60)] == [(64, 7)] * 2
    assert (padding.real, padding.padded) == (63, 128)


class Table(torch.nn.Module):
    """The logits of the next token are a row of a table, chosen by the last token."""

    def __init__(self, rows):
        super().__init__()
        self.rows = torch.nn.Parameter(rows)

    def forward(self, input_ids, use_cache, logits_to_keep):
        return SimpleNamespace(logits=self.rows[input_ids[:, -logits_to_keep:]])


def answered(model, prompt, tokens):
    given = [prompt]
    for _ in range(tokens):
        given.append(int(model.rows[given[-1]].argmax()))
    return Answer(tuple(given[1:]), 0.1, ())


def agreed(rows, others, tokens=4):
    models = Table(rows), Table(others)
    trace = [Request(0.0, (start,), tokens) for start in range(len(rows))]
    answers = [[answered(model, request.prompt[0], tokens) for request in trace] for model in models]
    return agreement(models, Table(rows.double() + 1e-6), trace, tuple(answers))


def test_equal_answers_agree():
    rows = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
    found = agreed(rows, rows.clone())
    assert (found.requests, found.same, found.compared) == (7, 7, 28)
    assert str(found) == "7 of 7 answers are the same to the end (28 tokens)"


def test_answers_may_part_where_rounding_decides():
    rows = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
    best, second = rows[3].topk(2).indices
    rows[3, second] = rows[3, best] - 1e-4
    others = rows.clone()
    others[3, second] += 2e-4  # one of seven prompts
    found = agreed(rows, others)
    assert found.same < 7
    assert found.gap == pytest.approx(1e-4, rel=0.1)
    assert found.noise == pytest.approx(2e-4, rel=0.1)
    assert "the others part where the two tokens' logits differ by 0.0001 at most" in str(found)


def test_other_answers_are_refused():
    rows = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
    with pytest.raises(
        ValueError, match=r"ours has a relative error of .*: expected at most 2.0 times stock's"
    ):
        agreed(rows, rows + 1e-3 * torch.randn(7, 7))
    models = Table(rows), Table(rows)
    trace = [Request(0.0, (0,), 2)]
    right = answered(models[0], 0, 2)
    wrong = Answer((right.tokens[0], (right.tokens[1] + 1) % 7), 0.1, ())
    with pytest.raises(ValueError, match="expected a gap of at most 4 times what rounding moves"):
        agreement(models, models[0], trace, ([right], [wrong]))


def test_a_batch_that_answers_otherwise_than_the_model_alone_is_refused():
    rows = torch.randn(7, 7, generator=torch.Generator().manual_seed(0))
    models = Table(rows), Table(rows)
    wrong = Answer(((int(rows[0].argmax()) + 1) % 7,), 0.1, ())
    with pytest.raises(ValueError, match="alone, stock prefers another first token by"):
        agreement(models, models[0], [Request(0.0, (0,), 1)], ([wrong], [wrong]))


def flash_by_formula(
    query, key, value, starts, key_starts, most, most_keys, *, scale, window_size, **options
):
    """What `torch.nn.attention.varlen` computes: causal, aligned at the end of each sequence."""
    out, groups = torch.zeros_like(query), query.shape[1] // key.shape[1]
    for begin, end, key_begin, key_end in zip(starts, starts[1:], key_starts, key_starts[1:]):
        q = query[begin:end].transpose(0, 1)
        k, v = (each[key_begin:key_end].repeat_interleave(groups, 1).transpose(0, 1) for each in (key, value))
        assert q.shape[1] <= most and k.shape[1] <= most_keys
        age = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
        seen = (age >= 0) & (window_size[0] < 0) | (age >= 0) & (age <= window_size[0])
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
        out[begin:end] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out


@pytest.mark.skipif(not serving_attention.is_known(), reason="of another transformers")
def test_flash_attention_answers_as_sdpa_does(monkeypatch):
    """Continuous batching with the glue to PyTorch's flash attention, which itself is for GPUs."""
    monkeypatch.setattr(flash_paged, "lazy_import_paged_flash_attention", None)  # and put back
    monkeypatch.setattr(serving_attention.varlen, "varlen_attn", flash_by_formula)
    trace = make_trace(5, Mix(((1.0, 3, 40),), (2, 6)), 64, seed=1)
    answers = []
    for attention in ("sdpa", "flash"):
        torch.manual_seed(0)
        model = small_qwen3_moe(vocab_size=64, max_position_embeddings=200).eval()
        if attention == "flash":
            serving_attention.use_torch_flash(model)
        options = ServeOptions(
            "", backend=None, greedy=True, max_batch_tokens=64, num_blocks=16, page_size=16
        )
        engine = Engine(model, options, 64)
        answers.append([answer.tokens for answer in engine.replay(at_rate(trace, math.inf)).answers])
        engine.close()
    assert answers[0] == answers[1]


def test_the_whole_of_it(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    serving_bench.add_arguments(parser)
    out = tmp_path / "deep" / "serving.json"
    given = [
        "--device",
        "cpu",
        "--model",
        "small",
        "--eager",
        "--requests",
        "6",
        "--loads",
        "2,inf",
        "--rounds",
        "1",
    ]
    assert serving_bench.main(parser.parse_args([*given, "--out", str(out)])) == 0
    told = json.loads(out.read_text())
    assert (told["gate"]["requests"], told["gate"]["same"]) == (6, 6)
    assert [(row["load"], row["way"]) for row in told["rows"]] == [
        (load, way) for load in ("2", "inf") for way in ("stock", "ours")
    ]
    assert all(row["tokens/s"] > 0 and 0 < row["first p50"] <= row["first p99"] for row in told["rows"])
    printed = capsys.readouterr().out
    assert "6 of 6 answers are the same to the end" in printed
    assert "x between p99" in printed
    plot = out.with_suffix(".png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    plot.unlink()
    assert serving_bench.main(parser.parse_args(["--draw", str(out)])) == 0
    assert plot.stat().st_size > 10_000
