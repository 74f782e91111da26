"""`CudaGraphRunner` without a GPU: buckets, padding, nested arguments, refusals. Steps are recorded by `OnCpu`."""

import pytest
import torch

import inductor_passes
from layers import CaptureError, CudaGraphRunner, FusedMoE, MoEConfig, RouterOutput
from layers.graph_capture import Captured, causes_named

E, K, H = 13, 2, 8


class OnCpu:
    """As a graph does: outputs lie where the capture put them, and a replay reads and writes memory alone."""

    device_type = "cpu"

    def __init__(self):
        self.captured, self.replays, self.is_released = [], 0, False

    def capture(self, step, device):
        outputs = step()
        leaves = torch.utils._pytree.tree_leaves(outputs)
        self.captured.append(step)

        def replay():
            self.replays += 1
            for held, new in zip(leaves, torch.utils._pytree.tree_leaves(step())):
                if isinstance(held, torch.Tensor):
                    with torch.inference_mode():  # a graph writes whatever a tensor's mode is
                        held.copy_(new)

        return Captured(outputs, replay, 100 * len(self.captured))

    def release(self):
        self.is_released = True


class Recording:
    """A step that keeps what it was given."""

    def __init__(self, step):
        self.step, self.given = step, []

    def __call__(self, *args, **kwargs):
        self.given.append([leaf.clone() for leaf in torch.utils._pytree.tree_leaves((args, kwargs))])
        return self.step(*args, **kwargs)


def _runner(step, sizes=(1, 4, 8), **options):
    return CudaGraphRunner(step, sizes, graphs=OnCpu(), **options)


def _double(x):
    return x * 2


@torch.no_grad()
def test_values_over_sizes_and_contents():
    layer = FusedMoE(MoEConfig(E, K, H, 8))
    step = Recording(layer)
    run = _runner(step)
    run.capture(torch.randn(2, H), torch.randn(2, E))
    assert [given[0].shape[0] for given in step.given] == [8, 4, 1]  # the largest first
    for tokens in (3, 1, 8, 4, 7, 0, 5, 3):
        hidden, logits = torch.randn(tokens, H), torch.randn(tokens, E)
        torch.testing.assert_close(run(hidden, logits), layer(hidden, logits))
    assert len(run._graphs.captured) == 3
    assert run._graphs.replays == 7  # none for no rows


@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (2, 4), (4, 4), (5, 8), (8, 8)])
def test_the_next_size_is_replayed(tokens, size):
    step = Recording(_double)
    run = _runner(step)
    run.capture(torch.randn(3, H))
    run(torch.randn(tokens, H))
    assert step.given[-1][0].shape[0] == size


def test_padding_is_the_last_row_and_ids_of_nobody():
    def step(routed, positions, *, topk_ids):
        return routed.topk_weights + routed.topk_ids + positions[:, None] + topk_ids

    step = Recording(step)
    run = _runner(step)
    for _ in range(2):  # at the capture, and with what a capture of 8 rows left behind
        ids = torch.randint(E, (3, K), dtype=torch.int32)
        routed = RouterOutput(torch.randn(3, E), torch.rand(3, K), ids)
        positions = torch.arange(3)
        run(routed, positions, topk_ids=ids.long() + 1)
        logits, weights, padded_ids, padded_positions, by_keyword = step.given[-1]
        for padded, tensor in ((logits, routed[0]), (weights, routed[1]), (padded_positions, positions)):
            assert torch.equal(padded, torch.cat([tensor, tensor[-1:]]))
        assert torch.equal(padded_ids, torch.cat([ids, ids.new_full((1, K), -1)]))
        assert torch.equal(by_keyword, torch.cat([ids.long() + 1, torch.full((1, K), -1)]))


def test_padding_at_the_capture():
    step = Recording(lambda x, topk_ids: x)
    run = _runner(step)
    x = torch.randn(3, H)
    run.capture(x, topk_ids=torch.zeros(3, K, dtype=torch.int32))
    first = step.given[0]
    assert torch.equal(first[0], torch.cat([x, x[-1:].expand(5, H)]))
    assert first[1][:, 0].tolist() == [0, 0, 0, -1, -1, -1, -1, -1]


def test_weights_of_that_name_are_no_ids():
    step = Recording(lambda topk_ids: topk_ids)
    _runner(step)(topk_ids=torch.full((3, 1), 7.0))
    assert step.given[-1][0].tolist() == [[7.0]] * 4


