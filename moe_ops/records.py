"""Records of an operator's arguments: how one is written as a schema, taken apart and put together.

A record is a NamedTuple. Its fields are tensors, options, and values: records again, such as the weights of an expert.
An operator of `torch.library` takes flat arguments; here, and nowhere else, do they have positions. Leaves go by their
field's name, those of a `GroupedLinear` by the name of the field that holds it: `w2`, `w2_bias`.

The same record type holds tensors, their metadata for a launch plan, the nodes of a graph, gradients, or booleans.
"""

import re
from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import lru_cache
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor


class Role(Enum):
    """What a leaf is besides its type."""

    PER_TOKEN = auto()
    """Its rows are tokens: a batch of `torch.vmap` may join them."""
    WHOLE = auto()
    """One for all tokens: `torch.vmap` may not batch it."""
    CONSTANT = auto()
    """Has no gradient."""
    INDEX = auto()
    """A vector of slots, offsets or experts, which kernels take as contiguous. Has no gradient."""
    SYMBOLIC = auto()
    """A number that may be symbolic."""
    MUTATED = auto()
    """Changed in place. Has no gradient; what has no such leaf is functional."""


class Leaf(NamedTuple):
    """One argument of an operator."""

    name: str
    type: Any
    roles: frozenset[Role]
    path: tuple[int, ...]

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, or may be one."""
        return self.type in (Tensor, Tensor | None)

    @property
    def is_optional(self) -> bool:
        """Whether it may be None."""
        return NoneType in get_args(self.type)

    @property
    def is_differentiable(self) -> bool:
        """Whether it has a gradient."""
        return self.is_tensor and not self.roles & {Role.CONSTANT, Role.INDEX, Role.MUTATED}

    @property
    def schema(self) -> str:
        """Its declaration in the operator's schema."""
        kind = "SymInt" if Role.SYMBOLIC in self.roles else _SCHEMA_TYPES[self.type]
        kind = kind.replace("Tensor", "Tensor(a!)") if Role.MUTATED in self.roles else kind
        return f"{kind} {self.name}"


_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", str: "str", torch.dtype: "ScalarType",
}  # fmt: skip
_SCHEMA_ORDER = list(_SCHEMA_TYPES)


RECORDS: dict[str, type] = {}
"""The record of each operator's arguments, by the operator's name."""


def operator_name(record: type) -> str:
    """What takes a record: `fused_moe` takes a `FusedMoe`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", record.__name__).lower()


def is_record(value: Any) -> bool:
    """Whether a type, or a value's type, is a record."""
    return hasattr(value, "_fields")


@lru_cache(maxsize=None)
def leaves(record: type) -> tuple[Leaf, ...]:
    """Every argument of a record type, in the order of a schema: tensors, those that may be missing, options."""
    return tuple(sorted(_declared(record), key=lambda leaf: _SCHEMA_ORDER.index(leaf.type)))


def _declared(record: type) -> Iterator[Leaf]:
    for index, (field, hint) in enumerate(get_type_hints(record, include_extras=True).items()):
        kind, *roles = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if not is_record(kind):
            yield Leaf(field, kind, frozenset(roles), (index,))
            continue
        if roles:
            raise TypeError(
                f"{record.__name__}.{field} has roles {roles}: expected them on the leaves of {kind.__name__}"
            )
        for leaf in _declared(kind):
            yield leaf._replace(name=_name(field, kind, leaf.name), path=(index, *leaf.path))


def _name(field: str, kind: Any, leaf: str) -> str:
    return leaf_name(field, kind._fields[0], leaf) if getattr(kind, "NAMED_AFTER_FIELD", False) else leaf


def leaf_name(field: str, first: str, leaf: str) -> str:
    """`weight` and `bias` of the field `w2` are `w2` and `w2_bias`; those of a field `weight` keep their names."""
    if field == first:
        return leaf
    return field if leaf == first else f"{field}_{leaf}"


@lru_cache(maxsize=None)
def names(record: type) -> tuple[str, ...]:
    """Names of a record type's leaves."""
    return tuple(leaf.name for leaf in leaves(record))


@lru_cache(maxsize=None)
def flattener(record: type) -> Callable[[Any], tuple[Any, ...]]:
    """The function that takes a record of this type apart; written out, for it runs in every call."""
    paths = ("".join(f"[{index}]" for index in leaf.path) for leaf in leaves(record))
    return eval(f"lambda record: ({' '.join(f'record{path},' for path in paths)})")


@lru_cache(maxsize=None)
def builder(record: type) -> Callable[..., Any]:
    """The function that puts a record of this type together from its leaves."""
    types: dict[str, type] = {}
    names = {leaf.path: f"leaf{index}" for index, leaf in enumerate(leaves(record))}

    def expression(kind: Any, path: tuple[int, ...]) -> str:
        types[kind.__name__] = kind
        hints = enumerate(get_type_hints(kind).values())
        parts = (expression(h, (*path, i)) if is_record(h) else names[(*path, i)] for i, h in hints)
        return f"{kind.__name__}({', '.join(parts)})"

    return eval(f"lambda {', '.join(names.values())}: {expression(record, ())}", types)


def flatten(record: Any) -> tuple[Any, ...]:
    """A record's leaves, in the order of the operator's schema."""
    return flattener(type(record))(record)


def named(record: Any) -> dict[str, Any]:
    """A record's leaves by name."""
    return dict(zip(names(type(record)), flatten(record), strict=True))


def transform(function: Callable[..., Any], record: Any, *others: Any) -> Any:
    """`function` of every leaf, or of the leaves of several records of one type, as a record."""
    return builder(type(record))(*map(function, flatten(record), *map(flatten, others)))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of everything in nested tuples and records."""
    if not isinstance(value, tuple):
        return function(value)
    parts = [map_leaves(function, part) for part in value]
    return type(value)(*parts) if is_record(value) else tuple(parts)


def partial(record: type, **fields: Any) -> Any:
    """A record of the `fields` that are given and nothing else: what a backward returns and a tangent rule is asked."""
    return builder(record)(*[None] * len(leaves(record)))._replace(**fields)
