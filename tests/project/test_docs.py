"""The documentation is true: its code runs, its quotations are in the source, and it names all that is public."""

import importlib
import re
import sys
import types

import pytest

from tests.project.doc_blocks import ROOT, blocks, documents

PUBLIC = ("moe_ops", "layers", "layers.huggingface", "inductor_passes")


def _with_code() -> list[str]:
    return [str(path.relative_to(ROOT)) for path in documents() if any(not b.source for b in blocks(path))]


@pytest.mark.parametrize("document", _with_code())
def test_code_blocks_run_in_order(document: str, tmp_path, monkeypatch) -> None:
    path = ROOT / document
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("documentation")  # Dynamo imports the module of a function that it traces
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(path):
        if not block.source:
            padding = "\n" * block.line  # so that a traceback points at the document's line
            exec(compile(padding + block.code, str(path), "exec"), vars(module))


def test_quoted_code_is_in_the_source() -> None:
    quoted = [block for path in documents() for block in blocks(path) if block.source]
    assert quoted, "adding_an_op.md quotes moe_ops/permute.py"
    for block in quoted:
        text = (ROOT / block.source).read_text()
        assert block.code.strip("\n") in text, (
            f"{block.path.name}:{block.line} is not in {block.source} any more"
        )


@pytest.mark.parametrize("module_name", PUBLIC)
def test_every_exported_name_is_documented(module_name: str) -> None:
    text = "\n".join(path.read_text() for path in documents())
    missing = [
        name
        for name in importlib.import_module(module_name).__all__
        if not re.search(rf"\b{re.escape(name)}\b", text)
    ]
    assert not missing, f"{module_name} exports names that no document mentions: {missing}"


def test_readme_quick_start_is_short() -> None:
    quick_start = blocks(ROOT / "README.md")[0]
    assert len(quick_start.code.strip().splitlines()) <= 15


def test_links_inside_the_repository_resolve() -> None:
    for path in documents():
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
