"""How tokens get to experts and back, in Python: the body of `experts(x, weights, ids, ...)`, a `total` [T, H]."""

from collections.abc import Callable

from tests.fuzz.raising.grammar import Case
from tests.fuzz.raising.mutations import instead, line_at
from tests.fuzz.raising.products import Way, expert_lines, weighed

DENSE = {
    "scatter": "dense = torch.zeros(x.shape[0], E, dtype=weights.dtype).scatter(1, idsw, weights)",
    "mask": "dense = ((idsw.unsqueeze(-1) == torch.arange(E)) * weights.unsqueeze(-1)).sum(1)",
    "where": "dense = torch.where(idsw.unsqueeze(-1) == torch.arange(E), weights.unsqueeze(-1), 0.0).sum(1)",
    "scatter_add": "dense = torch.zeros(x.shape[0], E, dtype=weights.dtype).scatter_add(1, idsw, weights)",
    "one_hot": 'dense = torch.einsum("tk,tke->te", weights, F.one_hot(idsw, E).to(weights.dtype))',
    "softmax of scattered": (
        'dense = torch.full((x.shape[0], E), float("-inf"), dtype=weights.dtype).scatter(1, idsw, weights).softmax(-1)'
    ),
}
OF_EXPERT = {
    "mask": "weight = (weights * (idsw == e)).sum(-1, keepdim=True)",
    "where": "weight = torch.where(idsw == e, weights, 0.0).sum(-1, keepdim=True)",
}
BEGIN = {"nothing": "torch.zeros_like(x)", "tokens": "x", "shared": "shared(x, s1, s2)"}


def _indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def _weights_of_one(case: Case) -> tuple[list[str], Case]:
    """Forms of all experts have weights of ones where others have none."""
    if case["weighed"] != "nowhere":
        return [], case
    return ["weights = torch.ones_like(weights)"], case.but("weighed", "after")


def _dense(case: Case) -> list[str]:
    """Weights [T, E], zero for those that nobody chose."""
    return [*DENSE[case["dense"]].split("\n"), *line_at("dense", case.mutations)]


def _added(case: Case) -> tuple[list[str], list[str], list[str]]:
    """What stands before, in and after a loop in which `out` is added up."""
    begin = BEGIN[case["begin"]]
    turn = line_at("turn", case.mutations)
    if case["begin"] != "nothing":
        step = case.chosen("sum", ("total = total + out", "total = out + total"))
        return [f"total = {begin}"], [step, *turn], []
    ways = (
        ([f"total = {begin}"], ["total = total + out", *turn], []),
        (["total = None"], ["total = out if total is None else total + out", *turn], []),
        (["outs = []"], ["outs.append(out)"], ["total = torch.stack(outs).sum(0)"]),
        (["outs = []"], ["outs.append(out)"], ["total = sum(outs)"]),
        ([f"total = {begin}"], ["total += out", *turn], []),
    )
    return ways[int(case["sum"])]


def _loop(case: Case) -> list[str]:
    ones, case = _weights_of_one(case)
    weight = OF_EXPERT.get(case["dense"])
    before, within, after = _added(case)
    second = instead("expert", case.mutations, "e")
    index, rows = f"[{second}]", "(x1 * weight).to(x.dtype)"
    way = Way("row", "row", "x1", "[e]", index, "[e]", index, "weight", "row", rows)
    body = [weight or "weight = dense[:, e, None]", *expert_lines(case, way), *weighed(case, way), *within]
    experts = instead("experts", case.mutations, "range(E)")
    dense = [] if weight else _dense(case)
    return [*ones, *dense, *before, f"for e in {experts}:", *_indented(body), *after]


def _turns(case: Case) -> list[str]:
    weight = "weights[:, k, None]"
    rows = f"(x1 * {weight}).to(x.dtype)"
    way = Way("slot", "slot", "x1", "[i]", "[i2]", "[i]", "[i2]", weight, "slot", rows)
    before, within, after = _added(case)
    body = ["i, i2 = ids[:, k], ids2[:, k]", *expert_lines(case, way), *weighed(case, way), *within]
    choices = instead("choices", case.mutations, "range(K)")
    return [*before, f"for k in {choices}:", *_indented(body), *after]


