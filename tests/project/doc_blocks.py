"""The code blocks of the documentation."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        source = match.group(1).strip().removeprefix("from ").strip()
        found.append(Block(path, line, source, match.group(2)))
    return found


def documents() -> list[Path]:
    """README, CONTRIBUTING and everything in docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
