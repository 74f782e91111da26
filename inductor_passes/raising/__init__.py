"""Raising: MoE layers of models that know nothing of us become our operators."""

from inductor_passes.raising.experts import RaiseExperts
from inductor_passes.raising.routers import RaiseRouters

__all__ = ["RaiseExperts", "RaiseRouters"]
