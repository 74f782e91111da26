"""Programs of invariant operators: one configuration for any number of tokens; interpreted, equal bits."""

import numpy as np
import pytest
import torch

from moe_ops import Activation, RoutingConfig
from moe_ops.kernels.gpu import H200, KIB, Gpu
from tests.kernels import oracles
from tests.kernels.by_name import launch, program_of
from tests.kernels.catalogue import meta

# What says how many rows there are and how many programs share them; bits follow from everything else.
COUNTS = {"num_tokens", "num_slots", "capacity", "programs", "num_rows"}
TOKENS = (1, 2, 7, 8, 9, 33, 129, 1000, 4096, 70_000)
SIZES = {
    "even": (16, 4, 256, 192),
    "odd": (6, 3, 77, 51),
    "one slot an expert": (256, 8, 512, 128),
    "wide": (2, 1, 64, 4224),
}
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
GPUS = (H200, Gpu(80, 108, 163 * KIB), Gpu(120, 188, 99 * KIB))


def fixed(program):
    """Of each launch that computes with numbers, what may not change with how many tokens there are."""
    return [
        (each.kernel.__name__, each.num_warps, each.num_stages)
        + tuple(sorted((name, str(value)) for name, value in each.args.items() if name not in COUNTS))
        for each in program.launches
        if {"x_ptr", "expert_out_ptr", "logits_ptr"} & set(each.args)
    ]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: str(gpu.capability))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_one_configuration_for_any_number_of_tokens(size, dtype, gpu):
    experts, top_k, hidden, inner = SIZES[size]
    weights = meta(experts, 2 * inner, hidden, dtype=dtype), meta(experts, hidden, inner, dtype=dtype)

    def program(tokens):
        routed = meta(tokens, top_k, dtype=torch.float32), meta(tokens, top_k, dtype=torch.int32)
        inputs = meta(tokens, hidden, dtype=dtype), *weights, *routed
        return program_of("batch_invariant_experts", *inputs, activation=Activation(), gpu=gpu)

    first = fixed(program(TOKENS[0]))
    assert len(first) == 3
    assert all(fixed(program(tokens)) == first for tokens in TOKENS[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", [8, 9, 6144])
def test_products_have_one_configuration(features, dtype):
    def program(rows):
        x, weight = meta(rows, 256, dtype=dtype), meta(1, features, 256, dtype=dtype)
        return program_of("batch_invariant_gemm", x, weight, meta(2, dtype=torch.int32), None)

    first = fixed(program(1))
    assert len(first) == 1
    assert all(fixed(program(tokens)) == first for tokens in TOKENS[1:])


@pytest.mark.parametrize("experts", [8, 60, 256])
def test_routing_has_one_configuration(experts):
    def program(tokens):
        logits = meta(tokens, experts, dtype=torch.float32)
        return program_of("batch_invariant_routing", logits, None, routing=RoutingConfig(2))

    first = fixed(program(1))
    assert len(first) == 1
    assert all(fixed(program(tokens)) == first for tokens in TOKENS[1:])


def matmul_by_rows(a, b, dtype=None):
    """As tensor cores compute it, each row in the same order. That of BLAS may depend on the place of a row."""
    products = [(row[:, None] * b).sum(0, dtype=dtype) for row in a]
    return np.stack(products)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bits_of_a_token(dtype, device, monkeypatch):
    """Alone, at another place, beside NaN: where elsewhere vectors and tiles of other sizes would run."""
    monkeypatch.setattr(np, "matmul", matmul_by_rows)  # of the interpreter
    experts, top_k, hidden, inner, tokens = 5, 2, 24, 20, 19
    weights, ids = torch.rand(tokens, top_k), torch.rand(tokens, experts).argsort(1)[:, :top_k].int()
    shapes = (tokens, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner)
    x, w13, w2 = (torch.randn(shape).to(device, dtype) for shape in shapes)
    weights, ids = weights.to(device), ids.to(device)

    def run(x, rows):
        given = x[rows].contiguous(), w13, w2, weights[rows].contiguous(), ids[rows].contiguous()
        return launch("batch_invariant_experts", *given, activation=Activation())

    everything = list(range(tokens))
    whole = run(x, everything)
    nothing = dict.fromkeys(("w13_bias", "w2_bias", "expert_map", "shared"))
    tensors = {"hidden_states": x, "w13": w13, "w2": w2, "topk_weights": weights, "topk_ids": ids}
    expected = oracles.experts(**tensors, **nothing, activation=Activation())
    oracles.assert_close(whole, expected)
    for rows in ([0], [18], [3, 2], everything[::-1]):
        assert torch.equal(run(x, rows), whole[rows])
    noisy = torch.full_like(x, float("nan"))
    noisy[4] = x[4]
    assert torch.equal(run(noisy, everything)[4], whole[4])
