"""Layers that know nothing of us, where a backward follows: raised before autograd, or left exactly as they were."""

import copy
from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import moe_ops
from inductor_passes import _compat
from inductor_passes.training import RaiseForTraining, raise_layers
from tests.helpers import RELATIVE_NORM, relative_error
from tests.passes import stock
from tests.passes.stock import layer

ALLOWED = RELATIVE_NORM[torch.float32]
RAISED = ["experts", "topk_routing"]
FORWARD = ["topk_routing", "build_dispatch", "gather_gemm", "act_gemm_combine"]


class Run:
    """Compiles a function with our pass before autograd, and runs forward and backward as ATen."""

    def __init__(self):
        self.raised, self.refused, self.graphs = [], [], []
        self.backend = _compat.post_grad_backend(self.seen, RaiseForTraining(note=self.note))

    def note(self, log):
        self.raised += [each.kind for each in log.raised]
        self.refused += [each.reason for each in log.refused]

    def seen(self, module, _):
        targets = (str(node.target) for node in module.graph.nodes)
        self.graphs.append([each.split(".")[1] for each in targets if each.startswith("moe.")])

    def compile(self, function, **options):
        torch._dynamo.reset()
        return torch.compile(function, backend=self.backend, fullgraph=True, **options)


def grads(function, args, dynamic=False):
    """The output, and the gradient of everything, in order."""
    args = [each.detach().clone().requires_grad_() for each in args]
    if dynamic:
        torch._dynamo.mark_dynamic(args[0], 0)
    out = function(*args)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights).sum().backward()
    return [out.detach(), *(each.grad for each in args)]


def exact(function, args):
    """Of eager float64. Memory that nobody writes is zero in it: no gradient times it is NaN."""
    with mock.patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros):
        return grads(function, [each.double() for each in args])


def check(function, args, **options):
    """As eager float64, within float32."""
    run, right = Run(), exact(function, args)
    for ours, expected in zip(grads(run.compile(function, **options), args), right, strict=True):
        assert (ours is None) == (expected is None)
        assert ours is None or relative_error(ours, expected) <= ALLOWED
    return run


def float32(tokens=9):
    return layer(tokens, torch.float32)


def test_forward_and_backward_are_our_operators():
    run = check(stock.batched, float32())
    assert run.raised == RAISED and not run.refused
    assert run.graphs[0] == FORWARD
    products = ["grouped_gemm", "grouped_gemm_weight_backward"]
    assert sorted(each for each in run.graphs[1] if "gemm" in each) == sorted(2 * products)  # none twice


def test_any_number_of_tokens_is_one_graph():
    run = Run()
    compiled = run.compile(stock.batched)
    for tokens in (5, 9, 14):
        args = float32(tokens)
        pairs = zip(grads(compiled, args, dynamic=True), exact(stock.batched, args), strict=True)
        assert all(relative_error(ours, expected) <= ALLOWED for ours, expected in pairs)
    assert run.raised == RAISED and len(run.graphs) == 2


def test_a_checkpoint_runs_the_first_product_again_and_no_other():
    run = check(lambda *args: checkpoint(stock.batched, *args, use_reentrant=False), float32())
    assert run.raised == RAISED
    assert run.graphs[0] == FORWARD
    assert {*FORWARD[:3]} <= {*run.graphs[1]} and "act_gemm_combine" not in run.graphs[1]


def test_a_number_of_experts_that_is_not_known_is_left():
    run, args = Run(), float32()
    grads(run.compile(stock.batched, dynamic=True), args)
    assert not run.raised and "a number of experts that is not known" in run.refused[0]


def test_what_changes_in_place_before_is_read_as_it_was():
    def function(x, *weights):
        rows = torch.zeros_like(x)
        rows.add_(x)
        return stock.batched(rows, *weights) * 2

    assert check(function, float32()).raised == RAISED


def test_what_changes_in_place_later_is_left():
    def function(*args):
        out = stock.batched(*args)
        more = out + 1
        out.mul_(3)
        return out + more

    run = check(function, float32())
    assert not run.raised and len(run.refused) == 1 and "is changed in place later" in run.refused[0]
    assert run.graphs == [[], []]


def test_what_has_no_gradient_has_none_raised():
    """Views of one tensor, one with a gradient and one without, are one tensor to a graph without gradients."""

    def detached(x, *weights):
        return stock.batched(x.detach(), *weights) + stock.batched(x, *weights)

    def viewed(x, *weights):
        with torch.no_grad():
            flat = x.view(x.shape)
        return stock.batched(flat, *weights) + stock.batched(x.view(x.shape), *weights)

    def written(x, *weights):
        rows = torch.zeros(x.shape, dtype=x.dtype)
        rows[:, :40] = x[:, :40]
        return stock.batched(rows.detach(), *weights) + stock.batched(x, *weights)

    for function in (detached, viewed, written):
        assert check(function, float32()).raised


