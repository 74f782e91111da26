"""Logits exchanged in the place of ids: values and gradients of one process."""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from layers import (
    BatchedExperts,
    EplbState,
    ExpertsConfig,
    FusedMoE,
    HashRouting,
    MoEBlock,
    RoutedExpertsCapture,
    RoutedExpertsReplay,
    RouterConfig,
    SimulatedRouting,
    StandardExperts,
)
from layers.parallel import AllGatherMonolithic, ExpertParallel
from moe_ops import RoutingConfig
from tests.helpers import assert_matches_oracle, assert_same
from tests.layers import oracle
from tests.layers.parallel.exchanges import (
    MOST,
    H,
    K,
    config,
    held_by,
    make_layer,
    owners,
    part_of_experts,
    shard_of_experts,
    tokens_of,
)
from tests.layers.parallel.test_exchanges import loss
from tests.layers.parallel.world import on_ranks

static = pytest.mark.parametrize("max_tokens", [None, MOST])


def whole_experts(layer):
    return part_of_experts(layer, owners(layer.config))


@on_ranks(1, 2, 4)
@static
@pytest.mark.parametrize("part", [whole_experts, shard_of_experts])
def test_values(max_tokens, part):
    layer = make_layer(config(has_bias=True))
    kernel = AllGatherMonolithic(dist.group.WORLD, part(layer), max_tokens=max_tokens)
    hidden, (logits, _, _) = tokens_of(dist.get_rank(), "logits")
    shared = torch.randn(hidden.shape)
    out = kernel(hidden.unsqueeze(0), logits.unsqueeze(0), shared.unsqueeze(0)).squeeze(0)
    assert_matches_oracle(out, oracle.experts(layer, hidden, logits) + shared.double())


@on_ranks(2)
@static
def test_gradients(max_tokens):
    layer, rank = make_layer(config(), torch.float64), dist.get_rank()
    kernel = AllGatherMonolithic(dist.group.WORLD, whole_experts(layer), max_tokens=max_tokens)
    inputs = [leaves(each) for each in range(2)]
    mine = leaves(rank)
    shared = [torch.randn_like(each[0]).requires_grad_() for each in (mine, inputs[rank])]
    loss(kernel(*mine, shared[0])).backward()
    for number, each in enumerate(inputs):
        loss(layer(*each, shared[1] if number == rank else None)).backward()
    assert_same([shared[0].grad], [shared[1].grad])
    assert_same([each.grad for each in mine], [each.grad for each in inputs[rank]])
    held = held_by(kernel.layer.expert_map)
    for name, parameter in kernel.layer.named_parameters():
        assert_same([parameter.grad], [layer.get_parameter(name).grad[held]])


def leaves(rank):
    hidden, (logits, _, _) = tokens_of(rank, "logits", dtype=torch.float64)
    return hidden.requires_grad_(), logits.requires_grad_()


