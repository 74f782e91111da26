"""A random case: everything about it follows from (seed, index), on any device."""

from dataclasses import dataclass, fields
from random import Random
from typing import Any, get_args

from moe_ops import Activation, RoutingConfig
from moe_ops.types import ScoreFn
from tests.cases import MORE_ACTIVATIONS
from tests.fuzz import quantised_cases

TOKENS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64, 100, 129, 256, 513, 777, 1500)
EXPERTS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 32, 60, 64, 96, 128, 160)
# A kernel is compiled anew for each of these (the depth of a product is a constant of some), hence a pool.
SIZES = (
    *(1, 2, 3, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 72, 96, 100, 104, 127, 128, 129),
    *(160, 192, 255, 256, 257, 300, 384, 500, 511, 512, 513, 520),
)
# Up to this many tokens a layer may run on the decode kernels, where the depth is that constant.
DECODE_TOKENS, DECODE_SIZES = 8, (1, 3, 8, 16, 17, 31, 64, 96, 100, 127, 128, 255, 256, 300, 512, 513)
LARGE_SIZES = (768, 1000, 1024, 1025, 1536, 2048, 2100)
MAX_WEIGHTS, MAX_PRODUCTS = 2**24, 2**31  # numbers in w13 and w2, multiplications of a forward
LARGE_SHARE, LARGE_PRODUCTS = 0.06, 2**27  # most cases stay below the second

DTYPES = ("bfloat16", "float16", "float32", "float64")
WEIGHT_LAYOUTS = (
    *("dense", "transposed", "padded", "padded odd", "transposed padded", "offset", "transposed offset"),
    *("experts apart", "experts inside", "experts expanded", "rows expanded"),
)
MATRIX_LAYOUTS = ("dense", "column major", "expanded", "strided", "padded", "offset")
ACTIVATIONS = (
    Activation("silu"),
    Activation("silu", interleaved=True),
    Activation("silu", limit=0.5),
    Activation("silu", limit=2.0, interleaved=True),
    Activation("gelu"),
    Activation("gelu", interleaved=True),
    Activation("gelu_tanh"),
    Activation("gelu_tanh", interleaved=True),
    Activation("relu2"),
    Activation("swiglu_oai"),
    Activation("swiglu_oai", interleaved=True),
    Activation("swiglu_oai", alpha=1.2, limit=0.7),
    Activation("swiglu_oai", alpha=1.2, limit=0.7, interleaved=True),
    *MORE_ACTIVATIONS,
)
SKEWS = ("even", "one", "few", "zipf", "nobody")
STAGES = (
    *("topk_routing", "build_dispatch", "permute", "grouped_gemm", "gated_activation", "combine"),
    "batched_gemm",
)
TARGETS = ("routing_dispatch", "gather_gemm_act", "gemm_combine", "halves")
LAYERS = ("fused_moe", "fused_experts")
LEVELS = (*LAYERS, *STAGES, *TARGETS, "compiled", *quantised_cases.LEVELS)
WEIGHED = ("fused_experts", "scaled_fused_experts")  # those that may weigh their input
COMPILED_EVERY = 100  # a compile takes as long as a hundred other cases


