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
        computed: (module name, what its own code computes) of routers and experts, as spec of a `RoutingConfig` or an
            `Activation`. It was run in float64 and gave the same for numbers small, large and tied.
    """

    experts: tuple[str, ...]
    routers: tuple[str, ...]
    left: tuple[tuple[str, str], ...]
    computed: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"moe_ops: {len(self.experts)} experts and {len(self.routers)} routers patched"]
        specs = dict(self.computed)
        lines += [
            f"  experts {name}: {specs.get(name, 'an activation of their own')}" for name in self.experts
        ]
        lines += [f"  router  {name}: {specs[name]}" for name in self.routers]
        lines += [f"  left    {name}: {reason}" for name, reason in self.left]
        return "\n".join(lines)
