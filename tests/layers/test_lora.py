"""Adapters of experts against dense experts with changed weights, in float64: eager, compiled, trained."""

import itertools

import pytest
import torch

import inductor_passes
from layers import (
    BatchedExperts,
    BatchedPrepareAndFinalize,
    ExpertLora,
    ExpertsConfig,
    FusedMoE,
    LocalPrepareAndFinalize,
    LowRank,
    ModularKernel,
    MoEBlock,
    MoEConfig,
    RouterConfig,
    RouterOutput,
    SharedExpertConfig,
    StandardExperts,
    join_gate_up,
)
from moe_ops import Activation
from tests.helpers import (
    RELATIVE_NORM,
    assert_matches_oracle,
    assert_same,
    grads_of,
    relative_error,
    usually,
)
from tests.layers.lora import RANKS, SCALINGS, attach, draw_ids, make_adapters, oracle

E, K, H, I = 13, 3, 17, 11
GPT_OSS = {"activation": Activation("swiglu_oai", interleaved=True), "has_bias": True}
OPTIONS = {
    "plain": {},
    "gpt_oss": GPT_OSS,
    "ungated": {"activation": "relu2", "has_bias": True},
    "post_norm": {"experts": ExpertsConfig(post_norm_eps=1e-6)},
    "chunks": {"experts": ExpertsConfig(chunk_size=5)},
}
WAYS = {
    "layer": lambda layer: layer,
    "standard": lambda layer: ModularKernel(LocalPrepareAndFinalize(), StandardExperts(layer)),
    "batched": lambda layer: ModularKernel(BatchedPrepareAndFinalize(), BatchedExperts(layer)),
}
ways = pytest.mark.parametrize("way", WAYS)


def make_layer(dtype=torch.float32, expert_map=None, **options) -> FusedMoE:
    torch.manual_seed(2)
    sizes = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I}
    return FusedMoE(MoEConfig(**{**sizes, **options}), expert_map, dtype=dtype)


def tokens(num_tokens, dtype=torch.float32):
    """Hidden states, and how they are routed: some to nobody."""
    hidden, logits = torch.randn(num_tokens, H, dtype=dtype), torch.randn(num_tokens, E, dtype=dtype)
    weights, ids = logits.softmax(1).topk(K)
    ids[::4, 0] = -1
    return hidden, RouterOutput(logits, weights, ids.to(torch.int32))


@ways
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
def test_values(way, num_tokens):
    layer = make_layer()
    adapters, ids = make_adapters(layer), draw_ids(num_tokens)
    attach(layer, adapters, ids)
    hidden, routed = tokens(num_tokens)
    assert_matches_oracle(WAYS[way](layer)(hidden, routed), oracle(layer, adapters, hidden, routed, ids))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_options(name, ids_dtype):
    layer = make_layer(**OPTIONS[name])
    adapters, ids = make_adapters(layer), draw_ids(9, dtype=ids_dtype)
    attach(layer, adapters, ids)
    hidden, routed = tokens(7)
    assert_matches_oracle(layer(hidden, routed), oracle(layer, adapters, hidden, routed, ids))


@ways
def test_bfloat16(way):
    layer = make_layer(torch.bfloat16)
    adapters, ids = make_adapters(layer), draw_ids(33)
    attach(layer, adapters, ids)
    hidden, routed = tokens(33)
    out = WAYS[way](layer)(hidden.bfloat16(), routed)
    expected = oracle(layer, adapters, hidden.bfloat16(), routed, ids)
    # Each of the two products rounds three times more: at the rank, the change, and the sum.
    assert relative_error(out, expected) <= 2.5 * RELATIVE_NORM[torch.bfloat16]


@ways
def test_tokens_without_an_adapter_are_as_without_adapters(way):
    """To the bit, also beside adapters that hold nothing finite."""
    layer = make_layer(emit="stages")
    ids, (hidden, routed) = draw_ids(33), tokens(33)
    plain = WAYS[way](layer)(hidden, routed)
    lora = attach(layer, make_adapters(layer), ids)
    with torch.no_grad():
        for linear in lora.linears():
            linear.a[:, 1], linear.b[:, 1] = float("nan"), float("inf")
    out = WAYS[way](layer)(hidden, routed)
    has_none = (ids < 0) | (ids >= len(RANKS))
    assert torch.equal(out[has_none], plain[has_none])
    assert not torch.isfinite(out[ids == 1]).all(1).any()
    assert torch.isfinite(out[(ids == 0) | (ids == 2)]).all()
    assert (out[ids == 0] != plain[ids == 0]).any(1).all()


