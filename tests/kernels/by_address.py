"""Checks of launches by address, on the stand-in driver; `launch_checks` runs them.

A layer of few tokens (decode kernels) and one of more (TMA) launch on the stand-in driver: first as Triton does it,
then by address, and the machine must get the same.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import stand_in_driver

DRIVER = stand_in_driver.Driver()

import triton  # noqa: E402

import moe_ops  # noqa: E402
from moe_ops import _library  # noqa: E402
from moe_ops.arguments import ExpertWeights, FusedMoe, GroupedLinear, PairedLinear, Placement, Router  # noqa: E402
from moe_ops.kernels import packed, plans, ready  # noqa: E402

E, K, H, I = 4, 2, 64, 64
ROUTING = moe_ops.RoutingConfig(top_k=K)
FEW, MANY = 1, 70
WEIGHTS = 3  # number of the last one, in the order of the operator's arguments


class Layer:
    """Weights, and calls of T tokens."""

    def __init__(self, num_experts: int = E) -> None:
        self.w13 = aligned(num_experts, 2 * I, H)
        self.w2 = aligned(num_experts, H, I)

    def __call__(self, tokens: int, **changed: Any) -> Tensor:
        given = {"hidden_states": aligned(tokens, H), "router_logits": aligned(tokens, self.w13.shape[0])}
        with torch.no_grad():
            return moe_ops.fused_moe(
                **{**given, "w13": self.w13, "w2": self.w2, "routing": ROUTING, **changed}
            )

    def ready(self, tokens: int) -> "Layer":
        """Itself, after calls from which on it launches by address."""
        for _ in range(3):
            self(tokens)
        know_all()
        DRIVER.launched()
        return self


def aligned(*shape: int) -> Tensor:
    """bfloat16 on 16 bytes, as a GPU's allocator places it."""
    size = torch.Size(shape).numel()
    memory = torch.zeros(size + 8, dtype=torch.bfloat16)
    start = -memory.data_ptr() % 16 // 2
    return memory[start : start + size].view(shape)


def know_all() -> None:
    """Tells the driver of every kernel that Triton has loaded."""
    for each in gc.get_objects():
        if type(each) is triton.compiler.CompiledKernel and each.function is not None:
            DRIVER.know(each)


def of_plan(layer: Layer, tokens: int) -> packed.Packed:
    """What is kept for calls of so many tokens."""
    calls = plans._PLANS[FusedMoe].ready.calls
    return next(each.packed for key, each in calls.items() if key[1] == (tokens, H))


def the_machine_gets_what_triton_gives_it() -> None:
    for tokens, least in ((FEW, 2), (MANY, 5)):
        layer = Layer().ready(tokens)
        layer(tokens)
        compare(layer, tokens, least)


def compare(layer: Layer, tokens: int, least: int) -> None:
    """What was just launched for so many tokens and what Triton launches."""
    ours = DRIVER.launched()
    with watched([]):
        layer(tokens)
    theirs = DRIVER.launched()
    assert len(ours) == len(theirs) >= least
    seen: dict[int, int] = {}
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[:3] == other[:3] and mine.name
        assert mine.others() == other.others() and len(mine.parameters) > 4
        for here, there in zip(mine.addresses(), other.addresses(), strict=True):
            assert seen.setdefault(here, there) == there, "one tensor is two"
    assert len(set(seen.values())) == len(seen), "two tensors are one"
    weights = {layer.w13.data_ptr(), layer.w2.data_ptr()}
    assert weights <= seen.keys() and all(seen[weight] == weight for weight in weights)


def counts_never_seen_are_filled_in() -> None:
    """Between counts that differ in what is compiled alike, and in how many tiles there are."""
    layer, counts = Layer(), (*range(81, 103), *range(163, 200, 7))
    for tokens in (65, 66, 67, 68, 80, 160, 161, 162, 96, 112, 128, 144):
        layer.ready(tokens)
    templates = plans._PLANS[FusedMoe].templates
    filled_in, of_makers = 0, []
    for tokens in counts:
        made = templates.plan.cache_info().misses
        layer(tokens)
        if templates.plan.cache_info().misses == made:
            filled_in += 1
            of_makers.append(of_plan(layer, tokens))
            compare(layer, tokens, 5)
        DRIVER.launched()
    assert filled_in >= len(counts) - 4, filled_in
    boxes = [each for plan in of_makers for launch in plan.launches for each in launch.boxes]
    of_buffers = [id(each.made) for each in boxes if each.tensor > WEIGHTS]
    of_weights = [id(each.made) for each in boxes if each.tensor <= WEIGHTS]
    assert len(of_buffers) == len({*of_buffers}) >= 4, "a map of a buffer is of one size"
    assert 2 * len({*of_weights}) < len(of_weights), "maps of weights are shared"


