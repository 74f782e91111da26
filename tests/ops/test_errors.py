"""Bad input raises a typed error that names argument, value and expectation: eager, make_fx, export, compile."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops
from moe_ops import Activation, RoutingConfig

T, E, K, H, I = 4, 6, 2, 8, 5


def good():
    return {
        "hidden_states": torch.randn(T, H),
        "router_logits": torch.randn(T, E),
        "w13": torch.randn(E, 2 * I, H),
        "w2": torch.randn(E, H, I),
        "routing": RoutingConfig(top_k=K),
    }


BAD_LAYERS = {
    "rank": (
        {"hidden_states": torch.randn(2, T, H)},
        ValueError,
        r"hidden_states has shape \[2, 4, 8\]: expected",
    ),
    "w13 hidden": (
        {"w13": torch.randn(E, 2 * I, H + 1)},
        ValueError,
        r"w13 has shape \[6, 10, 9\]: expected .*8",
    ),
    "w2 intermediate": (
        {"w2": torch.randn(E, H, I + 1)},
        ValueError,
        r"w2 has shape \[6, 8, 6\]: expected \[6, 8, 5",
    ),
    "w2 experts": ({"w2": torch.randn(E + 1, H, I)}, ValueError, r"w2 has shape \[7, 8, 5\]: expected \[6"),
    "logits experts": (
        {"router_logits": torch.randn(T, E + 1)},
        ValueError,
        r"router_logits has shape \[4, 7\]",
    ),
    "logits tokens": ({"router_logits": torch.randn(T + 1, E)}, ValueError, r"\[5, "),
    "top_k": (
        {"routing": RoutingConfig(top_k=E + 1)},
        ValueError,
        r"top_k=7: expected at most num_experts=6",
    ),
    "groups": (
        {"routing": RoutingConfig(num_groups=4)},
        ValueError,
        r"num_groups=4: expected a divisor of .*=6",
    ),
    "mixed dtypes": (
        {"w2": torch.randn(E, H, I).double()},
        TypeError,
        r"w2 has dtype torch.float64: expected .*32",
    ),
    "integer hidden": (
        {"hidden_states": torch.ones(T, H, dtype=torch.int32)},
        TypeError,
        r"torch.int32: expected",
    ),
    "device": ({"w13": torch.randn(E, 2 * I, H, device="meta")}, ValueError, r"w13 is on meta: expected cpu"),
    "strides": (
        {"w13": torch.randn(E, 4 * I, 2 * H)[:, ::2, ::2]},
        ValueError,
        r"(w13|weight) has strides \[320, 32, 2\]: expected stride 1 in one of the last two",
    ),
    "bias shape": (
        {"w13_bias": torch.randn(E, I)},
        ValueError,
        r"w13_bias has shape \[6, 5\]: expected \[6, 10\]",
    ),
    "bias dtype": (
        {"w2_bias": torch.randn(E, H).half()},
        TypeError,
        r"bias has dtype torch.float16: expected",
    ),
    "correction bias": (
        {"correction_bias": torch.randn(E + 1)},
        ValueError,
        r"correction_bias has shape \[7\]",
    ),
    "activation": (
        {"activation": "swish"},
        ValueError,
        r"activation='swish': expected one of 'silu', 'gelu'",
    ),
    "activation option": ({"activation": "silu;beta=1"}, ValueError, r"'beta=1': expected name=value"),
    "odd gate": (
        {"w13": torch.randn(E, 2 * I - 1, H)},
        ValueError,
        r"w13 has 9 gate and up features: expected an even",
    ),
    "map dtype": (
        {"expert_map": torch.zeros(E)},
        TypeError,
        r"expert_map has dtype torch.float32: expected .*int32",
    ),
}
layers = pytest.mark.parametrize("name", BAD_LAYERS)


@layers
@pytest.mark.parametrize("emit", ["fused", "stages"])
def test_eager(name, emit):
    change, error, message = BAD_LAYERS[name]
    with pytest.raises(error, match=message):
        moe_ops.fused_moe(**{**good(), **change}, emit=emit)


@layers
def test_compiled(name):
    """The compile error carries the same text, whether Dynamo or a fake raises it."""
    change, _, message = BAD_LAYERS[name]
    arguments = {**good(), **change}
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    options = {key: value for key, value in arguments.items() if key not in tensors}
    compiled = torch.compile(
        lambda **tensors: moe_ops.fused_moe(**tensors, **options), fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match=message):
        compiled(**tensors)


@pytest.mark.parametrize("name", ["w2 intermediate", "mixed dtypes", "bias shape", "top_k", "activation"])
@pytest.mark.parametrize("mode", ["real", "fake"])
def test_make_fx(name, mode):
    change, error, message = BAD_LAYERS[name]
    arguments = {**good(), **change}
    names = [key for key, value in arguments.items() if isinstance(value, torch.Tensor)]

    def layer(*tensors):
        return moe_ops.fused_moe(**{**arguments, **dict(zip(names, tensors, strict=True))})

    with pytest.raises(error, match=message):
        make_fx(layer, tracing_mode=mode)(*(arguments[key] for key in names))


@pytest.mark.parametrize("name", ["w13 hidden", "mixed dtypes", "bias shape", "top_k", "activation"])
def test_export(name):
    change, error, message = BAD_LAYERS[name]
    arguments = {**good(), **change}
    hidden_states = arguments.pop("hidden_states")

    class Layer(torch.nn.Module):
        def forward(self, x):
            return moe_ops.fused_moe(x, **arguments)

    with pytest.raises(error, match=message):
        torch.export.export(Layer(), (hidden_states,), strict=False)


OFFSETS = torch.tensor([0, 2, 4], dtype=torch.int32)
BAD_CALLS = {
    "ids dtype": (lambda: moe_ops.build_dispatch(torch.zeros(2, 2), 4), TypeError, "topk_ids has dtype torch.float32"),
    "ids rank": (lambda: moe_ops.build_dispatch(torch.zeros(2).int(), 4), ValueError, r"topk_ids has shape \[2\]"),
    "no slots": (
        lambda: moe_ops.build_dispatch(torch.zeros(2, 0).int(), 4),
        ValueError,
        r"topk_ids has shape \[2, 0\]: expected at least one expert per token",
    ),
    "no experts": (lambda: moe_ops.build_dispatch(torch.zeros(2, 2).int(), 0), ValueError, "num_experts=0: expected"),
    "slots": (lambda: moe_ops.permute(torch.randn(2, 3), torch.arange(5).int()), ValueError, "5 rows: expected a mult"),
    "slots dtype": (lambda: moe_ops.permute(torch.randn(2, 3), torch.arange(4)), TypeError, "int64: expected .*int32"),
    "offsets": (
        lambda: moe_ops.grouped_gemm(torch.randn(4, 3), torch.randn(3, 5, 3), OFFSETS),
        ValueError,
        r"expert_offsets has shape \[3\]: expected \[4\]",
    ),
    "combine weights": (
        lambda: moe_ops.combine(torch.randn(4, 3), torch.randn(2, 3), torch.arange(4).int()),
        ValueError,
        r"inverse has shape \[4\]: expected \[6\]",
    ),
    "shared": (
        lambda: moe_ops.combine(torch.randn(4, 3), torch.randn(2, 2), torch.arange(4).int(), torch.randn(2, 4)),
        ValueError,
        r"shared has shape \[2, 4\]: expected \[2, 3\]",
    ),
    "weight on input": (
        lambda: moe_ops.fused_experts(
            torch.randn(2, 4), torch.randn(3, 6, 4), torch.randn(3, 4, 3), torch.ones(2, 2), torch.zeros(2, 2).int(),
            apply_router_weight_on_input=True,
        ),
        ValueError,
        r"apply_router_weight_on_input=True with topk_weights of shape \[2, 2\]: expected \[T, 1\]",
    ),
    "routing type": (lambda: moe_ops.topk_routing(torch.randn(2, 4), "top_k=2"), TypeError, "expected a RoutingConfig"),
    "activation type": (lambda: moe_ops.gated_activation(torch.randn(2, 4), 3), TypeError, "activation=3: expected"),
    "emit": (lambda: moe_ops.fused_moe(**good(), emit="both"), ValueError, "emit='both': expected 'auto', 'stages'"),
    "raw operator": (
        lambda: torch.ops.moe.permute(torch.randn(2, 3), torch.arange(5).int()), ValueError, "expected a multiple",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CALLS)
def test_calls(name):
    call, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        call()


BAD_OPTIONS = {
    "top_k": (lambda: RoutingConfig(top_k=0), ValueError, "top_k=0: expected at least 1"),
    "top_k type": (lambda: RoutingConfig(top_k=2.0), TypeError, "top_k=2.0: expected an int"),
    "score": (lambda: RoutingConfig(score_fn="tanh"), ValueError, "score_fn='tanh': expected one of 'softmax', 'sig"),
    "order": (lambda: RoutingConfig(order="both"), ValueError, "order='both': expected one of 'score_then_topk'"),
    "group score": (lambda: RoutingConfig(group_score="sum"), ValueError, "group_score='sum': expected one of 'max'"),
    "groups": (lambda: RoutingConfig(topk_groups=3, num_groups=2), ValueError, "topk_groups=3: expected at most"),
    "eps": (lambda: RoutingConfig(renorm_eps=-1.0), ValueError, "renorm_eps=-1.0: expected a number >= 0"),
    "alpha": (lambda: Activation("silu", alpha=1.0), ValueError, "alpha=1.0: activation 'silu' has no alpha"),
    "limit": (lambda: Activation("gelu", limit=1.0), ValueError, "limit=1.0: activation 'gelu' has no limit"),
    "limit sign": (lambda: Activation("silu", limit=-1.0), ValueError, "limit=-1.0: expected a positive number"),
    "interleaved": (lambda: Activation("relu2", interleaved=True), ValueError, "has no gate to interleave"),
    "group of one": (
        lambda: moe_ops.topk_routing(
            torch.randn(2, 4), RoutingConfig(2, num_groups=4, topk_groups=2, group_score="top2_sum")
        ),
        ValueError,
        "groups of 1 expert: expected at least 2",
    ),
    "few in groups": (
        lambda: moe_ops.topk_routing(torch.randn(2, 8), RoutingConfig(3, num_groups=4, topk_groups=1)),
        ValueError,
        "top_k=3: expected at most 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options(name):
    build, error, message = BAD_OPTIONS[name]
    with pytest.raises(error, match=message):
        build()


def test_specs_round_trip_and_are_canonical():
    routing = RoutingConfig(
        8, "sigmoid", num_groups=8, topk_groups=4, group_score="top2_sum", group_fill=0, scale=2.5
    )
    assert RoutingConfig.from_spec(routing.spec) == routing
    assert RoutingConfig(2).spec == RoutingConfig().spec == "top_k=2"
    activation = Activation("swiglu_oai", limit=5, interleaved=True)
    assert Activation.from_spec(activation.spec) == activation
    assert Activation("swiglu_oai", 1.702, 7.0).spec == "swiglu_oai"


def test_a_dtensor_is_refused():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        x = torch.distributed.tensor.distribute_tensor(torch.randn(T, H), mesh)
        with pytest.raises(TypeError, match="DTensor: expected a plain tensor"):
            moe_ops.fused_moe(**{**good(), "hidden_states": x})
    finally:
        torch.distributed.destroy_process_group()
