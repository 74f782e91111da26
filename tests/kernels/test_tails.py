"""Rows past the last expert are zeros, and no product is made of them: on ranks they are most rows."""

import pytest
import torch
import triton
from triton.runtime import interpreter

from tests.kernels.by_name import launch

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
EXPERTS, FEATURES, DEPTH, SLOTS = 3, 40, 128, 23
PLAIN = {"by pointers": torch.float32, "in boxes": torch.bfloat16}


def _weight(form):
    """Weights, scales and the rest of the arguments that `scaled_grouped_gemm` takes."""
    if form == "pairs":
        weight = torch.randint(0, 256, (EXPERTS, FEATURES, DEPTH // 2), dtype=torch.uint8)
        return weight, torch.full((EXPERTS, FEATURES, DEPTH // 32), 127, dtype=torch.uint8), (1, 32)
    weight = torch.randint(-9, 9, (EXPERTS, FEATURES, DEPTH), dtype=torch.int8)
    return weight, torch.ones(EXPERTS, 1, 1), (FEATURES, DEPTH)


def _out(form, slots, offsets):
    offsets = torch.tensor(offsets, dtype=torch.int32)
    if form in PLAIN:
        x, weight = torch.randn(slots, DEPTH), torch.randn(EXPERTS, FEATURES, DEPTH)
        x, weight = x.to(PLAIN[form]), weight.to(PLAIN[form])
        return launch("grouped_gemm", x=x, weight=weight, expert_offsets=offsets)
    weight, scale, block = _weight(form)
    given = {"weight": weight, "scale": scale, "expert_offsets": offsets, "dtype": torch.float32}
    given |= {"block_rows": block[0], "block_columns": block[1]}
    x = torch.randn(slots, DEPTH)
    if form == "quantised rows":
        x, given["x_scale"] = torch.randint(-9, 9, (slots, DEPTH), dtype=torch.int8), torch.ones(slots, 1)
    return launch("scaled_grouped_gemm", x=x, **given)


@pytest.mark.parametrize("slots", [SLOTS, 99 * EXPERTS])
@pytest.mark.parametrize("form", ["pairs", "exact rows", "quantised rows", *PLAIN])
@pytest.mark.usefixtures("poisoned_empty")
def test_products_are_those_of_experts(form, slots, monkeypatch):
    products, dot = [], interpreter.interpreter_builder.create_dot

    def counted(*arguments):
        products.append(arguments)
        return dot(*arguments)

    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", counted)
    none = _out(form, slots, [0] * (EXPERTS + 1))
    assert none.shape == (slots, FEATURES) and not none.any() and not products
    some = _out(form, slots, [0, 2, 2, 5])
    assert products and some[:5].any(1).all() and not some[5:].any()


@pytest.mark.usefixtures("poisoned_empty")
def test_programs_go_on_with_what_they_leave_at_first():
    """Tiles have more numbers than a program writes at a time."""
    x, weight = torch.randn(1500, DEPTH).bfloat16(), torch.randn(EXPERTS, 256, DEPTH).bfloat16()
    out = launch("grouped_gemm", x=x, weight=weight, expert_offsets=torch.tensor([0, 0, 0, 1]).int())
    assert out[0].all() and not out[1:].any()
