"""Products chosen by time on a GPU: values, one timing for alike layers, the same choice out of Inductor's cache."""

import logging

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code

import inductor_passes
import moe_ops
from inductor_passes.lowerings import TimeProducts, timed
from inductor_passes.pipeline import PIPELINE, MoEPasses
from moe_ops.product_timing import GroupedMm, Timed, measure, ways
from tests.helpers import relative_error

pytestmark = pytest.mark.gpu
ROUTING = moe_ops.RoutingConfig(top_k=4)
E, H, I, TOKENS = 16, 256, 192, 300


@pytest.fixture(autouse=True)
def cold():
    timed._timed.cache_clear()
    torch._dynamo.reset()
    with fresh_cache():
        yield


def given(tokens=TOKENS):
    torch.manual_seed(0)
    shapes = ((tokens, H), (tokens, E), (E, 2 * I, H), (E, H, I))
    scales = 1.0, 1.0, H**-0.5, I**-0.5
    return [
        torch.randn(shape, device="cuda").to(torch.bfloat16) * scale for shape, scale in zip(shapes, scales)
    ]


def layers(x, logits, w13, w2):
    for _ in range(3):
        x = moe_ops.fused_moe(x, logits, w13, w2, ROUTING) + x
    return x


def eager(x, logits, w13, w2):
    for _ in range(3):
        x = moe_ops.fused_moe(x, logits, w13, w2, ROUTING, emit="fused") + x
    return x


def compiled(timer, **options):
    passes = (TimeProducts(timer) if isinstance(each, TimeProducts) else each for each in PIPELINE)
    options |= {"post_grad_custom_pre_pass": MoEPasses(passes=tuple(passes))}
    return autotuned(**options)


def autotuned(**options):
    made = inductor_passes.options("max-autotune", **options)
    return torch.compile(layers, fullgraph=True, dynamic=False, options=made)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [9, 33, TOKENS, 4096])
def test_values_and_one_timing_for_alike_layers(tokens):
    asked = []

    def timer(gemm, device):
        asked.append(measure(gemm, ways(gemm), device))
        return asked[-1]

    args = given(tokens)
    assert relative_error(compiled(timer)(*args), eager(*args)) <= 2 * torch.finfo(torch.bfloat16).eps
    assert len(asked) == 2 and all(
        not each.failure and each.microseconds > 0 for found in asked for each in found
    )
    assert any(isinstance(each.way, GroupedMm) for found in asked for each in found)


@torch.no_grad()
def test_torchs_product_in_the_graph():
    def timer(gemm, device):
        return [Timed(way, 1.0 if isinstance(way, GroupedMm) else 2.0) for way in ways(gemm)]

    args = given()
    out, (code,) = run_and_get_code(compiled(timer), *args)
    assert "grouped_gemm_tma_kernel" not in code and "torch.ops.moe" not in code
    assert relative_error(out, eager(*args)) <= 2 * torch.finfo(torch.bfloat16).eps


@torch.no_grad()
def test_on_a_hit_the_earlier_choice_comes_back(caplog):
    args = given()
    first = autotuned()(*args).clone()
    asked = timed._timed.cache_info().misses
    torch._dynamo.reset()
    counters.clear()
    with caplog.at_level(logging.INFO, logger="inductor_passes"):
        assert torch.equal(autotuned()(*args), first)
    assert counters["inductor"]["fxgraph_cache_hit"] or counters["aot_autograd"]["autograd_cache_hit"]
    assert timed._timed.cache_info().misses == asked == 2
    assert not any("not timed" in each for each in caplog.messages)
