"""The modular kernel against a float64 oracle, in both formats, eager and compiled, and what its parts may be."""

import copy
import pickle
import weakref
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layers import (
    BatchedExperts,
    BatchedPrepareAndFinalize,
    FusedMoE,
    ModularKernel,
    MoEBlock,
    Prepared,
    RouterOutput,
    StandardExperts,
)
from moe_ops import build_dispatch
from moe_ops.reference import reference_experts
from tests.helpers import assert_matches_oracle, assert_same, grads_of, mixed
from tests.layers import oracle
from tests.layers.modular import (
    EXPERT_MAP,
    FORMATS,
    OPTIONS,
    E,
    H,
    K,
    Recorded,
    batched,
    config,
    standard,
)

formats = pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)


def make_block(options=None, dtype=torch.float32, expert_map=None) -> MoEBlock:
    torch.manual_seed(2)
    block = MoEBlock(config(**(options or {})), expert_map, dtype=dtype)
    torch.nn.init.normal_(block.gate.weight, std=1.0)
    if block.experts.e_score_correction_bias is not None:
        torch.nn.init.normal_(block.experts.e_score_correction_bias, std=0.3)
    return block


def modular(block: MoEBlock, make) -> MoEBlock:
    twin = copy.deepcopy(block)
    twin.experts = make(twin.experts)
    return twin


@formats
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_values(make, options, tokens):
    block = make_block(options)
    hidden = torch.randn(tokens, H)
    assert_matches_oracle(modular(block, make)(hidden), oracle.block(block, hidden))


@formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_values_in_other_dtypes(make, dtype):
    block = make_block({**OPTIONS["gpt_oss"], **OPTIONS["shared"]}, dtype)
    layer, hidden = block.experts, torch.randn(3, 5, H).to(dtype)
    routed = layer.route(torch.randn(3, 5, E, dtype=dtype))
    shared = torch.randn(3, 5, H).to(dtype)
    expected = oracle_of_routed(layer, hidden, routed) + shared.double()
    out = make(layer)(hidden, routed, shared)
    assert out.dtype == dtype
    assert_matches_oracle(out, expected)


def oracle_of_routed(layer, hidden, routed, ids=None):
    weights = [None if each is None else each.double() for each in layer.parameters(recurse=False)]
    names = ("w13", "w2", "w13_bias", "w2_bias")
    w13, w2, *biases = dict(zip(names, weights, strict=False)).values()
    rest = dict(zip(("w13_bias", "w2_bias"), biases, strict=False))
    ids = routed.topk_ids if ids is None else ids
    tokens = hidden.reshape(-1, H).double()
    expert_map = layer.expert_map
    out = reference_experts(
        tokens,
        w13,
        w2,
        routed.topk_weights.double(),
        ids,
        layer.config.activation,
        expert_map=expert_map,
        **rest,
    )
    return out.reshape(hidden.shape)


