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


def test_parts_of_another_kind():
    layer = FusedMoE(config())
    message = "prepare_finalize is a NoneType: expected a PrepareAndFinalize, which has activation_format"
    with pytest.raises(TypeError, match=message):
        ModularKernel(None, StandardExperts(layer))
    message = "experts is a FusedMoE: expected a PermuteExpertsUnpermute, which has activation_formats"
    with pytest.raises(TypeError, match=message):
        ModularKernel(LocalPrepareAndFinalize(), layer)
    with pytest.raises(TypeError, match="prepare_finalize is the class LocalPrepareAndFinalize: expected an"):
        ModularKernel(LocalPrepareAndFinalize, StandardExperts(layer))
    half = type("Half", (), {"activation_format": ActivationFormat.Standard, "weigh_and_reduce": None})
    with pytest.raises(
        TypeError, match="prepare_finalize is a Half: expected a PrepareAndFinalize, which has pre"
    ):
        ModularKernel(half(), StandardExperts(layer))
    of_nobody = type("OfNobody", (BatchedPrepareAndFinalize,), {"weigh_and_reduce": None})
    with pytest.raises(
        TypeError, match="weigh_and_reduce is a NoneType: expected a TopKWeightAndReduce, which"
    ):
        ModularKernel(of_nobody(), BatchedExperts(layer))


def returns(value):
    return lambda *args: value


WRONG = {
    "output of prepare=<tuple>: expected Prepared": {"prepare": returns((1, 2))},
    "output of experts=<Tensor>: expected ExpertOutput": {"experts": returns(torch.ones(5, H))},
    "output of finalize=None: expected a torch.Tensor": {"finalize": returns(None)},
    r"output of finalize has shape \[16, 5\]: expected \[5, 16\]": {"finalize": returns(torch.ones(H, 5))},
    "output of prepare_async=None: expected a hook and a receiver": {
        "prepare_async": returns(None),
        "finalize_async": returns(None),
    },
    "output of finalize_async=<tuple>: expected a hook and": {
        "prepare_async": lambda self, *args: (returns(None), lambda: self.prepare(*args)),
        "finalize_async": returns((1, 2, 3)),
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_parts_that_return_something_else(message):
    methods = dict(WRONG[message])
    experts = type("Mine", (StandardExperts,), {"forward": methods.pop("experts", StandardExperts.forward)})
    exchange = type("Exchange", (LocalPrepareAndFinalize,), methods)
    kernel = ModularKernel(exchange(), experts(FusedMoE(config())))
    with pytest.raises((TypeError, ValueError), match=message):
        kernel(torch.randn(5, H), torch.randn(5, E))


SCALAR = torch.tensor(1.0)
MISTAKES = {
    "list of tokens": ({"hidden_states": [1.0]}, TypeError, "hidden_states=<list>: expected a torch.Tensor"),
    "no tokens": ({"hidden_states": None}, TypeError, "hidden_states=None: expected a torch.Tensor"),
    "scalar": ({"hidden_states": SCALAR}, ValueError, r"hidden_states has shape \[\]: expected \[..., H\]"),
    "no logits": ({"router_logits": None}, TypeError, "router_logits=None: expected a torch.Tensor"),
    "number for shared": ({"shared": 5}, TypeError, "shared=5: expected a torch.Tensor"),
    "scalar for shared": ({"shared": SCALAR}, ValueError, r"shared has shape \[\]: expected \[..., H\]"),
    "tensor for extras": ({"extra_tensors": SCALAR}, TypeError, "extra_tensors=<Tensor>: expected a tuple or list"),
    "no extras": ({"extra_tensors": None}, TypeError, "extra_tensors=None: expected a tuple or list of tensors"),
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MISTAKES)
def test_what_a_kernel_is_given(name, compiled):
    change, error, message = MISTAKES[name]
    kernel = standard(FusedMoE(config()))
    run = torch.compile(kernel, fullgraph=True, backend="eager") if compiled else kernel
    with pytest.raises(Exception if compiled else error, match=message):
        run(**{"hidden_states": torch.randn(5, H), "router_logits": torch.randn(5, E), **change})


def test_what_is_started_has_rows():
    kernel = standard(FusedMoE(config()))
    with pytest.raises(ValueError, match=r"hidden_states has shape \[2, 5, 16\]: expected \[T, H\]"):
        kernel.start(torch.randn(2, 5, H), torch.randn(10, E))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [standard, batched])
def test_an_overlapped_shared_expert_of_a_block_gives_a_kernel_its_output(make, compiled):
    block = MoEBlock(config(shared_experts=SharedExpertConfig(40, "sigmoid", overlap=True)))
    hidden = torch.randn(5, H)
    expected = oracle.block(block, hidden)
    block.experts = make(block.experts)
    run = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
    assert_matches_oracle(run(hidden), expected)


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
