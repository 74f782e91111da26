"""PackageProducts: the products of a package are torch's; what it cannot write out is named."""

import expecttest
import pytest
import torch

import moe_ops
from inductor_passes import _compat
from inductor_passes.costs import costs
from inductor_passes.lowerings import PackageProducts
from inductor_passes.repeats import is_call, may_move
from tests.helpers import assert_matches_oracle
from tests.passes.capture import computed, rewrite

PASS = (PackageProducts(),)
EXPERTS, ROWS, IN, OUT = 5, 13, 16, 24
OFFSETS = torch.tensor([0, 4, 4, 5, 9, 11], dtype=torch.int32)  # the last two rows are nobody's


@pytest.fixture(autouse=True)
def packaging(monkeypatch):
    """As when AOTInductor compiles, and torch packs grouped products. The graph runs, so it calls the operator."""
    monkeypatch.setattr(_compat, "is_packaging", lambda: True)
    monkeypatch.setattr(_compat, "packages_grouped_mm", lambda: True)
    monkeypatch.setattr(_compat, "grouped_mm", lambda: torch.ops.aten._grouped_mm.default)


def given(dtype=torch.bfloat16, columns=IN):
    return torch.randn(ROWS, columns, dtype=dtype), torch.randn(EXPERTS, OUT, columns, dtype=dtype)


def plain(x, weight, *bias):
    return moe_ops.grouped_gemm(x, weight, OFFSETS.clone(), *bias)


def oracle(x, weight, bias=None):
    out = torch.zeros(ROWS, OUT, dtype=torch.float64)
    for expert in range(EXPERTS):
        rows = slice(OFFSETS[expert], OFFSETS[expert + 1])
        added = 0 if bias is None else bias[expert].double()
        out[rows] = x[rows].double() @ weight[expert].double().T + added
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_values(dtype, has_bias, is_transposed):
    x, weight = given(dtype)
    if is_transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    bias = (torch.randn(EXPERTS, OUT, dtype=dtype),) if has_bias else ()
    result, out = computed(plain, x, weight, *bias, passes=PASS)
    assert not result.ops() and [each.kind for each in result.log.lowered] == ["ATen"]
    assert_matches_oracle(out, oracle(x, weight, *bias))
    assert not out[OFFSETS[-1] :].any()


def test_offsets_apart_in_memory_are_copied():
    x, weight = given()
    apart = torch.stack((OFFSETS, OFFSETS), dim=1)[:, 0]
    result, out = computed(moe_ops.grouped_gemm, x, weight, apart, passes=PASS)
    (product,) = result.graph.find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default)
    assert product.args[2].meta["val"].stride() == (1,)
    assert_matches_oracle(out, oracle(x, weight))


def test_the_product_is_a_call_that_costs_what_the_operator_did(monkeypatch):
    """It is no operator: a function takes it in, and what it multiplies is counted."""
    monkeypatch.undo()
    monkeypatch.setattr(_compat, "is_packaging", lambda: True)
    monkeypatch.setattr(_compat, "packages_grouped_mm", lambda: True)
    graph = rewrite(moe_ops.grouped_gemm, *given(), OFFSETS.clone(), passes=PASS).graph
    (product,) = (node for node in graph.nodes if node.target is _compat.grouped_mm())
    assert is_call(product) and may_move(product)
    assert costs(graph, {product.name: "layer"})["layer"].flops == 2 * ROWS * IN * OUT


