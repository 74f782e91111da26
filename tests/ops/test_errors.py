"""Bad input raises a typed error that names argument, value and expectation: eager, make_fx, export, compile."""

import re
import traceback

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops
from moe_ops import RoutingConfig
from tests.bad_inputs import BAD_CALLS, BAD_LAYERS, BAD_VALUES, good
from tests.bad_modules import BAD_INPUTS, BAD_MODULES

T, E, K, H, I = 4, 6, 2, 8, 5
layers = pytest.mark.parametrize("name", BAD_LAYERS)


def last_lines(error):
    """What a user looks at first: the end of the traceback, without the source lines above it."""
    lines = "".join(traceback.format_exception(error)).rstrip().split("\n")
    return "\n".join(lines[-10:])


@layers
@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
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


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_calls(name):
    call, error, message = BAD_INPUTS[name]
    with pytest.raises(error, match=message):
        call()


def test_every_public_function_is_called_with_something_bad():
    called = {name for call, *_ in BAD_INPUTS.values() for name in call.__code__.co_names}
    assert set(moe_ops.__all__) - called == {
        "DispatchPlan",
        "InputScales",
        "source_hash",
        "tuning_key",
        "warmup",
    }
    assert len(BAD_INPUTS) == len(BAD_LAYERS) + len(BAD_CALLS) + len(BAD_VALUES) + len(BAD_MODULES) >= 40


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
    with pytest.raises(RuntimeError, match="overflow") as raised:  # no error of ours
        moe_ops.build_dispatch(torch.zeros(2, 1).int(), 2**62)
    text = "".join(traceback.format_exception(raised.value))
    assert "return function(*args)" in text
    assert "hidden_states has shape" not in text


@pytest.mark.parametrize("value", ["a string", None, 3, np.ones((T, H), dtype=np.float32)], ids=str)
@pytest.mark.parametrize("emit", ["fused", "stages", "halves"])
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
        torch.ops.moe.gather_gemm_act(
            torch.randn(2, 8), torch.randn(2, 12, 8), slots, offsets, *(None,) * 3, "silu"
        )
