"""Checks of calls that are known: what they skip, and what they must not miss; `launch_checks` runs them."""

import contextlib
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ops
from moe_ops import _compat, _library
from moe_ops.arguments import GatedActivationBackward
from moe_ops.kernels import plans
from tests.kernels.by_address import (
    DRIVER,
    FEW,
    MANY,
    ROUTING,
    E,
    H,
    I,
    Layer,
    aligned,
    know_all,
    maps_of,
    of_plan,
)


@contextlib.contextmanager
def unseen() -> Iterator[list[str]]:
    """What is called within that a known call has no need of: the dispatcher, and what runs behind it."""
    seen: list[str] = []
    functions = {(plans, "launch_known"), (plans, "launch_checked"), (_library, "_call_plainly")}
    kept = {each: getattr(*each) for each in functions}
    for (module, name), function in kept.items():
        setattr(
            module, name, lambda *args, name=name, function=function: (seen.append(name), function(*args))[1]
        )
    try:
        yield seen
    finally:
        for (module, name), function in kept.items():
            setattr(module, name, function)


def known_calls_go_straight_to_their_launches() -> None:
    for tokens in (FEW, MANY):
        layer = Layer().ready(tokens)
        with unseen() as seen:
            for other in (layer, Layer()):  # alike, with weights elsewhere
                other(tokens)
                launched = DRIVER.launched()
                addresses = {address for each in launched for address in each.addresses()}
                assert {other.w13.data_ptr(), other.w2.data_ptr()} <= addresses
        assert not seen
        with torch.inference_mode():  # tensors made here have fewer keys of the dispatcher
            for _ in range(3):
                layer(tokens)
            with unseen() as seen:
                layer(tokens)
        assert not seen
        plans.forget_known()
        with unseen() as seen:
            layer(tokens)
        assert "launch_checked" in seen


def the_first_call_may_be_in_inference_mode() -> None:
    """Weights are made before it: all that serves looks like that."""
    layer = Layer().ready(FEW)
    plans.forget_known()
    _compat._plain_keys.cache_clear()
    with torch.inference_mode():
        for _ in range(3):
            layer(FEW)
        with unseen() as seen:
            layer(FEW)
    assert not seen


def changed_weights_are_met_as_they_are() -> None:
    """Exchanged under the same object, freed with others in their memory, and given other sizes."""
    layer = Layer().ready(MANY)
    layer.w13, other = torch.nn.Parameter(layer.w13, requires_grad=False), aligned(E, 2 * I, H)
    layer.ready(MANY)
    layer(MANY)
    before = maps_of(DRIVER.launched())
    layer.w13.data = other
    layer(MANY)
    assert other.data_ptr() in maps_of(DRIVER.launched()) and other.data_ptr() not in before
    layer.w13.data = aligned(E, 2 * I + 2, H)
    with pytest.raises(ValueError, match="w2 has shape"):
        layer(MANY)
    layer.w13.data = other.double()
    with pytest.raises(TypeError, match="w13 has dtype"):
        layer(MANY)
    layer.w13.data = aligned(H, 2 * I, E).permute(2, 1, 0)  # the same sizes
    with pytest.raises(ValueError, match="w13 has strides"):
        layer(MANY)
    assert not DRIVER.launched()


def nothing_known_keeps_a_tensor() -> None:
    layer = Layer().ready(MANY)
    given = aligned(MANY, H)
    layer(MANY, hidden_states=given)
    dead = [weakref.ref(each) for each in (layer.w13, layer.w2, given)]
    del layer, given
    gc.collect()
    assert all(each() is None for each in dead)


class Dispatched(TorchDispatchMode):
    """Operators that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """The same of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def modes_and_profilers_see_known_calls() -> None:
    layer = Layer().ready(FEW)
    for mode in (Dispatched(), Functions()):
        with mode:
            for _ in range(3):
                layer(FEW)
        assert sum("fused_moe" in each for each in mode.seen) == 3, mode
        with unseen() as seen:
            layer(FEW)
        assert not seen, "what a mode has seen is as known as before"
    with torch.profiler.profile() as profile:
        layer(FEW)
    assert any(event.name == "moe::fused_moe" for event in profile.events() or ())
    with unseen() as seen:
        layer(FEW)
    assert not seen


