"""Products with experts in Python, for each way in which rows meet weights, and what stands between two of them."""

from typing import NamedTuple

from tests.fuzz.raising.grammar import Case
from tests.fuzz.raising.mutations import line_at

STORED: dict[str, tuple[str, ...]] = {  # weights [E, B, A]
    "row": (
        *("F.linear({r}, {w})", "{r} @ {w}.T", 'torch.einsum("ti,oi->to", {r}, {w})', "({w} @ {r}.T).T"),
    ),
    "slot": (
        *("torch.bmm({w}, {r}.unsqueeze(-1)).squeeze(-1)", 'torch.einsum("si,soi->so", {r}, {w})'),
        *("({r}.unsqueeze(1) @ {w}.mT).squeeze(1)", "({w} * {r}.unsqueeze(1)).sum(-1)"),
    ),
    "token": (
        *('torch.einsum("ti,tkoi->tko", {r}, {w})', "({w} @ {r}[:, None, :, None]).squeeze(-1)"),
        *("({r}[:, None, None] @ {w}.mT).squeeze(2)", "({w} * {r}[:, None, None]).sum(-1)"),
    ),
    "pair": (
        *('torch.einsum("tki,tkoi->tko", {r}, {w})', "({w} @ {r}.unsqueeze(-1)).squeeze(-1)"),
        *("({r}.unsqueeze(2) @ {w}.mT).squeeze(2)", "({w} * {r}.unsqueeze(2)).sum(-1)"),
    ),
    "token of all": (
        *('torch.einsum("ti,eoi->teo", {r}, {w})', "({r} @ {w}.mT).transpose(0, 1)"),
        *(
            "torch.tensordot({r}, {w}, ([1], [2]))",
            "F.linear({r}, {w}.flatten(0, 1)).view(-1, E, {w}.shape[1])",
        ),
    ),
    "of all": (
        *('torch.einsum("tei,eoi->teo", {r}, {w})', "({r}.transpose(0, 1) @ {w}.mT).transpose(0, 1)"),
        "({w} @ {r}.unsqueeze(-1)).squeeze(-1)",
    ),
    "token by expert": (
        *(
            "{r} @ {w}.mT",
            'torch.einsum("ti,eoi->eto", {r}, {w})',
            "torch.bmm({r}.expand(E, -1, -1), {w}.mT)",
        ),
    ),
    "by expert": ("{r} @ {w}.mT", 'torch.einsum("eti,eoi->eto", {r}, {w})', "torch.bmm({r}, {w}.mT)"),
    "grouped": ("torch._grouped_mm({r}, {w}.mT, offsets)",),
}
TRANSPOSED: dict[str, tuple[str, ...]] = {  # weights [E, A, B]
    "row": ("{r} @ {w}", "F.linear({r}, {w}.T)", 'torch.einsum("ti,io->to", {r}, {w})', "torch.mm({r}, {w})"),
    "slot": (
        *("torch.bmm({r}.unsqueeze(1), {w}).squeeze(1)", 'torch.einsum("si,sio->so", {r}, {w})'),
        *("({w}.mT @ {r}.unsqueeze(-1)).squeeze(-1)", "({w} * {r}.unsqueeze(-1)).sum(1)"),
    ),
    "token": (
        *('torch.einsum("ti,tkio->tko", {r}, {w})', "({r}[:, None, None] @ {w}).squeeze(2)"),
        *("({w}.mT @ {r}[:, None, :, None]).squeeze(-1)", "({w} * {r}[:, None, :, None]).sum(2)"),
    ),
    "pair": (
        *('torch.einsum("tki,tkio->tko", {r}, {w})', "({r}.unsqueeze(2) @ {w}).squeeze(2)"),
        *("({w}.mT @ {r}.unsqueeze(-1)).squeeze(-1)", "({w} * {r}.unsqueeze(-1)).sum(2)"),
    ),
    "token of all": (
        *('torch.einsum("ti,eio->teo", {r}, {w})', "({r} @ {w}).transpose(0, 1)"),
        "torch.tensordot({r}, {w}, ([1], [1]))",
    ),
    "of all": ('torch.einsum("tei,eio->teo", {r}, {w})', "({r}.transpose(0, 1) @ {w}).transpose(0, 1)"),
    "token by expert": (
        *("{r} @ {w}", 'torch.einsum("ti,eio->eto", {r}, {w})', "torch.bmm({r}.expand(E, -1, -1), {w})"),
    ),
    "by expert": ("{r} @ {w}", 'torch.einsum("eti,eio->eto", {r}, {w})', "torch.bmm({r}, {w})"),
    "grouped": ("torch._grouped_mm({r}, {w}, offsets)",),
}