def test_nested_arguments_and_outputs():
    def step(pair, scale, mask=None):
        return {"sum": pair["x"] + pair["y"], "rest": (pair["x"][:, 0] * scale, None, scale), "mask": mask}

    run = _runner(step)
    for tokens in (3, 8):
        pair = {"x": torch.randn(tokens, H), "y": torch.randn(tokens, H)}
        mask = torch.rand(tokens) > 0.5
        out = run(pair, 3, mask=mask)
        expected = step(pair, 3, mask=mask)
        assert out.keys() == expected.keys() and out["rest"][1:] == (None, 3)
        assert torch.equal(out["sum"], expected["sum"]) and torch.equal(out["mask"], mask)
        assert torch.equal(out["rest"][0], expected["rest"][0])


def test_outputs_are_the_callers():
    run = _runner(_double)
    x = torch.randn(4, H)
    first = run(x)
    second = run(first)  # an output as the next input
    first_again = x * 2
    assert torch.equal(first, first_again) and torch.equal(second, x * 4)
    run.close()
    assert torch.equal(first, first_again)


def test_captured_in_inference_mode_and_called_outside_of_it():
    run = _runner(_double)
    x = torch.randn(3, H)
    with torch.inference_mode():
        run.capture(x)
    assert torch.equal(run(x), x * 2)


@torch.no_grad()
def test_a_compiled_step():
    layer = FusedMoE(MoEConfig(E, K, H, 8))
    run = _runner(torch.compile(layer, fullgraph=True, backend="aot_eager"), sizes=[2, 4])
    for tokens in (3, 1):
        hidden, logits = torch.randn(tokens, H), torch.randn(tokens, E)
        torch.testing.assert_close(run(hidden, logits), layer(hidden, logits))


def test_memory_by_size_until_it_is_closed():
    with _runner(_double) as run:
        assert run.memory.total == 0
        run.capture(torch.randn(2, H))
        assert run.memory.graphs == {8: 100, 4: 200, 1: 300}
        assert run.memory.buffers == 8 * H * 4
        assert run.memory.total == 600 + 8 * H * 4
        with pytest.raises(RuntimeError, match="captured already"):
            run.capture(torch.randn(2, H))
    assert run.memory.total == 0 and run._graphs.is_released
    with pytest.raises(RuntimeError, match="closed"):
        run(torch.randn(2, H))


def test_nothing_is_held_after_a_refusal():
    run = _runner(lambda x: x if x.shape[0] > 1 else x.sum())
    with pytest.raises(CaptureError, match="capture_sizes=1"):
        run.capture(torch.randn(2, H))
    assert run.memory.total == 0 and run._graphs.is_released


X = torch.ones(3, H)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda run: run(torch.ones(9, H), scale=2), ValueError, r"args\[0\] has 9 rows: expected at most 8"),
        (
            lambda run: run(X.double(), scale=2),
            ValueError,
            r"args\[0\] is torch.float64 .*expected torch.float32",
        ),
        (lambda run: run(torch.ones(3, H + 1), scale=2), ValueError, r"\[T, 9\] .*expected .*\[T, 8\]"),
        (lambda run: run(X.to("meta"), scale=2), ValueError, "on meta: expected .* on cpu"),
        (lambda run: run(X.clone().requires_grad_(), scale=2), ValueError, "requires a gradient"),
        (lambda run: run(X, scale=3), ValueError, r"kwargs\['scale'\] is 3: expected 2"),
        (lambda run: run(X, scale=X), ValueError, r"kwargs\['scale'\] is <Tensor>: expected 2"),
        (lambda run: run(2, scale=2), ValueError, r"args\[0\] is 2: expected <Tensor>"),
        (lambda run: run(X), TypeError, "arguments are"),
    ],
    ids=["rows", "dtype", "shape", "device", "gradient", "constant", "tensor", "no tensor", "structure"],
)
def test_calls_that_were_not_captured(call, error, text):
    run = _runner(lambda x, scale=2: x * scale)
    run(X, scale=2)
    with pytest.raises(error, match=text):
        call(run)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.tensor(1.0),), ValueError, r"args\[0\] has shape \[\]"),
        ((torch.ones(0, H),), ValueError, "has 0 rows"),
        ((torch.ones(3, H), torch.ones(2)), ValueError, r"args\[1\] has 2 rows: expected 3"),
        ((3,), TypeError, "no tensor"),
        ((torch.ones(3, device="meta"),), ValueError, "on meta: expected cpu"),
    ],
    ids=["no rows", "zero rows", "other rows", "no tensor", "device"],
)
def test_examples_without_rows(arguments, error, text):
    with pytest.raises(error, match=text):
        _runner(lambda *given: given).capture(*arguments)


