"""docs/coverage.md, written from the recorded table."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.coverage.measure import Row

PAGE = Path(__file__).parents[2] / "docs/coverage.md"

_TEXT = """# Families of Hugging Face transformers

What `layers.huggingface.patch(model)` does to every family with a mixture of experts in transformers 5.24: {families} \
families in {configurations} configurations, two layers each, with random weights, in float32 on a CPU.

| of {families} families | |
|---|---|
| experts run on our operators | {experts} |
| routers run on `topk_routing` | {routers} |
| compiled, each layer is one operator | {fused} |

Routers and gates are known by what they compute, not by their names: `patch` runs a module's own code in float64 on \
inputs made for it, numbers small, large and tied, and compares values and gradients with what would take its place. \
Whatever does not agree keeps its own code, and the report of `patch` says why.

Errors are the largest difference from the stock model, over the largest number: of the output, run eagerly and \
compiled (our passes' graph, before machine code), and of the worst of all \
gradients larger than 1e-4 of the largest. "stacked" needs \
`patch(model, stack_experts=True)`.

{table}

## What is left alone

{left}

`python -m tests.coverage` measures all of it again and writes this page.
"""


def page(rows: Sequence[Row]) -> str:
    """The whole page."""
    families = {row.family for row in rows}
    return _TEXT.format(
        families=len(families),
        configurations=len(rows),
        experts=count(rows, lambda row: row.experts > 0),
        routers=count(rows, lambda row: row.routers > 0),
        fused=count(rows, lambda row: row.is_fused),
        table="\n".join([_HEAD, *map(_line, rows)]),
        left="\n".join(f"- {row.name}: {row.left}" for row in rows if row.left),
    )


def count(rows: Sequence[Row], holds: Callable[[Row], bool]) -> int:
    """Families of which every configuration is so."""
    return len({row.family for row in rows} - {row.family for row in rows if not holds(row)})


_HEAD = """| configuration | experts | router | compiled | eager | compiled | gradient |
|---|---|---|---|---|---|---|"""


def _line(row: Row) -> str:
    experts = "no" if not row.experts else "stacked" if row.options else "yes"
    errors = " | ".join(f"{error:.0e}" for error in (row.eager, row.compiled_error, row.gradient))
    return f"| {row.name} | {experts} | {'yes' if row.routers else 'no'} | {row.compiled or 'stock'} | {errors} |"