class Way(NamedTuple):
    """How the rows of a form meet weights: kinds of products, rows, and what picks weights and biases for them."""

    first: str
    second: str
    rows: str
    picked: str
    second_picked: str
    bias_index: str
    second_bias_index: str
    weight: str
    """[..., 1], of rows, or of what experts make of them."""
    weighed_first: str = ""
    """The kind of the first product where weights are on its rows, which are `weighed_rows`."""
    weighed_rows: str = ""


def _product(case: Case, axis: str, kind: str, rows: str, weight: str, bias: str) -> str:
    templates = (STORED if case["layout"] == "stored" else TRANSPOSED)[kind]
    text = case.chosen(axis, templates).format(r=rows, w=weight)
    return f"{text} + {bias}" if bias else text


ACTIVATIONS = {
    "silu": "F.silu({0})",
    "gelu": "F.gelu({0})",
    "gelu_tanh": 'F.gelu({0}, approximate="tanh")',
    "relu": "{0}.relu()",
    "relu2": "{0}.relu().square()",
    "sigmoid": "{0}.sigmoid()",
    "quick": "{0} * ({0} * 1.702).sigmoid()",
    "nothing": "{0}",
    "softplus": "F.softplus({0})",
    "leaky": "F.leaky_relu({0}, 0.01)",
    "relu6": "F.relu6({0})",
    "hardswish": "F.hardswish({0})",
}


def _glu(case: Case) -> list[str]:
    """What is made of `gate` and `up`."""
    activated = ACTIVATIONS[case["activation"]].format("gate")
    lines = {
        "gate first": [f"hidden = {activated} * up"],
        "up first": [f"hidden = up * ({activated})"],
        "limited": ["gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)", f"hidden = {activated} * up"],
        "alpha": [
            "gate, up = gate.clamp(max=1.5), up.clamp(-1.5, 1.5)",
            "hidden = (up + 1) * (gate * (gate * 1.702).sigmoid())",
        ],
        "offset": [f"hidden = {activated} * (up + 1)"],
        "halves": ["hidden = F.glu(torch.cat([up, gate], -1))"],
    }
    return [*line_at("gate", case.mutations), *lines[case["glu"]]]


CUT = {
    "packed": "gate, up = both.chunk(2, -1)",
    "interleaved": "gate, up = both[..., ::2], both[..., 1::2]",
    "up first": "up, gate = both.chunk(2, -1)",
    "one matrix": "gate, up = both.split(I, -1)",
    "sliced": "gate, up = both.chunk(2, -1)",
}
BETWEEN = {
    "none": "",
    "dropout": "hidden = F.dropout(hidden, 0.1, training=False)",
    "scaled": "hidden = hidden * 0.5",
    "normed": "hidden = F.rms_norm(hidden, (I,))",
    "clamped": "hidden = hidden.clamp(-1.0, 1.0)",
    "added": "hidden = hidden + 0.1",
}


def _first(case: Case, way: Way) -> list[str]:
    """`hidden` of rows."""
    is_before = case["weighed"] == "before" and way.weighed_first
    kind, rows = (way.weighed_first, way.weighed_rows) if is_before else (way.first, way.rows)

    def product(name: str) -> str:
        bias = f"b{name[1:]}{way.bias_index}" if case["biases"] in ("both", "first") else ""
        return _product(case, "product", kind, rows, name + way.picked, bias)

    if case["packing"] == "ungated":
        return [f"gate = {product('w1')}", f"hidden = {ACTIVATIONS[case['activation']].format('gate')}"]
    if case["packing"] == "apart":
        return [f"gate = {product('w1')}", f"up = {product('w3')}", *_glu(case)]
    return [f"both = {product('w13')}", CUT[case["packing"]], *_glu(case)]


def expert_lines(case: Case, way: Way) -> list[str]:
    """`out` of rows, weighed where the case says so."""
    bias = f"b2{way.second_bias_index}" if case["biases"] in ("both", "second") else ""
    second = _product(case, "second product", way.second, "hidden", "w2" + way.second_picked, bias)
    lines = [*_first(case, way), BETWEEN[case["between"]], *line_at("hidden", case.mutations)]
    if case["weighed"] == "hidden":
        lines.append(f"hidden = (hidden * {way.weight}).to(x.dtype)")
    return [*filter(None, lines), f"out = {second}", *line_at("out", case.mutations)]


def weighed(case: Case, way: Way) -> list[str]:
    """`out` times weights, if that is where they are."""
    return [f"out = out * {way.weight}"] if case["weighed"] == "after" else []
