"""A tuning table: which block sizes were the fastest on one GPU, by what a product is and how many rows an expert has.

    {"format": 1, "gpu": "NVIDIA H200", "choices": [
      {"experts": 128, "features": 1536, "depth": 2048, "dtype": "bfloat16", "layout": "rows", "gated": true,
       "gathered": true, "rows": 64, "config": {"block_m": 64, "block_n": 128, "block_k": 64, "num_warps": 4, ...}}]}

A value, and part of the `Gpu` that a plan is made for: so plans, templates and choices are kept for each table.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from moe_ops.kernels.gemm_tables import LaunchConfig, offered

_FORMAT = 1
_MOST_ROWS = 1 << 20
_LEAST, _MOST = 0.75, 1.5  # of a choice's rows: neighbouring powers of two leave no gap
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in offered}


class Product(NamedTuple):
    """What products have in common that one choice is for: a weight [experts, features, depth], and how it is read.

    layout: "rows" where the depth is the contiguous dimension, else "transposed". gated: the activation of gate and up
    columns is in the kernel. gathered: rows are those of tokens, found by slot, and do not lie in expert order.
    """

    experts: int
    features: int
    depth: int
    dtype: str
    layout: Literal["rows", "transposed"]
    gated: bool
    gathered: bool


class Choice(NamedTuple):
    """The fastest for experts of `rows` rows in the mean, a power of two: from 3/4 of them up to 3/2."""

    product: Product
    rows: int
    config: LaunchConfig


@dataclass(frozen=True, slots=True, eq=False)
class Tuning:
    """What was measured on `gpu`, its name as `torch.cuda.get_device_name` has it. Equal texts are equal tables."""

    gpu: str
    choices: tuple[Choice, ...] = field(repr=False)
    digest: str = field(init=False)
    """sha256 of the text: what a cache knows the table by."""
    _by_product: Mapping[Product, list[tuple[int, LaunchConfig]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.gpu, str):
            raise TypeError(f"gpu={self.gpu!r}: expected the name of a GPU")
        by_product: dict[Product, list[tuple[int, LaunchConfig]]] = {}
        for product, rows, config in self.choices:
            by_product.setdefault(product, []).append((rows, config))
        object.__setattr__(self, "_by_product", by_product)
        object.__setattr__(self, "digest", hashlib.sha256(self.to_json().encode()).hexdigest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tuning) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def choice(self, product: Product, rows_per_expert: float) -> LaunchConfig | None:
        """What is best for so many rows of an expert; None where nothing like it was measured."""
        for rows, config in self._by_product.get(product, ()):
            above = rows == 1 or rows_per_expert > _LEAST * rows
            if above and rows_per_expert <= _MOST * rows:
                return config
        return None

    def to_json(self) -> str:
        """The text of a file, a choice to a line."""
        lines = [
            json.dumps({**each.product._asdict(), "rows": each.rows, "config": _config_fields(each.config)})
            for each in self.choices
        ]
        body = ",\n  ".join(lines)
        return f'{{"format": {_FORMAT}, "gpu": {json.dumps(self.gpu)}, "choices": [\n  {body}]}}\n'

    @classmethod
    def from_json(cls, text: str | bytes, path: str) -> "Tuning":
        """Reads it. Raises ValueError that names `path`, the key and what was expected there."""
        try:
            read = json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"{path}: {error}: expected a JSON file by `python -m benchmarks tune`"
            ) from None
        table = _read(path, read, _TABLE)
        choices = [_choice(f"{path}: choices[{index}]", each) for index, each in enumerate(table["choices"])]
        _expect_different(path, choices)
        return cls(table["gpu"], tuple(choices))


def nearest_rows(rows_per_expert: float) -> int:
    """The `rows` of the choice that so many rows of an expert are for."""
    rows = 1
    while rows_per_expert > _MOST * rows:
        rows *= 2
    return rows


def _config_fields(config: LaunchConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in _CONFIG}


class _Rule(NamedTuple):
    """What is expected of a value, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _one_of(*values: object) -> _Rule:
    words = ", ".join(map(repr, values))
    return _Rule(f"one of {words}", lambda value: any(value is each or value == each for each in values))


_COUNT = _Rule("an integer of at least 1", _is_count)
_TRUTH = _Rule("true or false", lambda value: type(value) is bool)
_ROWS = _Rule(
    f"a power of two up to {_MOST_ROWS}",
    lambda value: _is_count(value) and value & -value == value <= _MOST_ROWS,
)
_OBJECT = _Rule("an object", lambda value: isinstance(value, dict))
_TABLE = {
    "format": _Rule(f"{_FORMAT}", lambda value: _is_count(value) and value == _FORMAT),
    "gpu": _Rule("a GPU's name", lambda value: isinstance(value, str)),
    "choices": _Rule("a list", lambda value: isinstance(value, list)),
}
_CHOICE = {
    **dict.fromkeys(("experts", "features", "depth"), _COUNT),
    "dtype": _one_of(*DTYPES),
    "layout": _one_of("rows", "transposed"),
    **dict.fromkeys(("gated", "gathered"), _TRUTH),
    "rows": _ROWS,
    "config": _OBJECT,
}
_CONFIG = dict.fromkeys(("block_m", "block_n", "block_k", "num_warps", "num_stages", "ctas_per_sm"), _COUNT)


def _read(where: str, value: Any, rules: Mapping[str, _Rule]) -> dict[str, Any]:
    """An object with these keys and no others, each as its rule says."""
    names = ", ".join(rules)
    if not isinstance(value, dict) or value.keys() != rules.keys():
        found = ", ".join(map(str, value)) if isinstance(value, dict) else repr(value)
        raise ValueError(f"{where} has {found}: expected the keys {names}")
    separator = ": " if "[" not in where else "."
    for name, rule in rules.items():
        if not rule.holds(value[name]):
            raise ValueError(f"{where}{separator}{name}={value[name]!r}: expected {rule.words}")
    return value


def _choice(where: str, value: Any) -> Choice:
    fields = dict(_read(where, value, _CHOICE))
    config = LaunchConfig(**_read(f"{where}.config", fields.pop("config"), _CONFIG))
    rows = fields.pop("rows")
    product = Product(**fields)
    known = offered[DTYPES[product.dtype]]
    if config not in known:
        raise ValueError(
            f"{where}.config={config}: expected one of the {len(known)} that are offered for {product.dtype}"
        )
    return Choice(product, rows, config)


def _expect_different(path: str, choices: Iterable[Choice]) -> None:
    seen: dict[tuple[Product, int], int] = {}
    for index, each in enumerate(choices):
        first = seen.setdefault((each.product, each.rows), index)
        if first != index:
            raise ValueError(
                f"{path}: choices[{index}] is for the product and rows of choices[{first}]: expected one of each"
            )


def name_of(dtype: torch.dtype) -> str:
    """As tables have it."""
    return str(dtype).removeprefix("torch.")
