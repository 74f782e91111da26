"""What the documents claim of quantised experts is what the recorded results say."""

import csv
import math
import re
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
QUANTISED = RESULTS / "h200-2026-11-29"
IN_4_BITS = RESULTS / "h200-2026-11-28" / "in-4-bits.txt"
PAGE = (ROOT / "docs" / "PERFORMANCE.md").read_text()


def test_the_page_shows_what_quantised_experts_take() -> None:
    rows = list(csv.DictReader((RESULTS / "h200-2026-11-30" / "quantised.csv").open()))
    ways = (
        "float8 rows",
        "float8 rows, given",
        "float8 blocks",
        "int8 rows",
        "float8 rows, exact",
        "MXFP4",
        "NVFP4",
        "int4",
    )
    section = PAGE.partition("## Quantised experts")[2].partition("\n## ")[0]
    assert len(rows) == 40
    for row in rows:
        usual = float(row["bfloat16"])
        assert f" {usual:.0f} |" in section
        for way in ways:
            assert f" {float(row[way]):.0f} ({float(row[way]) / usual:.2f}) |" in section
    ratios = [float(row["float8 rows"]) / float(row["bfloat16"]) for row in rows if int(row["tokens"]) >= 4]
    assert f"takes {min(ratios):.2f} to {max(ratios):.2f} of bfloat16's time" in section
    given = [float(row["float8 rows, given"]) / float(row["float8 rows"]) for row in rows]
    assert f"they take {min(given):.2f} to {max(given):.2f} of the time" in section
    errors = [100 * float(row["error of float8 rows"]) for row in rows]
    blocks = [100 * float(row["error of float8 blocks"]) for row in rows]
    assert f"by {min(errors + blocks):.1f} to {max(errors + blocks):.1f} %" in section
    in_4_bits = [100 * float(row[f"error of {way}"]) for row in rows for way in ("MXFP4", "int4")]
    assert f"by {min(in_4_bits):.0f} to {max(in_4_bits):.0f} %" in section


def test_the_page_shows_what_nvfp4_takes() -> None:
    section = PAGE.partition("### Weights of 4 bits")[2].partition("\n## ")[0]
    rows = list(csv.DictReader((RESULTS / "h200-2026-11-30" / "quantised.csv").open()))
    ratios = {
        counts: [float(row["NVFP4"]) / float(row["MXFP4"]) for row in rows if int(row["tokens"]) in counts]
        for counts in ((1,), (16, 64, 256))
    }
    (token, tiles) = ratios.values()
    assert f"{min(token):.2f} to {max(token):.2f} of MXFP4" in section
    assert f"made into factors, {min(tiles):.2f} to {max(tiles):.2f}" in section
    errors = [100 * float(row["error of NVFP4"]) for row in rows]
    assert f"a layer by {min(errors):.0f} to {max(errors):.0f} % instead of 20" in section


def test_the_page_shows_what_published_gpt_oss_takes() -> None:
    for name in ("20b", "120b"):
        text = (RESULTS / "h200-2026-12-01" / f"published-{name}.txt").read_text()
        rows = re.findall(r"^(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)$", text, re.MULTILINE)
        assert len(rows) == 5
        for tokens, stock, in_4_bits, patched, times in rows:
            assert f"| gpt-oss-{name} | {tokens} | {stock} | {patched} | {in_4_bits} | {times} |" in PAGE
        for seconds, held in re.findall(r": ([\d.]+) s, ([\d.]+) GiB", text):
            assert re.search(rf"\b{held}\b", PAGE) and re.search(rf"\b{seconds}\b", PAGE)
        assert "weights are the same to the bit" in text
        *_, (_, _, slowest, usual, _) = rows
        assert name == "120b" or f"MXFP4 takes {float(slowest) / float(usual):.2f} of bfloat16" in PAGE


def test_the_page_shows_what_high_tiles_take() -> None:
    text = (RESULTS / "h200-2026-11-30" / "high-tiles.txt").read_text()
    found = re.findall(r"^W\d +\d+ +(\d+) +(\S+) +(\d+) +(\d+) +\d+ +\S+ +(\S+)$", text, re.MULTILINE)
    many = [each for each in found if int(each[0]) >= 192]
    of = {how: [float(each[4]) for each in many if each[1] in how] for how in (("NVFP4",), ("MXFP4", "int4"))}
    alone = [int(high) / int(usual) for _, how, usual, high, _ in many if how == "f8"]
    assert len(many) == 32
    for values, words in zip(
        (*of.values(), alone), ("{} to {} of tiles of 128", "int4 take {} to {} and", "alone {} to {} (")
    ):
        assert words.format(f"{min(values):.2f}", f"{max(values):.2f}") in PAGE, words


