"""What a random layer is made of: independent choices, each by name, the plainest first."""

import random
from dataclasses import dataclass, field, replace

from tests.fuzz.raising.mutations import MUTATIONS

AXES: dict[str, tuple[str, ...]] = {
    # the router
    "logits": ("linear", "matmul", "float", "wide", "biased", "of a batch"),
    "change": (
        *(
            "none",
            "temperature",
            "cap",
            "learned",
            "centred",
            "clamped",
            "masked",
            "masked by 1e9",
            "floored",
        ),
        *("zeroed", "finite"),
    ),
    "route": (
        *("softmax, topk", "topk, softmax", "sigmoid, topk", "topk, sigmoid", "raw", "log_softmax, exp"),
        *("sqrtsoftplus", "squares", "sorted", "argsort", "corrected", "corrected softmax", "with the bias"),
        *("groups by two", "groups by max", "in turn", "unsorted", "one more", "of negative", "smallest"),
        *("scattered", "first twice", "of a table", "by max"),
        *(
            "exp",
            "tanh",
            "relu",
            "product",
            "of tokens",
            "one more within",
            "bias behind",
            "softmax of sigmoids",
        ),
    ),
    "renormalise": ("none", "sum", "eps", "tiny eps", "clamp", "where", "normalize", "softmax", "of all"),
    "scale": ("none", "number", "buffer", "by K", "per expert"),
    "late": (
        *("none", "detach", "threshold", "top-p", "capacity", "tokens", "first alone", "dropped"),
        *("dropped by id", "dropped and zero"),
    ),
    "weights": ("cast", "as they are"),
    # how tokens get to experts
    "form": (
        *("loop", "turns", "turns and experts", "gathered", "flat", "by choice", "sorted", "grouped"),
        *("at once", "by expert", "picked", "masks"),
    ),
    "dense": ("scatter", "mask", "where", "scatter_add", "one_hot", "softmax of scattered"),
    "product": ("0", "1", "2", "3"),
    "second product": ("0", "1", "2", "3"),
    "rows": ("0", "1", "2"),
    "order": ("argsort", "sort", "one_hot"),
    "counts": ("histc", "bincount", "one_hot", "compared"),
    # experts
    "layout": ("stored", "transposed"),
    "packing": ("packed", "interleaved", "apart", "up first", "one matrix", "sliced", "ungated"),
    "biases": ("none", "both", "first", "second"),
    "stored": ("as it is", "cast", "copied", "stacked"),
    "activation": (
        "silu",
        "gelu",
        "gelu_tanh",
        "relu",
        "relu2",
        "sigmoid",
        "quick",
        "nothing",
        "softplus",
        "leaky",
        "relu6",
        "hardswish",
    ),
    "glu": ("gate first", "up first", "limited", "alpha", "offset", "halves"),
    "between": ("none", "dropout", "scaled", "normed", "clamped", "added"),
    # the sum
    "weighed": ("after", "hidden", "before", "nowhere"),
    "sum": ("0", "1", "2", "3", "4"),
    "begin": ("nothing", "tokens", "shared"),
    "end": ("nothing", "residual", "shared", "gated shared", "divided", "scaled", "cast", "tokens off"),
    "model": ("one", "behind one another", "side by side", "ids of another", "in a batch"),
    "other form": ("same", "loop", "turns", "gathered", "flat", "by expert"),
}
"""An axis and its options. What an option is in Python is in the module of its part."""

RARE = {
    "change": {"centred", "zeroed", "finite", "masked by 1e9"},
    "route": {"squares", "in turn", "smallest", "scattered", "first twice", "of a table", "with the bias"}
    | {
        "exp",
        "tanh",
        "relu",
        "product",
        "of tokens",
        "one more within",
        "bias behind",
        "softmax of sigmoids",
    },
    "renormalise": {"softmax", "of all", "where", "normalize"},
    "late": {"capacity", "dropped by id", "top-p"},
    "activation": {"softplus", "leaky", "relu6", "hardswish"},
    "between": {"scaled", "normed", "clamped", "added"},
    "weighed": {"before", "hidden", "nowhere"},
    "stored": {"cast", "copied", "stacked"},
    "glu": {"offset", "halves"},
    "dense": {"softmax of scattered"},
    "logits": {"of a batch"},
    "end": {"tokens off", "divided"},
}
"""Options that mostly keep a layer from being raised, or its router."""

