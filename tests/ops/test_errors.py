"""Bad input raises a typed error that names argument, value and expectation: eager, make_fx, export, compile."""

import re
import traceback

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops
from moe_ops import RoutingConfig

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
    "activation option": ({"activation": "silu;gamma=1"}, ValueError, r"'gamma=1': expected name=value"),
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


def last_lines(error):
    """What a user looks at first: the end of the traceback, without the source lines above it."""
    lines = "".join(traceback.format_exception(error)).rstrip().split("\n")
    return "\n".join(lines[-10:])


@layers
@pytest.mark.parametrize("emit", ["fused", "stages"])
def test_eager(name, emit):
    change, error, message = BAD_LAYERS[name]
    with pytest.raises(error, match=message):
        moe_ops.fused_moe(**{**good(), **change}, emit=emit)


@layers
def test_compiled(name):
    """The compile error ends with the same text, whether Dynamo or a fake raises it."""
    change, _, message = BAD_LAYERS[name]
    arguments = {**good(), **change}
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    options = {key: value for key, value in arguments.items() if key not in tensors}
    compiled = torch.compile(
        lambda **tensors: moe_ops.fused_moe(**tensors, **options), fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match=message) as raised:
        compiled(**tensors)
    assert re.search(message, last_lines(raised.value))


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
    "gate without shared": (
        lambda: moe_ops.combine(
            torch.randn(4, 3), torch.randn(2, 2), torch.arange(4).int(), shared_gate=torch.randn(2, 1)
        ),
        ValueError,
        r"shared_gate of shape \[2, 1\] without shared: expected both or neither",
    ),
    "weight on input": (
        lambda: moe_ops.fused_experts(
            torch.randn(2, 4), torch.randn(3, 6, 4), torch.randn(3, 4, 3), torch.ones(2, 2), torch.zeros(2, 2).int(),
            apply_router_weight_on_input=True,
        ),
        ValueError,
        r"apply_router_weight_on_input=True with topk_weights of shape \[2, 2\]: expected \[T, 1\]",
    ),
    "no expert weights": (
        lambda: moe_ops.fused_experts(
            torch.randn(2, 4), torch.randn(0, 6, 4), torch.randn(0, 4, 3), torch.ones(2, 2), torch.zeros(2, 2).int(),
            emit="fused",
        ),
        ValueError,
        r"w13 has shape \[0, 6, 4\]: expected at least one expert",
    ),
    "w2 strides": (
        lambda: moe_ops.fused_moe(**{**good(), "w2": torch.randn(E, 2 * H, 2 * I)[:, ::2, ::2]}, emit="fused"),
        ValueError,
        r"w2 has strides \[160, 20, 2\]: expected stride 1 in one of the last two",
    ),
    "plan": (
        lambda: moe_ops.gather_gemm_act(
            torch.randn(2, 4), torch.randn(1, 6, 4), (torch.arange(2).int(), torch.arange(2).int(), OFFSETS[:2])
        ),
        TypeError,
        "plan=<tuple>: expected a DispatchPlan",
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


@pytest.mark.parametrize("name", [name for name in BAD_CALLS if name != "raw operator"])
def test_compiled_calls(name):
    """Nested in frames of a user's own, too; text of one error does not show up in the next."""
    call, _, message = BAD_CALLS[name]

    def inner(x):
        return call()

    def outer(x):
        return inner(x + 1)

    with pytest.raises(Exception, match=message) as raised:
        torch.compile(outer, fullgraph=True, backend="eager")(torch.ones(1))
    assert re.search(message, last_lines(raised.value))


def test_an_eager_traceback_shows_the_source_again():
    plain = torch.randn(2, 3)
    with pytest.raises(Exception, match="expected a multiple"):
        torch.compile(moe_ops.permute, fullgraph=True, backend="eager")(plain, torch.arange(5).int())
    with pytest.raises(ValueError, match=r"hidden_states has shape \[3\]") as raised:
        moe_ops.permute(plain[0], torch.arange(4).int())
    text = "".join(traceback.format_exception(raised.value))
    assert "expected a multiple" not in text
    with pytest.raises(IndexError) as raised:
        moe_ops.permute(plain, torch.tensor([0, 9], dtype=torch.int32))
    text = "".join(traceback.format_exception(raised.value))
    assert "return function(*args)" in text
    assert "hidden_states has shape" not in text


@pytest.mark.parametrize("value", ["a string", None, 3, np.ones((T, H), dtype=np.float32)], ids=str)
@pytest.mark.parametrize("emit", ["fused", "stages"])
@pytest.mark.parametrize("argument", ["hidden_states", "w2", "router_logits"])
def test_something_else_in_a_tensors_place(argument, emit, value):
    with pytest.raises(TypeError, match=rf"{argument}=.*: expected a torch.Tensor"):
        moe_ops.fused_moe(**{**good(), argument: value}, emit=emit)


def test_none_in_the_place_of_the_only_tensor():
    with pytest.raises(TypeError, match=r"gate_up=None: expected a torch\.Tensor"):
        moe_ops.gated_activation(None)


def test_symbolic_sizes_are_compared():
    """A size of 1 is not broadcast, equal symbols cost one guard, unbacked sizes are taken for equal."""
    w13, w2 = good()["w13"], good()["w2"]

    def layer(x, logits, shared):
        return moe_ops.fused_moe(x, logits, w13, w2, RoutingConfig(top_k=K), shared=shared)

    x, logits = torch.randn(T, H), torch.randn(T, E)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with pytest.raises(Exception, match=r"shared has shape \[1, .*\]: expected \[s\d+ \(now 4\)"):
        compiled(x, logits, torch.randn(1, H))
    shared = torch.randn(T, H)
    torch.testing.assert_close(compiled(x, logits, shared), layer(x, logits, shared))
    with pytest.raises(Exception, match=r"router_logits has shape .*\(now 3\).*: expected .*\(now 4\)"):
        torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)(x, logits[:3], shared)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_unbacked_token_counts(backend):
    w13, w2 = good()["w13"], good()["w2"]
    layer = lambda x, logits: moe_ops.fused_moe(x, logits, w13, w2, RoutingConfig(top_k=K))  # noqa: E731
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for tokens in (4, 1, 9):
        x, logits = torch.randn(tokens, H), torch.randn(tokens, E)
        for tensor in (x, logits):
            torch._dynamo.decorators.mark_unbacked(tensor, 0)
        torch.testing.assert_close(compiled(x, logits), layer(x, logits))
    x, logits = torch.randn(4, H), torch.randn(3, E)
    for tensor in (x, logits):
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
    with pytest.raises((RuntimeError, AssertionError), match=r"Eq\(|=="):  # of torch's: only the run can tell
        compiled(x, logits)


def test_a_size_of_one_against_a_symbol():
    """make_fx takes 1 for a number and 4 for a symbol of at least 2: they are known to differ."""
    x, logits, w13, w2, routing = good().values()
    layer = lambda *tensors: moe_ops.fused_moe(*tensors, routing)  # noqa: E731
    with pytest.raises(ValueError, match=r"router_logits has shape \[1, .*\]: expected \[s\d+ \(now 4\)"):
        make_fx(layer, tracing_mode="symbolic")(x, logits[:1], w13, w2)


def test_a_dtensor_is_refused():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        x = torch.distributed.tensor.distribute_tensor(torch.randn(T, H), mesh)
        with pytest.raises(TypeError, match="DTensor: expected a plain tensor"):
            moe_ops.fused_moe(**{**good(), "hidden_states": x})
    finally:
        torch.distributed.destroy_process_group()


def test_offsets_elsewhere_are_compared_with_the_operators_own_input():
    offsets, slots = torch.zeros(3, dtype=torch.int32, device="meta"), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(
        ValueError, match="expert_offsets is on meta: expected cpu, the device of hidden_states"
    ):
        torch.ops.moe.gather_gemm_act(torch.randn(2, 8), torch.randn(2, 12, 8), slots, offsets, None, "silu")
