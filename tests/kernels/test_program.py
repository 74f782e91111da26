"""Programs: one plan per metadata, whatever kind of tensor it came from, and an import that touches no GPU."""

import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
import triton
from torch._subclasses import FakeTensorMode

from moe_ops import arguments, records
from moe_ops.kernels import gemm_config, permute, plans
from moe_ops.kernels.gemm_tables import BY_TMA_IN_ORDER
from moe_ops.kernels.gpu import H200, Gpu
from moe_ops.kernels.program import Buffer, Descriptor, Launch, Program, Ref
from moe_ops.types import Activation
from tests.kernels.by_name import launch, program_of
from tests.kernels.catalogue import meta, product

B200 = Gpu(100, 148, H200.shared_memory)


def _experts_program(make, tokens: int = 16, hidden: int = 64) -> Program:
    args = make(tokens, hidden), make(4, 128, hidden), make(4, hidden, 64)
    routes = make(tokens, 2), make(tokens, 2).to(torch.int32)
    return program_of("fused_experts", *args, *routes, activation=Activation())


def test_real_fake_and_meta_tensors_share_one_plan() -> None:
    def real(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    program = _experts_program(real)
    assert _experts_program(lambda *shape: real(*shape).to("meta")) is program
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _experts_program(real) is program
    assert _experts_program(real, tokens=32) is not program


def test_a_plan_is_for_one_gpu() -> None:
    given = meta(64, 64), meta(4, 64, 64), meta(5, dtype=torch.int32), None
    kernels = [
        program_of("grouped_gemm", *given, gpu=gpu).launches[-1].kernel.__name__
        for gpu in (H200, Gpu(80, 108, H200.shared_memory))
    ]
    assert kernels == ["grouped_gemm_mixed_kernel", "grouped_gemm_generic_kernel"]


def test_a_program_names_the_arguments_of_its_operator() -> None:
    program = _experts_program(lambda *shape: torch.zeros(shape, dtype=torch.bfloat16))
    arguments = [a for launch in program.launches for a in launch.args.values()]
    names = {a.name if isinstance(a, Ref) else a.source for a in arguments if isinstance(a, Ref | Descriptor)}
    buffers = {buffer.name for buffer in program.buffers}
    assert names - buffers == {"hidden_states", "w13", "w2", "topk_weights", "topk_ids"}
    assert program.outputs == ("combined",)


def test_a_launch_needs_every_kernel_parameter() -> None:
    with pytest.raises(ValueError, match=r"missing .*num_slots.* unknown .*nonsense"):
        Launch(
            permute._invert_kernel,
            (1,),
            {"slots_ptr": Ref("a"), "rows_ptr": Ref("b"), "BLOCK": 8, "nonsense": 1},
        )


def test_rows_per_tile_grow_with_the_rows_of_an_expert() -> None:
    """Where tiles have one height, as on GPUs of which nothing was measured."""
    products = [product(meta(128, 1536, 2048), slots, gpu=B200) for slots in (8, 128, 2048, 8192, 1 << 17)]
    configs = [gemm_config.pick_config(gemm) for gemm in products]
    assert [config.block_m for config in configs] == [16, 16, 32, 64, 128]
    assert {*configs} <= {*gemm_config.candidates(products[0])}


def test_steps_that_divide_the_depth() -> None:
    """128 divides 2944 and 64 divides 2880; what neither divides takes the shorter steps too."""
    for depth, block_k in ((2944, 128), (2880, 64), (2888, 64)):
        products = [product(meta(128, 1536, depth), slots, gpu=B200) for slots in (8, 2048, 8192)]
        configs = [gemm_config.pick_config(gemm) for gemm in products]
        assert [(config.block_m, config.block_k) for config in configs] == [
            (16, block_k),
            (32, block_k),
            (64, 64),
        ]
        for config in configs[:2]:  # enough bytes in flight, in no more memory than there is
            held = config.num_stages * (config.block_m + config.block_n) * config.block_k * 2
            assert 65536 <= held <= H200.shared_memory


def test_tiles_of_some_hundred_rows_in_order_are_halved() -> None:
    """Not of gathered rows, nor where a gate doubles the tile. Those of a wide layer can be, but are not."""
    weight, up = meta(8, 1024, 2048), meta(8, 2048, 2048)
    for rows, halved in ((80, False), (81, True), (320, True), (321, False)):
        gemm = product(weight, 8 * rows)
        assert (gemm_config.pick_config(gemm) == BY_TMA_IN_ORDER) == halved
        assert (gemm_config.loads_rows_by_tma(gemm, gemm_config.pick_config(gemm))) == (rows > 80)
    for rows, halved in ((80, False), (81, True), (192, True), (193, False), (2048, False)):
        before_a_tail = replace(product(weight, 8 * rows), tail=True)
        config = gemm_config.pick_config(before_a_tail)
        assert (config == BY_TMA_IN_ORDER) == gemm_config.loads_rows_by_tma(before_a_tail, config) == halved
    for rows, halved in ((192, True), (193, False)):  # of an eighth of a layer's experts
        part = replace(product(weight, 64 * rows), num_ids=64)
        assert (gemm_config.pick_config(part) == BY_TMA_IN_ORDER) == halved
    copied = product(meta(8, 5120, 2048), 8 * 512)  # first, if an expert has so many rows
    assert [gemm_config.sorts_rows_first(replace(copied, num_ids=ids)) for ids in (8, 9)] == [True, False]
    rows, wide = 8 * 256, product(meta(8, 2048, 2048), 8 * 256)
    assert gemm_config.pick_config(wide).block_m == 128 and BY_TMA_IN_ORDER in gemm_config.candidates(wide)
    gated, other = product(up, rows, Activation()), product(weight, rows, gpu=replace(H200, capability=100))
    gathered = replace(product(weight, rows), top_k=2)
    for gemm in (gated, other, gathered, product(weight.mT.contiguous().mT, rows)):
        assert BY_TMA_IN_ORDER not in (gemm_config.pick_config(gemm), *gemm_config.candidates(gemm))


def test_two_products_share_a_tile_map() -> None:
    program = _experts_program(lambda *shape: torch.zeros(shape, dtype=torch.bfloat16), tokens=1000)
    names = [launch.kernel.fn.__name__ for launch in program.launches]
    assert names.count("_tile_map_kernel") == 1 and names.count("grouped_gemm_tma_kernel") == 2


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the same when interpreted")
def test_importing_the_kernels_starts_no_gpu() -> None:
    code = "import torch, moe_ops.kernels.fused; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_wide_addresses_are_64_bit() -> None:
    """S*H past 2**31: the plan is made, and strides of that size reach the kernels as they are."""
    x = torch.empty(1 << 20, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(8, 14336, 4096, dtype=torch.bfloat16, device="meta")
    program = program_of("grouped_gemm", x, weight, torch.empty(9, dtype=torch.int32, device="meta"), None)
    descriptor = program.launches[-1].args["weight_desc"]
    assert isinstance(descriptor, Descriptor) and descriptor.strides == (14336 * 4096, 4096, 1)


@pytest.mark.gpu
def test_gpu_addresses_past_two_to_the_31(device: str) -> None:
    if device == "cpu":
        pytest.skip("needs 14 GB and a GPU")
    rows, columns = (1 << 31) // 1024 + 4096, 1024
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=device)
    x[-1] = 1.0
    weight = torch.full((1, 64, columns), 0.5, dtype=torch.bfloat16, device=device)
    offsets = torch.tensor([0, rows], dtype=torch.int32, device=device)
    out = launch("grouped_gemm", x, weight, offsets, None)
    assert (out[-1] == columns / 2).all() and (out[:-1] == 0).all()
    slots = torch.arange(rows, dtype=torch.int32, device=device).flip(0)
    assert torch.equal(launch("permute", x, slots)[0], x[-1])


def test_what_was_never_launched_is_for_the_checks_even_a_scalar() -> None:
    for record in (arguments.Permute, arguments.TopkRouting, arguments.FusedExperts):
        leaves = records.leaves(record)
        given = tuple(torch.tensor(1.0) if leaf.is_tensor else None for leaf in leaves)
        assert plans.launch_known(record, given) is None


def test_strided_index_vectors_are_refused_by_plans_and_copied_by_launches(device: str) -> None:
    hidden, slots = (
        torch.randn(4, 8).to(device),
        torch.tensor([2, 9, 0, 9, 3, 9, 1, 9], dtype=torch.int32).to(device)[::2],
    )
    with pytest.raises(ValueError, match="sorted_slots has stride 2"):
        program_of("permute", hidden, slots)
    assert torch.equal(launch("permute", hidden, slots), hidden[slots.long()])


def test_a_program_is_split_before_the_first_reader(device: str) -> None:
    """Both parts launched one after the other are the whole, and the first can do without the tensor."""

    def shift(source: object, out: str) -> Launch:
        args = {
            "hidden_ptr": source,
            "slots_ptr": Ref("slots"),
            "offsets_ptr": None,
            "out_ptr": Ref(out),
            "top_k": 1,
            "num_tokens": 4,
            "num_experts": 0,
            "num_columns": 4,
            "stride_t": 4,
            "stride_h": 1,
            "BLOCK": 4,
        }
        return Launch(permute._permute_kernel, (4,), args)

    launches = shift(Ref("early"), "a"), shift(Ref("late"), "b"), shift(Ref("a"), "c")
    program = Program(tuple(Buffer(name, (4, 4), torch.float32) for name in "abc"), launches, ("b", "c"))
    assert [program.filled.first_reader(name) for name in ("late", "a", "nowhere")] == [1, 0, 3]
    boxed = shift(Ref("a"), "c"), shift(Descriptor("late", (4, 4), (4, 1), (4, 4)), "b")
    assert Program((), boxed, ()).filled.first_reader("late") == 1
    early, late = torch.arange(16.0, device=device).view(4, 4), torch.zeros(4, 4, device=device)
    slots = torch.tensor(
        [1, 0, 3, 2], dtype=torch.int32, device=device
    )  # a caller's tensors live as long as the run
    for _ in range(3):  # by name, and on a GPU then by address
        bound = program.filled.bind({"early": early, "slots": slots, "late": late}, early.device)
        bound.results[0].fill_(7)
        bound.launch(0, 1)
        assert (bound.results[0] == 7).all()
        late.copy_(early[[1, 0, 3, 2]] * 2)
        bound.launch(1)
        assert torch.equal(bound.results[0], 2 * early) and torch.equal(bound.results[1], early)
        late.zero_()