def transforms_see_known_calls() -> None:
    layer = Layer().ready(FEW)

    def of(x: Tensor) -> Tensor:
        return moe_ops.fused_moe(x, logits, layer.w13, layer.w2, ROUTING)

    x, logits = aligned(FEW, H), aligned(FEW, E)
    with unseen() as seen:
        of(x)
        assert not seen
        assert torch.vmap(of)(aligned(3, FEW, H)).shape == (3, FEW, H)
        assert torch.func.vjp(of, x)[0].shape == x.shape
        with forward_ad.dual_level():
            dual = of(forward_ad.make_dual(x, aligned(FEW, H)))
            assert forward_ad.unpack_dual(dual).tangent is not None
    assert seen.count("_call_plainly") >= 3


def what_wraps_a_tensor_is_the_dispatchers_to_take_off() -> None:
    """A transform that has ended, whose tensors its pullback still has, and a sign that is yet to be turned."""
    layer, x, logits = Layer().ready(FEW), aligned(FEW, H), aligned(FEW, E)
    ended: list[Tensor] = []
    torch.func.vjp(lambda given: (ended.append(given), given * 1)[1], x)
    turned = torch._neg_view(x)
    for given, has_values in ((ended[0], True), (turned, False)):
        for _ in range(3):
            with torch.no_grad():  # as in a pullback
                moe_ops.fused_moe(given, logits, layer.w13, layer.w2, ROUTING)
            addresses = {address for each in DRIVER.launched() for address in each.addresses()}
            assert addresses and (x.data_ptr() in addresses) == has_values


def a_state_of_the_thread_is_part_of_a_call() -> None:
    """Gradients, inference mode and autocast: each gives what it gives, in any order."""
    layer = Layer().ready(FEW)
    x, logits = aligned(FEW, H), aligned(FEW, E)
    recorded = x.clone().requires_grad_()
    for _ in range(2):
        with torch.inference_mode():
            assert moe_ops.fused_moe(x, logits, layer.w13, layer.w2, ROUTING).is_inference()
        assert not layer(FEW).is_inference()
        assert moe_ops.fused_moe(recorded, logits, layer.w13, layer.w2, ROUTING).requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            out = moe_ops.fused_moe(x.float(), logits, layer.w13, layer.w2, ROUTING)
        assert out.dtype == torch.bfloat16
        with pytest.raises(TypeError, match="w13 has dtype"):
            moe_ops.fused_moe(x.float(), logits, layer.w13, layer.w2, ROUTING)


STATES: tuple[Callable[[], Any], ...] = (
    contextlib.nullcontext,
    torch.no_grad,
    torch.enable_grad,
    torch.inference_mode,
    lambda: torch.inference_mode(False),
    lambda: torch.autocast("cpu", torch.float16, enabled=False),
    forward_ad.dual_level,
)


def a_walk_through_states_records_where_each_would() -> None:
    """Of calls in one state nothing may be taken for another, whatever came before."""
    draw = random.Random(0)
    shapes = ((FEW, H), (FEW, E), (E, 2 * I, H), (E, H, I))
    tensors = [(aligned(*shape), aligned(*shape).requires_grad_()) for shape in shapes]
    Layer().ready(FEW)
    for _ in range(3):
        moe_ops.fused_moe(*[each for _, each in tensors], ROUTING)
        know_all()
    known = 0
    for _ in range(100):
        given = [draw.choices(pair, (3, 1))[0] for pair in tensors]
        outer, inner = draw.sample(STATES, 2)  # torch nests no dual levels
        for _ in range(3):
            with outer(), inner(), unseen() as seen:
                out, is_inference = moe_ops.fused_moe(*given, ROUTING), torch.is_inference_mode_enabled()
                records = torch.is_grad_enabled() and any(each.requires_grad for each in given)
            assert (out.requires_grad, out.is_inference()) == (records and not is_inference, is_inference)
            known += bool(DRIVER.launched()) and not seen
    assert known > 60


