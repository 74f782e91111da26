"""With emit="batch_invariant" a token's bits do not depend on the others: on how many, on where it stands, on who."""

import pytest
import torch

import moe_ops
from moe_ops import Activation, RoutingConfig, batch_invariant
from tests.cases import Case, make
from tests.helpers import assert_matches_oracle, assert_same, grads_of, usually
from tests.ops.test_values import oracle

# No size is a multiple of what a CPU loads at once; more tokens than there are, fewer, and one.
T, E, K, H, I = 37, 5, 3, 50, 27
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROUTINGS = [
    RoutingConfig(K),
    RoutingConfig(K, "sigmoid", renormalize=False),
    RoutingConfig(K, "sqrtsoftplus"),
]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
invariant = {"emit": "batch_invariant"}


def layer(dtype, routing=ROUTINGS[0], activation="silu"):
    """A layer as a function of tokens and logits, with biases, a shared output per token, and an expert elsewhere."""
    w13, w2 = torch.randn(E - 1, 2 * I, H) / 7, torch.randn(E - 1, H, I) / 5
    biases = {"w13_bias": torch.randn(E - 1, 2 * I).to(dtype), "w2_bias": torch.randn(E - 1, H).to(dtype)}
    places = torch.tensor([2, 0, -1, 3, 1], dtype=torch.int32)

    def run(x, logits, **options):
        weights = w13.to(dtype), w2.to(dtype)
        given = {**biases, "expert_map": places, "shared": x.flip(1), **invariant, **options}
        return moe_ops.fused_moe(x, logits, *weights, routing, activation, **given)

    return run


def given(dtype, tokens=T):
    return torch.randn(tokens, H).to(dtype), torch.randn(tokens, E)


def assert_rows_do_not_depend_on_the_batch(run, *tensors):
    """`run` of all rows against any of them: alone, elsewhere, twice, beside zeros and beside what is not finite."""
    whole = run(*tensors)
    for rows in ([0], [T - 1], [1, 0], [5, 5], list(range(3, 20)), list(range(T - 1, -1, -1)), []):
        assert torch.equal(run(*(t[rows] for t in tensors)), whole[rows]), rows
    for fill in (0.0, 1e4, float("nan"), float("inf")):
        others = tuple(torch.full_like(t, fill) for t in tensors)
        for t, other in zip(tensors, others, strict=True):
            other[[2, 30]] = t[[2, 30]]
        assert torch.equal(run(*others)[[2, 30]], whole[[2, 30]]), fill


@dtypes
@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.spec)
def test_a_layer(dtype, routing):
    assert_rows_do_not_depend_on_the_batch(layer(dtype, routing), *given(dtype))


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda routing: routing.spec)
def test_routing(routing):
    bias = torch.randn(E)

    def run(logits):
        weights, ids = moe_ops.topk_routing(logits, routing, bias, **invariant)
        return torch.cat((weights, ids), 1)

    assert_rows_do_not_depend_on_the_batch(run, torch.randn(T, E))


@dtypes
@pytest.mark.parametrize("into", ["same", "float32"])
def test_a_product(dtype, into):
    weight, bias = torch.randn(9, H).to(dtype), torch.randn(9).to(dtype)
    result = torch.float32 if into == "float32" and dtype != torch.float64 else dtype

    def run(x):
        out = moe_ops.dense_gemm(x, weight, bias, result, **invariant)
        assert out.dtype == result
        return out

    (x, _) = given(dtype)
    assert_rows_do_not_depend_on_the_batch(run, x)
    exact = x.double() @ weight.double().T + bias.double()
    assert_matches_oracle(run(x), exact)


def test_the_layout_of_the_rows_changes_nothing():
    run, (x, logits) = layer(torch.float32), given(torch.float32)
    apart = torch.randn(T, 2 * H)[:, ::2].copy_(x), torch.randn(E, T).t().copy_(logits)
    moved = torch.randn(T * H + 1)[1:].view(T, H).copy_(x)
    assert torch.equal(run(*apart), run(x, logits))
    assert torch.equal(run(moved, logits), run(x, logits))


def test_rows_for_a_gpu_are_brought_into_one_layout():
    x = torch.randn(3, 6).bfloat16()
    moved = torch.empty(19, dtype=x.dtype)[1:].view(3, 6).copy_(x)
    assert batch_invariant._rows_of_one_layout(x) is x
    for rows in (moved, x.t().contiguous().t()):
        aligned = batch_invariant._rows_of_one_layout(rows)
        assert aligned.is_contiguous() and aligned.data_ptr() % 16 == 0 and torch.equal(aligned, x)


@dtypes
@pytest.mark.parametrize("activation", [Activation(), Activation("swiglu_oai", interleaved=True)], ids=str)
def test_values(dtype, activation):
    problem = make(Case(9, 6, 2, 20, 11, activation=activation, bias=True), dtype)
    weights, ids = moe_ops.topk_routing(problem.router_logits, problem.routing)
    out = moe_ops.fused_moe(*problem.args(), **problem.biases(), **invariant)
    assert_matches_oracle(out, oracle(problem, weights, ids))


def test_gradients_are_those_of_the_layer():
    problem = make(Case(9, 6, 2, 20, 11, bias=True), torch.float64, requires_grad=True)
    run = lambda **options: moe_ops.fused_moe(*problem.args(), **problem.biases(), **options)  # noqa: E731
    expected = grads_of(run, problem.tensors())
    assert_same(grads_of(lambda: run(**invariant), problem.tensors()), expected)