def buffers_without_elements_count() -> None:
    layer = Layer()
    layer.w13, layer.w2 = aligned(E, 0, H), aligned(E, H, 0)
    layer.ready(FEW)
    layer(FEW)
    with watched([]):
        ours = DRIVER.launched()
        layer(FEW)
    assert [each.name for each in ours] == [each.name for each in DRIVER.launched()] != []


def nothing_else_is_asked_of_the_driver() -> None:
    for tokens in (FEW, MANY):
        layer = Layer().ready(tokens)
        outputs = [layer(tokens)]  # it lives, so that the next is elsewhere
        launches = of_plan(layer, tokens).launches
        DRIVER.launched()
        outputs.append(layer(tokens))
        of_buffers = [each for launch in launches for each in launch.boxes if each.tensor > WEIGHTS]
        assert DRIVER.other_calls() <= len(of_buffers) < 2
        assert len(DRIVER.launched()) == len(launches)
        assert outputs[0].data_ptr() != outputs[1].data_ptr()


def buffers_are_apart() -> None:
    layer = Layer().ready(MANY)
    plan, arguments = of_plan(layer, MANY), _arguments(layer, MANY)
    leaves = _library.OPERATORS[FusedMoe].flatten(arguments)
    bound = plan.bind([each for each in leaves if not isinstance(each, str)])
    assert bound is not None and bound.kept is not None
    starts = bound.addresses[-len(plan.parts) :]
    end = bound.kept.data_ptr() + bound.kept.nbytes
    program = plans.program(arguments)
    inner = [each for each in program.buffers if each.name not in program.outputs]
    assert starts[0] >= bound.kept.data_ptr() and len(starts) == len(inner) > 3
    for buffer, start, after in zip(inner, starts, [*starts[1:], end], strict=True):
        assert start + torch.Size(buffer.shape).numel() * buffer.dtype.itemsize <= after


def descriptors_are_of_the_weights_that_are_given() -> None:
    """Of new weights, of weights in the memory of old ones, and of more than are kept."""
    first = Layer().ready(MANY)
    kept = []  # so that each has memory of its own
    for turn in range(packed._MOST_MAPS + 3):
        layer = Layer()
        kept.append(layer)
        layer(MANY)
        assert {layer.w13.data_ptr(), layer.w2.data_ptr()} <= maps_of(DRIVER.launched()), turn
    boxes = [each for launch in of_plan(first, MANY).launches for each in launch.boxes]
    assert boxes and all(len(each.made) <= packed._MOST_MAPS for each in boxes)
    memory = aligned(2 * E, 2 * I, H)
    for shape in ((E, 2 * I, H), (2 * E, 2 * I, H), (E, 2 * I, H)):
        layer = Layer(shape[0])
        layer.w13 = memory.view(-1)[: torch.Size(shape).numel()].view(shape)
        layer.ready(MANY)(MANY)
        for launch in DRIVER.launched():
            for name, value in launch.parameters:
                if len(value) == 128 and value[:8] == memory.data_ptr().to_bytes(8, "little"):
                    assert shape[0] in memoryview(value).cast("Q").tolist()[2::3], name
                    break


def maps_of(launches: list[stand_in_driver.Launched]) -> set[int]:
    """Addresses in descriptors."""
    return {
        int.from_bytes(value[:8], "little")
        for launch in launches
        for _, value in launch.parameters
        if len(value) == 128
    }


def a_tensor_elsewhere_is_planned_for_itself() -> None:
    layer = Layer().ready(MANY)
    layer(MANY)
    names = [each.name for each in DRIVER.launched()]
    shifted = aligned(MANY * H + 1)[1:].view(MANY, H)
    for _ in range(4):
        layer(MANY, hidden_states=shifted)
        found = DRIVER.launched()
        assert [each.name for each in found] != names
        assert shifted.data_ptr() not in maps_of(found)
        layer(MANY)
        assert [each.name for each in DRIVER.launched()] == names


def hooks_are_told() -> None:
    told: list[Any] = []
    layer = Layer().ready(FEW)
    with watched(told):
        layer(FEW)
    assert len(told) == 2
    layer(FEW)
    assert len(told) == 2 and len(DRIVER.launched()) == 4