NAMES = {"W1": "Mixtral-8x7B", "W2": "Qwen3-30B-A3B", "W3": "DeepSeek-V3", "W4": "gpt-oss-120b"}
NAMES |= {"W5": "OLMoE", "N": "Qwen3-Next", "Q": "Qwen3-235B", "D": "DeepSeek-V3/4"}
FOUR_BITS = ("MXFP4", "NVFP4", "int4")


def _cells(row: str) -> list[str]:
    """Some are empty, of which one space is left."""
    return re.split(r" ?\| ?", row)


def test_the_page_shows_what_few_exact_tokens_take() -> None:
    text = (RESULTS / "h200-2026-11-30" / "few-exact-tokens.txt").read_text()
    line = re.compile(r"^(\w+) +(\d+) +(.+?) +(\S+) +(\S+) +(\S+) +\d\.\d+$|^$", re.MULTILINE)
    usual = {each[:3]: each[3:] for each in line.findall(text.partition("\nForms of tiles")[0]) if each[0]}
    assert len(usual) == 224
    forms = text.partition("\nForms of single rows")[2]
    line = re.compile(r"^(W2|N) +(\d) +(\w+ rows) +(\S+)" + 5 * r" +\S+" + r" +(\S+)", re.MULTILINE)
    since = {each[:3]: (each[4], each[3]) for each in line.findall(forms)}
    assert len(since) == 12
    table = PAGE.partition("| layer | T=1 | T=2 | T=4 | int8, T=1 |")[2].partition("\n\n")[0]
    for name in ("W1", "W3", "Q", "W4", "W2", "N"):
        (cells,) = re.findall(rf"^\| {NAMES[name]} \| (.*) \|$", table, re.MULTILINE)
        for cell, (how, tokens) in zip(_cells(cells), product(("f8 rows", "i8 rows"), "124"), strict=True):
            rows, tiles = since.get((name, tokens, how), usual[name, tokens, how][:2])
            assert cell in ("", f"{float(rows):.0f} ({float(tiles):.0f})"), (name, how, tokens)


def _few_tokens_in_pairs(name: str, columns: int) -> dict[tuple[str, str, str], tuple[float, float]]:
    """What layers took before and take now, by layer, tokens and format. columns: those between."""
    text = (RESULTS / "h200-2026-11-30" / name).read_text()
    line = re.compile(
        r"^(\w+) +(\d) +(\S+)" + columns * r" +\S+" + r" +(\S+) +(\S+) +(\d\.\d\d)$", re.MULTILINE
    )
    found = line.findall(text)
    assert all(f"{float(now) / float(was):.2f}" == share for *_, was, now, share in found)
    return {each[:3]: (float(each[3]), float(each[4])) for each in found}


def _means(found: dict[tuple[str, str, str], tuple[float, float]]) -> list[str]:
    shares = ([now / was for key, (was, now) in found.items() if key[2] == how] for how in FOUR_BITS)
    return [f"{math.prod(each) ** (1 / len(each)):.2f}" for each in shares]


def test_the_page_shows_what_pairs_take_on_tensor_cores() -> None:
    rows, found = (
        _few_tokens_in_pairs("pairs-on-tensor-cores.txt", 4),
        _few_tokens_in_pairs("read-at-once.txt", 3),
    )
    assert len(rows) == 72 and len(found) == 108
    beside, section = PAGE.split("| layer | tokens | MXFP4 | NVFP4 | int4 |")
    table = re.findall(r"^\| (\S+) \| (\d) \| (.*) \|$", section.partition("\n\n")[0], re.MULTILINE)
    assert len(table) == 18
    for name, tokens, cells in table:
        (short,) = (each for each in NAMES if NAMES[each] == name)
        for how, cell in zip(FOUR_BITS, _cells(cells), strict=True):
            was, now = found[short, tokens, how]
            assert cell == f"{now:.0f} ({was:.0f})"
    assert "layers took {} (MXFP4), {} (NVFP4) and {} (int4)".format(*_means(rows)) in beside
    assert (
        "is {} of the time on the mean in MXFP4, {} in NVFP4 and {} in int4".format(*_means(found)) in section
    )
    shares = sorted(now / was for was, now in found.values())
    assert f"at the least\n{shares[0]:.2f};" in section
    assert [f"{share:.2f}" for share in shares if share > 1.01] == ["1.02", "1.03", "1.04"]