def launches_go_to_the_gpu_of_the_tensors() -> None:
    """As a plan for the second GPU would, while the first is current."""
    layer = Layer().ready(FEW)
    plan, entered = of_plan(layer, FEW), []
    real, torch.cuda.device = (
        torch.cuda.device,
        lambda index: (entered.append(index), contextlib.nullcontext())[1],
    )
    try:
        given = (aligned(FEW, H), aligned(FEW, E), layer.w13, layer.w2, *[None] * 6)
        for index in (0, 1):
            assert plan._replace(index=index).run(given) is not None
    finally:
        torch.cuda.device = real
    assert entered == [1]


def a_run_in_two_parts_launches_the_same() -> None:
    """As a layer with a shared expert beside it runs; a tensor elsewhere is Triton's to launch there too."""
    for tokens in (FEW, MANY):
        layer = Layer().ready(tokens)
        plan, rest = of_plan(layer, tokens), (aligned(tokens, E), layer.w13, layer.w2, *[None] * 6)
        given = aligned(tokens, H), *rest
        plan.run(given)
        whole = DRIVER.launched()
        bound = plan.bind(given)
        assert bound is not None
        bound.launch(0, 1)
        first = DRIVER.launched()
        bound.launch(1)
        parts = first + DRIVER.launched()
        assert len(first) == 1 and len(parts) == len(whole)
        for part, each in zip(parts, whole, strict=True):
            assert part[:3] == each[:3] and part.others() == each.others()
        starts = {each.data_ptr() for each in given if each is not None}
        for of in (parts, whole):
            assert starts <= {address for each in of for address in each.addresses()}
        assert plan.bind((aligned(tokens * H + 1)[1:].view(tokens, H), *rest)) is None


def products_of_a_library_are_known() -> None:
    x, weight = aligned(40, H).normal_(), aligned(600, H).normal_()
    for bias in (None, aligned(600).normal_()):
        moe_ops.dense_gemm(x, weight, bias)
        with unseen() as seen:
            assert torch.equal(moe_ops.dense_gemm(x, weight, bias), F.linear(x, weight, bias))
        assert not seen and not DRIVER.launched()
    with pytest.raises(TypeError, match="weight has dtype"):
        moe_ops.dense_gemm(x, weight.float())
    for rows in (1, 1):
        moe_ops.dense_gemm(x[:rows], weight)
        assert len(DRIVER.launched()) == 1


def results_may_have_the_sizes_of_an_argument() -> None:
    """Which are no tuple but a `torch.Size`."""
    grad, gate_up = aligned(MANY, I), aligned(MANY, 2 * I)
    for _ in range(4):
        given = plans.launch_checked(GatedActivationBackward(grad, gate_up, "silu"))
        assert isinstance(given, Tensor) and given.shape == gate_up.shape and given.is_contiguous()
        know_all()
    assert DRIVER.launched()


CHECKS: tuple[Callable[[], None], ...] = (
    known_calls_go_straight_to_their_launches,
    the_first_call_may_be_in_inference_mode,
    changed_weights_are_met_as_they_are,
    nothing_known_keeps_a_tensor,
    modes_and_profilers_see_known_calls,
    transforms_see_known_calls,
    what_wraps_a_tensor_is_the_dispatchers_to_take_off,
    a_state_of_the_thread_is_part_of_a_call,
    a_walk_through_states_records_where_each_would,
    launches_go_to_the_gpu_of_the_tensors,
    a_run_in_two_parts_launches_the_same,
    products_of_a_library_are_known,
    results_may_have_the_sizes_of_an_argument,
)
