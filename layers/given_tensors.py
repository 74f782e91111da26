"""Modules of tensors that somebody has filled: maps, ids, seeds. None is a weight, which a state dict brings."""

from collections.abc import Callable

from torch import Tensor, nn


class GivenTensors(nn.Module):
    """A module that keeps the buffers it was given: `to_empty`, which sets memory aside for weights, leaves them."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GivenTensors":
        given = dict(self.named_buffers(recurse=False, remove_duplicate=False))
        super()._apply(fn, recurse)
        for name, tensor in given.items():
            applied = self.get_buffer(name)
            # Another dtype is that of a cast, which has values.
            if not tensor.is_meta and tensor.dtype == applied.dtype:
                setattr(self, name, tensor.to(applied.device))
        return self