def test_one_adapter():
    """Of which rows keep the order of experts, and some have none."""
    layer = make_layer(torch.float64, emit="stages")
    (adapter, *_), ids, (hidden, routed) = make_adapters(layer), draw_ids(33), tokens(33, torch.float64)
    plain = layer(hidden, routed)
    lora = attach(layer, [adapter], ids)
    out = layer(hidden, routed)
    assert_matches_oracle(out, oracle(layer, [adapter], hidden, routed, ids))
    assert torch.equal(out[ids != 0], plain[ids != 0])
    inputs = [hidden.requires_grad_(), *lora.parameters()]

    def expected():
        w13, w2 = (LowRank(each.a[:, 0], each.b[:, 0]) for each in lora.linears())
        return oracle(layer, [(w13, w2, adapter.scaling)], hidden, routed, ids)

    assert_same(grads_of(lambda: layer(hidden, routed), inputs), grads_of(expected, inputs))
    with torch.no_grad():
        lora.b13.fill_(float("inf"))
    assert torch.equal(layer(hidden, routed)[ids != 0], plain[ids != 0])


def test_batched_rows_without_a_token_are_nobodys():
    layer, ids = make_layer(), torch.zeros(7, dtype=torch.int32)
    attach(layer, make_adapters(layer), ids)
    hidden, routed = tokens(7)
    prepared = BatchedPrepareAndFinalize().prepare(hidden, *routed[1:], E, None, (ids,))
    is_empty = torch.arange(7) >= prepared.counts.unsqueeze(1)
    rows = prepared.hidden_states.masked_fill(is_empty.unsqueeze(2), float("nan"))
    out = BatchedExperts(layer)(prepared._replace(hidden_states=rows)).rows
    assert (out[is_empty] == 0).all()
    assert torch.isfinite(out).all()


def test_new_adapters_change_nothing():
    layer = make_layer(emit="stages")
    hidden, routed = tokens(7)
    plain = layer(hidden, routed)
    layer.lora = ExpertLora(layer, 2, 4, torch.zeros(7, dtype=torch.int32))
    assert torch.equal(layer(hidden, routed), plain)
    assert layer.lora.a13.abs().max() > 0


def test_experts_that_live_elsewhere():
    whole = make_layer()
    expert_map = torch.tensor([1, -1, 0, 3, -1, 2, 4, -1, -1, 6, 5, -1, -1], dtype=torch.int32)
    part, adapters, ids = make_layer(expert_map=expert_map), make_adapters(whole), draw_ids(9)
    held = [2, 0, 5, 3, 6, 10, 9]
    with torch.no_grad():
        part.w13_weight.copy_(whole.w13_weight[held])
        part.w2_weight.copy_(whole.w2_weight[held])
    attach(part, adapters, ids)
    hidden, routed = tokens(9)
    here = torch.isin(routed.topk_ids, torch.tensor(held, dtype=torch.int32))
    only = routed._replace(topk_ids=routed.topk_ids.masked_fill(~here, -1))
    for way in WAYS.values():
        assert_matches_oracle(way(part)(hidden, routed), oracle(whole, adapters, hidden, only, ids))


@ways
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients(way, compiled):
    layer = make_layer(torch.float64, has_bias=True)
    ids, (hidden, routed) = draw_ids(7), tokens(7, torch.float64)
    lora = attach(layer, make_adapters(layer), ids)
    hidden.requires_grad_()
    routed = routed._replace(topk_weights=routed.topk_weights.clone().requires_grad_())
    inputs = [hidden, routed.topk_weights, *layer.parameters()]
    assert {id(each) for each in lora.parameters()} < {id(each) for each in inputs}
    kernel = WAYS[way](layer)
    run = torch.compile(kernel, fullgraph=True, backend="aot_eager") if compiled else kernel

    def expected():
        w13, w2 = lora.linears()
        adapters = [
            (LowRank(w13.a[:, n], w13.b[:, n]), LowRank(w2.a[:, n], w2.b[:, n]), scaling)
            for n, scaling in enumerate(SCALINGS)
        ]
        return oracle(layer, adapters, hidden, routed, ids)

    assert_same(grads_of(lambda: run(hidden, routed), inputs), grads_of(expected, inputs))


