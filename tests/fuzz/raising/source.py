"""A `Case` as Python that stands alone, and the functions that it defines."""

import linecache
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.fuzz.raising.forms import FORMS
from tests.fuzz.raising.grammar import Case
from tests.fuzz.raising.mutations import line_at
from tests.fuzz.raising.routers import route_lines

PARAMETERS = (
    "router",
    "bias",
    "scale",
    "w13",
    "w1",
    "w3",
    "w2",
    "every",
    "b13",
    "b1",
    "b3",
    "b2",
    "s1",
    "s2",
)
_GIVEN = ", ".join(PARAMETERS)
_SEEN = {
    ("one matrix", "stored"): "w13 = w13.view(E, 2 * I, H)",
    ("one matrix", "transposed"): "w13 = w13.view(E, H, 2 * I)",
    ("sliced", "stored"): "w13, w2 = every[:, : 2 * I], every[:, 2 * I :].mT",
    ("sliced", "transposed"): "w13, w2 = every[:, : 2 * I].mT, every[:, 2 * I :]",
}
_STORED = {
    "as it is": "",
    "cast": "{0} = {0}.to(x.dtype)",
    "copied": "{0} = {0}.clone()",
    "stacked": "{0} = torch.stack({0}.unbind())",
}
_ENDS = {
    "nothing": "",
    "residual": "total = total + x",
    "shared": "total = total + shared(x, s1, s2)",
    "gated shared": "total = total + torch.sigmoid(x[:, :1]) * shared(x, s1, s2)",
    "divided": "total = total / 2",
    "scaled": "total = total * scale",
    "cast": "total = total.to(x.dtype)",
    "tokens off": "total = total - x",
}
_MODELS = {
    "one": ["return layer(x, {0})"],
    "behind one another": ["return layer(layer(x, {0}) / 4, {0})"],
    "side by side": ["return layer(x, {0}) + layer(x.flip(0), {0}) / 2"],
    "ids of another": [
        *("weights, ids = route(x, {0})", "y = experts(x, weights, ids, {0}) / 4"),
        "return other(y, weights, ids, {0})",
    ],
    "in a batch": ["return layer(x.view(-1, H), {0}).view(x.shape)"],
}


def _defined(name: str, given: str, lines: list[str]) -> list[str]:
    return [f"def {name}({given}):", *("    " + line for line in lines), "", ""]


def _stored(case: Case) -> list[str]:
    names = {"apart": ("w1", "w3", "w2"), "ungated": ("w1", "w2")}.get(case["packing"], ("w13", "w2"))
    seen = _SEEN.get((case["packing"], case["layout"]), "")
    return [
        *([seen] if seen else []),
        *(_STORED[case["stored"]].format(name) for name in names if case["stored"] != "as it is"),
    ]


def _experts(case: Case) -> list[str]:
    lines = ["ids2, idsw, x1 = ids, ids, x"]
    for place in ("ids2", "idsw", "x1"):
        lines += line_at(place, case.mutations)
    lines += [
        *_stored(case),
        *line_at("stored", case.mutations),
        *FORMS[case["form"]](case),
        *line_at("total", case.mutations),
    ]
    return [*lines, *filter(None, [_ENDS[case["end"]]]), "return total.to(x.dtype)"]


def source(case: Case) -> str:
    """`model(x, *PARAMETERS)` in Python, with its sizes."""
    sizes = case.sizes
    lines = ["import torch", "from torch.nn import functional as F", ""]
    lines += [f"E, K, H, I = {sizes.experts}, {sizes.top_k}, {sizes.hidden}, {sizes.intermediate}", "", ""]
    shared = ["return F.linear(F.silu(F.linear(x, s1)), s2)"]
    lines += _defined("shared", "x, s1, s2", shared)
    lines += _defined("route", f"x, {_GIVEN}", [*route_lines(case), "return weights, ids"])
    lines += _defined("experts", f"x, weights, ids, {_GIVEN}", _experts(case))
    if case["model"] == "ids of another":
        other = case if case["other form"] == "same" else case.but("form", case["other form"])
        lines += _defined("other", f"x, weights, ids, {_GIVEN}", _experts(other))
    layer = [f"weights, ids = route(x, {_GIVEN})", f"return experts(x, weights, ids, {_GIVEN})"]
    lines += _defined("layer", f"x, {_GIVEN}", layer)
    model = [line.format(_GIVEN) for line in _MODELS[case["model"]]]
    return "\n".join([*lines, *_defined("model", f"x, {_GIVEN}", model)]).rstrip() + "\n"


def grouped_in_double(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`torch._grouped_mm`, which knows no float64."""
    ends = [0, *offsets.tolist()]
    parts = [rows[start:end] @ each for start, end, each in zip(ends[:-1], ends[1:], weight, strict=True)]
    return torch.cat([*parts, rows.new_zeros(len(rows) - ends[-1], weight.shape[2])])


def in_double(text: str) -> str:
    """Where a model casts to float32, to float64."""
    text = text.replace(".float()", ".double()").replace("torch._grouped_mm", "grouped_mm")
    return text.replace("torch.float32", "torch.float64")


def model_of(text: str, name: str) -> Callable[..., Tensor]:
    """The function `model` of a source, which tracebacks show."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    defined: dict[str, Any] = {"F": F, "torch": torch, "grouped_mm": grouped_in_double}
    exec(compile(text, name, "exec"), defined)
    return defined["model"]
