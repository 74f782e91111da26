"""The code blocks of the documentation, and what can be wrong with a document."""

import importlib
import re
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FENCES = re.compile(r"^[ \t]*(?:```|~~~)[^\n]*$", re.MULTILINE)
_KNOWN_FENCE = re.compile(r"```(?:python(?: from [\w./]+\.py)?|text)?$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced python block: `source` names the file it quotes, "" for code that runs."""

    path: Path
    line: int
    source: str
    code: str


def blocks(path: Path) -> list[Block]:
    """Every python block of a markdown file. A quotation is fenced as `python from path/of/file.py`."""
    text = path.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        source = match.group(1).strip().removeprefix("from ").strip()
        found.append(Block(path, line, source, match.group(2)))
    return found


def documents() -> list[Path]:
    """README, CONTRIBUTING and everything in docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def run(path: Path) -> None:
    """Runs a document's code, block after block in one module. Raises what it raises, at the document's own lines."""
    # Dynamo imports the module of a function that it traces, and keeps what it has imported under that name.
    module = types.ModuleType(f"documentation_{path.stem}")
    sys.modules[module.__name__] = module
    try:
        for block in blocks(path):
            if not block.source:
                exec(compile("\n" * block.line + block.code, str(path), "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]


def stale_quotations(path: Path, root: Path = ROOT) -> list[str]:
    """Quotations that are not in the source any more."""
    return [
        f"{path.name}:{block.line} is not in {block.source} any more"
        for block in blocks(path)
        if block.source and block.code.strip("\n") not in (root / block.source).read_text()
    ]


def unknown_fences(path: Path) -> list[str]:
    """Fences by which code would slip past `blocks`: indented ones, and languages such as "py"."""
    fences = _FENCES.findall(path.read_text())
    return [fence for fence in fences if not _KNOWN_FENCE.fullmatch(fence)]


def broken_links(path: Path) -> list[str]:
    """Links to files of the repository that are not there."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text())
    return [target for target in targets if not (path.parent / target).exists()]


def undocumented(module_name: str, paths: Iterable[Path]) -> list[str]:
    """Names that a module exports and no document mentions."""
    text = "\n".join(path.read_text() for path in paths)
    names = importlib.import_module(module_name).__all__
    return [name for name in names if not re.search(rf"\b{re.escape(name)}\b", text)]
