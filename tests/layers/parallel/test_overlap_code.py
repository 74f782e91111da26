"""The order of generated code: an exchange starts, what does not need it runs, and only then it is waited for."""

import itertools
import re
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import inductor_passes
from inductor_passes import _compat, pipeline
from inductor_passes.overlap import overlap_exchanges
from layers import MoEBlock, MoEConfig, SharedExpertConfig
from layers.parallel import ExpertParallel, ExpertTensorParallel, Group
from layers.parallel.collectives import (
    start_all_gathers,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from moe_ops import RoutingConfig, fused_moe, topk_routing
from tests.compile.fake_cuda import body, compile_for_h200
from tests.helpers import usually

W, RANK, T, H, I, E, K = 4, 1, 9, 64, 32, 8, 3
CONFIG = MoEConfig(E, K, H, intermediate_size=I, shared_experts=SharedExpertConfig(intermediate_size=48))
STYLES = {
    "allgather": lambda: ExpertParallel("allgather", max_tokens=16),
    "alltoall": lambda: ExpertParallel("alltoall", max_tokens=16),
    "variable": lambda: ExpertParallel("alltoall"),
    "allreduce": ExpertTensorParallel,
}


@pytest.fixture
def ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=W)
    yield
    dist.destroy_process_group()


class Generated(Exception):
    """Code, in the place of what it would compile to."""


def code_of(module, *inputs, **options):
    """What Inductor writes for one call of `module`; nothing of it is compiled."""

    def stop(code):
        raise Generated(code)

    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, options=inductor_passes.options(), **options)
    with fresh_cache(), mock.patch.object(GraphLowering, "save_output_code", stop):
        try:
            compiled(*inputs)
        except Exception as error:
            return str(_cause(error))
    raise AssertionError("no code was generated")


def _cause(error):
    while not isinstance(error, Generated):
        error = error.__cause__ or error.__context__
    return error


# A line of generated code that starts an exchange, waits for one, or is a product: of a shared expert, or of experts.
EVENTS = {
    "start": r"_c10d_functional\.(?!wait)\w+\.default\(",
    "wait": r"_c10d_functional\.wait_tensor\.default\(",
    "shared": r"extern_kernels\.(?:add)?mm\(",
    "experts": r"torch\.ops\.moe\.(?:grouped_gemm|fused_experts)\.\w+\(|_gemm\w*\.run\(",
}


def events(code):
    """The order of `EVENTS` in the generated function, or in one that it calls."""
    text = body(code) if "def call(" in code else code
    lines = [line for line in text.splitlines() if not re.match(r"\s*(#|assert_)", line)]
    found = [[name for name, pattern in EVENTS.items() if re.search(pattern, line)] for line in lines]
    return [name for names in found for name in names]


@torch.no_grad()
@pytest.mark.parametrize(
    ("style", "is_dynamic"),
    usually(itertools.product(STYLES, (False, True)), (("allgather", False),)),
)
def test_shared_experts_run_during_the_way_back(ranks, style, is_dynamic):
    mesh = init_device_mesh("cpu", (W,), mesh_dim_names=("ep",))
    block = parallelize_module(MoEBlock(CONFIG), mesh["ep"], {"experts": STYLES[style]()})
    code = code_of(block, torch.randn(T, H), dynamic=is_dynamic)
    assert events(code)[-4:] == ["start", "shared", "shared", "wait"]
    assert events(code).count("shared") == 3  # with the router
    assert_nothing_is_freed_on_its_way(code)


@torch.no_grad()
@pytest.mark.parametrize("is_dynamic", usually((False, True), (False,)), ids=["static", "symbolic"])
def test_one_batch_is_on_its_way_while_experts_run_the_other(ranks, is_dynamic):
    mesh = init_device_mesh("cpu", (W,), mesh_dim_names=("ep",))
    style = ExpertParallel("allgather", max_tokens=256, batches=2)
    block = parallelize_module(MoEBlock(CONFIG), mesh["ep"], {"experts": style})
    code = code_of(block, torch.randn(200, H), dynamic=is_dynamic)
    assert events(code) == [
        *("shared", "start", "start"),  # the router; tokens, weights and ids of both
        *(*["wait"] * 3, "experts", "experts", "start"),
        *(*["wait"] * 3, "experts", "experts", "start"),
        *("shared", "shared", "wait", "wait"),
    ]
    second = parts_of(code, re.findall(r"(\w+) = torch\.ops\._c10d_functional\.all_gather", code)[1])
    assert len(second) == 3
    for each in second:
        assert code.index(f"wait_tensor.default({each})") > code.index(".grouped_gemm.")
    assert_nothing_is_freed_on_its_way(code)


@torch.no_grad()
def test_layers_that_are_one_function_overlap_in_it(ranks):
    mesh = init_device_mesh("cpu", (W,), mesh_dim_names=("ep",))
    blocks = torch.nn.Sequential(*(MoEBlock(CONFIG) for _ in range(5)))
    parallelize_module(blocks, mesh["ep"], {"*.experts": STYLES["allgather"]()})
    code = code_of(blocks, torch.randn(T, H))
    function = code[code.index("def repeated_layer(") : code.index("def call(")]
    assert events(function)[-4:] == ["start", "shared", "shared", "wait"]


def test_training_keeps_the_order_of_the_layer(ranks):
    mesh = init_device_mesh("cpu", (W,), mesh_dim_names=("ep",))
    block = parallelize_module(MoEBlock(CONFIG), mesh["ep"], {"experts": STYLES["allgather"]()})
    code = code_of(block, torch.randn(T, H))
    assert events(code)[:7] == ["shared", "start", "shared", "shared", *["wait"] * 3]
    assert_nothing_is_freed_on_its_way(code)


