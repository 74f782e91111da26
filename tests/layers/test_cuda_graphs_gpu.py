"""On a GPU: what `CudaGraphRunner` replays equals eager, what it cannot capture is named, and its memory comes back.

OMP_NUM_THREADS=1 python -m pytest -q -m gpu tests/layers/test_cuda_graphs_gpu.py
"""

import gc

import pytest
import torch

import inductor_passes
import moe_ops
from layers import CaptureError, CudaGraphRunner, MoEBlock, MoEConfig
from tests.project import doc_blocks

pytestmark = pytest.mark.gpu

E, K, H, I = 13, 3, 128, 64
SIZES = (1, 2, 4, 8, 33)
TOKENS = (7, 33, 1, 0, 5, 32, 2, 8, 3)


def _block():
    block = MoEBlock(MoEConfig(E, K, H, I)).to("cuda", torch.bfloat16)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return block.requires_grad_(False)


def _hidden(tokens):
    return torch.randn(tokens, H, device="cuda", dtype=torch.bfloat16)


def _assert_near(actual, expected):
    # Another number of rows may take other tiles: bfloat16 rounds sums of another order.
    torch.testing.assert_close(actual.float(), expected.float(), atol=2e-2, rtol=2e-2)


def _padded(step, hidden):
    """What `step` itself returns at the size that a call takes: other sizes may round logits, and route, otherwise."""
    tokens = hidden.shape[0]
    size = next(size for size in SIZES if size >= tokens)
    rows = torch.arange(size, device="cuda").clamp(max=max(tokens - 1, 0))
    return step(hidden[rows])[:tokens] if tokens else hidden


def _compiled(step):
    return torch.compile(step, fullgraph=True, options=inductor_passes.options())


@pytest.mark.parametrize("prepare", [lambda step: step, _compiled], ids=["eager", "compiled"])
@torch.no_grad()
def test_replays_equal_eager_over_sizes_and_contents(prepare):
    block = _block()
    with CudaGraphRunner(prepare(block), SIZES) as run:
        for tokens in TOKENS:
            hidden = _hidden(tokens)
            _assert_near(run(hidden), _padded(block, hidden))


@torch.no_grad()
def test_nested_arguments_and_ids_of_nobody():
    w13 = torch.randn(E, 2 * I, H, device="cuda", dtype=torch.bfloat16) * H**-0.5
    w2 = torch.randn(E, H, I, device="cuda", dtype=torch.bfloat16) * I**-0.5
    seen = torch.zeros(max(SIZES), K, device="cuda", dtype=torch.int32)

    def step(hidden, routing):
        seen[: hidden.shape[0]].copy_(routing["topk_ids"])
        out = moe_ops.fused_experts(hidden, w13, w2, routing["weights"], routing["topk_ids"])
        return {"out": out, "rest": (hidden + 1, routing["topk_ids"])}

    with CudaGraphRunner(step, SIZES) as run:
        for tokens in TOKENS:
            ids = torch.randint(E, (tokens, K), device="cuda", dtype=torch.int32)
            routing = {"weights": torch.rand(tokens, K, device="cuda"), "topk_ids": ids}
            hidden = _hidden(tokens)
            replayed = run(hidden, routing)
            size = next(size for size in SIZES if size >= tokens)
            assert tokens == 0 or (seen[tokens:size] == -1).all()
            expected = step(hidden, routing)
            _assert_near(replayed["out"], expected["out"])
            assert torch.equal(replayed["rest"][0], expected["rest"][0])
            assert torch.equal(replayed["rest"][1], ids)


@torch.no_grad()
def test_rows_do_not_see_the_padding():
    """A row of a size has the same bits whatever lies behind it: padding, or rows of others."""
    block, hidden = _block(), _hidden(8)
    with CudaGraphRunner(block, [8]) as run:
        whole = run(hidden)
        for tokens in (1, 3, 7, 8):
            run(hidden.flip(0) * 100)
            _assert_near(run(hidden[:tokens]), whole[:tokens])


