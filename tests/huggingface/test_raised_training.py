"""Stock models of transformers that train, nothing changed but the backend: forward and backward are our operators."""

import copy
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from inductor_passes import _compat
from inductor_passes.backend import moe_inductor
from inductor_passes.training import RaiseForTraining
from tests.helpers import mixed, relative_error, usually
from tests.huggingface.blocks import BLOCKS, HIDDEN, block
from tests.huggingface.families import FAMILIES, tiny_model, tokens

CASES = [("grouped_mm", torch.float32), ("batched_mm", torch.bfloat16)]
ALLOWED_FLOAT32, TIMES_STOCK = 1e-5, 2.0
RAISED = ["experts", "topk_routing"]


def raised(module, **options):
    """`module` with our pass before autograd, run as ATen; what was raised, and the operators of each graph."""
    found, graphs = [], []

    def seen(graph_module, _):
        targets = (str(node.target) for node in graph_module.graph.nodes)
        graphs.append([each.split(".")[1] for each in targets if each.startswith("moe.")])

    before_autograd = RaiseForTraining(note=lambda log: found.extend(each.kind for each in log.raised))
    torch._dynamo.reset()
    backend = _compat.post_grad_backend(seen, before_autograd)
    return torch.compile(module, backend=backend, fullgraph=True, **options), found, graphs


def grads(module, inputs, run):
    """Gradients of the input, where it has any, and of all parameters, by name."""
    module.zero_grad()
    inputs = inputs.clone().requires_grad_(inputs.is_floating_point())
    out = run(inputs)
    out = out.logits if hasattr(out, "logits") else out[0] if isinstance(out, tuple) else out
    weights = torch.linspace(0.5, 1.5, out.numel()).view(out.shape)
    (out.float() * weights).sum().backward()
    found = {name: each.grad.clone() for name, each in module.named_parameters() if each.grad is not None}
    return found if inputs.grad is None else {**found, "input": inputs.grad}


def check(module, inputs, dtype):
    """Within the contract: of float32, or of what stock itself is off in bfloat16."""
    rounded = module.to(dtype).train()
    cast = inputs.to(dtype) if inputs.is_floating_point() else inputs
    exact = copy.deepcopy(rounded).float()
    expected = grads(exact, cast.float() if inputs.is_floating_point() else cast, exact)
    stock = grads(rounded, cast, rounded)
    compiled, found, graphs = raised(rounded)
    ours = grads(rounded, cast, compiled)
    assert found == RAISED
    assert graphs[0] == ["topk_routing", "build_dispatch", "gather_gemm", "act_gemm_combine"]
    biases = sum("experts" in name and "bias" in name for name in ours)  # whose gradients are products too
    assert graphs[1].count("grouped_gemm") == 2 + biases // 2 and "gather_gemm" not in graphs[1]
    assert graphs[1].count("grouped_gemm_weight_backward") == 2 + biases
    assert ours.keys() == expected.keys() and any("experts" in name for name in ours)
    for name, gradient in ours.items():
        allowed = ALLOWED_FLOAT32
        if dtype != torch.float32:
            allowed = TIMES_STOCK * relative_error(stock[name], expected[name].double())
        assert relative_error(gradient, expected[name].double()) <= allowed, name


# The forward's test has all families.
OFTEN = list(zip(("gpt_oss", "deepseek_v3"), CASES, strict=True))


@pytest.mark.parametrize(("family", "case"), usually(itertools.product(FAMILIES, CASES), OFTEN), ids=str)
def test_models(family, case):
    implementation, dtype = case
    model = tiny_model(family, torch.float32, implementation, use_cache=False, num_hidden_layers=1)
    check(model, tokens(2, 9), dtype)


@pytest.mark.parametrize(("family", "case"), mixed(BLOCKS, CASES), ids=str)
def test_blocks(family, case):
    implementation, dtype = case
    inputs = torch.randn(2, 32, HIDDEN, generator=torch.Generator().manual_seed(0))
    check(block(family, implementation), inputs, dtype)


def test_inside_autocast():
    module = block("dots1", "grouped_mm").train()
    inputs = torch.randn(2, 32, HIDDEN, generator=torch.Generator().manual_seed(0))

    def cast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return module(x).float()

    expected, stock = grads(module, inputs, module), grads(module, inputs, cast)
    compiled, found, _ = raised(cast)
    ours = grads(module, inputs, compiled)
    assert found == RAISED
    for name, gradient in ours.items():
        error, of_stock = (relative_error(each, expected[name].double()) for each in (gradient, stock[name]))
        assert gradient.dtype == torch.float32 and 1e-4 < error <= TIMES_STOCK * of_stock, name


def test_checkpoints_of_transformers():
    """Inside compile, around each layer: what is run again is the router and the first product."""
    model = tiny_model("mixtral", torch.float32, "grouped_mm", use_cache=False).train()
    ids = tokens(2, 9)
    expected = grads(model, ids, model)
    compiled, found, graphs = raised(lambda x: checkpoint(model, x, use_reentrant=False))
    for name, gradient in grads(model, ids, compiled).items():
        assert relative_error(gradient, expected[name].double()) <= ALLOWED_FLOAT32, name
    assert sorted(found) == sorted(2 * RAISED)
    assert graphs[1].count("gather_gemm") == 2 and "act_gemm_combine" in graphs[0]


def test_around_compile_a_checkpoint_runs_forward_again():
    module = block("dots1", "grouped_mm").train()
    inputs = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0))
    expected = grads(module, inputs, module)
    compiled, found, graphs = raised(module)
    ours = grads(module, inputs, lambda x: checkpoint(compiled, x, use_reentrant=False))
    assert found == RAISED and len(graphs) == 2
    for name, gradient in ours.items():
        assert relative_error(gradient, expected[name].double()) <= ALLOWED_FLOAT32, name


def test_the_backend_alone_trains_alike():
    """From first to last, with Inductor's code and its caches: twice, so that the second may come out of them."""
    module = block("dots1", "grouped_mm").train()
    inputs = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0))
    expected = grads(module, inputs, module)
    for _ in range(2):
        torch._dynamo.reset()
        ours = grads(module, inputs, torch.compile(module, backend=moe_inductor, fullgraph=True))
        for name, gradient in ours.items():
            assert relative_error(gradient, expected[name].double()) <= ALLOWED_FLOAT32, name