class watched:
    """Triton tells of launches within."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def __enter__(self) -> None:
        triton.knobs.runtime.launch_enter_hook.add(self.told.append)

    def __exit__(self, *error: object) -> None:
        triton.knobs.runtime.launch_enter_hook.remove(self.told.append)


def launches_go_to_the_current_stream() -> None:
    layer = Layer().ready(FEW)
    for stream in (11, 12, 7):
        stand_in_driver.STREAM[0] = stream
        layer(FEW)
        assert {each.stream for each in DRIVER.launched()} == {stream}


def other_metadata_is_checked() -> None:
    layer = Layer().ready(FEW)
    for changed, text in (
        ({"w2": aligned(E, H, I + 16)}, "w2 has shape"),
        ({"w13": layer.w13.float()}, "w13 has dtype"),
        ({"router_logits": aligned(FEW + 1, E)}, "router_logits has shape"),
        ({"w2": layer.w2.to("meta")}, "meta"),
        ({"w13": aligned(E, 2 * I, 2 * H)[..., ::2]}, "w13 has strides"),
        ({"w13_bias": aligned(E, 2 * I + 2)}, "w13_bias has shape"),
    ):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
                layer(FEW, **changed)
    layer(FEW, w13_bias=aligned(E, 2 * I))
    layer(FEW)
    assert len(DRIVER.launched()) == 4


def fewer_tokens_are_not_checked_again() -> None:
    """What was checked for more tokens; anything else that differs is, and so are more."""
    layer = Layer()
    for tokens in (80, 81, 82, 96, 112, 128):
        layer.ready(tokens)
    checked, check = [], plans.launch_checked
    plans.launch_checked = lambda arguments: checked.append(arguments) or check(arguments)
    try:
        for tokens, again in ((90, 0), (91, 0), (90, 0), (127, 0), (129, 1), (89, 0)):
            assert layer(tokens).shape == (tokens, H)
            assert len(checked) == again, (tokens, len(checked))
            checked.clear()
            assert len(DRIVER.launched()) > 3 and of_plan(layer, tokens)
        with pytest.raises(ValueError, match="router_logits has shape"):
            layer(93, router_logits=aligned(92, E))
        with pytest.raises(ValueError, match="w2 has shape"):
            layer(93, w2=aligned(E, H, I + 16))
        assert moe_ops.fused_moe(aligned(0, H), aligned(0, E), layer.w13, layer.w2, ROUTING).shape == (0, H)
        layer(94, w13_bias=aligned(E, 2 * I))
        layer(95, router_logits=aligned(95, 2 * E)[:, ::2])
        plans.forget_known()
        layer(88)
        assert len(checked) == 3
    finally:
        plans.launch_checked = check


def gradients_are_asked_for_as_ever() -> None:
    layer = Layer().ready(FEW)
    x = aligned(FEW, H).requires_grad_()
    out = moe_ops.fused_moe(x, aligned(FEW, E), layer.w13, layer.w2, ROUTING)
    assert out.requires_grad and out.grad_fn is not None
    with torch.no_grad():
        assert not moe_ops.fused_moe(x, aligned(FEW, E), layer.w13, layer.w2, ROUTING).requires_grad


def gradients_are_asked_for_again_after_calls_without_them() -> None:
    """As in training that evaluates first: what is kept of weights that require gradients is not for those calls."""
    layer = Layer()
    layer.w13.requires_grad_()
    for _ in range(2):
        layer.ready(FEW)
        out = moe_ops.fused_moe(aligned(FEW, H), aligned(FEW, E), layer.w13, layer.w2, ROUTING)
        assert out.requires_grad and out.grad_fn is not None
        assert not layer(FEW).requires_grad and of_plan(layer, FEW)
        with pytest.raises(TypeError, match="w13 has dtype"):
            layer(FEW, w13=layer.w13.detach().float().requires_grad_())


def watchers_see_calls_that_are_known() -> None:
    layer = Layer().ready(FEW)
    with plans.watched() as seen:
        layer(FEW)
    assert [each.record.__name__ for each in seen] == ["FusedMoe"]


def few_are_kept() -> None:
    layer, plan = Layer(), plans._PLANS[FusedMoe]
    plans.forget_known()
    ready.MOST = 3
    for tokens in (1, 2, 3, 4, 1, 2):
        layer.ready(tokens)
        assert of_plan(layer, tokens) and len(plan.known) <= 3 and len(plan.ready.calls) <= 3


def _arguments(layer: Layer, tokens: int) -> Any:
    experts = ExpertWeights(PairedLinear(layer.w13, None), GroupedLinear(layer.w2, None))
    router = Router(aligned(tokens, E), None, ROUTING.spec)
    return FusedMoe(aligned(tokens, H), router, experts, Placement(None), "silu")


CHECKS: tuple[Callable[[], None], ...] = (
    the_machine_gets_what_triton_gives_it,
    nothing_else_is_asked_of_the_driver,
    buffers_are_apart,
    descriptors_are_of_the_weights_that_are_given,
    a_tensor_elsewhere_is_planned_for_itself,
    hooks_are_told,
    launches_go_to_the_current_stream,
    other_metadata_is_checked,
    fewer_tokens_are_not_checked_again,
    gradients_are_asked_for_as_ever,
    gradients_are_asked_for_again_after_calls_without_them,
    watchers_see_calls_that_are_known,
    few_are_kept,
    counts_never_seen_are_filled_in,
    buffers_without_elements_count,
)
