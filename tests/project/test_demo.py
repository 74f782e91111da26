"""The demo: what it generates, claims, refuses and shows."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import (
    demo,
    demo_run,
)
from benchmarks.checkpoints import UnsupportedCheckpoint, load, moe_blocks, write_small_checkpoint
from benchmarks.demo_run import Run
from benchmarks.generation import Generation, compare, generate, next_token_logits, static_cache


def _generation(tokens: list[int], gaps: list[float]) -> Generation:
    return Generation(torch.tensor(tokens)[:, None], torch.tensor(gaps)[:, None])


def test_a_near_tie_ends_the_comparison() -> None:
    reference_run = _generation([3, 5, 7], [1.0, 1e-5, 1.0])
    assert compare(reference_run, _generation([3, 6, 8], [1.0] * 3)).same
    assert "then a near-tie" in str(compare(reference_run, _generation([3, 6, 8], [1.0] * 3)))
    assert not compare(reference_run, _generation([4, 5, 7], [1.0] * 3)).same
    assert not compare(_generation([3, 5], [1.0, 1.0]), _generation([3, 6], [1.0, 1.0])).same


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Path:
    return write_small_checkpoint("mixtral", tmp_path_factory.mktemp("checkpoints"))


def test_generation_equals_the_one_of_transformers(mixtral: Path) -> None:
    model = load(mixtral, "cpu", torch.float32)
    prompt = 1 + torch.arange(2 * 5).view(2, 5)  # 0 is the padding token
    cache = static_cache(model, 2, 32)
    with torch.no_grad():
        ours = generate(next_token_logits(model, cache), cache, prompt, 6)
    theirs = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(ours.tokens.T, theirs[:, 5:])


def test_a_checkpoint_is_patched_whole(mixtral: Path) -> None:
    assert len(moe_blocks(demo._patched(mixtral, "cpu", torch.float32))) == 2


def _arguments(model: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(["--model", str(model)])


def test_demo_says_what_is_wrong_with_a_path(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "_fresh_compiler_cache", lambda: None)
    assert demo.main(_arguments(tmp_path / "nothing")) == 2
    assert "no config.json there" in capsys.readouterr().out


def test_demo_refuses_a_family_without_experts(tmp_path: Path, capsys, monkeypatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path / "dense")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "_fresh_compiler_cache", lambda: None)
    assert demo.main(_arguments(tmp_path / "dense")) == 2
    assert "'llama' has no mixture-of-experts block" in capsys.readouterr().out


def test_demo_refuses_a_block_that_patch_leaves_alone(tmp_path: Path) -> None:
    from transformers import DogeConfig, DogeForCausalLM

    config = DogeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, is_moe=True, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    DogeForCausalLM(config).save_pretrained(tmp_path / "doge")
    with pytest.raises(UnsupportedCheckpoint, match="doge"):
        demo._patched(tmp_path / "doge", "cpu", torch.float32)


class _Report:
    def __init__(self, breaks: int, fused: int) -> None:
        self.graph_breaks = (None,) * breaks
        self.fused = [type("Fusion", (), {"layer": f"layer {i}", "kind": "fused_moe"}) for i in range(fused)]


def _demo(
    our_tokens: list[int], report: _Report, further_compiles: int = 1, decode_compiles: int = 1
) -> demo.Demo:
    """The last way is the one that the arguments are about."""

    def run(way: str, tokens: list[int], rates: tuple[float, float]) -> Run:
        made = Run(way, first=_generation(tokens, [1.0] * len(tokens)), cold_s=9.5, warm_s=1.25)
        made.further = [] if way == "torch.compile" else [made.first]
        made.prefill_rate, made.decode_rate = rates
        return made

    mine = run("ours, patched", our_tokens, (12000.0, 1500.0))
    mine.further_compiles, mine.decode_compiles = further_compiles, decode_compiles
    runs = (
        run("eager", [1, 2], (5000.0, 500.0)),
        run("torch.compile", [1, 2], (10000.0, 1000.0)),
        run("ours, backend", [1, 2], (11000.0, 2000.0)),
        mine,
    )
    return demo.Demo("m", runs, runs, 2, (_Report(0, 2), report), (), Path("m.html"))


def test_demo_claims_hold_only_when_they_do() -> None:
    def failed(result: demo.Demo) -> list[str]:
        return [f"{claim.way}: {claim.name}" for claim in demo.check(result) if not claim.holds]

    assert failed(_demo([1, 2], _Report(0, 2))) == []
    tokens = ["ours, patched: same tokens as eager", "ours, patched: further prompts the same"]
    assert failed(_demo([1, 3], _Report(0, 2))) == tokens
    assert failed(_demo([1, 2], _Report(1, 2))) == ["ours, patched: graph breaks"]
    assert failed(_demo([1, 2], _Report(0, 1))) == ["ours, patched: MoE layers fused"]
    several = ["ours, patched: compiles of further lengths"]
    assert failed(_demo([1, 2], _Report(0, 2), further_compiles=2)) == several
    assert failed(_demo([1, 2], _Report(0, 2), decode_compiles=2)) == ["ours, patched: compiles of decode"]


def test_the_tables_of_the_demo_show_four_ways() -> None:
    result = _demo([1, 3], _Report(0, 1))
    text = demo.summary(result, demo.check(result))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 110 and max(len(line) for line in lines if "  " in line.strip()) <= 80
    cells = {line[:28].strip(): line[28:].split() for line in lines if len(line) > 28}
    assert cells["same tokens as eager"] == ["2", "of", "2", "2", "of", "2", "2", "of", "2", "FAILED"]
    assert cells["further prompts the same"] == ["-", "1", "of", "1", "0", "of", "1", "FAILED"]
    assert cells["MoE layers fused"] == ["-", "2", "of", "2", "1", "of", "2", "FAILED"]
    rates = {line[:20].strip(): line[20:].split() for line in lines if len(line) > 20}
    assert rates["prefill tokens/s"] == ["5000", "10000", "11000", "12000"]
    assert rates["decode tokens/s"] == ["500", "1000", "2000", "1500"]
    over = [line.split()[2:] for line in lines if line.startswith("  over torch.compile")]
    assert over == [["0.50", "1.00", "1.10", "1.20"], ["0.50", "1.00", "2.00", "1.50"]]
    assert sum(line.startswith("m: ") for line in lines) == 2  # what each table shows, in words


def test_the_figures_of_the_demo_are_plain_data() -> None:
    result = _demo([1, 2], _Report(0, 2))
    plain = json.loads(json.dumps(demo.figures(result, demo.check(result))))
    assert [run["way"] for run in plain["runs"]] == [run.way for run in result.runs]
    assert [run["decode_rate"] for run in plain["runs"]] == [500, 1000, 2000, 1500]
    claims = {(claim["name"], claim["way"]): claim["holds"] for claim in plain["claims"]}
    assert claims[("MoE layers fused", "ours, backend")] is True and len(claims) == 3 + 2 + 2 * 4


def test_only_torch_compile_is_spared_the_further_lengths() -> None:
    ways = (demo_run.eager(), demo_run.stock(), demo_run.ours(), demo_run.ours_patched())
    assert [len(way.further) for way in ways] == [5, 0, 5, 5]


def test_nothing_is_left_of_a_way_but_the_disk_cache_when_it_compiles_again(monkeypatch) -> None:
    """All are forgotten at once, after the last one has met other lengths, and before what is timed."""
    order: list[str] = []

    class Recorded:
        def __init__(self, model: str, way: demo_run.Way, steps: int) -> None:
            self.run = way.name[:1]

        def __getattr__(self, name: str):
            return lambda: order.append(f"{self.run} {name}")

    monkeypatch.setattr(demo, "Session", Recorded)
    monkeypatch.setattr(demo, "time_in_turns", lambda sessions: order.append("timed"))
    monkeypatch.setattr(torch.compiler, "reset", lambda: order.append("reset"))
    demo._four_ways(None, None, 2, None, timed=True)  # type: ignore[arg-type]
    cold = [f"{way} {what}" for way in "etoo" for what in ("compile_cold", "generate_all")]
    assert order == [*cold, "reset", *(f"{way} compile_again" for way in "etoo"), "timed"]


def test_time_in_turns_gives_medians() -> None:
    class Recorded:
        def __init__(self, name: str, seconds: list[float]) -> None:
            self.run, self.left = Run(name), iter(seconds)

        def warm_up(self) -> None:
            order.append("warm")

        def prefill_seconds(self) -> float:
            order.append(self.run.way)
            return next(self.left)

        def decode_seconds(self, steps: int) -> float:
            return next(self.left) * steps

    order: list[str] = []
    sessions = [Recorded("a", [1.0, 2.0, 3.0, 0.5, 9.0, 8.0]), Recorded("b", [1.0] * 6)]
    demo_run.time_in_turns(sessions, repeats=3, decode_steps=4)  # type: ignore[arg-type]
    assert order == ["warm", "warm", *"abbaab"]
    tokens = demo_run.BATCH * demo_run.PROMPT_LENGTH
    assert (sessions[0].run.prefill_rate, sessions[0].run.decode_rate) == (tokens / 3.0, demo_run.BATCH / 2.0)


def test_each_session_of_the_demo_has_code_of_its_own(mixtral: Path) -> None:
    """Dynamo's limit of recompiles is one of a code object, and what it saw vary goes by a name; both are shared."""
    model = load(mixtral, "cpu", torch.float32)
    cache = static_cache(model, 2, 8)
    codes = [next_token_logits(model, cache).__code__ for _ in range(2)]  # type: ignore[attr-defined]
    assert codes[0] is not codes[1] and codes[0].co_name != codes[1].co_name
