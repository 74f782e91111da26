"""What a case of experts in 8 or 4 bits has besides: drawn from its number by a sequence of its own."""

from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.cases import Case

LEVELS = ("scaled_fused_experts", "scaled_grouped_gemm", "quantise_rows", "quantised_layer")
SHARES = (5, 3, 1, 2)
EVERY = 8  # each case of a number that this divides; other numbers stay the cases they were

IN_8_BITS, IN_4_BITS = ("float8_e4m3fn", "int8"), ("mxfp4", "int4", "nvfp4")
STORED = (*IN_8_BITS, *IN_4_BITS)
GROUPS = {"mxfp4": 32, "int4": 32, "nvfp4": 16}  # columns that share a scale, at least
BLOCKS = ("matrix", "row", "group", "block", "weight", "larger")
KINDS = ("tensor", "channel", "group", "block")
EDGES = (1, 2, 3, 5, 7, 8, 16, 24, 32, 40, 64, 100, 128, 130)
SCALE_DTYPES = ("float32", "float32", "float64", "bfloat16", "float16")
SCALE_LAYOUTS = (
    *("dense", "transposed", "padded", "offset", "experts apart", "experts inside", "experts expanded"),
    "strided",
)
MOST_SCALES = 2**18  # of a weight
FAR = 1 << 40  # an edge no matrix has


@dataclass(frozen=True)
class Scaled:
    """How weights and rows are quantised. A block is (rows, columns)."""

    stored: str  # a dtype, or a format of 4 bits
    rows: str  # "quantised" or "exact"
    kind: str  # of a layer, in place of blocks of each weight
    w13_block: tuple[int, int]
    w2_block: tuple[int, int]
    is_said: bool  # whether a call is given a block that its sizes say as well
    scale_dtype: str
    scale_layout: str
    gathered: bool  # a product takes tokens and slots, not rows
    widened: bool  # and gives what sums are in
    faint: bool  # some tokens are zeros, or next to them
    strange: bool  # weights and scales of experts that nobody chose are NaN
    compiled: str  # "", or the backend
    zero_points: bool = False  # of integers of 4 bits
    given: tuple[float, ...] = ()  # scales of rows, of both products
    parts: tuple[int, int] = (
        0,
        0,
    )  # of the rows of each weight of NVFP4 that have a global scale, 0 if none has

    def __str__(self) -> str:
        return " ".join(f"{name}={value!r}" for name, value in vars(self).items())


def level(random: Random) -> str:
    """One of these levels."""
    return random.choices(LEVELS, SHARES)[0]


@lru_cache(maxsize=64)
def draw(case: "Case") -> Scaled:
    """That of a case of these levels."""
    random = Random(f"{case.seed}:{case.index}:8 bits")
    is_layer = case.level == "quantised_layer"
    stored, rows = random.choice(IN_8_BITS), random.choice(("quantised", "quantised", "exact"))
    shapes = (case.columns, case.hidden), (case.hidden, case.intermediate)
    kind = _kind(random, case) if is_layer else ""
    blocks = (
        _layer_blocks(random, case, kind) if is_layer else [_block(random, case, *each) for each in shapes]
    )
    scaled = Scaled(
        stored,
        rows,
        kind,
        *blocks,
        is_said=random.random() < 0.7,
        scale_dtype=random.choice(SCALE_DTYPES),
        scale_layout="dense" if random.random() < 0.3 else random.choice(SCALE_LAYOUTS),
        gathered=random.random() < 0.6,
        widened=random.random() < 0.2,
        faint=random.random() < 0.3 and rows == "quantised",
        strange=random.random() < 0.3,
        compiled=random.choices(("", "aot_eager", "inductor"), (60, 5, 1))[0],
    )
    stored = random.choices(("", *IN_4_BITS), (46, 18, 18, 18))[0]
    has_zeros = random.random() < 0.5 and stored == "int4"
    if not stored or not _goes_in_pairs(case):
        return replace(scaled, given=_given(random, case, rows))
    parts = _parts(random, case.columns), _parts(random, case.hidden)
    return replace(
        _in_pairs(scaled, stored, is_layer),
        zero_points=has_zeros,
        parts=parts if stored == "nvfp4" else (0, 0),
    )


def _parts(random: Random, rows: int) -> int:
    return random.choice([each for each in (0, 1, 2, 3, rows) if each == 0 or rows % each == 0])


def _given(random: Random, case: "Case", rows: str) -> tuple[float, ...]:
    """From such as leave few numbers apart to such as cut most of them off."""
    if case.level != "scaled_fused_experts" or rows == "exact" or random.random() < 0.6:
        return ()
    return 2 ** random.uniform(-11, -4), 2 ** random.uniform(-11, -4)


def _in_pairs(scaled: Scaled, stored: str, is_layer: bool) -> Scaled:
    """The same in 4 bits, whose tokens are exact and whose columns have scales by the group."""
    group = GROUPS[stored]
    w13, w2 = (
        (1, group) if is_layer else (rows, -(-columns // group) * group)
        for rows, columns in (scaled.w13_block, scaled.w2_block)
    )
    return replace(
        scaled, stored=stored, rows="exact", kind="group" if is_layer else "", w13_block=w13, w2_block=w2, faint=False
    )  # fmt: skip


def _goes_in_pairs(case: "Case") -> bool:
    """Whether a row is of whole bytes, and a layer's of whole groups."""
    depths = (case.hidden,) if case.level == "scaled_grouped_gemm" else (case.hidden, case.intermediate)
    whole = max(GROUPS.values()) if case.level == "quantised_layer" else 2
    return case.level != "quantise_rows" and not any(depth % whole for depth in depths)


def _block(random: Random, case: "Case", rows: int, columns: int) -> tuple[int, int]:
    beyond = random.choice((1, 3, rows + columns, FAR))
    block = {
        "matrix": (rows, columns),
        "row": (1, columns),
        "group": (1, random.choice(EDGES)),
        "block": (random.choice(EDGES), random.choice(EDGES)),
        "weight": (1, 1),
        "larger": (rows + beyond, columns + beyond),
    }[random.choice(BLOCKS)]
    while case.local_experts * num_blocks(rows, block[0]) * num_blocks(columns, block[1]) > MOST_SCALES:
        block = block[0] * 2, block[1] * 3
    return block


def _kind(random: Random, case: "Case") -> str:
    """Blocks of rows never hold gate and up rows, so interleaved ones have none."""
    apart = not case.activation.is_gated or not case.activation.interleaved
    return random.choice(KINDS if apart else ("channel", "group"))


def _layer_blocks(random: Random, case: "Case", kind: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """One for both weights, with groups that divide both depths and blocks that divide what a gate takes."""
    columns = random.choice(EDGES)
    rows = random.choice(EDGES)
    if kind == "group":
        columns = random.choice(_common_divisors(case.hidden, case.intermediate))
    if kind == "block" and case.activation.is_gated:
        rows = random.choice(_common_divisors(case.intermediate))
    return (rows, columns), (rows, columns)


def _common_divisors(*sizes: int) -> list[int]:
    return [size for size in range(1, min(sizes) + 1) if not any(each % size for each in sizes)]


def num_blocks(size: int, edge: int) -> int:
    """Of a dimension, the last of which may be short."""
    return (size + edge - 1) // edge