class TestGolden(expecttest.TestCase):
    def test_before_and_after(self):
        x, weight = given()
        torch._dynamo.mark_dynamic(x, 0)
        result = rewrite(
            moe_ops.grouped_gemm,
            x,
            weight,
            OFFSETS,
            torch.zeros(EXPERTS, OUT, dtype=torch.bfloat16),
            passes=PASS,
        )
        self.assertExpectedInline(
            result.after,
            """\
%0 = input() : bfloat16[5, 24, 16]
%1 = aten.permute.default(%0, [0, 2, 1]) : bfloat16[5, 16, 24]
%2 = input() : int32[6]
%3 = aten.slice.Tensor(%2, 0, 1, 6) : int32[5]
%4 = input() : bfloat16[T0, 16]
%5 = aten._grouped_mm.default(%4, %1, %3) : bfloat16[T0, 24]
%6 = aten.sym_size.int(%5, 0) : SymInt
%7 = sub(%6, 0) : SymInt
%8 = add(%7, 1) : SymInt
%9 = sub(%8, 1) : SymInt
%10 = floordiv(%9, 1) : SymInt
%11 = prims.iota.default(%10) : int64[T0]
%12 = aten.searchsorted.Tensor(%2, %11) : int64[T0]
%13 = aten.sub.Tensor(%12, 1) : int64[T0]
%14 = aten.clamp_max.default(%13, 4) : int64[T0]
%15 = input() : bfloat16[5, 24]
%16 = aten.index.Tensor(%15, [%14]) : bfloat16[T0, 24]
%17 = aten.add.Tensor(%5, %16) : bfloat16[T0, 24]
%18 = aten.select.int(%2, 0, -1) : int32[]
%19 = aten.ge.Tensor(%11, %18) : bool[T0]
%20 = aten.unsqueeze.default(%19, 1) : bool[T0, 1]
%21 = aten.scalar_tensor.default(0.0) : bfloat16[]
%22 = aten.where.self(%20, %21, %17) : bfloat16[T0, 24]
return [%22]""",
        )


def test_a_second_run_finds_nothing():
    result = rewrite(plain, *given(), passes=PASS + PASS)
    assert len(result.log.lowered) == 1 and not result.log.kept


def kept(caplog, *args):
    result = rewrite(plain, *args, passes=PASS)
    assert result.ops() == ["grouped_gemm"] and not result.log.lowered
    assert "the package calls moe::grouped_gemm: import moe_ops before it is loaded" in caplog.messages
    return [each.reason for each in result.log.kept]


def test_rows_that_are_not_aligned_stay(caplog):
    assert kept(caplog, *given(columns=12)) == ["rows of [5, 24, 12] are no multiple of 16 bytes apart"]


def test_columns_that_are_not_aligned_stay(caplog):
    x, weight = given()
    weight = weight[:, :23].transpose(1, 2).contiguous().transpose(1, 2)
    assert kept(caplog, x, weight) == ["rows of [5, 23, 16] are no multiple of 16 bytes apart"]


def test_what_torch_does_not_multiply_stays(caplog):
    assert kept(caplog, *given(torch.float64)) == ["torch has no grouped product of torch.float64"]


def test_a_torch_that_cannot_pack_the_product_keeps_it(caplog, monkeypatch):
    monkeypatch.setattr(_compat, "packages_grouped_mm", lambda: False)
    assert kept(caplog, *given()) == ["before torch 2.12 no package can call a grouped product of torch's"]


def test_elsewhere_the_operator_stays(caplog, monkeypatch):
    monkeypatch.setattr(_compat, "is_packaging", lambda: False)
    result = rewrite(plain, *given(), passes=PASS)
    assert result.ops() == ["grouped_gemm"] and not result.log.kept and not caplog.messages


def test_operators_without_an_aten_form_are_named_once_each(caplog):
    def layer(x, weight, logits):
        ids = moe_ops.topk_routing(logits, moe_ops.RoutingConfig(2))[1]
        counts = moe_ops.topk_routing(logits + 1, moe_ops.RoutingConfig(2))[1]
        return plain(x, weight), ids, moe_ops.build_dispatch(counts, EXPERTS).inverse

    rewrite(layer, *given(), torch.randn(4, EXPERTS), passes=PASS)
    assert caplog.messages[-1].startswith("the package calls moe::build_dispatch, moe::topk_routing: import")


def test_an_operator_that_changes_an_argument_is_named(caplog):
    maps = torch.arange(EXPERTS, dtype=torch.int32)[:, None], torch.ones(EXPERTS, dtype=torch.int32)
    load, ids = torch.zeros(EXPERTS, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    rewrite(lambda ids, load: moe_ops.map_replicas(ids, *maps, load=load), ids, load, passes=PASS)
    assert caplog.messages[-1].startswith("the package calls moe::map_and_record: import")
