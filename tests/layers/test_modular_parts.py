"""Which parts make a modular kernel, and what it says of those that do not fit."""

from dataclasses import dataclass

import pytest
import torch

from layers import (
    ActivationFormat,
    BatchedExperts,
    BatchedPrepareAndFinalize,
    ExpertOutput,
    FusedMoE,
    LocalPrepareAndFinalize,
    ModularKernel,
    MoEBlock,
    MoEConfig,
    Prepared,
    SharedExpertConfig,
    StandardExperts,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOp,
)
from tests.helpers import assert_matches_oracle
from tests.layers import oracle
from tests.layers.modular import E, H, K, ReducedExperts, batched, config, standard


def test_formats_that_differ():
    layer = FusedMoE(config())
    message = (
        "BatchedPrepareAndFinalize returns ActivationFormat.BatchedExperts: "
        "expected ActivationFormat.Standard, which StandardExperts takes"
    )
    with pytest.raises(ValueError, match=message):
        ModularKernel(BatchedPrepareAndFinalize(), StandardExperts(layer))
    message = (
        "LocalPrepareAndFinalize returns ActivationFormat.Standard: expected .*, which BatchedExperts takes"
    )
    with pytest.raises(ValueError, match=message):
        ModularKernel(LocalPrepareAndFinalize(), BatchedExperts(layer))


def test_rows_in_another_format_than_the_sum_takes():
    experts = StandardExperts(FusedMoE(config()))
    experts.weigh_and_reduce = TopKWeightAndReduceNaiveBatched()
    message = r"ActivationFormat.Standard: expected .*, which TopKWeightAndReduceNaiveBatched takes"
    with pytest.raises(ValueError, match=message):
        ModularKernel(LocalPrepareAndFinalize(), experts)


def test_who_weighs():
    layer = FusedMoE(config())
    assert standard(layer).weigh_and_reduce == TopKWeightAndReduceContiguous()
    assert batched(layer).weigh_and_reduce == TopKWeightAndReduceNaiveBatched()  # delegated


def test_experts_that_weigh_themselves():
    block = MoEBlock(config(shared_experts=SharedExpertConfig(40)))
    experts = ReducedExperts(block.experts)
    experts.weigh_and_reduce = TopKWeightAndReduceNoOp()
    hidden = torch.randn(5, H)
    expected = oracle.block(block, hidden)
    block.experts = ModularKernel(LocalPrepareAndFinalize(), experts)
    assert_matches_oracle(block(hidden), expected)


def test_experts_of_no_module():
    with pytest.raises(TypeError, match=r"experts=.*: expected Module"):
        ModularKernel(LocalPrepareAndFinalize(), object())
    with pytest.raises(TypeError, match=r"layer=.*: expected FusedMoE"):
        StandardExperts(torch.nn.Linear(1, 1))


def test_an_option_they_do_not_know():
    @dataclass(frozen=True)
    class Wider(MoEConfig):
        post_norm: float | None = None

    known = config()
    values = {name: getattr(known, name) for name in MoEConfig.__dataclass_fields__}
    StandardExperts(FusedMoE(Wider(**values)))
    for experts in (StandardExperts, BatchedExperts):
        with pytest.raises(ValueError, match=r"config.post_norm=1e-06: expected None in a ModularKernel"):
            experts(FusedMoE(Wider(**values, post_norm=1e-6)))


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5])
def test_max_tokens(max_tokens):
    with pytest.raises((TypeError, ValueError), match=f"max_tokens={max_tokens}"):
        BatchedPrepareAndFinalize(max_tokens)


def test_routing_of_other_tokens():
    kernel = standard(FusedMoE(config()))
    routed = kernel.route(torch.randn(5, E))
    with pytest.raises(ValueError, match=r"topk_ids has shape \[5, 2\]: expected \[4, K\]"):
        kernel(torch.randn(4, H), routed)
    with pytest.raises(ValueError, match=r"topk_weights has shape \[5, 1\]: expected \[5, 2\]"):
        kernel(torch.randn(5, H), routed._replace(topk_weights=torch.ones(5, 1)))
    with pytest.raises(ValueError, match="hidden_states has last dimension 15: expected 16"):
        kernel(torch.randn(5, H - 1), routed)


def test_a_format_by_value():
    assert ActivationFormat("batched_experts") is ActivationFormat.BatchedExperts
    assert BatchedPrepareAndFinalize(3) != BatchedPrepareAndFinalize(4)


def test_what_a_format_needs():
    prepared = Prepared(torch.randn(E, 2, H), torch.ones(2, K), torch.zeros(2, K, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"counts=None: expected a torch.Tensor"):
        BatchedExperts(FusedMoE(config()))(prepared)
    for reducer in (TopKWeightAndReduceContiguous(), TopKWeightAndReduceNaiveBatched()):
        with pytest.raises(TypeError, match=r"inverse=None: expected a torch.Tensor"):
            reducer.apply(ExpertOutput(torch.randn(E, 2, H)), torch.ones(2, K), None)
