"""One grouped product as a value: what is multiplied, for which GPU."""

from dataclasses import dataclass

from moe_ops.kernels import tma
from moe_ops.kernels.gpu import Gpu
from moe_ops.kernels.program import TensorMeta
from moe_ops.types import Activation


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor a plan reads: its name in the program and its metadata."""

    name: str
    meta: TensorMeta


@dataclass(frozen=True, slots=True)
class Gemm:
    """One grouped product: out[r] = activation(x[r] @ weight[e].T + bias[e]), a buffer [num_slots, features].

    top_k: None when x has a row per slot; else row r of the product is x[sorted_slots[r] // top_k].
    tail: rows past the last expert are written as zeros (else not at all).
    """

    x: Operand
    weight: Operand
    bias: Operand | None
    out: str
    num_slots: int
    gpu: Gpu
    top_k: int | None = None
    activation: Activation | None = None
    tail: bool = False

    @property
    def gated(self) -> bool:
        """Whether the weight has gate and up rows."""
        return self.activation is not None and self.activation.is_gated

    @property
    def halves(self) -> bool:
        """Whether the up rows follow all gate rows."""
        return self.gated and self.activation is not None and not self.activation.interleaved

    @property
    def features(self) -> int:
        """Output columns."""
        return self.weight.meta.shape[1] // 2 if self.gated else self.weight.meta.shape[1]

    @property
    def out_meta(self) -> TensorMeta:
        """Metadata of the output buffer."""
        return TensorMeta((self.num_slots, self.features), (self.features, 1), self.x.meta.dtype, True)

    @property
    def boxed_weight(self) -> tma.Boxed:
        """The weight as TMA would cut it."""
        return tma.boxed_weight(self.weight.meta, self.halves)

    @property
    def weight_by_tma(self) -> bool:
        """Whether the TMA kernel takes it; else the pointer kernel does."""
        return tma.allows(self.gpu, self.weight.meta, self.boxed_weight)