def assert_nothing_is_freed_on_its_way(code):
    """What is being sent stays as it is until the wait."""
    text = body(code)
    starts = re.findall(r"(\w+) = torch\.ops\._c10d_functional\.\w+\.default\((.*)", text)
    assert starts or "all_reduce_" in text  # which is in place
    for received, given in starts:
        sent = re.findall(r"buf\d+", given)
        for part, each in zip(parts_of(text, received), sent, strict=True):
            behind = text[text.index(f"{received} = torch.ops._c10d") :]
            on_the_way, _, later = behind.partition(f"wait_tensor.default({part})")
            assert f"del {each}\n" not in on_the_way and f"= {each};" not in on_the_way
            assert later


def parts_of(code, received):
    """What is waited for: the one tensor that a start returns, or those of its list."""
    return re.findall(rf"(\w+) = {received}\[\d+\]", code) or [received]


# Exchanges as plain calls: fake CUDA tensors cannot be indexed without a GPU.
GROUP = Group("0", W, RANK)
TOKENS = 64
SPLITS = [TOKENS] * W
EXCHANGES = {
    "allgather": (lambda *given: start_all_gathers(given, GROUP), lambda x: start_reduce_scatter(x, GROUP)),
    "alltoall": (
        lambda *given: [start_all_to_all(x.repeat(W, 1), SPLITS, SPLITS, GROUP) for x in given],
        lambda x: start_all_to_all(x, SPLITS, SPLITS, GROUP),
    ),
    "allreduce": (
        lambda *given: [partial(torch.clone, x) for x in given],
        lambda x: start_all_reduce(x, GROUP),
    ),
}


def given(tokens):
    shapes = (tokens, H), (tokens, E), (E, 2 * I, H), (E, H, I), (48, H), (H, 48)
    return [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def run_experts(tokens, logits, w13, w2):
    # make_fx is not a compiler to `is_compiling`, so the stages are asked for.
    return fused_moe(tokens, logits, w13, w2, RoutingConfig(K), emit="stages")


@pytest.mark.parametrize(
    "name, is_symbolic",
    usually(
        [
            ("allgather", False),
            ("allgather", True),
            ("alltoall", False),
            ("allreduce", False),
            ("allreduce", True),
        ],
        [("allgather", False), ("alltoall", False), ("allreduce", True)],
    ),
)
def test_on_a_gpu(ranks, name, is_symbolic):
    send, bring_back = EXCHANGES[name]

    def layer(x, logits, w13, w2, up, down):
        tokens, routed = send(x, logits)
        sums = bring_back(run_experts(tokens(), routed(), w13, w2))()
        return sums.narrow(0, 0, x.shape[0]) + torch.relu(x @ up.t()) @ down.t()

    code = compile_for_h200(layer, given, tokens=TOKENS, symbolic=is_symbolic).code
    assert events(code)[-4:] == ["start", "shared", "shared", "wait"]
    assert_nothing_is_freed_on_its_way(code)


def test_batches_on_a_gpu(ranks, monkeypatch):
    """Triton launches are held as products are: by the memory that they write."""
    send, bring_back = EXCHANGES["allgather"]

    def layer(x, logits, w13, w2, up, down):
        half = TOKENS // 2
        sent = [send(*(each.narrow(0, at, half) for each in (x, logits))) for at in (0, half)]
        back = [bring_back(run_experts(tokens(), routed(), w13, w2)) for tokens, routed in sent]
        return torch.cat([each() for each in back])

    held, order_behind = set(), _compat.order_behind

    def order_and_tell(graph, behind):
        held.update(node.target for node in behind)
        order_behind(graph, behind)

    monkeypatch.setattr(_compat, "order_behind", order_and_tell)
    compiled = compile_for_h200(layer, given, tokens=TOKENS)
    assert held == {torch.ops.aten.empty.memory_format, torch.ops._c10d_functional.wait_tensor.default}
    code = compiled.code
    order = [name for name in events(code) if name != "shared"]
    products = order.count("experts") // 2
    assert products > 1 and order == [
        *("start", "start"),
        *("wait", "wait", *["experts"] * products, "start"),
        *("wait", "wait", *["experts"] * products, "start"),
        *("wait", "wait"),
    ]
    assert_nothing_is_freed_on_its_way(code)
    monkeypatch.setattr(pipeline, "overlap_exchanges", lambda graph: 0)
    as_they_come = compile_for_h200(layer, given, tokens=TOKENS).launches
    assert sorted(compiled.launches) == sorted(as_they_come)  # nothing is copied


@pytest.mark.parametrize("is_symbolic", [False, True], ids=["static", "symbolic"])
def test_operators_of_several_outputs_are_held(ranks, is_symbolic):
    def function(x, logits, *_):
        (sent,) = EXCHANGES["allgather"][0](x)
        weights, ids = topk_routing(logits, RoutingConfig(K))
        return sent().cos(), weights.cos(), ids + 1

    code = compile_for_h200(
        function, given, tokens=TOKENS, symbolic=is_symbolic, graph_pass=overlap_exchanges
    ).code
    started, routed, arrived = (
        code.index(f"torch.ops.{name}.default(")
        for name in (
            "_c10d_functional.all_gather_into_tensor_coalesced",
            "moe.topk_routing",
            "_c10d_functional.wait_tensor",
        )
    )
    assert started < routed < arrived
