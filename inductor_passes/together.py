"""CompileTogether: the C++ kernels of a graph that has MoE layers are compiled together, not one by one.

It sits in Inductor's slot behind fusion, where the code that will define the kernels has been begun. Which graphs it
is for, our passes have noted; the code of any other stays as it is.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from inductor_passes import _compat, _compat_kernels
from inductor_passes.slot import InSlot


@dataclass(frozen=True)
class CompileTogether(InSlot, _compat_kernels.SchedulerPass):
    """Writes into the generated code what compiles kernels, then runs the user's pass of the slot."""

    slot: ClassVar[str] = _compat.POST_FUSION_SLOT

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Changes no node of the schedule."""
        _compat_kernels.compile_kernels_together()
        for user_pass in self.users():
            nodes = user_pass(nodes)
        return nodes

    def __getstate__(self) -> dict[str, Any]:
        """What Inductor's keys have of this slot, which they pickle. Raises TypeError: then nothing is cached."""
        key = self.uuid()
        if key is None:
            raise TypeError("a pass in the slot has no uuid")
        return {"key": key}