@dataclass(frozen=True)
class Case:
    """One call and its inputs. `experts` are those of the router; `local_experts` have their weights here."""

    seed: int
    index: int
    level: str
    emit: str
    tokens: int
    experts: int
    local_experts: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: str
    logits_dtype: str
    ids_dtype: str
    w13_layout: str
    w2_layout: str
    hidden_layout: str
    small_layout: str  # of logits, routing weights, ids and biases
    activation: Activation
    routing: RoutingConfig
    logits: str  # "separate", "ties" or "not finite"
    correction: str  # "none", "finite" or "not finite"
    skew: str  # "even", "one", "few", "zipf" or "nobody": ids that are all out of range
    dropped: bool
    bias: bool
    shared: bool
    weight_on_input: bool
    backward: bool
    poisoned: bool  # and once more with tokens that are NaN or infinite
    apart: bool  # gate and up are given as two tensors

    @property
    def number(self) -> str:
        """What `--case` takes."""
        return f"{self.seed}:{self.index}"

    @property
    def columns(self) -> int:
        """Rows of w13: gate and up, or up alone."""
        return (2 if self.activation.is_gated else 1) * self.intermediate

    def given(self, w13: Any) -> Any:
        """A weight, or a bias, of gate and up as a call gets it."""
        return w13.chunk(2, dim=1) if self.apart and w13 is not None else w13

    def rest(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """What a layer may get besides its weights."""
        rest = {name: tensors.get(name) for name in ("w13_bias", "w2_bias", "shared")}
        return {**rest, "w13_bias": self.given(rest["w13_bias"])}

    @property
    def scaled(self) -> quantised_cases.Scaled | None:
        """How experts are quantised, where they are."""
        return quantised_cases.draw(self) if self.level in quantised_cases.LEVELS else None

    @property
    def is_compiled(self) -> bool:
        """Whether a compiler runs."""
        return self.level == "compiled" or (self.scaled is not None and self.scaled.compiled != "")

    @property
    def mapped(self) -> bool:
        """Whether some experts live elsewhere."""
        return self.local_experts < self.experts

    @property
    def odd_sizes(self) -> int:
        """How many of H and I are no multiple of 8."""
        return bool(self.hidden % 8) + bool(self.intermediate % 8)

    def __str__(self) -> str:
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        values |= {"activation": self.activation.spec, "routing": self.routing.spec}
        text = " ".join(f"{name}={value!r}" for name, value in values.items())
        return text if self.scaled is None else f"{text} {self.scaled}"


def draw(seed: int, index: int) -> Case:
    """The case of this number."""
    random = Random(f"{seed}:{index}")
    activation = random.choice(ACTIVATIONS)
    sizes = _draw_sizes(random, 3 if activation.is_gated else 2)
    level = _draw_level(random, index)
    mapped = random.random() < 0.3 and sizes["experts"] > 1
    weight_on_input = level in WEIGHED and random.random() < 0.15
    routing = _draw_routing(random, sizes["experts"], 1 if weight_on_input else 16)
    dtype = random.choice(DTYPES)
    return Case(
        seed=seed,
        index=index,
        level=level,
        emit="auto"
        if level == "compiled"
        else random.choice(("fused", "fused", "halves", "stages", "batch_invariant")),
        **sizes,
        local_experts=random.randint(1, sizes["experts"] - 1) if mapped else sizes["experts"],
        top_k=routing.top_k,
        dtype=dtype,
        logits_dtype=random.choice((dtype, *DTYPES)),
        ids_dtype=random.choice(("int32", "int64")),
        w13_layout=_mostly_first(random, WEIGHT_LAYOUTS),
        w2_layout=_mostly_first(random, WEIGHT_LAYOUTS),
        hidden_layout=_mostly_first(random, MATRIX_LAYOUTS),
        small_layout=_mostly_first(random, MATRIX_LAYOUTS),
        activation=activation,
        routing=routing,
        logits=_draw_logits(random, routing),
        correction=random.choices(("none", "finite", "not finite"), (6, 3, 1))[0],
        skew=random.choices(SKEWS, (8, 4, 4, 4, 1))[0],
        dropped=random.random() < 0.3,
        bias=random.random() < 0.5,
        shared=random.random() < 0.3,
        weight_on_input=weight_on_input,
        backward=random.random() < 0.5,
        poisoned=random.random() < 0.4,
        apart=random.random() < 0.2 and activation.is_gated and not activation.interleaved,
    )


def _mostly_first(random: Random, choices: tuple[str, ...]) -> str:
    return choices[0] if random.random() < 0.2 else random.choice(choices)


def _draw_level(random: Random, index: int) -> str:
    if index % COMPILED_EVERY == COMPILED_EVERY - 1:
        return "compiled"
    if index % quantised_cases.EVERY == 0:
        return quantised_cases.level(random)
    return random.choices((*LAYERS, *STAGES, *TARGETS), (40, 24, *[4] * len(STAGES), *[4] * len(TARGETS)))[0]


def _draw_sizes(random: Random, matrices: int) -> dict[str, int]:
    """Sizes within the budgets: what is drawn too large is halved, the largest number first."""
    tokens, experts = random.choice(TOKENS), random.choice(EXPERTS)
    is_large = random.random() < LARGE_SHARE
    pool = DECODE_SIZES if tokens <= DECODE_TOKENS else SIZES
    pool = (*pool, *LARGE_SIZES) if is_large else pool
    hidden, intermediate = random.choice(pool), random.choice(pool)
    products = MAX_PRODUCTS if is_large else LARGE_PRODUCTS
    while matrices * experts * hidden * intermediate > MAX_WEIGHTS:
        experts = max(size for size in EXPERTS if size < experts)
    while matrices * tokens * min(experts, 4) * hidden * intermediate > products:
        tokens = max(size for size in TOKENS if size < tokens)
    return {"tokens": tokens, "experts": experts, "hidden": hidden, "intermediate": intermediate}


def _draw_routing(random: Random, experts: int, max_top_k: int) -> RoutingConfig:
    groups = random.choice([1, 1, *(size for size in (2, 3, 4, 5, 8, 16) if experts % size == 0)])
    topk_groups = random.randint(1, groups)
    size = experts // groups
    # Few experts a token more often than many.
    top_k = min(random.choice((1, 1, 2, 2, 3, 4, 6, 8, 11, 16)), topk_groups * size, max_top_k)
    return RoutingConfig(
        top_k,
        random.choice(get_args(ScoreFn)),
        random.choice(("score_then_topk", "topk_then_score")),
        random.random() < 0.6,
        random.choice((0.0, 1e-20, 1e-3)),
        groups,
        topk_groups,
        random.choice(("max", "top2_sum")) if size > 1 else "max",
        random.choice((float("-inf"), 0.0)),
        random.choice((1.0, 2.5, 0.5)),
    )


def _draw_logits(random: Random, routing: RoutingConfig) -> str:
    """Sums of tied scores need not tie in every precision, so such groups get none."""
    kind = random.choices(("separate", "ties", "not finite"), (8, 1, 1))[0]
    return "separate" if kind == "ties" and routing.group_score == "top2_sum" else kind


def first(level: str, **wanted: Any) -> Case:
    """The first case of `level` with these values, by seed 0. Raises LookupError when there is none."""
    for index in range(20_000):
        case = draw(0, index)
        if case.level == level and all(getattr(case, name) == value for name, value in wanted.items()):
            return case
    raise LookupError(level)
