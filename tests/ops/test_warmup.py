"""moe_ops.warmup without a GPU: its checks, and that it plans what the operator launches."""

from types import SimpleNamespace

import pytest
import torch

import moe_ops
from moe_ops import Activation, RoutingConfig

CONFIG = SimpleNamespace(
    num_experts=16,
    hidden_size=256,
    intermediate_size=192,
    routing=RoutingConfig(top_k=4),
    activation=Activation("silu"),
    has_bias=True,
)


def test_nothing_to_load_on_the_cpu():
    moe_ops.warmup(CONFIG, [1, 8], device="cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bad_arguments(device):
    with pytest.raises(ValueError, match="sizes has 0: expected token counts of at least 1"):
        moe_ops.warmup(CONFIG, [0], device=device)
    with pytest.raises(TypeError, match=r"dtype=torch\.int32: expected a floating"):
        moe_ops.warmup(CONFIG, [1], device=device, dtype=torch.int32)


@pytest.mark.parametrize("tokens", [1, 33, 300])
def test_loads_every_kernel_of_the_operators_plan(tokens, monkeypatch):
    """The plan warmup loads is the one a call with real tensors of these sizes makes."""
    from moe_ops.kernels import fused
    from moe_ops.kernels.program import Program

    loaded = []
    monkeypatch.setattr(Program, "load", lambda self, dtypes, device: loaded.append(self))
    moe_ops.warmup(CONFIG, [tokens])
    shapes = [(tokens, 256), (tokens, 16), (16, 384, 256), (16, 256, 192), (16, 384), (16, 256)]
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
    tensors[1] = tensors[1].float()
    program = fused.fused_moe_program(*tensors, None, None, CONFIG.routing, CONFIG.activation)
    assert len(loaded) == 2
    assert program in loaded
