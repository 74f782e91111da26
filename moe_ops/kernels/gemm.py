"""One grouped product as a value: what is multiplied, for which GPU."""

from dataclasses import dataclass
from typing import Any

from moe_ops import records
from moe_ops.formula import Formula
from moe_ops.kernels import tma
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import Ref, TensorMeta
from moe_ops.kernels.tuning import Product, name_of
from moe_ops.types import Activation


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor a plan reads: its name in the program and its metadata."""

    name: str
    meta: TensorMeta


def operands(field: str, value: Any) -> Any:
    """The metadata of `value`, a `GroupedLinear`, as operands: named as in an operator that has it as `field`."""
    first, *_ = value._fields
    return type(value)(
        *(
            None if meta is None else Operand(records.leaf_name(field, first, leaf), meta)
            for leaf, meta in zip(value._fields, value, strict=True)
        )
    )


def reference_to(operand: Operand | None) -> Ref | None:
    """What a kernel gets as the pointer of an operand that there may be."""
    return None if operand is None else Ref(operand.name)


def bias_args(bias: Operand | None) -> dict[str, Any]:
    """What a kernel needs that adds `bias`."""
    return {
        "bias_ptr": reference_to(bias),
        "bias_stride_e": 0 if bias is None else bias.meta.strides[0],
        "bias_stride_n": 1 if bias is None else bias.meta.strides[1],
    }


@dataclass(frozen=True, slots=True)
class Gemm:
    """One grouped product: out[r] = activation(x[r] @ weight[e].T + bias[e]), a buffer [num_slots, columns].

    linear: the `PairedLinear` of operands that is multiplied with.
    top_k: None when x has a row per slot; else row r of the product is x[sorted_slots[r] // top_k].
    tail: rows past the last expert are written as zeros (else not at all).
    max_tokens: None when `expert_offsets` says which rows an expert has; else expert e has the first counts[e] of the
    `max_tokens` rows from e * max_tokens on, and the others are not written.
    rows_per_tile: None for as many as suit the number of slots; else the product has one configuration for any number
    of them, so that a row's bits do not depend on it.
    num_ids: None when the slots chose among the experts of the weight; else among so many, of which these are here.
    """

    x: Operand
    linear: Any
    out: str
    num_slots: int
    gpu: Gpu
    top_k: int | None = None
    activation: Activation | Formula | None = None
    tail: bool = False
    max_tokens: int | None = None
    rows_per_tile: int | None = None
    num_ids: int | None = None

    @property
    def paired(self) -> bool:
        """Whether gate and up rows are two tensors."""
        return self.linear.up is not None

    @property
    def gated(self) -> bool:
        """Whether a tile has gate and up rows."""
        return self.paired or (self.activation is not None and self.activation.is_gated)

    @property
    def halves(self) -> bool:
        """Whether one tensor has up rows behind all gate rows."""
        return self.gated and self.activation is not None and not (self.paired or self.activation.interleaved)

    @property
    def doubled(self) -> bool:
        """Whether gate and up rows come in a box each, so that a tile is two products: columns, or tensors, of each."""
        return self.paired or (self.halves and tma.is_transposed(self.linear.weight.meta))

    @property
    def features(self) -> int:
        """Output columns, of a pair without an activation those of each half."""
        rows = self.linear.weight.meta.shape[1]
        return rows // 2 if self.gated and not self.paired else rows

    @property
    def rows_per_expert(self) -> float:
        """How many rows an expert has if all are chosen alike."""
        return self.num_slots / (self.num_ids or self.linear.weight.meta.shape[0])

    @property
    def is_part(self) -> bool:
        """Whether experts that are not here have slots as well."""
        return self.num_ids is not None and self.num_ids > self.linear.weight.meta.shape[0]

    @property
    def columns(self) -> int:
        """Output columns."""
        return 2 * self.features if self.paired and self.activation is None else self.features

    @property
    def out_meta(self) -> TensorMeta:
        """Metadata of the output buffer."""
        return TensorMeta((self.num_slots, self.columns), (self.columns, 1), self.x.meta.dtype, True)

    @property
    def product(self) -> Product:
        """What a tuning table knows it by."""
        weight = self.linear.weight.meta
        layout = "transposed" if tma.is_transposed(weight) else "rows"
        return Product(*weight.shape, name_of(weight.dtype), layout, self.gated, self.top_k is not None)

    @property
    def boxed_weight(self) -> tma.Boxed:
        """The weight as TMA would cut it; the up half of a pair is cut alike."""
        return tma.boxed_weight(self.linear.weight.meta, self.halves)

    @property
    def weight_by_tma(self) -> bool:
        """Whether the TMA kernel takes it; else the pointer kernel does."""
        weights = (self.linear.weight,) if self.linear.up is None else (self.linear.weight, self.linear.up)
        return all(tma.allows_weight(self.gpu, weight.meta, self.halves) for weight in weights)