@on_ranks(2)
@static
def test_compiled(max_tokens):
    layer, counter = make_layer(config()), CompileCounterWithBackend("aot_eager")
    kernel = AllGatherMonolithic(dist.group.WORLD, whole_experts(layer), max_tokens=max_tokens)
    function = torch.compile(kernel, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (7, 5, 9):  # not E, which torch would take for the same size
        hidden, (logits, _, _) = tokens_of(0, "logits", sizes="most", step=tokens)
        mine = slice(tokens - 2 * dist.get_rank())
        with torch.no_grad():
            out = function(hidden[mine], logits[mine])
        assert_matches_oracle(out, oracle.experts(layer, hidden[mine], logits[mine]))
    assert counter.frame_count == 1


@on_ranks(2)
def test_ranks_that_differ():
    layer = make_layer(config(num_experts=8 + dist.get_rank()))
    with pytest.raises(ValueError, match="max_tokens differs between ranks: 8 on rank 0; 9 on rank 1"):
        AllGatherMonolithic(dist.group.WORLD, layer, max_tokens=8 + dist.get_rank())
    kernel = AllGatherMonolithic(dist.group.WORLD, layer)
    with pytest.raises(ValueError, match="number of logits differs between ranks: 8 on rank 0; 9 on rank 1"):
        kernel(torch.randn(3, H), torch.randn(3, layer.config.num_experts))


@on_ranks(1)
def test_layers_that_are_none():
    with pytest.raises(TypeError, match="layer=None: expected FusedMoE"):
        AllGatherMonolithic(dist.group.WORLD, None)


@on_ranks(2)
@pytest.mark.parametrize("part", [whole_experts, shard_of_experts])
def test_zero_experts_count_once(part):
    """Every rank is given every token, and one of them adds it."""
    layer = make_layer(config(experts=ExpertsConfig(num_zero_experts=6)))
    kernel = AllGatherMonolithic(dist.group.WORLD, part(layer))
    torch.manual_seed(dist.get_rank())
    hidden, logits = torch.randn(5, H), torch.randn(5, 14)
    assert_matches_oracle(kernel(hidden, logits), oracle.experts(layer, hidden, logits))


@on_ranks(2)
def test_load_is_that_of_all_ranks_and_of_rows_of_no_token():
    layer = make_layer(config())
    kernel = AllGatherMonolithic(dist.group.WORLD, whole_experts(layer), max_tokens=MOST)
    state = EplbState.initial(1, 8)
    kernel.layer.set_eplb_state(0, *state)
    hidden, logits = torch.randn(5, H), torch.randn(5, 8)
    assert_matches_oracle(kernel(hidden, logits), oracle.experts(layer, hidden, logits))
    assert state.expert_load_view.sum() == 2 * MOST * layer.config.top_k


@on_ranks(1)
def test_a_shared_output_that_is_no_tensor():
    kernel, hidden = AllGatherMonolithic(dist.group.WORLD, make_layer(config())), torch.randn(5, H)
    with pytest.raises(TypeError, match=r"shared=<function>: expected a torch.Tensor"):
        kernel(hidden, torch.randn(5, 8), lambda: hidden)


@on_ranks(2)
@static
def test_latent_experts(max_tokens):
    """Logits are of the tokens in front, what is exchanged are the latent ones."""
    torch.manual_seed(3)
    moe = config(experts=ExpertsConfig(latent_size=12))
    block, routed = MoEBlock(moe), FusedMoE(moe, owners(moe).expert_map(dist.get_rank()))
    hidden, held = torch.randn(5 + dist.get_rank(), H), held_by(routed.expert_map)
    expected = oracle.block(block, hidden)
    routed.load_state_dict({name: each[held] for name, each in block.experts.state_dict().items()})
    block.experts = AllGatherMonolithic(dist.group.WORLD, routed, max_tokens=max_tokens)
    assert_matches_oracle(block(hidden), expected)


def refused():
    """What a layer may know of this rank's tokens alone, and the message."""
    routing, ids = RoutingConfig(K), torch.zeros(MOST, K, dtype=torch.int32)
    replay, table = RoutedExpertsReplay(ids, routing), HashRouting(ids, torch.arange(MOST), routing)
    latent = config(experts=ExpertsConfig(latent_size=H))
    function = config(
        experts=latent.experts, router=RouterConfig(routing_function=lambda h, x, k, _: x.topk(k))
    )
    yield config(), {"capture": RoutedExpertsCapture(ids)}, "layer has capture: expected None"
    yield (
        config(),
        {"routing_override": replay},
        "routing_override=RoutedExpertsReplay: expected AllGatherPrepare",
    )
    yield config(), {"routing_override": table}, "routing_override=HashRouting: expected AllGatherPrepare"
    yield latent, {"routing_override": SimulatedRouting("uniform", K)}, "expected by logits alone"
    yield function, {}, "expected by logits alone"


@on_ranks(2)
def test_what_is_known_of_tokens_of_one_rank():
    for moe, attributes, message in refused():
        kernel = AllGatherMonolithic(dist.group.WORLD, FusedMoE(moe))
        for name, value in attributes.items():
            setattr(kernel.layer, name, value)
        with pytest.raises(ValueError, match=message):
            kernel(torch.randn(5, H), torch.randn(5, moe.num_experts))


@on_ranks(1)
def test_bits_that_no_sum_over_ranks_promises():
    with pytest.raises(
        ValueError, match=r"layer\.config\.emit='batch_invariant': expected another among ranks"
    ):
        AllGatherMonolithic(dist.group.WORLD, FusedMoE(config(emit="batch_invariant")))


@on_ranks(2)
def test_layers_that_exchange_tokens_themselves():
    layer = parallelize_module(make_layer(config()), init_device_mesh("cpu", (2,)), ExpertParallel())
    with pytest.raises(ValueError, match="layer is sharded by a style"):
        AllGatherMonolithic(dist.group.WORLD, layer)(torch.randn(5, H), torch.randn(5, 8))
    for experts in (StandardExperts, BatchedExperts):
        with pytest.raises(ValueError, match="layer is sharded by a style"):
            experts(layer)