@torch.no_grad()
def test_a_step_reads_what_it_holds_and_writes_what_it_keeps():
    scale = torch.ones(H, device="cuda")
    calls = torch.zeros((), device="cuda", dtype=torch.int64)

    def step(x):
        calls.add_(1)
        return x * scale

    with CudaGraphRunner(step, [2, 4]) as run:
        x = torch.randn(3, H, device="cuda")
        run.capture(x)
        calls.zero_()
        for factor in (1.0, 2.0, 5.0):
            scale.fill_(factor)
            assert torch.equal(run(x), x * factor)
        assert calls.item() == 3


@torch.no_grad()
def test_next_to_cuda_graphs_of_torch_compile():
    block, hidden = _block(), _hidden(4)
    trees = torch.compile(block, mode="reduce-overhead", fullgraph=True)
    expected = block(hidden)
    with CudaGraphRunner(block, [2, 4]) as run:
        for _ in range(4):  # warm-up, recording and replays of theirs
            _assert_near(trees(hidden).clone(), expected)
            _assert_near(run(hidden), expected)
            _assert_near(run(hidden[:1]), expected[:1])


@pytest.mark.parametrize(
    ("step", "cause", "line"),
    [
        (lambda x: x * x.sum().item(), "waits for the device", ".item()"),
        (lambda x: x if x.sum() > 0 else -x, "waits for the device", "x.sum() > 0"),
        (lambda x: x + x[x > 0].sum(), "waits for the device", "x[x > 0]"),
        (lambda x: x + torch.ones(H).to(x.device), "waits for the device", "torch.ones(H)"),
        (lambda x: (torch.cuda.synchronize(), x * 2)[1], "waits for the device", "synchronize()"),
    ],
    ids=["item", "condition", "mask", "host tensor", "synchronize"],
)
@torch.no_grad()
def test_what_cannot_be_captured_is_named(step, cause, line):
    run = CudaGraphRunner(step, [2, 4])
    with pytest.raises(CaptureError, match=cause) as raised:
        run.capture(torch.randn(3, H, device="cuda"))
    assert raised.value.size == 4 and line in raised.value.where
    assert run.memory.total == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.get_sync_debug_mode() == 0
    x = torch.randn(3, H, device="cuda")
    assert torch.equal(CudaGraphRunner(lambda x: x * 2, [4])(x), x * 2)  # the device goes on


@torch.no_grad()
def test_outputs_on_the_host_are_refused():
    host = torch.ones(4, H)
    with pytest.raises(CaptureError, match=r"output\[1\] is on cpu"):
        CudaGraphRunner(lambda x: (x, host), [4]).capture(torch.randn(3, H, device="cuda"))


@torch.no_grad()
def test_smaller_sizes_fit_into_the_memory_of_the_largest():
    def step(x):
        for _ in range(3):
            x = torch.cat([x, x], 1)  # 8 times as wide in the end
        return x[:, :1].clone()

    x = torch.randn(512, 1 << 13, device="cuda")
    with CudaGraphRunner(step, [64, 128, 256, 512]) as run:
        run.capture(x)
        graphs = run.memory.graphs
        assert list(graphs) == [512, 256, 128, 64]
        assert graphs[512] >= 8 * x.nbytes
        assert sum(graphs[size] for size in (64, 128, 256)) <= 3 * (2 << 20)
        assert run.memory.buffers == x.nbytes


@torch.no_grad()
def test_memory_comes_back():
    block, hidden = _block(), _hidden(33)

    def held():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    seen = []
    for _ in range(4):
        with CudaGraphRunner(block, SIZES) as run:
            run(hidden)
            assert run.memory.total > 0 and torch.cuda.memory_reserved() >= sum(run.memory.graphs.values())
        seen.append(held())
    assert len(set(seen)) == 1, seen  # the first leaves workspaces of the capturing stream, no more


def test_the_page_about_serving_runs():
    doc_blocks.run(doc_blocks.ROOT / "docs/serving.md")