PLAIN = {"form": 0.0, "route": 0.2, "activation": 0.5, "packing": 0.4, "layout": 0.6, "late": 0.75}
PLAIN |= {"begin": 0.75, "biases": 0.6, "change": 0.6, "model": 0.7, "between": 0.85, "weighed": 0.75}
PLAIN |= {"dense": 0.3, "product": 0.3, "second product": 0.3, "rows": 0.3, "sum": 0.3, "stored": 0.8}
"""How often an axis is its plainest option whatever else there is; of others half of the time."""


@dataclass(frozen=True)
class Sizes:
    """Numbers of tokens T, experts E, choices K; features H and I."""

    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int


@dataclass(frozen=True)
class Case:
    """A random layer, and how it is compiled."""

    number: str
    sizes: Sizes
    dtype: str
    is_dynamic: bool
    is_training: bool
    is_lowered: bool
    """Whether what follows raising is run as well."""
    mutations: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict, hash=False)

    def __getitem__(self, axis: str) -> str:
        return self.options[axis]

    def chosen(self, axis: str, variants: tuple[str, ...]) -> str:
        """That of `variants` which an axis numbers."""
        return variants[int(self[axis]) % len(variants)]

    def but(self, axis: str, option: str) -> "Case":
        """The same layer with another option."""
        return replace(self, options={**self.options, axis: option})

    def __str__(self) -> str:
        others = {axis: option for axis, option in self.options.items() if option != AXES[axis][0]}
        how = [name for name in ("is_dynamic", "is_training", "is_lowered") if getattr(self, name)]
        return f"{self.number} {self.sizes} {self.dtype} {how} mutated: {self.mutations} {others}"


def _option(pick: random.Random, axis: str) -> str:
    options = AXES[axis]
    if pick.random() < PLAIN.get(axis, 0.5):
        return options[0]
    rare = RARE.get(axis, set())
    return pick.choices(options, [0.2 if each in rare else 1.0 for each in options])[0]


def _sizes(pick: random.Random) -> Sizes:
    experts = pick.choice((2, 3, 4, 4, 5, 6, 8, 8, 13))
    top_k = experts if experts < 5 and pick.random() < 0.1 else min(pick.choice((1, 2, 2, 2, 3, 4)), experts)
    tokens = pick.choice((1, 2, 3, 4, 5, 7, 9, 16, 33, 40, top_k, experts))
    return Sizes(tokens, experts, top_k, pick.choice((16, 24, 32)), pick.choice((8, 16, 24)))


def draw(seed: int, index: int) -> Case:
    """The layer of this number, always the same."""
    pick = random.Random(f"{seed}:{index}")
    sizes = _sizes(pick)
    is_training = pick.random() < 0.3
    mutations = tuple(pick.choices([*MUTATIONS], k=pick.choice((1, 1, 1, 2)))) if pick.random() < 0.5 else ()
    case = Case(
        number=f"{seed}:{index}",
        sizes=sizes,
        dtype="bfloat16" if pick.random() < 0.15 else "float32",
        is_dynamic=sizes.tokens > 2 and pick.random() < 0.25,
        is_training=is_training,
        is_lowered=not is_training and pick.random() < 0.25,
        mutations=mutations,
        options={axis: _option(pick, axis) for axis in AXES},
    )
    return _possible(case)


def _possible(case: Case) -> Case:
    """The layer with other options where these make none."""
    experts, top_k = case.sizes.experts, case.sizes.top_k
    if case["route"].startswith("groups") and (experts % 4 or top_k > experts // 2):
        case = case.but("route", "softmax, topk")
    if case["route"] == "by max" and top_k > 1:
        case = case.but("route", "sorted")
    if case["form"] in ("grouped", "sorted", "masks", "picked") and case["late"] in (
        "dropped",
        "dropped by id",
        "dropped and zero",
    ):
        case = case.but("late", "threshold")
    if case["dense"] in ("scatter", "scatter_add", "one_hot", "softmax of scattered") and case[
        "late"
    ].startswith("dropped"):
        case = case.but("dense", "mask")
    if case["route"] == "unsorted" and (case.mutations or case["late"] != "none"):
        case = case.but("route", "softmax, topk")  # of an order that nobody promises
    if case["form"] == "turns and experts" and experts * top_k > 12:
        case = case.but("form", "loop")
    if "grouped" in (case["form"], case["other form"]):
        case = replace(case, dtype="bfloat16")
    if case["glu"] == "halves" and case["packing"] != "packed":
        case = case.but("glu", "gate first")
    return case
