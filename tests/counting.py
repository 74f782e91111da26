"""What a forward saves for its backward, and which of our operators run."""

from collections import Counter

from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode


def saved_bytes(fn, *args) -> int:
    """Bytes of the distinct storages that fn(*args) saves for its backward."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = fn(*args)  # alive, so that no two storages have one address
    assert output is not None
    return sum(storages.values())


class Calls(TorchDispatchMode):
    """Counts the calls of our operators, or of those whose names are given, such as "moe.fused_moe"."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.wanted = names
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removesuffix(".default")
        if name in self.wanted or (not self.wanted and name.startswith("moe.")):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return sorted(self.counts.elements())

    @property
    def total(self) -> int:
        return self.counts.total()