def _turns_and_experts(case: Case) -> list[str]:
    ones, case = _weights_of_one(case)
    second = instead("expert", case.mutations, "e")
    index, rows = f"[{second}]", "(x1 * weight).to(x.dtype)"
    way = Way("row", "row", "x1", "[e]", index, "[e]", index, "weight", "row", rows)
    before, within, after = _added(case)
    weight = (
        "weight = torch.where(idsw[:, k] == e, weights[:, k], 0.0).unsqueeze(-1)",
        "weight = (weights[:, k] * (idsw[:, k] == e)).unsqueeze(-1)",
    )
    body = [case.chosen("rows", weight), *expert_lines(case, way), *weighed(case, way), *within]
    choices = instead("choices", case.mutations, "range(K)")
    experts = instead("experts", case.mutations, "range(E)")
    loops = [f"for k in {choices}:", f"    for e in {experts}:", *_indented(_indented(body))]
    return [*ones, *before, *loops, *after]


def _begun(case: Case, lines: list[str]) -> list[str]:
    """With what a sum begins with, where it is not the sum's own."""
    return lines if case["begin"] == "nothing" else [*lines, f"total = {BEGIN[case['begin']]} + total"]


def _gathered(case: Case) -> list[str]:
    weight = "weights.unsqueeze(-1)"
    rows = f"(x1.unsqueeze(1) * {weight}).to(x.dtype)"
    way = Way("token", "pair", "x1", "[ids]", "[ids2]", "[ids]", "[ids2]", weight, "pair", rows)
    choices = instead("choices", case.mutations, "range(K)")
    plain = ("total = out.sum(1)", "total = out.sum(dim=-2)", f"total = sum(out[:, k] for k in {choices})")
    if case["weighed"] == "after":
        plain = tuple(f"out = out * {weight}\n{each}" for each in plain)
        plain += (
            'total = torch.einsum("tkh,tk->th", out.to(weights.dtype), weights)',
            "total = torch.bmm(weights.unsqueeze(1), out.to(weights.dtype)).squeeze(1)",
        )
    return _begun(case, [*expert_lines(case, way), *case.chosen("sum", plain).split("\n")])


def _scattered(case: Case, tokens: str) -> tuple[str, ...]:
    """Sums of rows [S, H] into those of their tokens."""
    index_add = f"total = {BEGIN[case['begin']]}.to(out.dtype).index_add(0, {tokens}, out)"
    added = f"total = {BEGIN[case['begin']]}.to(out.dtype).scatter_add(0, {tokens}.unsqueeze(-1).expand(-1, H), out)"
    return index_add, added


def _flat(case: Case) -> list[str]:
    rows = (
        *("x1.repeat_interleave(K, 0)", "x1.unsqueeze(1).expand(-1, K, -1).reshape(-1, H)"),
        "x1[torch.arange(x.shape[0] * K) // K]",
    )
    weight, chosen = "weights.reshape(-1, 1)", case.chosen("rows", rows)
    weighed_rows = f"({chosen} * {weight}).to(x.dtype)"
    way = Way("slot", "slot", chosen, "[i]", "[i2]", "[i]", "[i2]", weight, "slot", weighed_rows)
    index_add, scatter_add = _scattered(case, "(torch.arange(x.shape[0] * K) // K)")
    begin = "" if case["begin"] == "nothing" else f"{BEGIN[case['begin']]} + "
    sums = (
        *(f"total = {begin}out.view(-1, K, H).sum(1)", index_add, scatter_add),
        f"total = {begin}out.unflatten(0, (-1, K)).sum(dim=1)",
        f"total = {begin}torch.einsum('tkh->th', out.view(-1, K, H))",
    )
    slots = "i, i2 = ids.reshape(-1), ids2.reshape(-1)"
    return [slots, *expert_lines(case, way), *weighed(case, way), case.chosen("sum", sums)]


