"""LaunchPrograms over a program of our own: views, descriptors, workspaces, scalars and absent pointers."""

import re

import pytest
import torch

import moe_ops
from tests.compile.fake_cuda import body, compile_for_h200

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from moe_ops.kernels.program import Buffer, Descriptor, Launch, Program, Ref  # noqa: E402

TOKENS, HIDDEN, EXPERTS, INTERMEDIATE = 64, 64, 8, 32


@triton.jit
def _scale_kernel(src_ptr, dst_ptr, absent_ptr, count, factor, NAME: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if absent_ptr is not None:
        tl.store(dst_ptr + offsets, tl.load(absent_ptr + offsets))
    tl.store(dst_ptr + offsets, tl.load(src_ptr + offsets, offsets < count) * factor, offsets < count)


@triton.jit
def _add_tiles_kernel(weight_desc, scaled_desc, scaled_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(weight_desc.load([0, 0]).to(tl.float32)) + tl.sum(scaled_desc.load([0, 0]).to(tl.float32))
    tl.store(out_ptr + offsets, tl.load(scaled_ptr + offsets, offsets < count) + total, offsets < count)


def _scale(source, target, warps):
    args = {
        "src_ptr": source,
        "dst_ptr": Ref(target),
        "absent_ptr": None,
        "count": TOKENS * HIDDEN,
        "factor": 2.0,
    }
    return Launch(_scale_kernel, (32,), {**args, "NAME": "silu", "BLOCK": 128}, warps, 2)


def _program(arguments, gpu):
    count = TOKENS * HIDDEN
    add = {
        "weight_desc": Descriptor("w13", (EXPERTS * 2 * INTERMEDIATE, HIDDEN), (HIDDEN, 1), (16, 64)),
        "scaled_desc": Descriptor("scaled", (TOKENS, HIDDEN), (HIDDEN, 1), (16, 64)),
        "scaled_ptr": Ref("scaled"),
        "out_ptr": Ref("out"),
        "count": count,
        "BLOCK": 128,
    }
    buffers = tuple(
        Buffer(name, (TOKENS, HIDDEN), arguments.hidden_states.dtype) for name in ("scaled", "out")
    )
    launches = (
        _scale(Ref("hidden_states"), "scaled", 8),
        _scale(Ref("scaled"), "out", 8),
        Launch(_add_tiles_kernel, (32,), add, 4, 3),
    )
    return Program(buffers, launches, ("out",))


@pytest.fixture
def wrapper(monkeypatch):
    monkeypatch.setattr("moe_ops.kernels.plans.program", _program)

    def inputs(tokens):
        shapes = (
            (tokens, HIDDEN),
            (tokens, EXPERTS),
            (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
            (EXPERTS, HIDDEN, INTERMEDIATE),
        )
        return [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]

    def layer(hidden, logits, w13, w2):
        return moe_ops.fused_moe(
            hidden * 2, logits, w13, w2, moe_ops.RoutingConfig(top_k=2), emit="stages"
        ).sin()

    return compile_for_h200(layer, inputs, tokens=TOKENS)


def test_every_launch_in_order_and_no_copy(wrapper):
    assert [re.sub(r"_\d+$", "", name) for name in wrapper.launches] == [
        "triton_poi_fused",
        "_scale_kernel",
        "_scale_kernel",
        "_add_tiles_kernel",
        "triton_poi_fused",
    ]


def test_equal_launches_share_one_kernel(wrapper):
    assert wrapper.launches[1] == wrapper.launches[2]


def test_descriptors_are_built_over_views_of_the_tensor_itself(wrapper):
    descriptors = re.findall(r"TensorDescriptor\.from_tensor\((.*), (\[[^]]*\])\)", body(wrapper.code))
    assert len(descriptors) == 2 and all(block == "[16, 64]" for _, block in descriptors)
    assert "reinterpret_tensor" in descriptors[0][0] and re.fullmatch(r"buf\d+", descriptors[1][0])


def test_launch_options_reach_the_kernels(wrapper):
    assert re.search(r"'num_warps': 8, 'num_stages': 2", wrapper.code)
    assert re.search(r"'num_warps': 4, 'num_stages': 3", wrapper.code)


def test_grids_reach_the_launches(wrapper):
    runs = [line for line in body(wrapper.code).splitlines() if "_kernel_" in line and ".run(" in line]
    assert len(runs) == 3 and all(", 32, 1, 1, stream=" in run for run in runs)
