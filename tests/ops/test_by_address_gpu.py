"""Launches by address on a GPU give the bits that Triton's own launches give, whatever changes between two calls."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import moe_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
E, K, H, I = 16, 4, 256, 128
ROUTING = moe_ops.RoutingConfig(top_k=K)
TOKENS = (1, 7, 64, 700)


def layer(scale=1.0):
    w13 = torch.randn(E, 2 * I, H, device="cuda").bfloat16() * scale / H**0.5
    return w13, torch.randn(E, H, I, device="cuda").bfloat16() / I**0.5


def given(tokens):
    return torch.randn(tokens, H, device="cuda").bfloat16(), torch.randn(tokens, E, device="cuda")


@contextmanager
def launched_by_triton() -> Iterator[None]:
    """Somebody who wants to know of launches is told by Triton alone."""
    import triton

    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(_told)
    try:
        yield
    finally:
        hook.remove(_told)


def _told(metadata):
    pass


def expect_same(inputs, weights):
    ours = moe_ops.fused_moe(*inputs, *weights, ROUTING)
    with launched_by_triton():
        assert torch.equal(ours, moe_ops.fused_moe(*inputs, *weights, ROUTING))


@pytest.mark.parametrize("tokens", TOKENS)
def test_bits(tokens):
    weights = layer()
    for _ in range(6):
        expect_same(given(tokens), weights)


@pytest.mark.parametrize("tokens", TOKENS)
def test_weights_that_change_move_and_go(tokens):
    inputs, weights = given(tokens), layer()
    for turn in range(4):
        expect_same(inputs, weights)
        weights[0].mul_(-1)  # in place
        expect_same(inputs, weights)
        del weights  # others take its place in memory
        weights = layer(turn + 2.0)
    padded = torch.zeros(E, 2 * I, H + 8, device="cuda", dtype=torch.bfloat16)
    strided = padded[..., :H].copy_(weights[0])
    for w13 in (strided, weights[0], strided):
        expect_same(inputs, (w13, weights[1]))


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_tensor_that_does_not_start_on_16_bytes(tokens):
    (x, logits), weights = given(tokens), layer()
    memory = torch.empty(x.numel() + 1, device="cuda", dtype=torch.bfloat16)
    shifted = memory[1:].view_as(x).copy_(x)
    for states in (x, shifted, x, shifted, x, shifted):
        expect_same((states, logits), weights)


@pytest.mark.parametrize("tokens", TOKENS)
def test_streams_and_graphs(tokens):
    (x, logits), weights = given(tokens), layer()
    expected = moe_ops.fused_moe(x, logits, *weights, ROUTING)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(8):
        for stream in streams:
            with torch.cuda.stream(stream):
                outputs.append(moe_ops.fused_moe(x, logits, *weights, ROUTING))
    torch.cuda.synchronize()
    assert all(torch.equal(each, expected) for each in outputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe_ops.fused_moe(x, logits, *weights, ROUTING)
    for _ in range(3):
        x.normal_()
        logits.normal_()
        graph.replay()
        assert torch.equal(captured, moe_ops.fused_moe(x, logits, *weights, ROUTING))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_its_own():
    inputs, weights = given(7), layer()
    expected = moe_ops.fused_moe(*inputs, *weights, ROUTING)
    elsewhere = [tuple(each.to("cuda:1") for each in tensors) for tensors in (inputs, weights)]
    for _ in range(4):
        there = moe_ops.fused_moe(*elsewhere[0], *elsewhere[1], ROUTING)
        assert torch.equal(there.to("cuda:0"), expected)
        assert torch.equal(moe_ops.fused_moe(*inputs, *weights, ROUTING), expected)


def test_gradients_and_nothing_that_stays():
    (x, logits), weights = given(64), layer()
    tensors = [each.requires_grad_() for each in (x, logits.requires_grad_(), *weights)]
    for _ in range(4):
        grads = torch.autograd.grad(moe_ops.fused_moe(*tensors, ROUTING).float().square().sum(), tensors)
        with launched_by_triton():
            out = moe_ops.fused_moe(*tensors, ROUTING)
            again = torch.autograd.grad(out.float().square().sum(), tensors)
        assert all(map(torch.equal, grads, again))
        with torch.no_grad():  # what is kept of these calls is not for those that record
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            for _ in range(10):
                moe_ops.fused_moe(*tensors, ROUTING)
            assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("emit", ["stages", "halves", "fused", "batch_invariant"])
def test_gradients_after_calls_without_them(emit):
    (x, logits), weights = given(33), layer()
    tensors = [each.float().requires_grad_() for each in (x, logits, *weights)]
    expected = torch.autograd.grad(moe_ops.fused_moe(*tensors, ROUTING, emit=emit).square().sum(), tensors)
    for _ in range(3):
        with torch.no_grad():
            for _ in range(3):
                assert not moe_ops.fused_moe(*tensors, ROUTING, emit=emit).requires_grad
        grads = torch.autograd.grad(moe_ops.fused_moe(*tensors, ROUTING, emit=emit).square().sum(), tensors)
        assert all(map(torch.equal, grads, expected))