@pytest.mark.parametrize(
    ("make", "name"),
    mixed(FORMATS.values(), ("deepseek_v3", "llama4")),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_compiled(make, name):
    block = make_block(OPTIONS[name])
    compiled = torch.compile(modular(block, make), fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (33, 7, 1, 0):
        hidden = torch.randn(tokens, H)
        assert_matches_oracle(compiled(hidden), oracle.block(block, hidden))


@formats
def test_experts_that_live_elsewhere(make):
    block = make_block(expert_map=EXPERT_MAP)
    hidden = torch.randn(9, H)
    assert_matches_oracle(modular(block, make)(hidden), oracle.block(block, hidden))


@formats
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients(make, compiled):
    layer = make_block({"has_bias": True}, torch.float64).experts
    hidden = torch.randn(7, H, dtype=torch.float64, requires_grad=True)
    routed = layer.route(torch.randn(7, E, dtype=torch.float64))
    routed = routed._replace(topk_weights=routed.topk_weights.detach().requires_grad_())
    kernel = make(layer)
    run = torch.compile(kernel, fullgraph=True) if compiled else kernel
    tensors = [hidden, routed.topk_weights, *layer.parameters()]
    ours = grads_of(lambda: run(hidden, routed), tensors)
    assert_same(ours, grads_of(lambda: oracle_of_routed(layer, hidden, routed), tensors))


@formats
def test_gradients_of_weights_on_the_input(make):
    layer = make_block(OPTIONS["llama4"], torch.float64).experts
    hidden = torch.randn(7, H, dtype=torch.float64, requires_grad=True)
    routed = layer.route(torch.randn(7, E, dtype=torch.float64))
    weights = routed.topk_weights.detach().requires_grad_()
    ours = grads_of(lambda: make(layer)(hidden, routed._replace(topk_weights=weights)), [hidden, weights])
    ones = routed._replace(topk_weights=torch.ones_like(weights))
    expected = grads_of(lambda: oracle_of_routed(layer, hidden * weights, ones), [hidden, weights])
    assert_same(ours, expected)


@pytest.mark.parametrize(("max_tokens", "compiled"), mixed((1, 3), (False, True)))
def test_slots_that_find_their_expert_full_are_dropped(max_tokens, compiled):
    """The last tokens first, exactly: the oracle gets an id of no expert for each."""
    layer = make_block().experts
    hidden, routed = torch.randn(12, H), layer.route(torch.randn(12, E))
    seen, ids = Counter(), routed.topk_ids.clone()
    for token, k in [(token, k) for token in range(12) for k in range(K)]:
        expert = int(ids[token, k])
        seen[expert] += 1
        ids[token, k] = expert if seen[expert] <= max_tokens else -1
    assert (ids < 0).any()
    kernel = batched(layer, max_tokens)
    run = torch.compile(kernel, fullgraph=True) if compiled else kernel
    assert_matches_oracle(run(hidden, routed), oracle_of_routed(layer, hidden, routed, ids))


def test_batched_tokens_lie_where_they_should():
    layer = make_block().experts
    hidden, ids = torch.randn(3, H), torch.tensor([[1, 0], [1, 5], [7, 1]], dtype=torch.int32)
    prepared = BatchedPrepareAndFinalize(2).prepare(hidden, torch.ones(3, 2), ids, E, None)
    assert prepared.hidden_states.shape == (E, 2, H)
    assert prepared.counts.tolist() == [1, 2, 0, 0, 0, 1, 0, 1]
    assert prepared.counts.dtype == prepared.inverse.dtype == torch.int32
    assert prepared.inverse.tolist() == [2, 0, 3, 10, 14, -1]
    expected = torch.zeros(E * 2, H)
    expected[[2, 0, 3, 10, 14]] = hidden[[0, 0, 1, 1, 2]]
    assert torch.equal(prepared.hidden_states.flatten(0, 1), expected)
    padded = prepared._replace(hidden_states=prepared.hidden_states.clone())
    padded.hidden_states[torch.arange(2) >= prepared.counts.unsqueeze(1)] = float("nan")
    experts = BatchedExperts(layer)
    assert torch.equal(experts(padded).rows, experts(prepared).rows)


@formats
def test_a_nan_token_changes_no_other(make):
    kernel = make(make_block().experts)
    hidden, logits = torch.randn(7, H), torch.randn(7, E)
    clean = kernel(hidden, logits)
    hidden[3] = float("nan")
    out = kernel(hidden, logits)
    kept = [0, 1, 2, 4, 5, 6]
    assert torch.equal(out[kept], clean[kept])


@formats
def test_autocast(make):
    layer = make_block().experts
    hidden, routed = torch.randn(5, H), layer.route(torch.randn(5, E))
    with torch.autocast("cpu", torch.bfloat16):
        out = make(layer)(hidden, routed)
    assert out.dtype == torch.bfloat16
    rounded = copy.deepcopy(layer).bfloat16()
    assert_matches_oracle(out, oracle_of_routed(rounded, hidden.bfloat16(), routed))


def test_what_is_under_way():
    exchange, layer = Recorded(), make_block().experts
    kernel, hidden, logits = (
        ModularKernel(exchange, StandardExperts(layer)),
        torch.randn(5, H),
        torch.randn(5, E),
    )
    prepared = kernel.start(hidden, logits)
    assert exchange.events == ["sent"]
    output = kernel.finish(prepared.wait())
    assert exchange.events == ["sent", "arrived", "received", "sent back"]
    assert torch.equal(output.wait(), standard(layer)(hidden, logits))
    assert exchange.events[4:] == ["arrived back", "received back"]
    hook, receiver = kernel.start(hidden, logits)
    hook()
    assert isinstance(receiver(), Prepared)


def test_asynchronous_and_compiled():
    layer = make_block().experts
    kernel = ModularKernel(Recorded(), StandardExperts(layer))
    hidden, logits = torch.randn(5, H), torch.randn(5, E)
    assert_matches_oracle(
        torch.compile(kernel, fullgraph=True)(hidden, logits), oracle.experts(layer, hidden, logits)
    )


@formats
def test_two_batches_under_way_at_once(make):
    kernel = make(make_block().experts)
    inputs = [(torch.randn(tokens, H), torch.randn(tokens, E)) for tokens in (5, 3)]
    started = [kernel.start(*each) for each in inputs]
    for each, prepared in zip(inputs, started, strict=True):
        assert torch.equal(kernel.finish(prepared.wait()).wait(), kernel(*each))


@formats
def test_copies_and_saved_states(make):
    block = modular(make_block(OPTIONS["deepseek_v3"]), make)
    hidden = torch.randn(5, H)
    loaded = modular(MoEBlock(block.config), make)
    loaded.load_state_dict(block.state_dict())
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block)), loaded):
        assert torch.equal(twin(hidden), block(hidden))
    loaded.reset_parameters()
    assert not torch.equal(loaded(hidden), block(hidden))