def test_the_page_shows_what_a_launch_less_takes() -> None:
    text = (
        (RESULTS / "h200-2026-11-30" / "read-at-once.txt").read_text().partition("three launches  two\n")[2]
    )
    found = re.findall(r"^\w+ +\d +\S+ +(\S+) +(\S+)$", text, re.MULTILINE)
    shares = sorted(float(two) / float(three) for three, two in found)
    assert len(found) == 36 and f"took {shares[0]:.2f} to {shares[-1]:.2f} of three launches' time" in PAGE


def test_the_page_shows_what_scales_in_one_load_take() -> None:
    text = (RESULTS / "h200-2026-11-30" / "scales-together.txt").read_text()
    rows = re.findall(r"^W\d +(\d+) +\S+ +\S+ +(\S+) +\S+ +\S+ +\S+ +(\S+)$", text, re.MULTILINE)
    assert len(rows) == 15
    low = [(float(mxfp4), float(nvfp4)) for tokens, mxfp4, nvfp4 in rows if 16 <= int(tokens) <= 256]
    mxfp4, nvfp4 = (sorted(each) for each in zip(*low, strict=True))
    integers = sorted(map(float, re.findall(r"^W\d +\d+ +\S+ +\S+ +(\S+)$", text, re.MULTILINE)[:6]))
    for shares, words in (
        (mxfp4, "rows take {} to {} of"),
        (integers, "32 {} to {},"),
        (nvfp4, "NVFP4 {} to {} ("),
    ):
        assert words.format(f"{shares[0]:.2f}", f"{shares[-1]:.2f}") in PAGE, words


def test_the_page_shows_what_zero_points_cost() -> None:
    section = PAGE.partition("### Weights of 4 bits")[2].partition("\n## ")[0]
    line = re.compile(r" *(.+) groups of (\d+) +T=(\d+) +symmetric +(\S+) +with zeros +(\S+) us")
    found = list(filter(None, map(line.match, (QUANTISED / "zero-points.txt").read_text().splitlines())))
    assert len(found) == 48
    for layer, columns, tokens, without, with_zeros in (each.groups() for each in found):
        (row,) = [each for each in section.splitlines() if each.startswith(f"| {layer} | {columns} |")]
        share = float(with_zeros) / float(without)
        assert share < 1.405
        if tokens != "2":
            assert f"| {float(with_zeros):.0f} ({share:.2f}) |" in row


def test_the_page_shows_what_words_take() -> None:
    section = PAGE.partition("### Weights of 4 bits")[2].partition("Since then the scales of a step")[0]
    line = re.compile(r"(\S+) +(MXFP4|int4|int4 zero 32) +T=(\d+) +(\S+) +(\S+) +(\S+)  \S+e-?\S+")
    lines = (QUANTISED / "words.txt").read_text().splitlines()
    found = [each.groups() for each in map(line.fullmatch, lines) if each]
    assert len(found) == 96
    for layer, how, tokens, before, since, share in found:
        (row,) = [each for each in section.splitlines() if each.startswith(f"| {layer} | {how} |")][-1:]
        assert abs(float(since) / float(before) - float(share)) < 1e-3
        if tokens != "8":
            assert f"| {float(since):.0f} ({float(share):.2f}) |" in row


def test_the_page_shows_what_adapters_beside_quantised_experts_take() -> None:
    page, line = (ROOT / "docs" / "lora.md").read_text(), re.compile(r"(\S+) T=(\d+): (.*)")
    lines = (QUANTISED / "quantised-lora.txt").read_text().splitlines()
    found = list(filter(None, map(line.match, lines)))
    assert len(found) == 10
    for layer, tokens, figures in (each.groups() for each in found):
        usual, *others = (float(each) for each in re.findall(r" ([\d.]+)(?:  |$)", figures))
        cells = " | ".join(f"{each:.0f} ({each / usual:.2f})" for each in others)
        assert f"| {layer} | {tokens} | {usual:.0f} | {cells} |" in page


def test_the_page_shows_what_quantised_blocks_of_stock_models_take() -> None:
    page = PAGE.partition("### Weights of 4 bits")[2]
    lines = [
        line.split() for line in IN_4_BITS.read_text().splitlines() if line.startswith(("Qwen3", "gpt-oss"))
    ]
    assert len(lines) == 6
    for line in lines:
        figures = dict(re.findall(r"(bfloat16|float8 rows|MXFP4|int4)=([\d.]+)", " ".join(line)))
        assert len(figures) == 4 and all(f"| {each} |" in page for each in figures.values())
