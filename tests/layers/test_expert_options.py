"""What the pairs of options do not show: rounding, memory, errors, and that nothing costs where it is off."""

import weakref

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from layers import (
    ExpertLora,
    ExpertsConfig,
    FusedMoE,
    MoEBlock,
    MoEConfig,
    RoutedExpertsCapture,
    RoutedExpertsReplay,
    RouterConfig,
)
from layers.expert_options import in_chunks
from tests.layers import oracle

H, I, E, K = 16, 20, 8, 2


def _config(**fields) -> MoEConfig:
    return MoEConfig(E, K, H, I, **fields)


class _Operators(TorchDispatchMode):
    """The operators of ours that are called, and the largest tensor that any operator returns, in bytes."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "moe":
            self.names.append(func._schema.name.removeprefix("moe::"))
        outputs = func(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(output, torch.Tensor):
                self.largest = max(self.largest, output.nbytes)
        return outputs


def _seen(run) -> _Operators:
    with torch.no_grad(), _Operators() as seen:
        run()
    return seen


@pytest.mark.parametrize(
    "options", [ExpertsConfig(), ExpertsConfig(chunk_size=64), ExpertsConfig(latent_size=H)]
)
def test_options_that_need_no_routing_of_their_own_stay_one_operator(options):
    layer = FusedMoE(_config(experts=options))
    assert _seen(lambda: layer(torch.randn(7, H), torch.randn(7, E))).names == ["fused_moe"]


def test_chunks_bound_the_workspace():
    hidden, logits = torch.randn(100, H), torch.randn(100, E)
    layer = FusedMoE(_config(experts=ExpertsConfig(chunk_size=10), emit="stages"))
    whole = FusedMoE(_config(emit="stages"))
    whole.load_state_dict(layer.state_dict())
    seen, unbounded = _seen(lambda: layer(hidden, logits)), _seen(lambda: whole(hidden, logits))
    assert seen.largest == hidden.nbytes  # the output; a chunk's gate and up columns are 10 * K of 2I
    assert unbounded.largest == 100 * K * 2 * I * hidden.itemsize
    assert oracle.relative_error(layer(hidden, logits), whole(hidden, logits)) < 1e-6


def test_a_chunk_is_gone_when_the_next_one_runs():
    chunks = []

    def run(tokens):
        assert all(chunk() is None for chunk in chunks)
        out = tokens * 2
        chunks.append(weakref.ref(out))
        return out

    tokens = torch.randn(10, H)
    assert torch.equal(in_chunks(run, 3, tokens), tokens * 2)
    assert len(chunks) == 4


def test_chunks_have_the_dtype_of_autocast():
    block = MoEBlock(_config(experts=ExpertsConfig(chunk_size=3)))
    with torch.autocast("cpu", torch.bfloat16):
        assert block(torch.randn(7, H)).dtype == torch.bfloat16


def test_chunks_expect_a_row_per_token():
    layer = FusedMoE(_config(experts=ExpertsConfig(chunk_size=3)))
    hidden, logits = torch.randn(7, H), torch.randn(7, E)
    for wrong in (6, 8):
        with pytest.raises(ValueError, match=f"{wrong} rows beside 7 tokens: expected one each"):
            layer(hidden, torch.randn(wrong, E))
        with pytest.raises(ValueError, match=f"{wrong} rows beside 7 tokens"):
            layer(hidden, layer.route(torch.randn(wrong, E)))
        with pytest.raises(ValueError, match=f"{wrong} rows beside 7 tokens"):
            layer(hidden, logits, torch.randn(wrong, H))


@pytest.mark.parametrize(
    "fields",
    [{"experts": ExpertsConfig(padded_size=24)}, {"experts": ExpertsConfig(num_zero_experts=2)},
     {"router": RouterConfig(scale_on="output")}],
)  # fmt: skip
def test_shared_output_of_another_length_is_refused(fields):
    """It would be broadcast, or dropped, where it is added by plain PyTorch."""
    layer = FusedMoE(_config(**fields))
    with pytest.raises(ValueError, match="shared has shape"):
        layer(torch.randn(7, H), torch.randn(7, layer.config.router_size), torch.randn(1, H))


def test_zero_experts_round_once():
    layer = FusedMoE(_config(experts=ExpertsConfig(num_zero_experts=4)), dtype=torch.bfloat16)
    with torch.no_grad():
        layer.w2_weight.zero_()
    hidden, logits = torch.randn(33, H).bfloat16(), torch.randn(33, E + 4)
    expected = oracle.experts(layer, hidden, logits)
    assert torch.equal(layer(hidden, logits), expected.bfloat16())


@pytest.mark.parametrize(
    "options",
    [{"router": RouterConfig(has_expert_scale=True)}, {"experts": ExpertsConfig(num_zero_experts=2)}],
)
def test_ids_out_of_range_are_nobodys(options):
    """Whoever routes: no scale is read for them, no zero expert answers to them, and none counts them."""
    layer = FusedMoE(_config(**options))
    hidden, logits = torch.randn(4, H), torch.randn(4, layer.config.router_size)
    ids = torch.tensor([[1, 2], [-1, 99], [0, 1 << 30], [layer.config.router_size, 3]], dtype=torch.int32)
    layer.routing_override = RoutedExpertsReplay(ids, layer.config.routing)
    routed = layer.route(logits)._replace(topk_weights=torch.ones(4, 2))
    alone = layer(hidden, routed._replace(topk_weights=(ids < E).float() * (ids >= 0)))
    assert torch.equal(layer(hidden, routed), alone) and not alone[1].any()
    assert torch.equal(layer(hidden, logits)[1], torch.zeros(H))
    assert routed.tokens_per_expert().tolist()[:4] == [1, 1, 1, 1] and routed.tokens_per_expert().sum() == 4


def _best(hidden_states, router_logits, top_k, renormalize):
    return router_logits.topk(top_k)


def test_a_routing_functions_weights_are_computed_with_in_float32():
    layer = FusedMoE(_config(router=RouterConfig(routing_function=_best)), dtype=torch.bfloat16)
    routed = layer.route(torch.randn(7, E).bfloat16(), torch.randn(7, H).bfloat16())
    assert (routed.topk_weights.dtype, routed.topk_ids.dtype) == (torch.float32, torch.int32)
    with pytest.raises(ValueError, match="hidden_states=None: expected a tensor"):
        layer.route(torch.randn(7, E))


@pytest.mark.parametrize("far", [2**32 + 1, -(2**32) + 1, 2**31, -5])
def test_ids_of_a_routing_function_that_no_expert_has_choose_none(far):
    def routing(none):
        def function(hidden_states, router_logits, top_k, renormalize):
            weights, ids = router_logits.topk(top_k)
            return weights, ids.index_fill(1, torch.tensor([1]), none)

        return function

    layers = [FusedMoE(_config(router=RouterConfig(routing_function=routing(none)))) for none in (far, -1)]
    layers[0].load_state_dict(layers[1].state_dict())
    logits, hidden = torch.randn(7, E), torch.randn(7, H)
    assert torch.equal(*(layer(hidden, logits) for layer in layers))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_ids_of_a_routing_function_are_integers_of_any_size(dtype):
    def function(hidden_states, router_logits, top_k, renormalize):
        weights, ids = router_logits.topk(top_k)
        return weights, ids.to(dtype)

    layer = FusedMoE(_config(router=RouterConfig(routing_function=function)))
    logits = torch.randn(7, E)
    routed = layer.route(logits, torch.randn(7, H))
    assert torch.equal(routed.topk_ids, logits.topk(routed.topk_ids.shape[1]).indices.int())


def test_a_routing_function_sees_the_tokens_a_block_is_given():
    seen = []

    def spy(hidden_states, router_logits, top_k, renormalize):
        seen.append(hidden_states)
        return router_logits.topk(top_k)

    hidden = torch.randn(7, H)
    options = {"router": RouterConfig(routing_function=spy), "experts": ExpertsConfig(latent_size=12)}
    MoEBlock(_config(**options))(hidden)
    assert len(seen) == 1 and torch.equal(seen[0], hidden)


def test_a_routing_function_is_compiled_with_the_layer():
    block = MoEBlock(_config(router=RouterConfig(routing_function=_best)))
    hidden = torch.randn(7, H)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(block, fullgraph=True)(hidden), block(hidden))


RETURNED = {  # what a routing function makes of (weights, ids), and what is said of it
    "swapped": (lambda weights, ids: (ids, weights), TypeError,
        "topk_ids of routing_function has dtype torch.float32: expected integers, behind topk_weights"),
    "mask": (lambda weights, ids: (weights, ids > 0), TypeError, "topk_ids of routing_function has dtype torch.bool"),
    "complex": (lambda weights, ids: (weights + 0j, ids), TypeError,
        "topk_weights of routing_function has dtype torch.complex64: expected a real one"),
    "one more": (lambda weights, ids: (weights, F.pad(ids, (0, 1))), ValueError,
        r"topk_ids of routing_function has shape \[7, 3\]: expected \[7, 2\]"),
    "one token": (lambda weights, ids: (weights[:1], ids), ValueError,
        r"topk_weights of routing_function has shape \[1, 2\]: expected \[7, 2\]"),
    "list of ids": (lambda weights, ids: (weights, [1]), TypeError,
        "topk_ids of routing_function=<list>: expected a torch.Tensor"),
    "weights alone": (lambda weights, ids: weights, TypeError,
        r"routing_function returned <Tensor>: expected \(topk_weights, topk_ids\)"),
    "nothing": (lambda weights, ids: None, TypeError, "routing_function returned None: expected"),
    "three": (lambda weights, ids: (weights, ids, ids), ValueError, "routing_function returned 3 values: expected"),
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", RETURNED)
def test_what_a_routing_function_may_not_return(name, compiled):
    change, error, message = RETURNED[name]

    def function(hidden_states, router_logits, top_k, renormalize):
        return change(*router_logits.topk(top_k))

    block = MoEBlock(_config(router=RouterConfig(routing_function=function)))
    run = torch.compile(block, fullgraph=True, backend="eager") if compiled else block
    with pytest.raises(Exception if compiled else error, match=message):
        run(torch.randn(7, H))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_a_routing_functions_ids_are_integers_of_any_width(dtype, compiled):
    def function(hidden_states, router_logits, top_k, renormalize):
        weights, ids = router_logits.topk(top_k)
        return [weights, ids.to(dtype)]

    layer = FusedMoE(_config(router=RouterConfig(routing_function=function)))
    hidden, logits = torch.randn(7, H), torch.randn(7, E)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    plain = FusedMoE(_config(router=RouterConfig(routing_function=_best)))
    plain.load_state_dict(layer.state_dict())
    assert oracle.relative_error(run(hidden, logits), oracle.experts(plain, hidden, logits)) < 1e-5


class _Logits(torch.nn.Module):
    def forward(self, hidden_states, router_logits):
        return router_logits


def test_an_override_returns_a_pair():
    layer = FusedMoE(_config())
    layer.routing_override = _Logits()
    with pytest.raises(TypeError, match="routing_override returned <Tensor>: expected"):
        layer(torch.randn(7, H), torch.randn(7, E))


def _adapted():
    layer = FusedMoE(_config())
    layer.lora = ExpertLora(layer, 1, 4, torch.zeros(9, dtype=torch.int32))
    return layer


def _captured():
    layer = FusedMoE(_config())
    layer.capture = RoutedExpertsCapture(torch.zeros(9, K, dtype=torch.int32))
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: FusedMoE(_config()), lambda: FusedMoE(_config(experts=ExpertsConfig(chunk_size=3))),
        lambda: FusedMoE(_config(experts=ExpertsConfig(post_norm_eps=1e-6))), _adapted, _captured,
    ],
)  # fmt: skip
def test_what_was_routed_is_of_these_tokens(make):
    layer, hidden = make(), torch.randn(7, H)
    routed = layer.route(torch.randn(7, E))
    chunked = layer.config.experts.chunk_size is not None
    for field in ("topk_weights", "topk_ids"):
        with pytest.raises(TypeError, match=f"{field}=None: expected a torch.Tensor"):
            layer(hidden, routed._replace(**{field: None}))
    message = "8 rows beside 7 tokens" if chunked else r"topk_ids has shape \[8, 2\]: expected \[7, K\]"
    with pytest.raises(ValueError, match=message):
        layer(hidden, layer.route(torch.randn(8, E)))


def test_chunks_without_logits():
    layer, hidden = FusedMoE(_config(experts=ExpertsConfig(chunk_size=3))), torch.randn(7, H)
    routed = layer.route(torch.randn(7, E))
    assert torch.equal(layer(hidden, routed._replace(router_logits=None)), layer(hidden, routed))


def test_reset_parameters_draws_the_transforms_too():
    block = MoEBlock(_config(experts=ExpertsConfig(latent_size=12, post_norm_eps=1e-6)))
    before = {name: parameter.clone() for name, parameter in block.named_parameters()}
    block.reset_parameters()
    same = [name for name, parameter in block.named_parameters() if torch.equal(parameter, before[name])]
    assert same == ["experts.post_norm_weight"] and (block.experts.post_norm_weight == 1).all()


def test_any_module_may_take_the_transforms_place():
    block = MoEBlock(_config(experts=ExpertsConfig(latent_size=H)))
    block.routed_input_transform, block.routed_output_transform = torch.nn.Identity(), torch.nn.Identity()
    plain = MoEBlock(_config())
    plain.load_state_dict(block.state_dict())
    hidden = torch.randn(7, H)
    torch.testing.assert_close(block(hidden), plain(hidden))
    wrong = rf"has shape \[7, 1\]: expected \[7, {H}\]"
    block.shared_experts = torch.nn.Linear(H, 1)
    with pytest.raises(ValueError, match=f"output of shared_experts {wrong}"):
        block(hidden)
    block.shared_experts, block.routed_output_transform = None, torch.nn.Linear(H, 1)
    with pytest.raises(ValueError, match=f"output of routed_output_transform {wrong}"):
        block(hidden)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ExpertsConfig(num_zero_experts=-1), ValueError, "num_zero_experts=-1: expected at least 0"),
        (lambda: ExpertsConfig(num_zero_experts=True), TypeError, "num_zero_experts=True: expected an int"),
        (lambda: ExpertsConfig(latent_size=0), ValueError, "latent_size=0: expected at least 1"),
        (lambda: ExpertsConfig(chunk_size=0), ValueError, "chunk_size=0: expected at least 1"),
        (lambda: ExpertsConfig(post_norm_eps=-1.0), ValueError, "post_norm_eps=-1.0: expected None or a finite float"),
        (lambda: _config(experts=ExpertsConfig(padded_size=12)), ValueError, "padded_size=12: expected at least .* 16"),
        (lambda: _config(experts=None), TypeError, "experts=None: expected ExpertsConfig"),
        (lambda: RouterConfig(scale_on="input"), ValueError, "scale_on='input': expected one of"),
        (lambda: RouterConfig(has_expert_scale=1), TypeError, "has_expert_scale=1: expected bool"),
        (lambda: RouterConfig(routing_function="topk"), TypeError, "routing_function='topk': expected None or a func"),
        (lambda: MoEConfig(4, 5, H, I), ValueError, "top_k=5: expected at most num_experts=4"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
