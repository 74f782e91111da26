"""A graph's C++ kernels are compiled together: fewer libraries, the same numbers, nobody else's code changes."""

import itertools
import json
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.exc import CppCompileError
from torch._inductor.utils import fresh_cache, run_and_get_code

import inductor_passes
from inductor_passes import _compat_kernels
from tests.forked import run_python
from tests.generated import codes_of
from tests.helpers import usually
from tests.passes.moe import MANY_TOKENS
from tests.passes.stacks import block, tokens, weights

TOGETHER = "async_compile = KernelsTogether("
TYPES = ["const float*", "float*", "const int64_t"]


def _source(body, before="", behind="", head="(const float* in_ptr0, float* out_ptr0, const int64_t ks0)"):
    return (
        f'#include <torch/csrc/inductor/cpp_prefix.h>\n{before}extern "C"  void kernel{head}\n{{\n'
        f"    for (int64_t x0 = 0; x0 < ks0; x0++)\n    {{\n        {body}\n    }}\n}}\n{behind}"
    )


TWICE, SQUARE = (
    _source("out_ptr0[x0] = in_ptr0[x0] * 2;"),
    _source("out_ptr0[x0] = in_ptr0[x0] * in_ptr0[x0];"),
)


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()


@pytest.fixture(params=[1, 2])
def threads(request):
    """How many kernels Inductor compiles at once."""
    with inductor_config.patch(compile_threads=request.param):
        yield request.param


