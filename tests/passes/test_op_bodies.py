"""The lint of a user's operator: what waits for the device is found where it stands, and becomes a hazard."""

import torch
from torch import Tensor

import inductor_passes
from inductor_passes.source_lint import waits


def _limit(x: Tensor) -> Tensor:
    return x.abs().amax()


def _wait_in_helper(x: Tensor) -> Tensor:
    return x[: _count(x)]


def _count(x: Tensor) -> int:
    return int(x.sum())


def _wait(x: Tensor, count: int) -> Tensor:
    limit = float(_limit(x))
    if x.any():
        x = x.cpu()
    return x.clamp(-limit, limit) * float(count)


def _clean(x: Tensor, bias: Tensor | None, count: int) -> Tensor:
    rows = int(x.shape[0]) + range(count)[-1]
    return x[:rows] if bias is None else x[:rows] + bias.to(x.dtype)


def _line(function, text):
    first = function.__code__.co_firstlineno
    with open(__file__) as file:
        lines = file.read().splitlines()
    number = next(n for n in range(first, len(lines)) if text in lines[n - 1])
    return f"test_op_bodies.py:{number}"


def test_what_waits_is_told_with_its_line():
    assert list(waits(_wait)) == [
        f"{_line(_wait, 'float(_limit')}: float(_limit(x))",
        f"{_line(_wait, 'if x.any')}: x.any()",
        f"{_line(_wait, 'x.cpu()')}: x.cpu()",
    ]


def test_helpers_of_the_module_are_read_too():
    assert list(waits(_wait_in_helper)) == [f"{_line(_count, 'int(x')}: int(x.sum())"]


def test_sizes_and_numbers_are_no_wait_and_a_builtin_has_no_source():
    assert waits(_clean) == () and waits(len) == ()


def _hazards(operator, x):
    with torch.no_grad():
        return inductor_passes.explain(lambda x: operator(x) * 2, x).capture_hazards


def _operator(name, body, **options):
    made = torch.library.custom_op(f"moe_lint::{name}", mutates_args=(), **options)(body)
    made.register_fake(torch.empty_like)
    return made


def test_a_custom_op_that_waits_is_a_hazard():
    def clip(x: Tensor) -> Tensor:
        return x.clamp(max=x.mean().item())

    (hazard,) = _hazards(_operator("clip", clip), torch.randn(3))
    assert hazard.target == "moe_lint.clip.default"
    assert hazard.reason == (f"its body waits for the device: {_line(clip, '.item()')}: x.mean().item()")


def test_what_runs_on_a_gpu_is_what_counts():
    def on_cpu(x: Tensor) -> Tensor:
        return x * x.sum().item()

    def on_gpu(x: Tensor) -> Tensor:
        return x * x.sum()

    good = _operator("good", on_cpu, device_types="cpu")
    good.register_kernel("cuda")(on_gpu)
    assert _hazards(good, torch.randn(3)) == ()
    bad = _operator("bad", on_gpu, device_types="cpu")
    bad.register_kernel("cuda")(on_cpu)
    assert [each.target for each in _hazards(bad, torch.randn(3))] == ["moe_lint.bad.default"]


def test_an_operator_that_changes_its_input_is_read_through_its_wrapper():
    @torch.library.custom_op("moe_lint::scale_", mutates_args=("x",))
    def scale(x: Tensor) -> None:
        x.mul_(float(x.abs().amax()))

    def run(x):
        y = x + 1
        scale(y)
        return y

    with torch.no_grad():
        (hazard,) = inductor_passes.explain(run, torch.randn(3)).capture_hazards
    assert hazard.target == "moe_lint.scale_.default" and "float(" in hazard.reason
