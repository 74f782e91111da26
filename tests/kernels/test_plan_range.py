"""Whatever a plan can ask of a GPU fits it: compiled ahead of time for every GPU that docs/PERFORMANCE.md names."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import triton

from moe_ops.kernels.common import compute_dtype, next_power_of_2
from moe_ops.kernels.decode_blocks import GemvConfig, column_config, down_config, up_config
from moe_ops.kernels.gpu import H200, KIB, Gpu
from moe_ops.kernels.program import TensorMeta, describe
from moe_ops.types import Activation
from tests.kernels import aot, plan_range, quantised_range
from tests.kernels.catalogue import meta
from tests.kernels.plan_range import GPUS, Range

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
# A few registers that ptxas parks outside of loops and around calls; which kernels differs from version to version.
PARKED = 32
FAMILIES = {**plan_range.FAMILIES, "quantised": quantised_range.quantised}

# What all is measured on, and the products where there is the least shared memory; `make exhaustive` compiles the rest.
of_every_plan = pytest.mark.parametrize(
    ("gpu", "family"),
    [
        pytest.param(
            GPUS[name],
            family,
            id=f"{name}-{family}",
            marks=[]
            if name == "sm_90" or (name, family) == ("sm_120", "products")
            else pytest.mark.exhaustive,
        )
        for name, family in itertools.product(GPUS, FAMILIES)
    ],
)
on_every_gpu = pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
of_every_family = pytest.mark.parametrize("family", FAMILIES)


def _misfits(family: str, gpu: Gpu, size: Range) -> list[tuple[str, str]]:
    compiled = [
        (planned.name, aot.compile_launch(planned.launch, planned.dtypes, gpu))
        for planned in FAMILIES[family](gpu, size)
    ]
    assert len(compiled) >= 4
    return [(name, misfit) for name, kernel in compiled if (misfit := kernel.misfit(gpu, PARKED))]


@of_every_plan
def test_plans_fit(gpu: Gpu, family: str) -> None:
    assert not _misfits(family, gpu, Range.NARROW)


@pytest.mark.exhaustive
@of_every_family
@on_every_gpu
def test_all_plans_fit(gpu: Gpu, family: str) -> None:
    assert not _misfits(family, gpu, Range.WIDE)


@on_every_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_every_decode_step_fits_shared_memory_and_registers(dtype: torch.dtype, gpu: Gpu) -> None:
    """All numbers of routes and all depths, by arithmetic: what a loop keeps in flight, and what it adds up."""
    for depth, top_k in itertools.product((1, 33, 100, 1000, 2048, 5000, 14336, 30000), range(1, 129)):
        weight = describe(meta(4, 64, depth, dtype=dtype))
        down = down_config(weight, top_k, gpu)
        for rows, config in ((next_power_of_2(top_k) * down.block_n, down), *_up_blocks(weight, gpu)):
            elements = rows * config.block_k
            if config.block_k >= depth or config.stages == 1:  # in one shot, in registers
                assert elements * dtype.itemsize <= 64 * KIB
                continue
            # Weights and rows, a buffer less than there are stages; 64 registers a thread add up.
            assert 2 * (config.stages - 1) * elements * dtype.itemsize <= gpu.shared_memory
            assert elements * compute_dtype(dtype).itemsize <= 32 * KIB


def _up_blocks(weight: TensorMeta, gpu: Gpu) -> Iterator[tuple[int, GemvConfig]]:
    """Weight rows of a program, and its blocks, for each kind of activation."""
    for halves, name in ((1, "relu2"), (2, "silu")):
        config = up_config(weight, Activation(name), gpu)
        yield halves * config.block_n, config


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_step_of_columns_is_256_bytes_a_thread(dtype: torch.dtype) -> None:
    """Or a quarter where each element needs an address, and less where the depth is."""
    for gpu, together in ((H200, 64), (replace(H200, memory_speed=3.35e12), 128)):
        for columns, depth, share in ((64, 4096, 1), (37, 4096, 4), (64, 8, 1)):
            weight = describe(meta(4, depth, columns, dtype=dtype).transpose(1, 2))
            config = column_config(weight, gpu)
            step = 8192 // together // share // dtype.itemsize
            assert (config.block_n, config.block_k, config.num_warps) == (together, min(step, depth), 1)


def test_a_misfit_is_named() -> None:
    small = aot.Compiled("kernel", 4, 255, 0, 1024, "", "")
    gpu = GPUS["sm_89"]
    assert small.misfit(gpu) is None
    large = aot.Compiled("kernel", 4, 255, 40, gpu.shared_memory + 1, "", "")
    assert large.misfit(gpu, 40) == "kernel: 255 registers, 40 bytes of stack, 101377 of shared memory"
    assert aot.Compiled("kernel", 4, 255, 40, 0, "", "").misfit(gpu, 32)
    assert aot.Compiled("kernel", 16, 129, 0, 0, "", "").misfit(gpu)
