"""Routers of transformers' models, on `moe_ops.topk_routing`.

A router is known by what it computes: its class's code is run in float64 on tokens with logits alike, far apart and
tied, and a replacement has to give the same logits, weights, experts and gradient (`router_trial`). `linear_router`
is for any router that is one product and a `RoutingConfig`, whatever it is called; the few that compute something
else as well are in `router_kinds`. What nothing fits keeps its own code.

Logits that a family computes in float32 are float32 inside `torch.autocast` too, where its own code gets the
autocast dtype after all: rounded logits pick other experts than the model was trained to pick.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from layers.huggingface import forwards
from layers.huggingface.experts import NAME, implementation, is_dispatched
from layers.huggingface.settled import has_changed, settings_of
from moe_ops import RoutingConfig


class Known(NamedTuple):
    """How one router is rebuilt on our operators.

    Attributes:
        forward: what runs in place of its class's forward.
        routing: the options of `topk_routing` in it.
        details: a frozen value with what else `forward` needs to know.
        inside: paths of modules that `forward` does not call, and the router's own code may.
    """

    forward: Any
    routing: RoutingConfig
    details: Any
    inside: tuple[str, ...] = ()


class Ours:
    """Stands for the config of experts that have none and run on our operators."""

    def __init__(self) -> None:
        self._experts_implementation_internal = NAME


OURS = Ours()


def install(router: Any, known: Known, experts: Any) -> None:
    """Replaces the forward of this one module, which routes to `experts`."""
    router.moe_ops_routing = known.routing
    router.moe_ops_details = known.details
    router.moe_ops_config = experts.config if is_dispatched(experts) else OURS
    router.moe_ops_forward, router.moe_ops_settings = known.forward, settings_of(router, *known.inside)
    forwards.replace(router, forward)


def forward(self: Any, *args: Any, **named: Any) -> Any:
    """The forward of patched routers."""
    run = type(self).forward if has_changed(self, self.moe_ops_settings) else self.moe_ops_forward
    return run(self, *args, **named)


def uninstall(router: nn.Module) -> None:
    """Undoes `install`, also on a module that was copied or pickled since; others are left as they are."""
    if "moe_ops_routing" not in vars(router):
        return
    forwards.restore(router)
    del router.moe_ops_routing, router.moe_ops_details, router.moe_ops_config
    del router.moe_ops_forward, router.moe_ops_settings


def is_installed(router: nn.Module) -> bool:
    """Whether the forward of this module is ours."""
    return getattr(forwards.current(router), "__module__", "").startswith(__package__ or "")


def for_experts(router: Any, ids: Tensor) -> Tensor:
    """Our experts take the ids as they are; transformers' own count on int64, as its routers return them."""
    return ids if implementation(router.moe_ops_config) == NAME else ids.long()