@pytest.mark.parametrize(
    ("sizes", "error"), [([], ValueError), ([0], ValueError), ([2, True], TypeError), (8, TypeError)]
)
def test_sizes_that_are_none(sizes, error):
    with pytest.raises(error, match="capture_sizes"):
        CudaGraphRunner(_double, sizes)


def test_tensors_of_the_host_are_refused():
    with pytest.raises(ValueError, match=r"args\[0\] is on cpu: expected cuda"):
        CudaGraphRunner(_double, [1])(torch.ones(1, H))


def test_a_step_that_writes_into_its_argument():
    with pytest.raises(CaptureError, match=r"writes into its argument args\[1\]"):
        _runner(lambda x, y: y.add_(x))(torch.ones(3, H), torch.ones(3, H))


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda x: (x, x.sum(0)), r"output\[1\] has shape \[8\]: expected \[16, ...\]"),
        (lambda x: x.mean(), r"output has shape \[\]"),
        (lambda x: x.to("meta"), "output is on meta"),
    ],
    ids=["sum over rows", "scalar", "other device"],
)
def test_outputs_without_rows(step, text):
    with pytest.raises(CaptureError, match=text) as raised:
        _runner(step, sizes=[16])(torch.ones(3, H))
    assert raised.value.size == 16


def test_a_number_of_rows_is_no_constant():
    run = _runner(lambda x: (x, {"rows": x.shape[0]}))
    with pytest.raises(
        CaptureError, match=r"output\[1\]\['rows'\] is 4, and 8 for other numbers of rows"
    ) as raised:
        run(torch.ones(3, H))
    assert raised.value.size == 4 and run.memory.total == 0
    assert _runner(lambda x: (x, 3, 0.5, float("nan")))(torch.ones(3, H))[1:3] == (3, 0.5)


def test_hazards_that_explain_reports():
    def step(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    run = _runner(step, explain=inductor_passes.explain)
    with pytest.raises(CaptureError, match="cond: the host reads its condition") as raised:
        run(torch.ones(3, H))
    assert raised.value.size == 8 and not run._graphs.captured
    run = _runner(_double, explain=inductor_passes.explain)
    assert torch.equal(run(X), X * 2)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("called a synchronizing CUDA operation", "waits for the device"),
        ("CUDA error: operation not permitted when stream is capturing", "CUDA graph of its own"),
        ("Cannot copy between CPU and CUDA tensors during CUDA graph capture", "moves a CPU tensor"),
        ("Could not guard on data-dependent expression u0 > 0", "unbacked"),
        ("Offset increment outside graph capture encountered unexpectedly.", "random numbers"),
        ("operation would make the legacy stream depend on a capturing blocking stream", "default stream"),
        ("capturing stream has unjoined work", "not waited for"),
        ("CUDA out of memory.", "it raises RuntimeError: CUDA out of memory."),
    ],
)
def test_what_torch_says_is_named(said, cause):
    def step():
        try:
            raise RuntimeError(said)
        except RuntimeError:  # then the end of the capture fails, too
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    with pytest.raises(CaptureError, match=cause) as raised, causes_named(4):
        step()
    assert raised.value.size == 4
    assert raised.value.where.endswith("raise RuntimeError(said)")
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_other_errors_of_a_step_are_its_own():
    def step(x):
        raise KeyError("mine")

    run = _runner(step)
    with pytest.raises(KeyError, match="mine"):
        run(X)
    try:
        raise RuntimeError("called a synchronizing CUDA operation")
    except RuntimeError:  # of the caller's, elsewhere
        with pytest.raises(KeyError, match="mine"):
            run(X)


def test_what_no_buffer_holds_is_refused():
    for tensor in (torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])):
        with pytest.raises(ValueError, match=r"args\[0\] is sparse or nested: expected a dense tensor"):
            _runner(_double)(tensor)
    with pytest.raises(TypeError, match="explain=3: expected a function"):
        _runner(_double, explain=3)
