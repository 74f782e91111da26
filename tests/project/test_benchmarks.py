"""The benchmark harness itself: what it compares with, what it refuses to time, and the demo's verdicts."""

import argparse
import json
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import (
    cpu_bench,
    demo,
    demo_run,
    loading,
    moe_bench,
    options_bench,
    peers,
    training_bench,
)
from benchmarks.checkpoints import UnsupportedCheckpoint, load, moe_blocks, write_small_checkpoint
from benchmarks.demo_run import Run
from benchmarks.generation import Generation, compare, generate, next_token_logits, static_cache
from benchmarks.implementations import gmm
from benchmarks.workloads import (
    TOKEN_COUNTS,
    WORKLOADS,
    Cell,
    Load,
    Workload,
    cells_of,
    make_inputs,
    make_weights,
    reference,
    roofline,
)

SMALL = Workload("small", num_experts=8, top_k=2, hidden_size=64, intermediate_size=32)


def test_recorded_baseline_covers_25_of_the_45_cells() -> None:
    recorded = peers.times_of(peers.read_rows([peers.RECORDED]), peers.BASELINE)
    assert len(peers.all_keys()) == 45
    assert len(recorded) == 25
    assert set(recorded) <= set(peers.all_keys())


def test_rooflines_agree_with_the_recorded_ones() -> None:
    for row in peers.read_rows([peers.RECORDED]):
        cell = Cell(WORKLOADS[row["workload"]], int(row["T"]), row["routing"])
        roof = roofline(cell, Load(float(row["distinct_experts"]), int(row["max_load"])))
        assert roof.us == pytest.approx(float(row["roof_us"]), rel=5e-3)


def test_comparison_takes_the_faster_baseline_and_counts_wins() -> None:
    ours = {"workload": "W1", "T": "4", "routing": "uniform", "impl": "fused_moe", "us": "500.0"}
    beside = {**ours, "impl": "gmm_compile", "us": "900.0"}
    elsewhere = [{**ours, "T": "1"}, {**beside, "T": "1", "us": "400.0"}]
    won, lost = peers.compare([ours, beside, *elsewhere])
    assert (won.recorded, won.beside) == (788.95, 900.0) and won.ratio == 788.95 / 500
    assert (lost.recorded, lost.beside) == (None, 400.0) and lost.ratio < 1
    text, won_all = peers.verdict([ours, beside, *elsewhere])
    assert "in 1 of 2 measured cells (45 in all)" in text
    assert not won_all


def test_cells_add_zipf_at_4096_only() -> None:
    assert [cell.routing for cell in cells_of(SMALL, (1, 4096))] == ["uniform", "uniform", "zipf"]
    assert [cell.routing for cell in cells_of(SMALL, (1,))] == ["uniform"]
    assert len(TOKEN_COUNTS) == 8


@pytest.mark.parametrize("routing", ["uniform", "zipf", "balanced"])
@pytest.mark.parametrize("name", ["gmm", "fused_moe"])
def test_what_is_timed_passes_the_gate(name: str, routing: str) -> None:
    import moe_ops

    inputs, weights = make_inputs(Cell(SMALL, 16, routing), "cpu")[0], make_weights(SMALL, 1, "cpu")

    def fused(one, copy, top_k):
        config = moe_ops.RoutingConfig(top_k=top_k)
        return moe_ops.fused_moe(one.hidden_states, one.router_logits, copy.w13, copy.w2, config)

    def grouped(one, copy, top_k):
        return gmm(one.hidden_states, one.router_logits, copy.w13, copy.w2, top_k)

    implementation = {"gmm": grouped, "fused_moe": fused}[name]
    assert moe_bench.check(implementation, inputs, weights, 2) < moe_bench.MAX_RELATIVE_ERROR


