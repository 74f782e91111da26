"""A mutant: one wrong edit of the source, and the tests that have to notice it."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_APART = "\n\n\n"


@dataclass(frozen=True, slots=True)
class Mutant:
    """In `path` the text `old`, which occurs there once, becomes `new`.

    `tests` are the nearest test files or node ids, separated by spaces. Those of kernels run interpreted.
    """

    path: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return f"{self.path}: {_line(self.old)}  ->  {_line(self.new)}"

    def edited(self, source: str) -> str:
        """`source` with the edit. Raises ValueError when it cannot be made or changes nothing."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self}: the old text is there {source.count(self.old)} times: expected once")
        if self.old == self.new:
            raise ValueError(f"{self}: expected a new text that differs")
        return source.replace(self.old, self.new)

    def fault(self, tree: Path) -> str:
        """Why this is no mutant of `tree`, empty when it is one: Python's own grammar must not reject it."""
        try:
            self._expect_python((tree / self.path).read_text())
        except (OSError, SyntaxError, ValueError) as error:
            return str(error)
        return "".join(
            f"{self}: there is no {target}" for target in self.tests.split() if not _exists(tree, target)
        )

    def _expect_python(self, source: str) -> None:
        """Raises SyntaxError. Of a file whose definitions are two empty lines apart the one edited is enough."""
        edited, start = self.edited(source), source.index(self.old)
        before, _, _ = edited[:start].rpartition(_APART)
        behind = edited.find(_APART, start + len(self.new))
        with suppress(SyntaxError):
            compile(
                edited[len(before) : behind if behind >= 0 else None], self.path, "exec", dont_inherit=True
            )
            return
        compile(edited, self.path, "exec", dont_inherit=True)


def _exists(tree: Path, target: str) -> bool:
    name, *inside = target.partition("[")[0].split("::")
    path = tree / name
    return path.is_file() and all(f"{each}(" in path.read_text() for each in inside)


def _line(text: str) -> str:
    return " ".join(text.split()) or "nothing"