@pytest.mark.parametrize("dynamic", usually([False, True], [True]))
def test_compiled_it_is_the_same_to_the_bit(dynamic):
    import inductor_passes

    run = layer(torch.float32)
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, options=inductor_passes.options())
    x, logits = given(torch.float32)
    with torch.no_grad():
        whole = run(x, logits)
        assert torch.equal(compiled(x, logits), whole)
        assert torch.equal(compiled(x[4:9], logits[4:9]), whole[4:9])


def test_other_paths_are_not_invariant():
    """What the option is for: on a CPU the fused operator's bits follow the number of tokens."""
    run, (x, logits) = layer(torch.float32), given(torch.float32)
    whole = run(x, logits, emit="fused")
    assert any(not torch.equal(run(x[:n], logits[:n], emit="fused"), whole[:n]) for n in (1, 2, 5))


def test_tokens_of_a_vmap_are_tokens_of_a_batch():
    run, (x, logits) = layer(torch.float32), given(torch.float32, 6)
    out = torch.vmap(run)(x.view(3, 2, H), logits.view(3, 2, E))
    assert torch.equal(out.view(6, H), run(x, logits))


def test_flops_are_those_of_the_operator():
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for emit in ("fused", "batch_invariant"):
        with FlopCounterMode(display=False) as counter:
            layer(torch.float32)(*given(torch.float32), emit=emit)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            layer(torch.float32, activation=lambda gate, up: gate * up),
            r"emit='batch_invariant' with a function as activation: expected 'auto' or 'stages'",
        ),
        (
            lambda x, logits: moe_ops.topk_routing(logits, ROUTINGS[0], emit="fused"),
            r"emit='fused': expected 'auto' or 'batch_invariant'",
        ),
        (
            lambda x, logits: moe_ops.dense_gemm(x, torch.randn(3, H), emit="stages"),
            r"emit='stages': expected 'auto' or 'batch_invariant'",
        ),
        (
            lambda x, logits: moe_ops.dense_gemm(x, torch.randn(3, H + 1), **invariant),
            r"weight has shape \[3, 51\]: expected \['?B'?, 50\]",
        ),
        (lambda x, logits: layer(torch.float32)(x, logits[:3]), r"router_logits has shape \[3, 5\]: expected \[37, 5"),
    ],
)  # fmt: skip
def test_what_is_not_offered_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call(*given(torch.float32))


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("layout", ["dense", "transposed", "odd"])
@pytest.mark.parametrize(
    "sizes", [(16, 4, 256, 192), (8, 2, 1024, 512), (128, 8, 512, 256), (6, 3, 77, 51)], ids=str
)
def test_on_a_gpu(dtype, layout, sizes):
    """Numbers of tokens that take every form of the layer elsewhere: vectors, small and large tiles, TMA."""
    num_experts, top_k, hidden, inner = sizes
    most = 4096 if dtype in (torch.bfloat16, torch.float16) else 256
    cuda = {"device": "cuda", "dtype": dtype}
    x, logits = torch.randn(most, hidden, **cuda), torch.randn(most, num_experts, device="cuda")
    w13 = torch.randn(num_experts, 2 * inner, hidden, **cuda) / hidden**0.5
    w2 = torch.randn(num_experts, hidden, inner, **cuda) / inner**0.5
    if layout == "transposed":
        w13, w2 = (w.mT.contiguous().mT for w in (w13, w2))
    if layout == "odd":
        w13, w2 = (torch.nn.functional.pad(w, (0, 5))[..., :-5] for w in (w13, w2))
    router, routing = torch.randn(num_experts, hidden, **cuda), RoutingConfig(top_k)

    def run(x, logits):
        logits = logits + moe_ops.dense_gemm(
            x, router, dtype=torch.float32 if dtype != torch.float64 else dtype, **invariant
        )
        return moe_ops.fused_moe(x, logits, w13, w2, routing, **invariant)

    whole = run(x, logits)
    sizes_of_batches = [n for n in (1, 2, 3, 4, 8, 9, 16, 33, 64, 127, 256, 1000, 2048) if n < most]
    for n in sizes_of_batches:
        for start in (0, 7, most - n):
            part = slice(start, start + n)
            assert torch.equal(run(x[part], logits[part]), whole[part]), (n, start)
    shuffled = torch.randperm(most, device="cuda")
    assert torch.equal(run(x[shuffled], logits[shuffled]), whole[shuffled])
    noisy = torch.full_like(x, float("nan"))
    noisy[10:20] = x[10:20]
    assert torch.equal(run(noisy, logits)[10:20], whole[10:20])
    graphed = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graphed):
        out = run(x[:5], logits[:5])
    graphed.replay()
    assert torch.equal(out, whole[:5])


@pytest.mark.gpu
def test_rows_at_other_addresses_on_a_gpu():
    x, w13, w2 = (torch.randn(s, device="cuda").bfloat16() for s in ((64, 256), (8, 128, 256), (8, 256, 64)))
    logits = torch.randn(64, 8, device="cuda")
    run = lambda x: moe_ops.fused_moe(x, logits[: len(x)], w13, w2, RoutingConfig(2), **invariant)  # noqa: E731
    moved = torch.empty(64 * 256 + 1, device="cuda", dtype=x.dtype)[1:].view(64, 256).copy_(x)
    assert torch.equal(run(moved), run(x))
    assert torch.equal(run(x.t().contiguous().t()), run(x))