def _by_choice(case: Case) -> list[str]:
    rows = (
        *("x1.repeat(K, 1)", "x1.expand(K, -1, -1).reshape(-1, H)"),
        "x1[torch.arange(x.shape[0] * K) % x.shape[0]]",
    )
    weight, chosen = "weights.T.reshape(-1, 1)", case.chosen("rows", rows)
    weighed_rows = f"({chosen} * {weight}).to(x.dtype)"
    way = Way("slot", "slot", chosen, "[i]", "[i2]", "[i]", "[i2]", weight, "slot", weighed_rows)
    begin = "" if case["begin"] == "nothing" else f"{BEGIN[case['begin']]} + "
    sums = (
        f"total = {begin}out.view(K, -1, H).sum(0)",
        *_scattered(case, "(torch.arange(x.shape[0] * K) % x.shape[0])"),
    )
    slots = "i, i2 = ids.T.reshape(-1), ids2.T.reshape(-1)"
    return [slots, *expert_lines(case, way), *weighed(case, way), case.chosen("sum", sums)]


ORDERS = {
    "argsort": ["order = ids.reshape(-1).argsort(stable=True)"],
    "sort": ["_, order = ids.reshape(-1).sort()"],
    "one_hot": [
        "of_expert = F.one_hot(ids.reshape(-1), E)",
        "place = (of_expert.cumsum(0) * of_expert).sum(-1) - 1",
        "place = place + (of_expert.sum(0).cumsum(0) - of_expert.sum(0))[ids.reshape(-1)]",
        "order = torch.zeros_like(place).scatter(0, place, torch.arange(place.shape[0]))",
    ],
}
COUNTS = {
    "histc": "torch.histc(ids.reshape(-1).to(torch.float), bins=E, min=0, max=E - 1)",
    "bincount": "torch.bincount(ids.reshape(-1), minlength=E)",
    "one_hot": "F.one_hot(ids.reshape(-1), E).sum(0)",
    "compared": "(ids.reshape(-1).unsqueeze(-1) == torch.arange(E)).sum(0)",
}


def _in_order(case: Case, offsets: list[str], kind: str, index: str) -> list[str]:
    """Rows in the order of experts."""
    weight = "weights.reshape(-1)[order].unsqueeze(-1)"
    weighed_rows = f"(x1[order // K] * {weight}).to(x.dtype)"
    way = Way(
        kind,
        kind,
        "x1[order // K]",
        index,
        index.replace("i", "i2"),
        "[i]",
        "[i2]",
        weight,
        kind,
        weighed_rows,
    )
    begin = "" if case["begin"] == "nothing" else f"{BEGIN[case['begin']]} + "
    back = (
        "back = torch.empty_like(order)\nback[order] = torch.arange(order.shape[0])",
        "back = order.argsort()",
    )
    returned = [*case.chosen("rows", back).split("\n"), *line_at("back", case.mutations)]
    put = "slots = torch.zeros_like(out)\nslots[order] = out\n"
    sums = (
        "\n".join([*returned, f"total = {begin}out[back].view(-1, K, H).sum(1)"]),
        *_scattered(case, "(order // K)"),
        f"{put}total = {begin}slots.view(-1, K, H).sum(1)",
    )
    lines = [*ORDERS[case["order"]], *line_at("order", case.mutations), *offsets]
    lines += ["i, i2 = ids.reshape(-1)[order], ids2.reshape(-1)[order]", *expert_lines(case, way)]
    return [*lines, *weighed(case, way), *case.chosen("sum", sums).split("\n")]


def _sorted(case: Case) -> list[str]:
    return _in_order(case, [], "slot", "[i]")


def _grouped(case: Case) -> list[str]:
    offsets = f"offsets = {COUNTS[case['counts']]}.cumsum(0, dtype=torch.int32)"
    return _in_order(case, [offsets, *line_at("offsets", case.mutations)], "grouped", "")


