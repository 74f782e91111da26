"""Which part of an expert's weights a module holds, as plain values: no process group."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorShard:
    """One of `size` equal parts of every expert: rows of gate and up, columns of down.

    Args:
        rank, size: of the tensor-parallel group.

    Raises:
        TypeError, ValueError: not ints, or `rank` is not in [0, size).
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        for name in ("rank", "size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r}: expected an int, got {type(value).__name__}")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank}: expected a rank in [0, size={self.size})")

    def local_size(self, name: str, size: int) -> int:
        """`size` over all ranks, on this one. Raises ValueError when it does not divide."""
        if size % self.size:
            raise ValueError(f"{name}={size}: expected a multiple of the shard's size={self.size}")
        return size // self.size

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of dimension `dim`, a view.

        Raises:
            ValueError: there is no such dimension, or it does not divide.
        """
        if not -tensor.dim() <= dim < tensor.dim():
            raise ValueError(f"tensor to shard has shape {tuple(tensor.shape)}: expected a dimension {dim}")
        size = self.local_size(f"dimension {dim} of shape {tuple(tensor.shape)}", tensor.shape[dim])
        return tensor.narrow(dim, self.rank * size, size)


WHOLE = TensorShard()
"""Everything on one rank."""