def test_a_wrong_implementation_is_not_timed() -> None:
    inputs, weights = make_inputs(Cell(SMALL, 4, "uniform"), "cpu")[0], make_weights(SMALL, 1, "cpu")
    for wrong in (
        lambda one, copy, top_k: reference(one, copy, top_k) * 1.02,
        lambda one, copy, top_k: torch.full_like(one.hidden_states, float("nan")),
    ):
        with pytest.raises(moe_bench.WrongResult, match="expected at most"):
            moe_bench.check(wrong, inputs, weights, 2)


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
    from transformers import DbrxConfig, DbrxForCausalLM

    config = DbrxConfig(
        d_model=32, n_heads=2, n_layers=1, vocab_size=64, max_seq_len=32,
        attn_config={"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    )  # fmt: skip
    DbrxForCausalLM(config).save_pretrained(tmp_path / "dbrx")
    with pytest.raises(UnsupportedCheckpoint, match="dbrx"):
        demo._patched(tmp_path / "dbrx", "cpu", torch.float32)


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
        made.further = [made.first]
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
    assert claims[("MoE layers fused", "ours, backend")] is True and len(claims) == 3 * 2 + 2 * 4


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
    """Dynamo's limit of recompiles is one of a code object: four ways in one would meet it."""
    model = load(mixtral, "cpu", torch.float32)
    cache = static_cache(model, 2, 8)
    codes = [next_token_logits(model, cache).__code__ for _ in range(2)]  # type: ignore[attr-defined]
    assert codes[0] is not codes[1]


def test_loading_is_compared_with_reading(monkeypatch, capsys) -> None:
    for name, size in (("HIDDEN", 16), ("INTERMEDIATE", 8), ("EXPERTS", 8)):
        monkeypatch.setattr(loading, name, size)
    threads = torch.get_num_threads()
    try:
        assert loading.main(argparse.Namespace(layers=2, rounds=1)) in (0, 1)
    finally:
        torch.set_num_threads(threads)
    assert "load / read" in capsys.readouterr().out


@pytest.mark.parametrize("factor", [1.02, 3.0, float("nan")])
def test_a_wrong_option_is_not_timed(factor: float) -> None:
    expected = torch.randn(8, 16)
    options_bench._expect_close(expected * 1.001, expected)
    with pytest.raises(ValueError, match="relative error"):
        options_bench._expect_close(expected * factor, expected)


@torch.no_grad()
def test_the_gates_that_are_timed_are_inlined_and_right() -> None:
    weights, hidden = make_weights(SMALL, 0, "cpu"), torch.randn(24, 64).bfloat16()
    inputs = options_bench.Inputs(hidden, torch.randn(24, 8))
    layers = {name: options_bench.gate_layer(gate, weights, 2) for name, gate in options_bench.GATES.items()}
    expected = layers["silu by name"](hidden, inputs.router_logits)
    for name in ("swiglu", "scale per expert"):
        options_bench._expect_close(layers[name](hidden, inputs.router_logits), expected)
    options_bench._inlined(layers["clamped"], inputs)
    options_bench.GATES["of a row"] = lambda gate, up: gate.softmax(-1) * up
    with pytest.raises(ValueError, match="the gate is not inlined"):
        options_bench._inlined(
            options_bench.gate_layer(options_bench.GATES.pop("of a row"), weights, 2), inputs
        )


TINY = cpu_bench.Layer(hidden_size=16, intermediate_size=8, num_experts=4, top_k=2)


def test_the_cpu_bench_times_every_way_once_for_each_load() -> None:
    alone, beside = cpu_bench.measure("float32", 3, ["idle", "loaded"], 0.01, TINY)
    assert (alone.load, beside.load) == cpu_bench.LOADS
    for result in (alone, beside):
        assert set(result.ms) == {*cpu_bench.EAGER, *cpu_bench.COMPILED}
        assert all(ms > 0 for ms in result.ms.values())
        for ways in cpu_bench.CAPTIONS:
            assert len(result.row(ways)) == len(cpu_bench.header(ways))


def test_a_wrong_cpu_way_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(experts, hidden, topk_ids, topk_weights):
        return {"ours": lambda: experts(hidden, topk_ids, topk_weights) * 1.001}

    monkeypatch.setattr(cpu_bench, "ways", wrong)
    monkeypatch.setattr(cpu_bench, "_time_in_turns", lambda *_: pytest.fail("timed"))
    with pytest.raises(AssertionError, match=r"ours, float32, T=3: relative error 1\.0e-03"):
        cpu_bench.measure("float32", 3, ["idle"], 0.01, TINY)


def test_the_cpu_bench_compares_with_the_best_of_the_others() -> None:
    ms = dict(zip((*cpu_bench.EAGER, *cpu_bench.COMPILED), (9.0, 4.0, 2.0, 3.0, 6.0, 4.0), strict=True))
    result = cpu_bench.CpuResult(1, "idle", "float32", 16, ms)
    assert result.speedup(cpu_bench.EAGER) == 2.0 and result.speedup(cpu_bench.COMPILED) == 0.75


def test_the_tables_of_the_cpu_bench_are_those_of_what_it_wrote(monkeypatch, tmp_path, capsys) -> None:
    ms = dict(zip((*cpu_bench.EAGER, *cpu_bench.COMPILED), (9.0, 4.0, 2.0, 3.0, 6.0, 1.5), strict=True))

    def measure(dtype, tokens, loads, seconds):
        return [cpu_bench.CpuResult(torch.get_num_threads(), load, dtype, tokens, ms) for load in loads]

    monkeypatch.setattr(cpu_bench, "measure", measure)
    parser, file = argparse.ArgumentParser(), tmp_path / "cpu.json"
    cpu_bench.add_arguments(parser)
    given = ["--json", str(file), "--ts", "1,16", "--threads", str(torch.get_num_threads())]
    assert cpu_bench.main(parser.parse_args(given)) == 0
    results = cpu_bench.read_results(file)
    assert len(results) == 2 * 2 * 2 and {result.load for result in results} == set(cpu_bench.LOADS)
    text = cpu_bench.tables(results)
    assert text in capsys.readouterr().out and max(map(len, text.splitlines())) <= 120
    rows = [line.split() for line in text.splitlines() if line.startswith("float32")]
    assert rows[0][4:] == ["9.000", "4.000", "2.000", "2.00"] and rows[4][4:] == [
        "3.000",
        "6.000",
        "1.500",
        "2.00",
    ]


def test_the_other_process_is_there_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with pytest.raises(ValueError, match="load 'half': expected one of idle, loaded"):
        cpu_bench.other_process("half").__enter__()
    with cpu_bench.other_process("idle"):
        assert not started
    with cpu_bench.other_process("loaded"):
        assert started[0].poll() is None
    assert started[0].returncode is not None


def test_training_times_no_layer_whose_gradients_are_wrong(monkeypatch, capsys) -> None:
    def right(*args):
        return gmm(*args, SMALL.top_k)

    ways = {"right": right, "wrong": lambda hidden, *rest: right(hidden, *rest) + hidden}
    monkeypatch.setattr(training_bench, "ways", lambda top_k: ways)
    cell = Cell(training_bench.SMALL, 16, "uniform")
    assert training_bench.measure(cell, "cpu", 1.0) == 1
    told = capsys.readouterr().out
    assert "WRONG small wrong" in told and "small T=16 right" in told and "T=16 wrong" not in told


def test_training_counts_what_is_kept_beside_weights() -> None:
    hidden, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    args = [hidden, torch.zeros(4, 2), weight, weight]
    assert training_bench.kept_bytes(lambda x, _, w, __: (x @ w).sin(), args) == 2 * 4 * 8 * 4