@pytest.mark.parametrize(
    ("way", "passes"), usually(itertools.product(WAYS, (False, True)), (("layer", True), ("batched", False)))
)
@torch._dynamo.config.patch(error_on_recompile=True)
def test_one_graph_for_all_adapters(way, passes):
    how = {"options": inductor_passes.options()} if passes else {"backend": "aot_eager"}
    layer = make_layer()
    adapters, ids = make_adapters(layer), draw_ids(40)
    lora = attach(layer, adapters, ids)
    run = torch.compile(WAYS[way](layer), fullgraph=True, dynamic=True, **how)
    for step, num_tokens in enumerate((7, 33, 9)):
        ids.copy_(draw_ids(40, step) if step else torch.full((40,), -1))
        adapters.reverse()
        for number, adapter in enumerate(adapters):
            lora.load_adapter(number, *adapter)
        hidden, routed = tokens(num_tokens)
        with torch.no_grad():
            assert_matches_oracle(run(hidden, routed), oracle(layer, adapters, hidden, routed, ids))


def test_blocks_that_share_ids():
    config = MoEConfig(E, K, H, I, shared_experts=SharedExpertConfig(9))
    ids = draw_ids(6)
    blocks = [MoEBlock(config), MoEBlock(config)]
    hidden = torch.randn(2, 3, H)
    for block in blocks:
        adapters = make_adapters(block.experts)
        attach(block.experts, adapters, ids)
        out, routed = block.forward_with_routing(hidden)
        rows = hidden.reshape(-1, H)
        expected = oracle(block.experts, adapters, rows, routed, ids) + block.shared_experts(rows).double()
        assert_matches_oracle(out, expected.reshape(hidden.shape))
        assert torch.equal(out, block(hidden))
    assert blocks[0].experts.lora.adapter_ids is blocks[1].experts.lora.adapter_ids


def test_gate_and_up_with_an_a_each():
    torch.manual_seed(1)
    gate, up, down = (
        LowRank(torch.randn(E, 2, size[0]), torch.randn(E, size[1], 2)) for size in ((H, I), (H, I), (I, H))
    )
    for interleaved in (False, True):
        joined = join_gate_up(gate, up, interleaved=interleaved)
        change = joined.b @ joined.a
        halves = (change[:, ::2], change[:, 1::2]) if interleaved else change.chunk(2, dim=1)
        for half, linear in zip(halves, (gate, up)):
            torch.testing.assert_close(half, linear.b @ linear.a)
    layer, ids = make_layer(), draw_ids(7)
    layer.lora = ExpertLora(layer, 1, 2, ids, gate_up_rank=4)
    layer.lora.load_adapter(0, join_gate_up(gate, up), down, scaling=0.5)
    hidden, routed = tokens(7)
    expected = oracle(layer, [(join_gate_up(gate, up), down, 0.5)], hidden, routed, ids)
    assert_matches_oracle(layer(hidden, routed), expected)


def test_an_adapter_of_peft():
    """One that trains the parameters of stacked experts, whose tensors have the experts of a rank side by side."""
    peft = pytest.importorskip("peft")

    class Experts(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.gate_up_proj, self.down_proj = layer.w13_weight, layer.w2_weight

        def forward(self, x):
            return x

    layer = make_layer()
    model = torch.nn.ModuleDict({"experts": Experts(layer)})
    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=[], target_parameters=names)
    wrapped = peft.get_peft_model(model, config)
    low_ranks = {}
    for module in wrapped.modules():
        if hasattr(module, "get_delta_weight") and hasattr(module, "parameter_name"):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            torch.nn.init.normal_(b)
            linear = LowRank(a.reshape(E, 3, -1), b.reshape(b.shape[0], 3, E).permute(2, 0, 1))
            low_ranks[module.parameter_name] = linear
            torch.testing.assert_close(2 * linear.b @ linear.a, module.get_delta_weight("default"))
    ids = draw_ids(7)
    layer.lora = ExpertLora(layer, 1, 3, ids)
    linears = low_ranks["gate_up_proj"], low_ranks["down_proj"]
    layer.lora.load_adapter(0, *linears, scaling=2.0)
    hidden, routed = tokens(7)
    assert_matches_oracle(layer(hidden, routed), oracle(layer, [(*linears, 2.0)], hidden, routed, ids))