def _libraries():
    """Those of kernels, in the cache of now."""
    return [*Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.main.so")]


def _scope(*sources, libraries=1):
    """What generated code has of these kernels once it has waited."""
    compiler = _compat_kernels.KernelsTogether(libraries)
    scope = {f"cpp_{index}": compiler.cpp_pybinding(TYPES, source) for index, source in enumerate(sources)}
    compiler.wait(scope)
    return scope


def _ran(kernel):
    given, out = torch.tensor([1.0, 2.0, 3.0]), torch.empty(3)
    kernel(given, out, 3)
    return out.tolist()


def test_several_kernels_are_one_library_and_equal_ones_one_function(threads):
    with fresh_cache():
        scope = _scope(TWICE, SQUARE, TWICE)
        assert len(_libraries()) == 1
    assert [_ran(kernel) for kernel in scope.values()] == [[2, 4, 6], [1, 4, 9], [2, 4, 6]]
    assert scope["cpp_0"] is scope["cpp_2"]


def test_one_kernel_is_compiled_as_ever():
    with fresh_cache():
        scope = _scope(TWICE)
        AsyncCompile().wait(others := {"cpp_0": AsyncCompile().cpp_pybinding(TYPES, TWICE)})
        assert len(_libraries()) == 1
    assert _ran(scope["cpp_0"]) == _ran(others["cpp_0"]) == [2, 4, 6]


NOT_PLAIN = {
    "a header": _source("out_ptr0[x0] = in_ptr0[x0] * 2;", before="#include <cmath>\n"),
    "a macro": _source("out_ptr0[x0] = in_ptr0[x0] * TWO;", before="#define TWO 2\n"),
    "a macro in it": _source("out_ptr0[x0] = in_ptr0[x0] * 2;\n  #define TWO 2"),
    "a function in front": _source(
        "out_ptr0[x0] = two(in_ptr0[x0]);", before="static float two(float x) {return 2*x;}\n"
    ),
    "a function behind": _source("out_ptr0[x0] = in_ptr0[x0] * 2;", behind="static void kernel2() {}\n"),
    "something behind": _source("out_ptr0[x0] = in_ptr0[x0] * 2;", behind="static int two;\n"),
    "its name in it": _source("float kernel = 2; out_ptr0[x0] = in_ptr0[x0] * kernel;"),
    "another linkage": _source("out_ptr0[x0] = in_ptr0[x0] * 2;").replace(
        '"C"  void', '"C" __attribute__((used)) void'
    ),
}


@pytest.mark.parametrize("source", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_what_is_more_than_a_function_is_compiled_for_itself(source):
    compiler = _compat_kernels.KernelsTogether(1)
    with mock.patch.object(AsyncCompile, "cpp_pybinding", return_value="as ever") as usual:
        assert compiler.cpp_pybinding(TYPES, source) == "as ever"
        usual.assert_called_once_with(TYPES, source)
        assert compiler.cpp_pybinding(TYPES, TWICE) != "as ever"


def test_kernels_of_tritons_are_inductors():
    assert _compat_kernels.KernelsTogether(1).triton.__func__ is AsyncCompile.triton


def test_beside_kernels_that_are_more_than_a_function():
    with fresh_cache():
        scope = _scope(TWICE, NOT_PLAIN["a macro"], SQUARE)
        assert len(_libraries()) == 2
    assert [_ran(kernel) for kernel in scope.values()] == [[2, 4, 6], [2, 4, 6], [1, 4, 9]]


def test_what_the_compiler_refuses_is_told(threads):
    with fresh_cache(), pytest.raises(CppCompileError, match=r"nowhere.* was not declared"):
        _scope(TWICE, _source("out_ptr0[x0] = nowhere;"))


def test_libraries_are_about_equal_and_large_enough_to_be_worth_it():
    def cut(most, *lengths):
        kernels = [
            _compat_kernels._Kernel((str(index),), "x" * length) for index, length in enumerate(lengths)
        ]
        parts = [*_compat_kernels._in_libraries(kernels, most)]
        assert [kernel for part in parts for kernel in part] == kernels
        return [[len(kernel.source) for kernel in part] for part in parts]

    large = _compat_kernels._SMALLEST
    assert cut(32, 100, 200, 300) == [[100, 200, 300]]
    assert cut(2, large, large, large, large) == [[large, large], [large, large]]
    assert cut(2, 100, 200, 3 * large) == [[100, 200], [3 * large]]
    assert cut(1, *[large] * 3) == [[large] * 3]
    assert cut(32, *[large // 2] * 8) == [[large // 2] * 2] * 4
    assert cut(32) == []


def test_numbers_are_those_of_kernels_compiled_one_by_one(monkeypatch):
    found = []
    for is_together in (True, False):
        torch._dynamo.reset()
        if not is_together:
            monkeypatch.setattr(_compat_kernels, "compile_kernels_together", lambda: None)
        compiled = torch.compile(block, options=inductor_passes.options(), fullgraph=True)
        with torch.no_grad(), fresh_cache(), inductor_config.patch(compile_threads=2):
            x, (layer,) = (
                tokens(MANY_TOKENS, torch.bfloat16),
                weights(1, torch.bfloat16),
            )  # too many for one kernel
            out, (code,) = run_and_get_code(compiled, x, layer)
            found.append((out, len(_libraries())))
        assert (TOGETHER in code) is is_together
        kernels = code.count("async_compile.cpp_pybinding(")
    (out, libraries), (one_by_one, as_many) = found
    assert torch.equal(out, one_by_one)
    assert 1 <= libraries <= 2 < as_many == kernels


def _branches(x, weights):
    return torch.cond(x.sum() > 0, lambda x: block(x, weights), torch.sin, (x,))


def _dense(x, weights):
    return x.sin().sum(0) @ weights[0] + x


@pytest.mark.parametrize(
    ("function", "trains"),
    usually(
        itertools.product([block, _branches, _dense], [False, True]),
        [(block, False), (block, True), (_branches, False), (_dense, True)],
    ),
)
def test_which_code_asks_for_it(function, trains):
    x, (layer,) = tokens().requires_grad_(trains), weights(1)
    compiled = torch.compile(function, options=inductor_passes.options())

    def run():
        out = compiled(x, layer)
        return torch.autograd.grad(out.sum(), x) if trains else out

    with torch.set_grad_enabled(trains):
        codes = codes_of(run)
    assert len(codes) == 1 + trains
    assert [TOGETHER in code for code in codes] == [function is not _dense] * len(codes)


# Prints how often the C++ compiler ran for a kernel and how many kernels the code has.
PROBE = """
import json, sys, torch, moe_ops, inductor_passes
import torch._inductor.config
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder
torch._inductor.config.compile_threads = int(sys.argv[1])
build, built = cpp_builder.CppBuilder.build, []
def noted(self):
    built.append(self.get_target_file_path())
    return build(self)
cpp_builder.CppBuilder.build = noted
def gates(x):
    return moe_ops.gated_activation(moe_ops.gated_activation(x, "silu") @ x, "gelu")
with torch.no_grad():
    x = torch.ones(4, 8)
    out = torch.compile(gates, fullgraph=True, options=inductor_passes.options())(x)
    torch.testing.assert_close(out, gates(x))
kernels = [path for path in built if path.endswith(".main.so")]
print(json.dumps([len(kernels), counters["inductor"]["fxgraph_cache_hit"]]))
"""


def test_another_process_finds_the_libraries(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for threads, expected in (("2", [1, 0]), ("1", [0, 1])):
        done = run_python(PROBE, threads, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout.splitlines()[-1]) == expected
    code = next(path.read_text() for path in tmp_path.rglob("*.py") if TOGETHER in path.read_text())
    assert re.findall(r"KernelsTogether\((\d+)\)", code) == ["2"] and code.count("cpp_pybinding(") == 2
