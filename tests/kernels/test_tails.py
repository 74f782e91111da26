"""Rows past the last expert are zeros, and no product is made of them: on ranks they are most rows.

Within a layer, where nothing reads them, they are not even that.
"""

import pytest
import torch
import triton
from triton.runtime import interpreter

from moe_ops.kernels import fused
from moe_ops.kernels.program import Program
from moe_ops.types import Activation
from tests.kernels import test_scaled_fused
from tests.kernels.by_name import launch, program_of
from tests.kernels.catalogue import meta

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


@pytest.mark.parametrize("form", ["pairs", "exact rows", "quantised rows", *PLAIN])
@pytest.mark.usefixtures("poisoned_empty")
def test_a_row_past_as_many_blocks_as_there_can_be(form):
    """Each of the four blocks of 16 rows that 20 rows of three experts can be has some."""
    out = _out(form, 20, [0, 1, 2, 19])
    assert out[:19].any(1).all() and not out[19].any()


@pytest.mark.usefixtures("poisoned_empty")
def test_programs_go_on_with_what_they_leave_at_first():
    """Tiles have more numbers than a program writes at a time."""
    x, weight = torch.randn(1500, DEPTH).bfloat16(), torch.randn(EXPERTS, 256, DEPTH).bfloat16()
    out = launch("grouped_gemm", x=x, weight=weight, expert_offsets=torch.tensor([0, 0, 0, 1]).int())
    assert out[0].all() and not out[1:].any()


def _within(operator, arguments, *names):
    """Buffers of those names, of which the last is `expert_offsets` or one of as many rows, after a run."""
    program = program_of(operator, **arguments)
    tensors = {
        name: each for name, each in arguments.items() if each is None or isinstance(each, torch.Tensor)
    }
    return Program(program.buffers, program.launches, names).filled.run(tensors)


def _assert_none_past(end, rows):
    assert rows[:end].isfinite().all() and 0 < end < len(rows) and rows[end:].isnan().all()


def _in_pairs(at):
    """The layer with weights of 4 bits, whose blocks have 32 columns."""
    for name in ("w13", "w2"):
        experts, features, depth = at[name].shape
        at[name] = torch.randint(256, (experts, features, depth // 2), dtype=torch.uint8)
        at[f"{name}_scale"] = torch.full((experts, features, depth // 32), 120, dtype=torch.uint8)
        at |= {f"{name}_block_rows": 1, f"{name}_block_columns": 32}
    return at


@pytest.mark.parametrize(
    ("size", "rows"),
    [*((size, rows) for size in ("T7", "T33") for rows in ("quantised", "exact")), ("T7", "pairs")],
)
def test_layers_leave_them_out(size, rows):
    at = test_scaled_fused._layer(size, torch.float8_e4m3fn, torch.float32, Activation("silu"))
    if rows == "pairs":
        at, rows = _in_pairs(at), "exact"
    experts = torch.arange(at["w13"].shape[0], dtype=torch.int32)
    at |= {"rows": rows, "expert_map": experts.where(experts % 3 == 1, -1)}
    gate = ("slot_rows", "slot_scale") if rows == "quantised" else ("activated",)
    offsets, *buffers = _within("scaled_fused_experts", at, "expert_offsets", "gate_up", *gate, "expert_out")
    for buffer in buffers:
        _assert_none_past(int(offsets[-1]), buffer.float())


def test_layers_copy_none_of_them(monkeypatch):
    monkeypatch.setattr(fused, "sorts_rows_first", lambda gemm: True)
    at = {"hidden_states": torch.randn(29, 40), "w13": torch.randn(2, 48, 40), "w2": torch.randn(2, 40, 24)}
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(29)]).int()
    at |= {"topk_weights": torch.rand(29, 2), "topk_ids": ids, "activation": Activation()}
    at["expert_map"] = torch.tensor([-1, 1, -1, 0, -1], dtype=torch.int32)
    offsets, *buffers = _within("fused_experts", at, "expert_offsets", "permuted", "activated", "expert_out")
    for buffer in buffers:
        _assert_none_past(int(offsets[-1]), buffer)


def test_a_gate_in_front_of_a_product_leaves_them_out():
    at = {"gate_up": torch.randn(SLOTS, 48), "w2": torch.randn(EXPERTS, 40, 24), "activation": Activation()}
    at |= {"expert_offsets": torch.tensor([0, 3, 3, 8]).int(), "topk_weights": torch.rand(SLOTS, 1)}
    at |= {"inverse": torch.arange(SLOTS).int().where(torch.arange(SLOTS) < 8, -1)}
    activated, combined = _within("act_gemm_combine", at, "activated", "combined")
    _assert_none_past(8, activated)
    assert combined[:8].any(1).all() and not combined[8:].any()


@pytest.mark.parametrize("tokens", [40, 400, 2500])
def test_tiles_are_as_high_as_those_of_the_whole_layer(tokens):
    """Experts of a part have as many rows as they have where all are here."""
    layers = {
        "fused_experts": {"w13": meta(128, 256, 128), "w2": meta(128, 128, 128)},
        "scaled_fused_experts": _scaled(torch.float8_e4m3fn, 1) | {"rows": "exact"},
        "in 8 bits": _scaled(torch.float8_e4m3fn, 1) | {"rows": "quantised"},
        "in 4 bits": _scaled(torch.uint8, 2) | {"rows": "exact"},
    }
    for name, weights in layers.items():
        operator = name if name.endswith("experts") else "scaled_fused_experts"
        part = {key: each[:16] if isinstance(each, torch.Tensor) else each for key, each in weights.items()}
        mapped = {"expert_map": meta(128, dtype=torch.int32)}
        given = {"hidden_states": meta(tokens, 128), "activation": Activation()}
        given |= {"topk_weights": meta(tokens, 8, dtype=torch.float32)}
        given |= {"topk_ids": meta(tokens, 8, dtype=torch.int32)}
        whole, some = (_heights(operator, given | each) for each in (weights, part | mapped))
        assert whole == some and len(whole) == 2, name


def _scaled(dtype, numbers):
    weights = {
        "w13": meta(128, 256, 128 // numbers, dtype=dtype),
        "w2": meta(128, 128, 128 // numbers, dtype=dtype),
    }
    scale, columns = (torch.uint8, 32) if numbers == 2 else (torch.float32, 128)
    scales = {
        f"{name}_scale": meta(128, each.shape[1], 128 // columns, dtype=scale)
        for name, each in weights.items()
    }
    blocks = {
        f"{name}_block_{side}": size for name in weights for side, size in (("rows", 1), ("columns", columns))
    }
    return weights | scales | blocks


def _heights(operator, arguments):
    launches = program_of(operator, **arguments).launches
    return [each.args["BLOCK_M"] for each in launches if "BLOCK_N" in each.args and "BLOCK_M" in each.args]