def test_where_gradients_stop_inside_a_layer_it_is_left():
    def function(x, router, w13, w2):
        weights, ids = stock.softmax_router(F.linear(x, router))
        rows = x[:, None].expand(-1, stock.TOP_K, -1).reshape(-1, x.shape[1])
        gate_up = torch.bmm(w13[ids.flatten()], rows.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            activated = stock.swiglu(gate_up)
        out = torch.bmm(w2[ids.flatten()], activated.unsqueeze(-1)).squeeze(-1)
        return (out.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1) + x + w13.sum()

    run = check(function, float32())
    assert not run.raised and "gradients stop at" in run.refused[0]


@pytest.mark.parametrize("is_cast", [False, True])
def test_where_gradients_stop_behind_a_router_the_layer_is_left(is_cast):
    """A cast to the dtype that weights have is no part of ATen's graph, and the router in front is replaced first."""

    def function(x, router, w13, w2):
        weights, ids = F.linear(x, router).softmax(-1).topk(stock.TOP_K)
        with torch.no_grad():
            weights = weights.to(x.dtype).sqrt() if is_cast else weights.sqrt()
        hidden = stock.swiglu(torch.einsum("th,tkih->tki", x, w13[ids]))
        return torch.einsum("tki,tkhi,tk->th", hidden, w2[ids], weights) + router.sum()

    run = check(function, float32())
    assert not run.raised and "gradients stop at" in run.refused[0]


@pytest.mark.parametrize("expert", [0, 3])
def test_where_gradients_stop_for_one_expert_of_a_loop_it_is_left(expert):
    def function(x, router, w13, w2):
        (weights, ids), total = stock.softmax_router(F.linear(x, router)), torch.zeros_like(x)
        for each in range(stock.EXPERTS):
            rows = x.detach() if each == expert else x
            out = F.linear(stock.swiglu(F.linear(rows, w13[each])), w2[each])
            total = total + out * (weights * (ids == each)).sum(-1, keepdim=True).to(x.dtype)
        return total

    run = check(function, float32())
    assert not run.raised and "reads something else than the others" in run.refused[0]


def test_zeros_like_the_tokens_stop_no_gradients():
    """torchtitan's sum, and gate and up apart: raised, though no kernel takes both in."""

    def function(x, router, w13, w2):
        weights, ids = stock.softmax_router(F.linear(x, router))
        experts, rows = ids.flatten(), x[:, None].expand(-1, stock.TOP_K, -1).reshape(-1, x.shape[1], 1)
        gate, up = (torch.bmm(w[experts], rows).squeeze(-1) for w in w13.chunk(2, dim=1))
        out = torch.bmm(w2[experts], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1) * weights.view(-1, 1)
        return torch.zeros_like(x).index_add(0, torch.arange(ids.numel()) // stock.TOP_K, out)

    run = check(function, float32())
    assert run.raised == RAISED and not any("gradients stop" in reason for reason in run.refused)
    assert run.graphs[0].count("gather_gemm") == 1  # of both weights


@pytest.mark.parametrize("gate", [F.silu, F.softplus, F.mish, F.elu, F.celu], ids=lambda gate: gate.__name__)
def test_gradients_of_large_numbers_in_a_gate_are_finite(gate):
    """Those of `x / (1 + exp(-x))`, term by term, are not; a gate of two products is written out."""

    def function(x, router, w13, w2):
        weights, ids = stock.softmax_router(F.linear(x, router))
        experts, rows = ids.flatten(), x[:, None].expand(-1, stock.TOP_K, -1).reshape(-1, x.shape[1], 1)
        left, up = (torch.bmm(w[experts], rows).squeeze(-1) for w in w13.chunk(2, dim=1))
        out = torch.bmm(w2[experts], (gate(500 * left) * up).unsqueeze(-1)).squeeze(-1)
        return (out * weights.view(-1, 1)).view(*ids.shape, -1).sum(1)

    assert check(function, float32()).raised == RAISED


def test_a_layer_without_gradients_is_left_and_its_neighbour_raised():
    def function(*args):
        with torch.no_grad():
            first = stock.batched(*args)
        return first + stock.batched(*args)

    run = check(function, float32())
    assert run.raised == RAISED and len(run.refused) == 1 and "gradients stop at" in run.refused[0]


def test_what_is_there_with_a_gradient_and_without_is_left():
    def function(x, *weights):
        rows = x.clone()
        with torch.no_grad():
            rows.mul_(2)
        return stock.batched(rows, *weights)

    run = check(function, float32())
    assert not run.raised and "with a gradient and without" in run.refused[0]


def test_a_tensor_that_a_call_gives_as_it_is_has_its_gradient():
    """Where gradients are off, too: only what is computed there has none."""

    def function(x, *weights):
        with torch.no_grad():
            same = x.to(x.dtype)
        return stock.batched(same, *weights)

    assert check(function, float32()).raised == RAISED


def test_an_input_that_changes_later_is_left():
    def function(x, *weights):
        out = stock.batched(x, *weights)
        x.add_(1)
        return out

    run, (x, *weights) = Run(), float32()
    down = weights[-1].requires_grad_()  # of all others the gradient would want the input as it was
    (expected,) = torch.autograd.grad(function(x.clone(), *weights).square().sum(), down)
    (ours,) = torch.autograd.grad(run.compile(function)(x.clone(), *weights).square().sum(), down)
    assert not run.raised and "is changed in place" in run.refused[0]
    assert relative_error(ours, expected.double()) <= ALLOWED


def test_what_is_overwritten_later_is_left():
    def function(x, *weights):
        rows = torch.zeros(x.shape, dtype=x.dtype)
        rows[:, :40] = x[:, :40]
        out = stock.batched(rows, *weights)
        rows[:, 40:] = 1
        return out + rows.sum()

    run, (x, *weights) = Run(), float32()
    down = weights[-1].requires_grad_()
    (expected,) = torch.autograd.grad(function(x, *weights).square().sum(), down)
    (ours,) = torch.autograd.grad(run.compile(function)(x, *weights).square().sum(), down)
    assert not run.raised and "aten.copy cannot be computed again" in run.refused[0]
    assert relative_error(ours, expected.double()) <= ALLOWED


def test_a_product_that_is_read_besides_is_not_run_twice():
    def function(x, router, w13, w2):
        weights, ids = stock.softmax_router(F.linear(x, router))
        rows = x[:, None].expand(-1, stock.TOP_K, -1).reshape(-1, x.shape[1])
        gate_up = torch.bmm(w13[ids.flatten()], rows.unsqueeze(-1)).squeeze(-1)
        out = torch.bmm(w2[ids.flatten()], stock.swiglu(gate_up).unsqueeze(-1)).squeeze(-1)
        return (out.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1) + gate_up.mean()

    run = check(function, float32())
    assert not run.raised and run.refused and run.graphs == [[], []]


def graphs_of(function, args):
    """The graphs that Dynamo hands to a backend."""
    found = []
    torch._dynamo.reset()
    torch.compile(function, backend=lambda gm, _: found.append(gm) or gm.forward, fullgraph=True)(*args)
    return found


@pytest.mark.parametrize("what", ["no layer", "refused", "no backward", "ours"])
def test_a_graph_in_which_nothing_is_raised_stays_the_object_it_was(what):
    def changed_later(*args):
        out = stock.batched(*args)
        out.mul_(3)
        return out + out.sum()

    functions = {
        "no layer": lambda x, router, w13, w2: (
            torch.bmm(w13, w2.mT.transpose(1, 2)[:, :, :1]).sum() + x.sum()
        ),
        "refused": changed_later,
        "no backward": stock.batched,
        "ours": lambda x, router, w13, w2: moe_ops.fused_moe(
            x, F.linear(x, router), w13, w2, moe_ops.RoutingConfig(stock.TOP_K)
        ),
    }
    args = [each.requires_grad_(what != "no backward") for each in float32()]
    (module,) = graphs_of(functions[what], args)
    graph, before = module.graph, [(node, node.target, node.args) for node in module.graph.nodes]
    log = raise_layers(graph)
    assert (log is None) == (what != "refused") and not (log and log.raised)
    assert module.graph is graph
    assert [(node, node.target, node.args) for node in graph.nodes] == before


def test_a_graph_that_cannot_be_looked_into_trains_as_it_is(monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("no image")

    monkeypatch.setattr("inductor_passes.training.image_of", fails)
    run = check(stock.batched, float32())
    assert not run.raised and run.graphs == [[], []]
    assert "a training graph is not looked into" in caplog.text


def test_router_logits_are_read_besides():
    def function(x, router, w13, w2):
        logits = F.linear(x, router)
        weights, ids = stock.softmax_router(logits)
        rows = x[:, None].expand(-1, stock.TOP_K, -1).reshape(-1, x.shape[1])
        gate_up = torch.bmm(w13[ids.flatten()], rows.unsqueeze(-1)).squeeze(-1)
        out = torch.bmm(w2[ids.flatten()], stock.swiglu(gate_up).unsqueeze(-1)).squeeze(-1)
        out = (out.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)
        return out + logits.logsumexp(-1, keepdim=True) + weights.sum() * 0.5

    run = check(function, float32())
    assert run.raised == RAISED and run.graphs[0].count("topk_routing") == 1


def test_copies_of_the_pass_are_itself():
    assert copy.deepcopy(RaiseForTraining()) == RaiseForTraining()
