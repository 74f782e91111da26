"""The recorded table, one row for each configuration."""

import csv
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tests.coverage.measure import Row

TABLE = Path(__file__).parent / "table.csv"
_FIELDS = [each.name for each in dataclasses.fields(Row)]


def recorded() -> list[Row]:
    """What the last full measurement found."""
    if not TABLE.exists():
        return []
    with TABLE.open(newline="") as file:
        return [_row(each) for each in csv.DictReader(file)]


def write(rows: Sequence[Row]) -> None:
    """Errors with one digit: more is of the machine."""
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_FIELDS)
        writer.writerows([_text(getattr(row, name)) for name in _FIELDS] for row in rows)


def _text(value: object) -> str:
    return f"{value:.0e}" if isinstance(value, float) else str(value)


def _row(values: dict[str, str]) -> Row:
    kinds = {each.name: each.type for each in dataclasses.fields(Row)}
    return Row(**{name: kinds[name](text) for name, text in values.items()})  # type: ignore[operator]
