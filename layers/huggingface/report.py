"""What `patch` did to a model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PatchReport:
    """Names of the modules changed, and of the expert blocks left alone with the reason.

    Attributes:
        experts: experts modules that now run on `moe_ops`.
        routers: routers that now run on `moe_ops.topk_routing`.
        left: (module name, reason) of every MoE module that still runs transformers' own code, and of experts whose
            router was not found.
    """

    experts: tuple[str, ...]
    routers: tuple[str, ...]
    left: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"moe_ops: {len(self.experts)} experts and {len(self.routers)} routers patched"]
        lines += [f"  experts {name}" for name in self.experts]
        lines += [f"  router  {name}" for name in self.routers]
        lines += [f"  left    {name}: {reason}" for name, reason in self.left]
        return "\n".join(lines)