def _at_once(case: Case) -> list[str]:
    ones, case = _weights_of_one(case)
    weight, rows = "dense.unsqueeze(-1)", "(x1.unsqueeze(1) * dense.unsqueeze(-1)).to(x.dtype)"
    way = Way("token of all", "of all", "x1", "", "", "", "", weight, "of all", rows)
    sums = ("total = out.sum(1)",)
    if case["weighed"] == "after":
        sums = (
            f"total = (out * {weight}).sum(1)",
            'total = torch.einsum("teh,te->th", out.to(dense.dtype), dense)',
            "total = torch.bmm(dense.unsqueeze(1), out.to(dense.dtype)).squeeze(1)",
        )
    return _begun(case, [*ones, *_dense(case), *expert_lines(case, way), case.chosen("sum", sums)])


def _by_expert(case: Case) -> list[str]:
    ones, case = _weights_of_one(case)
    weight, rows = "dense.T.unsqueeze(-1)", "(x1 * dense.T.unsqueeze(-1)).to(x.dtype)"
    each = ".unsqueeze(1)"
    way = Way("token by expert", "by expert", "x1", "", "", each, each, weight, "by expert", rows)
    experts = instead("experts", case.mutations, "range(E)")
    sums = ("total = out.sum(0)", f"total = sum(out[e] for e in {experts})")
    if case["weighed"] == "after":
        sums = tuple(f"out = out * {weight}\n{each}" for each in sums)
        sums += ('total = torch.einsum("eth,te->th", out.to(dense.dtype), dense)',)
    lines = [*ones, *_dense(case), *expert_lines(case, way), *case.chosen("sum", sums).split("\n")]
    return _begun(case, lines)


def _picked(case: Case) -> list[str]:
    """Out of what all experts give for all tokens, what was chosen."""
    weight = "weights.unsqueeze(-1)"
    way = Way("token of all", "of all", "x1", "", "", "", "", weight)
    picks = (
        "out = out.gather(1, idsw.unsqueeze(-1).expand(-1, -1, H))",
        "out = out[torch.arange(x.shape[0]).unsqueeze(1), idsw]",
        'out = torch.einsum("tke,teh->tkh", F.one_hot(idsw, E).to(out.dtype), out)',
    )
    is_weighed = case["weighed"] != "nowhere"
    case = case.but("weighed", "nowhere")
    sums = (
        f"total = (out * {weight}).sum(1)",
        'total = torch.einsum("tkh,tk->th", out.to(weights.dtype), weights)',
    )
    total = case.chosen("sum", sums) if is_weighed else "total = out.sum(1)"
    return _begun(case, [*expert_lines(case, way), case.chosen("rows", picks), total])


def _masks(case: Case) -> list[str]:
    """GShard's, with a capacity."""
    ones, case = _weights_of_one(case)
    each = ".unsqueeze(1)"
    way = Way("by expert", "by expert", "rows", "", "", each, each, "")
    case = case.but("weighed", "after")
    chosen = ("(dense > 0).int()", "(idsw.unsqueeze(-1) == torch.arange(E)).any(1).int()")
    lines = [
        *ones,
        *_dense(case),
        f"chosen = {case.chosen('rows', chosen)}",
        "place = chosen.cumsum(0) - 1",
        *line_at("place", case.mutations),
    ]
    lines += [
        "slots = F.one_hot(place.clamp(0, 3), 4).to(x.dtype) * (chosen * (place < 4)).to(x.dtype).unsqueeze(-1)",
        *line_at("slots", case.mutations),
        'rows = torch.einsum("tec,th->ech", slots, x1)',
        *expert_lines(case, way),
        'total = torch.einsum("tec,ech->th", (slots * dense.unsqueeze(-1)).to(x.dtype), out)',
    ]
    return _begun(case, lines)


FORMS: dict[str, Callable[[Case], list[str]]] = {
    "loop": _loop,
    "turns": _turns,
    "turns and experts": _turns_and_experts,
    "gathered": _gathered,
    "flat": _flat,
    "by choice": _by_choice,
    "sorted": _sorted,
    "grouped": _grouped,
    "at once": _at_once,
    "by expert": _by_expert,
    "picked": _picked,
    "masks": _masks,
}
