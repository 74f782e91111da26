"""A mutant: one wrong edit of the source, and the tests that have to notice it."""

from dataclasses import dataclass
from pathlib import Path


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
            compile(self.edited((tree / self.path).read_text()), self.path, "exec", dont_inherit=True)
        except (OSError, SyntaxError, ValueError) as error:
            return str(error)
        return "".join(
            f"{self}: there is no {target}" for target in self.tests.split() if not _exists(tree, target)
        )


def _exists(tree: Path, target: str) -> bool:
    name, *inside = target.partition("[")[0].split("::")
    path = tree / name
    return path.is_file() and all(f"{each}(" in path.read_text() for each in inside)


def _line(text: str) -> str:
    return " ".join(text.split()) or "nothing"
