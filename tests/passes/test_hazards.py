"""capture_hazards: what stops a CUDA graph is found, our own stages are not."""

import torch

from inductor_passes.hazards import capture_hazards
from inductor_passes.pipeline import PIPELINE
from tests.passes.capture import post_grad, rewrite
from tests.passes.moe import inputs, layer


def _found(function, *args):
    with (
        torch.no_grad(),
        torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True),
    ):
        (module,) = post_grad(function, *args)
    return {hazard.target: hazard.reason for hazard in capture_hazards(module.graph)}


def test_data_dependent_nodes():
    found = _found(lambda x: (x.nonzero(), x[x > 0]), torch.ones(3))
    assert found["aten.nonzero.default"] == "its output size is known only after running it"
    assert len(found) >= 2


def test_host_reads():
    found = _found(lambda x: x * x.sum().item(), torch.ones(3, dtype=torch.int64))
    assert found["aten._local_scalar_dense.default"] == "its output is read on the host"


def test_operators_that_say_so_themselves():
    library = torch.library.Library("moe_hazards", "FRAGMENT")
    library.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    graph = torch.fx.Graph()
    graph.call_function(torch.ops.moe_hazards.unsafe.default, (graph.placeholder("x"),))
    assert [hazard.reason for hazard in capture_hazards(graph)] == ["it is tagged cudagraph_unsafe"]


def test_a_boolean_mask_write():
    found = _found(
        lambda x, m: x.index_put((m,), x.new_zeros(())), torch.ones(3), torch.ones(3, dtype=torch.bool)
    )
    assert list(found.values()) == ["Inductor does not capture it"]


def test_gathers_by_index_are_fine():
    assert _found(lambda x, i: x[i], torch.ones(3), torch.zeros(2, dtype=torch.int64)) == {}


def test_our_stages_fused_or_not_have_none():
    for passes in ((), PIPELINE, PIPELINE[4:]):
        assert capture_hazards(rewrite(layer, *inputs(dynamic=True), passes=passes).graph) == ()


def test_cpu_tensors_in_a_cuda_graph():
    graph = torch.fx.Graph()
    mode = torch._subclasses.fake_tensor.FakeTensorMode()
    with mode:
        values = torch.empty(2, device="cuda"), torch.empty(2)
    for name, value in zip(("on_gpu", "on_cpu"), values, strict=True):
        graph.placeholder(name).meta["val"] = value
    (hazard,) = capture_hazards(graph)
    assert (hazard.node, hazard.reason) == ("on_cpu", "a CPU tensor in a CUDA graph")
