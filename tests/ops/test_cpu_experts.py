"""How the CPU groups experts: padding and idle weights stay bounded, however skewed the routing."""

import pytest
import torch

import moe_ops
from moe_ops import _cpu_experts
from moe_ops.reference import reference_experts
from moe_ops.types import Activation
from tests.helpers import assert_matches_oracle

E = 64
SKEWED = {
    "one hot": [0] * 20 + [4096] + [0] * 43,
    "hot among few": [1] * 20 + [4096] + [2] * 43,
    "two hot neighbours": [0] * 20 + [2048, 2048] + [0] * 42,
    "falling": [int(4096 / (rank + 1)) for rank in range(E)],
    "even": [64] * E,
    "few rows, one busy": [0] * 63 + [16],
    "few rows, every fourth busy": [16, 0, 0, 0] * 16,
    "few rows, all busy": [3] * E,
}


@pytest.mark.parametrize("threads", [1, 2, 32, 128])
@pytest.mark.parametrize("name", SKEWED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_and_idle_experts_are_bounded(name, threads, dtype, monkeypatch):
    counts = SKEWED[name]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    batches = _cpu_experts._batches(counts, torch.empty(E, 8, 8, dtype=dtype))
    covered = [expert for batch in batches for expert in range(batch.first, batch.first + batch.experts)]
    assert len(covered) == len(set(covered))
    assert {expert for expert, rows in enumerate(counts) if rows} <= set(covered)
    assert all(batch.rows == max(counts[batch.first : batch.first + batch.experts]) for batch in batches)
    busy = sum(rows > 0 for rows in counts)
    assert len(covered) <= 2 * busy or max(counts) > 16
    padded = sum(batch.rows * batch.experts for batch in batches)
    assert padded <= (2 * sum(counts) if max(counts) > 16 else 16 * 2 * busy)
    if name == "even":
        assert len(batches) == max(E // threads, 1)


@pytest.mark.parametrize("threads", [2, 64])
@pytest.mark.parametrize("hot", [[3], [3, 4], [0, 63], [10, 30, 31]], ids=str)
def test_skewed_values(hot, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, w13, w2 = torch.randn(40, 8), torch.randn(E, 12, 8), torch.randn(E, 8, 6)
    ids = torch.tensor(hot)[torch.randint(len(hot), (40, 2))]
    ids[::7, 1] = torch.randint(-1, E, (6,))
    weights = torch.rand(40, 2)
    out = moe_ops.fused_experts(x, w13, w2, weights, ids)
    doubles = [tensor.double() for tensor in (x, w13, w2, weights)]
    assert_matches_oracle(out, reference_experts(*doubles, ids, Activation()))
