"""Routers in Python: `weights` and `ids` [T, K] of tokens `x`, choice by choice of a `Case`."""

from tests.fuzz.raising.grammar import Case
from tests.fuzz.raising.mutations import line_at

LOGITS = {
    "linear": "logits = F.linear(x, router)",
    "matmul": "logits = x @ router.T",
    "float": "logits = F.linear(x, router).float()",
    "wide": "logits = x.float() @ router.float().T",
    "biased": "logits = F.linear(x, router, bias)",
    "of a batch": "logits = F.linear(x.unsqueeze(0), router).view(-1, E)",
}
CHANGES = {
    "none": "",
    "temperature": "logits = logits / 0.7",
    "cap": "logits = 5 * torch.tanh(logits / 5)",
    "learned": "logits = logits * scale",
    "centred": "logits = logits - logits.mean(-1, keepdim=True)",
    "clamped": "logits = logits.clamp(-10, 10)",
    "masked": 'logits = logits.masked_fill(torch.arange(E) == 1, float("-inf"))',
    "masked by 1e9": "logits = logits.masked_fill(torch.arange(E) == 1, -1e9)",
    "floored": "logits = logits.masked_fill(logits < -1, -1e4)",
    "zeroed": "logits = torch.where(logits > -0.5, logits, 0.0)",
    "finite": "logits = logits.nan_to_num(0.0)",
}
SCORES = {
    "sigmoid": "scores = logits.sigmoid()",
    "softmax": "scores = logits.softmax(-1)",
    "log_softmax": "scores = F.log_softmax(logits, -1)",
    "sqrtsoftplus": "scores = F.softplus(logits).sqrt()",
    "squares": "scores = logits.softmax(-1).square()",
    "raw": "scores = logits",
    "exp": "scores = logits.exp()",
    "tanh": "scores = logits.tanh()",
    "relu": "scores = logits.relu()",
    "product": "scores = logits.sigmoid() * logits.softmax(-1)",
    "of tokens": "scores = logits.softmax(0)",
}
BEST = "weights, ids = scores.topk(K, dim=-1)"
GATHERED = "weights = scores.gather(1, ids)"
GROUPS = "groups = scores.view(-1, E // 2, 2)"
KEPT = [
    "kept = of_group.topk(max(1, E // 4), dim=-1).indices",
    "mask = torch.zeros_like(of_group).scatter(1, kept, 1.0)",
    "mask = mask.unsqueeze(-1).expand(-1, E // 2, 2).reshape(-1, E)",
]
ROUTES: dict[str, tuple[str, list[str]]] = {
    "softmax, topk": ("softmax", [BEST]),
    "topk, softmax": ("raw", [BEST, "weights = weights.softmax(-1)"]),
    "sigmoid, topk": ("sigmoid", [BEST]),
    "topk, sigmoid": ("raw", [BEST, "weights = weights.sigmoid()"]),
    "raw": ("raw", [BEST]),
    "log_softmax, exp": ("log_softmax", [BEST, "weights = weights.exp()"]),
    "sqrtsoftplus": ("sqrtsoftplus", [BEST]),
    "squares": ("squares", [BEST]),
    "sorted": (
        "softmax",
        ["ranked, order = scores.sort(-1, descending=True)", "weights, ids = ranked[:, :K], order[:, :K]"],
    ),
    "argsort": ("softmax", ["ids = scores.argsort(-1, descending=True)[:, :K]", GATHERED]),
    "corrected": ("sigmoid", ["ids = (scores + bias).topk(K, dim=-1).indices", GATHERED]),
    "corrected softmax": ("softmax", ["ids = torch.topk(scores + bias, K).indices", GATHERED]),
    "with the bias": ("sigmoid", ["scores = scores + bias", BEST]),
    "groups by two": (
        "sigmoid",
        [
            *("choice = scores + bias", "of_group = choice.view(-1, E // 2, 2).sum(-1)", *KEPT),
            "ids = choice.masked_fill(mask == 0, float('-inf')).topk(K, dim=-1).indices",
            GATHERED,
        ],
    ),
    "groups by max": (
        "softmax",
        [GROUPS, "of_group = groups.amax(-1)", *KEPT, "scores = scores.masked_fill(mask == 0, 0.0)", BEST],
    ),
    "in turn": (
        "softmax",
        [
            *(
                "left, found = scores, []",
                "for _ in range(K):",
                "    found.append(left.argmax(-1, keepdim=True))",
            ),
            "    left = left.scatter(1, found[-1], -1.0)",
            *("ids = torch.cat(found, 1)", GATHERED),
        ],
    ),
    "unsorted": ("softmax", ["weights, ids = scores.topk(K, dim=-1, sorted=False)"]),
    "one more": (
        "softmax",
        ["weights, ids = scores.topk(min(K + 1, E), dim=-1)", "weights, ids = weights[:, :K], ids[:, :K]"],
    ),
    "of negative": ("softmax", ["ids = (-scores).topk(K, dim=-1, largest=False).indices", GATHERED]),
    "smallest": ("softmax", ["weights, ids = scores.topk(K, dim=-1, largest=False)"]),
    "scattered": (
        "raw",
        [
            "best, ids = scores.topk(K, dim=-1)",
            'all_weights = torch.full_like(scores, float("-inf")).scatter(1, ids, best).softmax(-1)',
            "weights = all_weights.gather(1, ids)",
        ],
    ),
    "first twice": ("softmax", ["ids = scores.argmax(-1, keepdim=True).expand(-1, K)", GATHERED]),
    "of a table": (
        "softmax",
        ["ids = (torch.arange(x.shape[0]).unsqueeze(1) * 3 + torch.arange(K)) % E", GATHERED],
    ),
    "exp": ("exp", [BEST]),
    "tanh": ("tanh", [BEST]),
    "relu": ("relu", [BEST]),
    "product": ("product", [BEST]),
    "of tokens": ("of tokens", [BEST]),
    "one more within": (
        "raw",
        ["best, ids = scores.topk(min(K + 1, E))", "weights, ids = best.softmax(-1)[:, :K], ids[:, :K]"],
    ),
    "bias behind": ("sigmoid", [BEST, "weights = weights + bias[ids]"]),
    "softmax of sigmoids": ("sigmoid", [BEST, "weights = weights.softmax(-1)"]),
    "by max": ("softmax", ["weights, ids = scores.max(-1, keepdim=True)"]),
}
RENORMALISED = {
    "none": "",
    "sum": "weights = weights / weights.sum(-1, keepdim=True)",
    "eps": "weights = weights / (weights.sum(-1, keepdim=True) + 1e-3)",
    "tiny eps": "weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)",
    "clamp": "weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)",
    "where": (
        "total = weights.sum(-1, keepdim=True)\nweights = torch.where(total > 0, weights / total, weights)"
    ),
    "normalize": "weights = F.normalize(weights, p=1.0, dim=-1)",
    "softmax": "weights = weights.softmax(-1)",
    "of all": "weights = weights / scores.sum(-1, keepdim=True)",
}
SCALES = {
    "none": "",
    "number": "weights = weights * 2.5",
    "buffer": "weights = weights * scale",
    "by K": "weights = weights / K",
    "per expert": "weights = weights * bias[ids]",
}
LATE = {
    "none": "",
    "detach": "weights = weights.detach()",
    "threshold": "weights = torch.where(weights > 0.2, weights, 0.0)",
    "top-p": "weights = weights * (weights.cumsum(-1) - weights < 0.6)",
    "capacity": (
        "of_expert = F.one_hot(ids.reshape(-1), E)\n"
        "place = ((of_expert.cumsum(0) - 1) * of_expert).sum(-1).view(ids.shape)\n"
        "weights = torch.where(place < 3, weights, 0.0)"
    ),
    "tokens": "weights = weights * (x[:, -1:] > 0)",
    "first alone": "weights = weights.masked_fill(torch.arange(K) >= 1, 0.0)",
    "dropped": (
        "is_dropped = weights < 0.2\n"
        "ids, weights = torch.where(is_dropped, -1, ids), weights.masked_fill(is_dropped, 0.0)"
    ),
    "dropped by id": "ids = torch.where(weights < 0.2, -1, ids)",
    "dropped and zero": (
        "is_dropped = x[:, -1:] > 0.1\nids, weights = ids.masked_fill(is_dropped, -1), weights * ~is_dropped"
    ),
}
CASTS = {"cast": "weights = weights.to(x.dtype)", "as they are": ""}


def route_lines(case: Case) -> list[str]:
    """The body of `route(x, ...)`."""
    score, chosen = ROUTES[case["route"]]
    texts = [LOGITS[case["logits"]], CHANGES[case["change"]], SCORES[score]]
    texts += [*line_at("scores", case.mutations), *chosen]
    texts += [RENORMALISED[case["renormalise"]], SCALES[case["scale"]], LATE[case["late"]]]
    texts += [*line_at("ids", case.mutations), *line_at("weights", case.mutations), CASTS[case["weights"]]]
    return [line for text in texts if text for line in text.split("\n")]