@formats
@pytest.mark.parametrize("emit", ["stages", "fused"])
def test_emit(make, emit):
    block = make_block({"emit": emit})
    hidden = torch.randn(5, H)
    assert_matches_oracle(modular(block, make)(hidden), oracle.block(block, hidden))


class Peak(TorchDispatchMode):
    """The most bytes that tensors made meanwhile held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.holders: Counter[int] = Counter()
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor)
        self.peak = max(self.peak, sum(self.sizes[key] for key in self.holders if self.holders[key]))
        return result

    def _hold(self, tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        self.sizes[key] = storage.nbytes()
        self.holders[key] += 1
        weakref.finalize(tensor, self._release, key)

    def _release(self, key) -> None:
        self.holders[key] -= 1


@formats
def test_workspaces_do_not_add_up_over_layers(make):
    """Twelve layers need what one needs: nothing of a layer outlives it but its output."""
    layers = [make(FusedMoE(config())) for _ in range(12)]
    logits = torch.randn(64, E)

    def peak(number):
        with torch.no_grad(), Peak() as memory:
            hidden = torch.randn(64, H)
            for layer in layers[:number]:
                hidden = layer(hidden, logits)
        return memory.peak

    one, many = peak(1), peak(12)
    assert one > 64 * K * H * 4
    assert many <= one + 64 * H * 4


def test_ids_of_no_expert_contribute_nothing():
    layer = make_block().experts
    hidden, weights = torch.randn(3, H), torch.rand(3, K)
    ids = torch.tensor([[0, -1], [E, 3], [1 << 30, 2]], dtype=torch.int32)
    routed = RouterOutput(torch.zeros(3, E), weights, ids)
    for make in FORMATS.values():
        assert_matches_oracle(make(layer)(hidden, routed), oracle_of_routed(layer, hidden, routed))
    assert build_dispatch(ids, E).inverse.tolist().count(-1) == 3
