"""Compiled layers: one graph for all identical layers, stage operators in it, no graph breaks, few recompiles."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from layers import ExpertsConfig, FusedMoE, MoEBlock, MoEConfig, RouterConfig, SharedExpertConfig
from moe_ops import RoutingConfig

H, I, E, K = 16, 24, 8, 2
BLOCK = {
    "routing": RoutingConfig(K, "sigmoid", renorm_eps=1e-20, scale=2.5),
    "router": RouterConfig(has_correction_bias=True),
    "shared_experts": SharedExpertConfig(40, "sigmoid"),
}
STAGES = [
    "topk_routing",
    "build_dispatch",
    "permute",
    "grouped_gemm",
    "gated_activation",
    "grouped_gemm",
    "combine",
]


def make_block(seed: int = 0) -> MoEBlock:
    torch.manual_seed(seed)
    return MoEBlock(MoEConfig(E, K, H, I, **BLOCK))


def unique_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


class Capture:
    """A backend that runs the graph as it is and keeps the names of our operators in it."""

    def __init__(self) -> None:
        self.operators: list[list[str]] = []

    def __call__(self, graph_module, example_inputs):
        targets = [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]
        self.operators.append([target.split(".")[1] for target in targets if target.startswith("moe.")])
        return graph_module


def aot(capture: Capture):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=lambda gm, inputs: make_boxed_func(capture(gm, inputs).forward))


@pytest.mark.parametrize("grad", [True, False])
def test_twelve_identical_layers_share_one_graph(grad):
    blocks = [make_block(seed) for seed in range(12)]
    hidden = torch.randn(2, 9, H)
    with torch.set_grad_enabled(grad):
        expected = hidden
        for block in blocks:
            expected = block(expected)
        actual = hidden
        for block in blocks:
            block.compile(backend="aot_eager", fullgraph=True)
            actual = block(actual)
    torch.testing.assert_close(actual, expected)
    assert unique_graphs() <= 2


def test_a_compiled_stack_is_one_graph_per_call():
    stack = torch.nn.Sequential(*[make_block(seed) for seed in range(3)])
    capture = Capture()
    hidden = torch.randn(2, 9, H)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(stack, backend=aot(capture), fullgraph=True)(hidden), stack(hidden)
        )
    ours = [name for name in capture.operators[0] if name in STAGES]
    shared_activations = 3
    assert len(ours) == 3 * len(STAGES) + shared_activations
    assert [ours.count(name) for name in ("topk_routing", "grouped_gemm", "combine")] == [3, 6, 3]


@pytest.mark.parametrize("dynamic", [True, None])
def test_few_recompiles_over_token_counts(dynamic):
    block = make_block()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for tokens in (7, 33, 64):
            hidden = torch.randn(tokens, H)
            torch.testing.assert_close(compiled(hidden), block(hidden))
    assert unique_graphs() <= (1 if dynamic else 2)


def test_training_is_one_graph_for_every_token_count():
    block = make_block()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (7, 33, 64):
        hidden = torch.randn(tokens, H, requires_grad=True)
        ours, expected = (torch.autograd.grad(each(hidden).sum(), hidden)[0] for each in (compiled, block))
        torch.testing.assert_close(ours, expected)
    assert unique_graphs() == 1


@pytest.mark.parametrize(
    ("emit", "expected"),
    [("auto", STAGES), ("stages", STAGES), ("fused", ["fused_moe"])],
    ids=lambda v: str(v)[:6],
)
@torch.no_grad()
def test_emit_decides_what_is_traced(emit, expected):
    module = FusedMoE(MoEConfig(E, K, H, I, emit=emit))
    capture = Capture()
    hidden, logits = torch.randn(5, H), torch.randn(5, E)
    compiled = torch.compile(module, backend=aot(capture), fullgraph=True)
    torch.testing.assert_close(compiled(hidden, logits), module(hidden, logits))
    assert capture.operators == [expected]


@torch.no_grad()
def test_shared_experts_enter_through_combine():
    capture = Capture()
    graphs = []

    def keep(graph_module, example_inputs):
        graphs.append(graph_module)
        return capture(graph_module, example_inputs)

    hidden = torch.randn(5, H)
    torch.compile(make_block(), backend=aot(keep), fullgraph=True)(hidden)
    (combine,) = [node for node in graphs[0].graph.nodes if str(node.target) == "moe.combine.default"]
    assert combine.args[3] is not None
    after = [node for node in graphs[0].graph.nodes if node.op == "call_function" and combine in node.args]
    assert not [node for node in after if "add" in str(node.target)]


@torch.no_grad()
def test_export_sees_the_stages():
    module = FusedMoE(MoEConfig(E, K, H, I))
    hidden, logits = torch.randn(5, H), torch.randn(5, E)
    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(
        module, (hidden, logits), dynamic_shapes=({0: tokens}, {0: tokens}, None)[:2]
    )
    operators = [
        str(node.target).split(".")[1] for node in program.graph.nodes if str(node.target).startswith("moe.")
    ]
    assert operators == STAGES
    more = torch.randn(9, H), torch.randn(9, E)
    torch.testing.assert_close(program.module()(*more), module(*more))


@pytest.mark.slow
def test_inductor_forward_and_backward():
    block = make_block()
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    parameters = list(block.parameters())
    for tokens in (7, 33):
        hidden = torch.randn(tokens, H)
        grads = []
        for module in (block, compiled):
            out = module(hidden)
            grads.append((out, *torch.autograd.grad(out.square().sum(), parameters)))
        for actual, expected in zip(grads[1], grads[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert unique_graphs() <= 2


def test_a_wrong_input_is_named_in_the_compile_error():
    compiled = torch.compile(
        FusedMoE(MoEConfig(E, K, H, I)), backend="aot_eager", fullgraph=True, dynamic=False
    )
    with pytest.raises(Exception, match=r"router_logits has last dimension 7: expected 8"):
        compiled(torch.randn(5, H), torch.randn(5, E - 1))
    with pytest.raises(Exception, match=r"router_logits has shape \[4, 8\]: expected \[5, 8\]"):
        compiled(torch.randn(5, H), torch.randn(4, E))


@pytest.mark.parametrize(
    "options",
    [
        {**BLOCK, "router": RouterConfig(scale_on="output")},
        {"experts": ExpertsConfig(post_norm_eps=1e-3)},
    ],
    ids=["scale", "norm"],
)
def test_layers_that_share_a_config_in_checkpoints_of_any_size(options):
    """Dynamo fails at a float that it meets as one and the same object in two checkpoints."""
    torch.manual_seed(0)
    config = MoEConfig(E, K, H, I, **options)
    blocks = [MoEBlock(config) for _ in range(2)]

    def both(hidden_states):
        for block in blocks:
            hidden_states = checkpoint(block, hidden_states, use_reentrant=False)
        return hidden_states

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (9, 5):
        hidden_states = torch.randn(2, length, H)
        torch.testing.assert_close(compiled(hidden_states), both(hidden_states))
    assert unique_graphs() == 1
