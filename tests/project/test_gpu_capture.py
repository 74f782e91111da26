"""fused_moe in a CUDA graph: no host sync, and a replay that follows new contents and new routing."""

import pytest
import torch

from benchmarks.capture import capture_and_replay

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("tokens", [1, 3, 8, 64, 257, 1024])
def test_fused_moe_is_captured_and_replays_with_new_contents_and_routing(tokens: int) -> None:
    assert capture_and_replay(tokens).worst <= 8e-3
