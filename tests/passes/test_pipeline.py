"""The pipeline as a whole: order, training graphs, uuid, equality, values on every node."""

import torch

import moe_ops
from inductor_passes import _compat, cache_key
from inductor_passes.pipeline import FUSIONS, PIPELINE, TRAINING_REASON, MoEPasses, is_training, run_passes
from tests.passes.capture import post_grad, rewrite
from tests.passes.moe import MANY_TOKENS, ROUTING, inputs, layer


class _Named(_compat.CustomGraphPass):
    def __init__(self, name):
        self.name, self.graphs = name, []

    def __call__(self, graph):
        self.graphs.append(graph)

    def uuid(self):
        return self.name


def test_every_node_has_a_value_and_the_graph_is_sound():
    result = rewrite(layer, *inputs(dynamic=True), passes=PIPELINE)
    result.graph.lint()
    assert all("val" in node.meta for node in result.graph.nodes if node.op == "call_function")


def test_graphs_with_a_backward_keep_what_it_reads():
    """The joint graph had raises and fusions of its own; what is left writes operators out or calls them directly."""
    first, *written_out, last = [each.name for each in PIPELINE if not each.inference_only]
    assert (first, last) == ("fuse_residual", "package_products")
    expanded = ["expand_few_slots", "expand_on_cpu", "expand_pointwise"]
    assert written_out == ["time_products", *expanded, "route_inside", "launch_programs"]


def test_on_a_cpu_a_layer_is_two_products():
    result = rewrite(layer, *inputs(MANY_TOKENS), passes=PIPELINE)
    assert result.ops() == ["grouped_gemm", "grouped_gemm"]
    assert [fusion.kind for fusion in result.log.lowered] == ["ATen"] and not result.log.kept


def test_on_a_cpu_quantised_weights_are_one_call_and_no_launch_is_looked_for():
    def quantised(hidden_states, ids, w13, w2):
        weights = torch.ones_like(ids, dtype=hidden_states.dtype)
        scaled = [moe_ops.ScaledWeight(each.to(torch.int8), each[:, :, :1].abs()) for each in (w13, w2)]
        return moe_ops.scaled_fused_experts(hidden_states, *scaled, weights, ids)

    hidden_states, logits, w13, w2 = inputs(MANY_TOKENS)
    result = rewrite(quantised, hidden_states, logits.topk(2).indices, w13, w2, passes=PIPELINE)
    assert result.ops() == ["scaled_fused_experts"] and not result.log.kept


def test_new_operator_nodes_pin_the_strides_of_their_arguments():
    # Inductor drops needs_exact_strides for nodes without this entry.
    fused = next(n for n in rewrite(layer, *inputs()).graph.nodes if "fused_moe" in str(n.target))
    args, kwargs = fused.meta["eager_input_vals"]
    assert [a.stride() for a in args[:4]] == [t.stride() for t in inputs()] and not kwargs


def _training_inputs():
    return [tensor.requires_grad_() for tensor in inputs()]


def _stages(hidden_states, logits, w13, w2):
    return moe_ops.fused_moe(hidden_states, logits, w13, w2, ROUTING, emit="stages")


def test_training_graph_is_refused_with_a_reason():
    (forward,) = post_grad(lambda *args: _stages(*args).sum(), *_training_inputs())
    assert is_training(forward.graph)
    before = [node.target for node in forward.graph.nodes]
    log = run_passes(forward.graph, FUSIONS)
    assert [refused.reason for refused in log.refused] == [TRAINING_REASON] and not log.fused
    assert [node.target for node in forward.graph.nodes] == before


def test_a_layer_that_trains_is_told_to_be_its_halves():
    (forward,) = post_grad(lambda *args: layer(*args).sum(), *_training_inputs())
    log = run_passes(forward.graph, FUSIONS)
    assert log.counts() == {"act_gemm_combine": 1} and not log.refused
    assert run_passes(forward.graph, FUSIONS, log).counts() == {"act_gemm_combine": 1}


def test_backward_graph_is_a_training_graph_too():
    graphs = []
    backend = _compat.post_grad_backend(lambda gm, _: graphs.append(is_training(gm.graph)))
    torch.compile(lambda *args: layer(*args).sum(), backend=backend)(*_training_inputs()).backward()
    assert graphs == [True, True]


def test_either_name_of_an_input_tells_a_training_graph():
    for name, expected in (("primals_1", True), ("tangents_1", True), ("arg0_1", False)):
        graph = torch.fx.Graph()
        graph.placeholder(name)
        assert is_training(graph) is expected


def test_grad_mode_without_anything_to_train_is_inference():
    assert torch.is_grad_enabled()
    (graph,) = post_grad(layer, *inputs())
    assert not is_training(graph.graph) and run_passes(graph.graph, FUSIONS).counts()["fused_moe"] == 1


def test_uuid_depends_on_sources_passes_and_chained_passes(monkeypatch):
    ours = MoEPasses().uuid()
    assert ours == MoEPasses().uuid()
    assert ours != MoEPasses(passes=PIPELINE[:2]).uuid()
    assert ours != MoEPasses((_Named("a"),)).uuid() != MoEPasses((_Named("b"),)).uuid()
    monkeypatch.setattr("inductor_passes.pipeline.source_hash", lambda: "changed")
    assert ours != MoEPasses().uuid()


def test_the_key_covers_the_operators_too(monkeypatch):
    before = cache_key.source_hash()
    assert cache_key.source_hash.__wrapped__() == before
    monkeypatch.setattr(moe_ops, "source_hash", lambda: "changed")
    assert cache_key.source_hash.__wrapped__() != before


def test_the_key_of_a_chained_pass_is_its_own_and_not_its_address():
    keys = {MoEPasses((_Named(("a", size)),)).uuid() for size in (1, 1, 2)}
    assert len(keys) == 2 and all(("a", 1) in key[-1][0] or ("a", 2) in key[-1][0] for key in keys)
    assert all(MoEPasses((_Named(nothing),)).uuid() is None for nothing in ("", None))


def test_a_pass_of_a_users_counts_by_its_source_or_its_uuid():
    class Mine:
        name, requires, inference_only = "mine", (), False

        def __init__(self, held):
            self.held = held

    class Named(Mine):
        def uuid(self):
            return "named"

    def key(*passes):
        return MoEPasses(passes=(*passes, *PIPELINE)).uuid()

    assert len({key(), key(Mine(1)), key(Mine(2)), key(Named(torch.ones(1)))}) == 4
    assert key(Mine(1)) == key(Mine(1)) and None not in (key(Mine(1)), key(Named(torch.ones(1))))
    assert key(Mine(torch.ones(1))) is None


def test_a_chained_pass_without_uuid_turns_caching_off():
    assert MoEPasses((lambda graph: None,)).uuid() is None


def test_equal_content_is_equal():
    named = _Named("a")
    assert MoEPasses((named,)) == MoEPasses((named,)) != MoEPasses()
    assert hash(MoEPasses()) == hash(MoEPasses())


def test_chained_pass_runs_once_after_ours():
    named = _Named("a")
    with torch.no_grad():
        (module,) = post_grad(layer, *inputs(MANY_TOKENS))
    MoEPasses((named,))(module.graph)
    assert named.graphs == [module.graph]
    assert sum("grouped_gemm" in str(node.target) for node in module.graph.nodes) == 2


def test_a_graph_without_moe_is_left_alone():
    with torch.no_grad():
        (module,) = post_grad(torch.sin, torch.ones(3))
    log = run_passes(module.graph, PIPELINE)
    assert not (log.fused or log.refused or log.lowered or log.kept)