def test_moved_and_saved():
    layer = make_layer()
    lora = attach(layer, make_adapters(layer), draw_ids(7))
    lora.scaling.fill_(0.1)
    names = ["lora.a13", "lora.b13", "lora.a2", "lora.b2", "lora.scaling"]
    assert [name for name in layer.state_dict() if name.startswith("lora")] == names
    layer.to(torch.bfloat16)
    assert lora.a13.dtype == torch.bfloat16
    assert lora.scaling.tolist() == [torch.tensor(0.1).item()] * 3
    assert "num_adapters=3, rank=5, gate_up_rank=5" in repr(lora)


def test_adapters_move_with_their_experts():
    layer = make_layer()
    lora = attach(layer, make_adapters(layer), draw_ids(7))
    views = layer.get_expert_weights()
    assert [view.shape[0] for view in views] == [E] * 6
    views[2][4] = 1.0
    assert (lora.a13[4] == 1).all()
    assert not (lora.a13[3] == 1).any()


def test_what_is_refused():
    layer, ids = make_layer(), draw_ids(7)
    with pytest.raises(TypeError, match=r"layer=.*: expected ExpertParameters"):
        ExpertLora(torch.nn.Linear(1, 1), 1, 1, ids)
    for name, sizes in (("num_adapters", (0, 1)), ("rank", (1, 0))):
        with pytest.raises(ValueError, match=f"{name}=0: expected at least 1"):
            ExpertLora(layer, *sizes, ids)
    with pytest.raises(ValueError, match="gate_up_rank=0: expected at least 1"):
        ExpertLora(layer, 1, 1, ids, gate_up_rank=0)
    with pytest.raises(TypeError, match=r"adapter_ids has dtype torch.float32: expected torch.int32"):
        ExpertLora(layer, 1, 1, ids.float())
    with pytest.raises(ValueError, match=r"adapter_ids has shape \[7, 1\]: expected \[max_tokens\]"):
        ExpertLora(layer, 1, 1, ids[:, None])
    lora, (gate_up, down, _) = attach(layer, make_adapters(layer), ids), make_adapters(layer)[0]
    with pytest.raises(ValueError, match="adapter=3: expected a number below num_adapters=3"):
        lora.load_adapter(3, gate_up, down)
    with pytest.raises(ValueError, match=r"gate_up.a has shape \[12, 5, 17\]: expected \[13, r, 17\]"):
        lora.load_adapter(0, gate_up._replace(a=gate_up.a[1:]), down)
    with pytest.raises(ValueError, match=r"down.b has shape \[13, 17, 4\]: expected \[13, 17, 5\]"):
        lora.load_adapter(0, gate_up, down._replace(b=down.b[:, :, 1:]))
    wide = join_gate_up(gate_up._replace(b=gate_up.b[:, :I]), gate_up._replace(b=gate_up.b[:, I:]))
    with pytest.raises(ValueError, match="gate_up has rank 10: expected at most 5"):
        lora.load_adapter(0, wide, down)
    hidden, routed = tokens(8)
    with pytest.raises(ValueError, match=r"adapter_ids has shape \[7\]: expected at least 8"):
        layer(hidden, routed)
    other = make_layer(num_experts=E + 1)
    other.lora = lora
    for way in WAYS.values():
        with pytest.raises(ValueError, match="lora has adapters of 13 experts: expected 14"):
            way(other)(hidden[:7], RouterOutput(*(each[:7] for each in routed)))


def test_shared_experts_in_the_same_operator_are_refused():
    config = MoEConfig(E, K, H, I, router=RouterConfig(), shared_experts=SharedExpertConfig(9, overlap=True))
    block = MoEBlock(config)
    attach(block.experts, make_adapters(block.experts), draw_ids(5))
    with pytest.raises(
        ValueError, match=r"beside lora or quantised experts: expected shared_experts.overlap=False"
    ):
        block(torch.randn(5, H))
