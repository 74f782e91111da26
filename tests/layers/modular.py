"""Blocks whose routed experts are a modular kernel, in both formats, and parts of a user's own."""

import torch

from layers import (
    BatchedExperts,
    BatchedPrepareAndFinalize,
    FusedMoE,
    LocalPrepareAndFinalize,
    ModularKernel,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
    StandardExperts,
)
from moe_ops import Activation, RoutingConfig

E, K, H, I = 8, 2, 16, 24
EXPERT_MAP = torch.tensor([1, -1, 0, 3, -1, 2, 4, -1], dtype=torch.int32)
OPTIONS = {
    "plain": {},
    "shared": {"shared_experts": SharedExpertConfig(40, "sigmoid")},
    "deepseek_v3": {
        "routing": RoutingConfig(K, "sigmoid", renorm_eps=1e-20, scale=2.5),
        "router": RouterConfig(has_correction_bias=True),
        "shared_experts": SharedExpertConfig(40),
    },
    "gpt_oss": {"activation": Activation("swiglu_oai", interleaved=True), "has_bias": True},
    "ungated": {"activation": "relu2", "has_bias": True},
    "llama4": {
        "top_k": 1,
        "routing": RoutingConfig(1, "sigmoid", renormalize=False),
        "router": RouterConfig(weight_on="input"),
    },
}


def config(**options) -> MoEConfig:
    return MoEConfig(**{"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I, **options})


def standard(layer: FusedMoE) -> ModularKernel:
    return ModularKernel(LocalPrepareAndFinalize(), StandardExperts(layer))


def batched(layer: FusedMoE, max_tokens: int | None = None) -> ModularKernel:
    return ModularKernel(BatchedPrepareAndFinalize(max_tokens), BatchedExperts(layer))


FORMATS = {"standard": standard, "batched": batched}


class Recorded(LocalPrepareAndFinalize):
    """One that is not over when it returns, and writes down when what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def _note(self, event: str, value=None):
        self.events.append(event)
        return value

    def prepare(self, *args):
        return self._note("prepare", super().prepare(*args))

    def prepare_async(self, *args):
        self._note("sent")
        prepared = LocalPrepareAndFinalize().prepare(*args)
        return lambda: self._note("arrived"), lambda: self._note("received", prepared)

    def finalize_async(self, *args):
        self._note("sent back")
        output = self.finalize(*args)
        return lambda: self._note("arrived back"), lambda: self._note("received back", output)


class ReducedExperts(StandardExperts):
    """Experts that weigh and sum themselves."""

    def forward(self, prepared):
        rows = super().forward(prepared)
        reduced = StandardExperts.weigh_and_reduce.apply(rows, prepared.topk_weights, None)
        return rows._replace(rows=reduced, inverse=None)
