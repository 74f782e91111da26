"""The documentation is true: its code runs, its quotations are in the source, and it names all that is public."""

import re
from pathlib import Path

import pytest

from tests.project import doc_blocks
from tests.project.doc_blocks import ROOT, blocks, documents

PUBLIC = ("moe_ops", "layers", "layers.huggingface", "layers.parallel", "inductor_passes")


def _with_code() -> list[str]:
    return [str(path.relative_to(ROOT)) for path in documents() if any(not b.source for b in blocks(path))]


@pytest.mark.parametrize("document", _with_code())
def test_code_blocks_run_in_order(document: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    doc_blocks.run(ROOT / document)


def test_quoted_code_is_in_the_source() -> None:
    assert any(block.source for path in documents() for block in blocks(path)), (
        "adding_an_op.md quotes permute.py"
    )
    assert not [stale for path in documents() for stale in doc_blocks.stale_quotations(path)]


def test_no_code_slips_past() -> None:
    assert not {path.name: found for path in documents() if (found := doc_blocks.unknown_fences(path))}


@pytest.mark.parametrize("module_name", PUBLIC)
def test_every_exported_name_is_documented(module_name: str) -> None:
    assert not doc_blocks.undocumented(module_name, documents())


def test_readme_quick_start_is_short() -> None:
    quick_start = blocks(ROOT / "README.md")[0]
    assert len(quick_start.code.strip().splitlines()) <= 15


def test_links_inside_the_repository_resolve() -> None:
    assert not {path.name: found for path in documents() if (found := doc_blocks.broken_links(path))}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A document with two blocks that depend on each other, a quotation and a link."""
    (tmp_path / "source.py").write_text("def double(x):\n    return 2 * x\n")
    path = tmp_path / "page.md"
    path.write_text(
        "# Page\n\nSee [the source](source.py) and [a site](https://example.org).\n\n"
        "```python\nimport moe_ops\nfour = 4\n```\n\nThen\n\n```python\nassert four == 4\n```\n\n"
        "```python from source.py\n    return 2 * x\n```\n\nIt documents RoutingConfig.\n\n```text\na\n```\n"
    )
    return path


def _changed(page: Path, old: str, new: str) -> Path:
    assert old in page.read_text()
    page.write_text(page.read_text().replace(old, new))
    return page


def test_a_true_page(page: Path) -> None:
    doc_blocks.run(page)
    for wrong in (doc_blocks.unknown_fences, doc_blocks.broken_links):
        assert not wrong(page)
    assert not doc_blocks.stale_quotations(page, page.parent)


@pytest.mark.parametrize(
    ("old", "new", "error", "line"),
    [
        ("four == 4", "four == 5", AssertionError, 13),
        ("four = 4", "four = moe_ops.no_such_name", AttributeError, 7),
        ("assert four", "assert for", SyntaxError, None),
    ],
    ids=["wrong assert", "missing name", "no python"],
)
def test_code_that_is_wrong(page: Path, old: str, new: str, error, line) -> None:
    with pytest.raises(error) as raised:
        doc_blocks.run(_changed(page, old, new))
    assert line is None or raised.traceback[-1].lineno + 1 == line


def test_a_quotation_that_is_no_longer_true(page: Path) -> None:
    stale = doc_blocks.stale_quotations(_changed(page, "return 2 * x", "return 3 * x"), page.parent)
    assert stale == ["page.md:16 is not in source.py any more"]


@pytest.mark.parametrize(
    "fence", ["```py", "``` python", "    ```python", "```python3", "~~~python", "```python of x.py"]
)
def test_a_fence_that_would_hide_code(page: Path, fence: str) -> None:
    _changed(page, "```python\nassert", f"{fence}\nassert")
    assert doc_blocks.unknown_fences(page) == [fence]


def test_a_link_to_nowhere(page: Path) -> None:
    assert doc_blocks.broken_links(_changed(page, "(source.py)", "(gone.py#part)")) == ["gone.py"]


def test_a_name_that_no_page_mentions(page: Path) -> None:
    missing = doc_blocks.undocumented("moe_ops", [page])
    assert "RoutingConfig" not in missing
    assert "fused_moe" in missing


def test_what_an_operand_costs():
    """The count in docs/adding_an_op.md."""
    page = (ROOT / "docs/adding_an_op.md").read_text()
    claimed = re.search(r"is (\d+) lines of `moe_ops`, in (\w+) files", page)
    files = [path.read_text().splitlines() for path in (ROOT / "moe_ops").rglob("*.py")]
    found = [sum("is_recording" in line for line in lines) for lines in files]
    assert (sum(found), sum(map(bool, found))) == (int(claimed[1]), {"three": 3}[claimed[2]])
