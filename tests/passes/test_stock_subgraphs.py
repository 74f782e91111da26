"""Layers of code that knows nothing of us, inside higher-order operators: raised and fused there, T symbolic or not."""

import pytest
import torch
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import inductor_passes
from inductor_passes import _compat
from inductor_passes.graph_tools import parts
from inductor_passes.pipeline import FUSIONS, RAISES, run_passes
from tests.helpers import assert_matches_oracle, fresh_graphs, mixed
from tests.passes import moe, stock
from tests.passes.capture import computed, rewrite
from tests.passes.stock import layer, oracle


def branches(hidden, *rest):
    return torch.cond(hidden.sum() > -1e9, stock.grouped, lambda *given: given[0] * 2, (hidden, *rest))


def loop(hidden, *rest):
    def body(index, hidden):
        return index + 1, stock.grouped(hidden, *rest)

    start = torch.zeros((), dtype=torch.int64), hidden
    return while_loop(lambda index, _: index < 1, body, start)[1]


def scanned(hidden, *rest):
    def step(carry, each):
        return carry + 0, stock.grouped(each, *rest)

    return scan(step, hidden, hidden[None])[1][0]


def mapped(hidden, *rest):
    return map_over(stock.batched, hidden[None], *rest)[0]


def checkpointed(*given):
    return checkpoint(stock.grouped, *given, use_reentrant=False)


@torch.compiler.nested_compile_region
def region(*given):
    return stock.grouped(*given)


def regions(hidden, *rest):
    region(hidden + 1, *rest)
    return region(hidden, *rest)


MODELS = [branches, loop, scanned, mapped, checkpointed, regions]


def fused(model, inputs):
    """What is raised and fused in all graphs of a model, the number of refusals, and what it computes then."""
    logs = []

    def rewrite(module, _):
        for part in parts(module):
            logs.append(run_passes(part.graph, (*RAISES, *FUSIONS)))
            part.graph.owning_module.recompile()

    with torch.no_grad():
        out = torch.compile(model, backend=_compat.post_grad_backend(rewrite), fullgraph=True)(*inputs)
    kinds = [each.kind for log in logs for each in (*log.raised, *log.fused)]
    return kinds, sum(len(log.refused) for log in logs), out


@pytest.mark.parametrize(
    ("model", "dynamic"), mixed(MODELS, (False, True)), ids=lambda each: getattr(each, "__name__", each)
)
def test_a_stock_layer_is_one_operator(model, dynamic):
    inputs = layer(9)
    if dynamic:
        torch._dynamo.mark_dynamic(inputs.hidden_states, 0)
    kinds, refused, out = fused(model, inputs)
    whole = ["experts", "topk_routing", "routing_dispatch", "gather_gemm_act", "gemm_combine", "fused_moe"]
    assert kinds == whole and not refused
    assert_matches_oracle(out, oracle(inputs, stock.grouped))


@pytest.mark.slow
@pytest.mark.parametrize("model", [branches, regions], ids=lambda model: model.__name__)
def test_compiled_values(model):
    inputs = layer(9)
    with fresh_graphs(), torch.no_grad():
        out = torch.compile(model, options=inductor_passes.options(), fullgraph=True)(*inputs)
    assert_matches_oracle(out, oracle(inputs, stock.grouped))


def test_sizes_in_a_gate_are_no_masks():
    """A gate that names its number of tokens is none of ours, and is kept as it is."""

    def gate(gate_up, rows):
        tokens = rows.shape[0] // stock.TOP_K
        split = gate_up.view(tokens, stock.TOP_K, 2, stock.INTERMEDIATE)
        gated = torch.nn.functional.silu(split[:, :, 0]) * split[:, :, 1]
        return gated.reshape(tokens * stock.TOP_K, stock.INTERMEDIATE) * tokens

    inputs = layer(9, dynamic=True)
    model = stock.grouped_with(gate=gate)
    kinds, _, out = fused(model, inputs)
    assert kinds == ["experts", "topk_routing", "routing_dispatch", "gemm_combine"]
    assert_matches_oracle(out, 9 * oracle(inputs, stock.grouped))


def batched_over(function):
    """`function` over a batch of tokens."""
    return torch.vmap(function, (0, None, None, None))


def batch(inputs):
    return inputs._replace(hidden_states=torch.stack([inputs.hidden_states, inputs.hidden_states.flip(0)]))


@pytest.mark.parametrize(
    ("style", "dynamic"),
    mixed((stock.batched, stock.einsums, stock.multiplied, stock.looped), (False, True)),
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_batch_of_tokens_is_one_layer(style, dynamic):
    """In `torch.vmap` they are tokens [B, S, H], whose router gives [B, S, K]."""
    inputs = batch(layer(9))
    if dynamic and style is stock.multiplied and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 multiplies no batches of symbolic sizes in vmap")
    if dynamic:
        torch._dynamo.mark_dynamic(inputs.hidden_states, 1)
    kinds, refused, out = fused(batched_over(style), inputs)
    assert kinds[:2] == ["experts", "topk_routing"] and kinds[-1] == "fused_moe" and not refused
    flat = inputs._replace(hidden_states=inputs.hidden_states.flatten(0, 1))
    assert_matches_oracle(out.flatten(0, 1), oracle(flat, style))


@pytest.mark.parametrize("batched", ["tokens", "weights"])
def test_what_vmap_takes_apart_stays(batched):
    """`_grouped_mm` has no rule in `torch.vmap`: it is called for each element, and what it gives put together."""
    inputs, given = layer(9), batch(layer(9))
    function = batched_over(stock.grouped)
    if batched == "weights":
        given = inputs._replace(w13=torch.stack([inputs.w13] * 2), w2=torch.stack([inputs.w2, -inputs.w2]))
        function = torch.vmap(stock.grouped, (None, None, 0, 0))
    with torch.no_grad():
        result, out = computed(function, *given, passes=RAISES)
    assert not result.log.raised
    assert "no gate leads to another: aten.cat reads it" in result.reasons[0]
    for index in range(2):
        one = [
            each[index] if whole.dim() < each.dim() else each
            for each, whole in zip(given, inputs, strict=True)
        ]
        assert_matches_oracle(out[index], oracle(layer(9)._make(one), stock.grouped))


def test_values_of_our_layer_under_vmap():
    """Nothing is fused there across what the batch unrolls; nothing is wrong either."""
    tensors = moe.inputs()

    def both(tensors):
        return [torch.stack([tensor, tensor.flip(0)]) for tensor in tensors[:2]] + [*tensors[2:]]

    out = fused(torch.vmap(moe.layer, (0, 0, None, None)), both(tensors))[2]
    doubles = both([tensor.double() for tensor in tensors])
    for index in range(2):
        assert_matches_oracle(out[index], moe.layer(*(each[index] for each in doubles[:2]), *doubles[2:]))


def test_a_gate_that_names_a_shape_nobody_knows_stays():
    def activate(gate_up):
        parts = gate_up.squeeze(-1).unflatten(-1, (2, -1))
        return (parts[:, 0].sigmoid() * parts[:, 1].tanh()).unsqueeze(-1) * gate_up.shape[0]

    inputs = batch(layer(9))
    torch._dynamo.mark_dynamic(inputs.hidden_states, 1)
    (reason,) = rewrite(batched_over(stock.gathered_with(activate=activate)), *inputs, passes=RAISES).reasons
    assert reason.startswith("rows are seen as ")
