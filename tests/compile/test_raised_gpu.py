"""Stock layers on a GPU: raised, right, captured."""

import pytest
import torch

import inductor_passes
from tests.helpers import assert_matches_oracle, relative_error
from tests.passes import stock
from tests.passes.stock import STYLES, layer, oracle

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cold():
    with torch._inductor.utils.fresh_cache():
        torch.compiler.reset()
        yield


def _compiled(function, **options):
    return torch.compile(function, options=inductor_passes.options(), fullgraph=True, **options)


@pytest.mark.parametrize("tokens", [1, 7, 33, 500])
@pytest.mark.parametrize("name", STYLES)
@torch.no_grad()
def test_values(name, tokens):
    inputs = layer(tokens)
    on_gpu = [tensor.cuda() for tensor in inputs]
    _, (code,) = torch._inductor.utils.run_and_get_code(_compiled(STYLES[name], dynamic=False), *on_gpu)
    assert_matches_oracle(_compiled(STYLES[name], dynamic=False)(*on_gpu).cpu(), oracle(inputs, STYLES[name]))
    called = [line for line in code.splitlines() if not line.lstrip().startswith("#")]
    assert not any("_grouped_mm(" in line or "extern_kernels.bmm(" in line for line in called)


@torch.no_grad()
def test_any_number_of_tokens():
    compiled = _compiled(stock.grouped, dynamic=True)
    for tokens in (7, 2, 100, 1000):
        inputs = layer(tokens)
        assert_matches_oracle(compiled(*(t.cuda() for t in inputs)).cpu(), oracle(inputs, stock.grouped))


@torch.no_grad()
def test_a_captured_layer_sees_new_tokens():
    inputs = layer(16)
    static = [tensor.cuda() for tensor in inputs]
    compiled = _compiled(stock.batched, dynamic=False)
    compiled(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(*static)
    for seed in (3, 5):
        fresh = layer(16)._replace(hidden_states=layer(16 + seed).hidden_states[:16])
        static[0].copy_(fresh.hidden_states)
        graph.replay()
        torch.cuda.synchronize()
        assert_matches_oracle(out.cpu(), oracle(fresh, stock.batched))


@pytest.mark.parametrize("tokens", [1, 33, 4096])
@torch.no_grad()
def test_logits_of_halves_are_those_of_float32(tokens):
    x, router = (torch.randn(n, 7168, device="cuda").bfloat16() for n in (tokens, 256))
    exact = x.double() @ router.double().T
    narrow = torch.mm(x, router.T, out_dtype=torch.float32)
    assert relative_error(narrow, exact) < 1e-5
