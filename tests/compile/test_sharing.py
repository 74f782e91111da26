"""N alike layers cost one compile: the generated code has one function for them, and computes what it did before."""

import re
from functools import partial

import pytest
import torch
from torch._higher_order_ops.while_loop import while_loop
from torch._inductor.utils import run_and_get_code

import inductor_passes
import moe_ops
from inductor_passes import pipeline
from tests.compile.fake_cuda import compile_for_h200
from tests.generated import codes_of
from tests.helpers import assert_matches_oracle, fresh_graphs, usually
from tests.passes.moe import MANY_TOKENS, ROUTING
from tests.passes.stacks import cached, exact, paged, stack, tokens, weights

LAYERS = 6


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    with fresh_graphs():
        yield


def _calls(code):
    return len(re.findall(r"= \w*repeated_layer\w*\(\w*repeated_layer\w*_args\)", code))


@pytest.mark.parametrize("dynamic", usually([False, True], [True]))
@torch.no_grad()
def test_the_code_of_alike_layers_is_there_once(dynamic):
    layers = weights(LAYERS)
    compiled = torch.compile(stack, options=inductor_passes.options(), fullgraph=True, dynamic=dynamic)
    out, (code,) = run_and_get_code(compiled, tokens(MANY_TOKENS), layers)
    assert_matches_oracle(out, exact(tokens(MANY_TOKENS), layers))
    assert code.count("def repeated_layer") == 1
    assert _calls(code) >= LAYERS - 1 - dynamic  # the first and the last are put together otherwise
    products = [
        line for line in code.splitlines() if re.match(r"\s*buf\d+ = torch.ops.moe.grouped_gemm", line)
    ]
    assert 2 <= len(products) <= 4  # of the function, and of a layer at the border
    for number in (17, 33) if dynamic else ():
        assert_matches_oracle(compiled(tokens(number), layers), exact(tokens(number), layers))


def _if(x, layers):
    return torch.cond(x.norm() > 0, lambda x: stack(x, layers), torch.neg, (x,))


def _while(x, layers):
    count = torch.zeros((), dtype=torch.int64)
    _, x = while_loop(lambda count, x: count < 1, lambda count, x: (count + 1, stack(x, layers)), (count, x))
    return x


@pytest.mark.parametrize("function", usually([_if, _while], [_if]))
@torch.no_grad()
def test_alike_layers_in_a_branch_or_a_loop(function):
    layers = weights(LAYERS)
    compiled = torch.compile(function, options=inductor_passes.options(), fullgraph=True)
    out, (code,) = run_and_get_code(compiled, tokens(MANY_TOKENS), layers)
    assert_matches_oracle(out, exact(tokens(MANY_TOKENS), layers))
    assert len(re.findall(r"def \w+_repeated_layer", code)) == 1 and _calls(code) == LAYERS - 1


@torch.no_grad()
def test_attention_to_caches():
    layers, given, wide = weights(LAYERS), cached(LAYERS), cached(LAYERS)
    wide_caches = [(keys.double(), values.double()) for keys, values in wide[0]]
    compiled = torch.compile(paged, options=inductor_passes.options(), fullgraph=True)
    out, (code,) = run_and_get_code(compiled, tokens(), layers, *given)
    doubled = [tuple(each.double() for each in layer) for layer in layers]
    assert_matches_oracle(out, paged(tokens().double(), doubled, wide_caches, *wide[1:]))
    assert _calls(code) == LAYERS - 1
    for cache, exact_cache in zip(given[0], wide_caches, strict=True):
        for filled, expected in zip(cache, exact_cache, strict=True):
            assert_matches_oracle(filled, expected)


@torch.no_grad()
def test_a_layer_at_the_border_has_the_functions_kernels(monkeypatch):
    """Its nodes are in the same order, so the C++ compiler has no kernel of it to compile."""
    kernels = []
    for shares in (True, False):
        torch._dynamo.reset()
        if not shares:
            monkeypatch.setattr(pipeline, "share_layers", lambda graph: 0)
        compiled = torch.compile(stack, options=inductor_passes.options(), fullgraph=True)
        (code,) = codes_of(partial(compiled, tokens(), weights(LAYERS)))
        assert ("def repeated_layer" in code) is shares
        kernels.append(code.count("async_compile.cpp_pybinding("))
    assert 0 < kernels[0] <= kernels[1] + 1  # what the first layer begins with


class Count:
    """A user's pass that counts our products."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.append(sum(str(node.target).startswith("moe.grouped_gemm") for node in graph.nodes))


@torch.no_grad()
def test_a_users_pass_sees_every_layer_once():
    count = Count()
    options = inductor_passes.options(post_grad_custom_pre_pass=count)
    layers = weights(LAYERS)
    out = torch.compile(stack, options=options, fullgraph=True)(tokens(MANY_TOKENS), layers)
    assert_matches_oracle(out, exact(tokens(MANY_TOKENS), layers))
    assert count.seen == [2 * LAYERS]


@torch.no_grad()
def test_models_without_experts_and_training_are_left():
    def dense(x, layers):
        return stack(x, layers, lambda x, each: torch.relu(x @ each[0] + x))

    for function, x in ((dense, tokens()), (stack, tokens().requires_grad_())):
        with torch.set_grad_enabled(x.requires_grad):
            compiled = torch.compile(function, options=inductor_passes.options(), fullgraph=True)
            codes = codes_of(partial(compiled, x, weights(5)))
        assert len(codes) == 1 + x.requires_grad
        assert not any("repeated_layer" in code for code in codes)


def _given(number):
    shapes = ((128, 128), (16, 128), (16, 128, 128), (16, 128, 64))
    layers = [
        tuple(torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        for _ in range(LAYERS)
    ]
    return [
        torch.empty(number, 128, device="cuda", dtype=torch.bfloat16),
        *(each for layer in layers for each in layer),
    ]


def _stacked(x, *flat):
    def staged(x, each):
        mixing, router, w13, w2 = each
        x = x + x @ mixing
        return x + moe_ops.fused_moe(x, x @ router.T, w13, w2, ROUTING, emit="stages")

    return stack(x, [flat[i : i + 4] for i in range(0, len(flat), 4)], staged)


@pytest.mark.parametrize("number", [1, 64])
def test_launches_on_a_gpu_are_written_once(number):
    code = compile_for_h200(_stacked, _given, tokens=number).code
    assert code.count("def repeated_layer") == 1 and _calls(code) >= LAYERS - 1
    ours = [
        line
        for line in code.splitlines()
        if ".run(" in line
        and "triton_poi" not in line
        and "triton_per" not in line
        and "triton_red" not in line
    ]
    assert 0 < len(ours) <= 12  # of the function, and of the layer that is left


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("number", [1, 64])
@torch.no_grad()
def test_on_a_gpu(number, mode):
    x, layers = tokens(number).cuda(), [tuple(each.cuda() for each in layer) for layer in weights(LAYERS)]
    compiled = torch.compile(stack, options=inductor_passes.options(mode), fullgraph=True, dynamic=False)
    _, (code,) = run_and_get_code(compiled, x, layers)
    assert _calls(code) >= LAYERS - 1
    for _ in range(3):  # warm up, capture, replay
        assert_matches_oracle(compiled(x, layers), exact(x, layers))
