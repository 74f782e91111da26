"""Adapters of a patched model's experts, whole and on ranks: against the stock model with the changed weights."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from layers import LowRank, huggingface
from layers.parallel import ExpertParallel, ExpertRebalancer, ExpertTensorParallel
from tests.layers.parallel.world import on_ranks

STYLES = {
    "allreduce": None,
    "alltoall": ExpertParallel("alltoall", max_tokens=10),
    "batches": ExpertParallel("allgather", batches=2),
    "tensor": ExpertTensorParallel(),
}
SAME_TOKENS = ("allreduce", "tensor")
E, H, I, R, SCALING = 8, 64, 32, 3, 0.5
families = pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])


def drawn(layer, adapter):
    """The change of each weight of a layer, the same on every rank."""
    generator = torch.Generator().manual_seed(10 * layer + adapter)
    shapes = ((E, R, H), (E, 2 * I, R)), ((E, R, I), (E, H, R))
    return [LowRank(*(torch.randn(shape, generator=generator) * 0.3 for shape in each)) for each in shapes]


def changed(stock, adapter):
    """A stock model whose weights have the adapter in them."""
    model = copy.deepcopy(stock)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            experts = layer.mlp.experts
            for parameter, change in zip((experts.gate_up_proj, experts.down_proj), drawn(number, adapter)):
                weight = SCALING * change.b @ change.a
                parameter += weight.mT if experts.is_transposed else weight
    return model


def model_with_adapters(family, ids, mesh=None, style=None):
    from tests.huggingface.families import tiny_model

    stock = tiny_model(family)
    model = copy.deepcopy(stock)
    huggingface.patch(model, mesh=mesh, style=style)
    for number, lora in enumerate(huggingface.add_adapters(model, 2, R, ids).values()):
        for adapter in range(2):
            lora.load_adapter(adapter, *drawn(number, adapter), scaling=SCALING)
    return stock, model


def expected_logits(stock, tokens, adapters):
    """Of sequences that each have an adapter, -1 for none."""
    models = {-1: stock, **{adapter: changed(stock, adapter) for adapter in range(2)}}
    return torch.cat([models[each](tokens[row : row + 1]).logits for row, each in enumerate(adapters)])


def tokens_of(rank):
    """[3, 3] and an adapter for each sequence."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 96, (3, 3), generator=generator), [[1, -1, 0], [0, 1, -1]][rank]


@families
def test_values(family):
    tokens, adapters = tokens_of(0)
    ids = torch.tensor(adapters).repeat_interleave(3)
    stock, model = model_with_adapters(family, ids)
    with torch.no_grad():
        expected = expected_logits(stock, tokens, adapters)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        assert (expected - stock(tokens).logits)[0].abs().max() > 0.01
    huggingface.unpatch(model)
    assert not [name for name in model.state_dict() if "lora" in name]
    torch.testing.assert_close(model(tokens).logits, stock(tokens).logits)


@on_ranks(2)
@families
@pytest.mark.parametrize("style", STYLES)
def test_values_on_ranks(family, style):
    mesh, rank = init_device_mesh("cpu", (2,)), 0 if style in SAME_TOKENS else dist.get_rank()
    tokens, adapters = tokens_of(rank)
    ids = torch.tensor(adapters).repeat_interleave(3)
    stock, model = model_with_adapters(family, ids, mesh, STYLES[style])
    with torch.no_grad():
        expected = expected_logits(stock, tokens, adapters)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    for name, parameter in model.model.layers[0].mlp.experts.moe_ops_lora.named_parameters():
        assert isinstance(parameter, DTensor)
        is_whole = style == "tensor" and name in ("a13", "b2")
        assert parameter.to_local().numel() * (1 if is_whole else 2) == parameter.numel()


@on_ranks(2)
@pytest.mark.parametrize("style", ["alltoall", "tensor"])
def test_gradients(style):
    ranks = [0] if style in SAME_TOKENS else [0, 1]
    tokens, adapters = tokens_of(ranks[-1] and dist.get_rank())
    ids = torch.tensor(adapters).repeat_interleave(3)
    _, plain = model_with_adapters("qwen3_moe", ids)
    _, model = model_with_adapters("qwen3_moe", ids, init_device_mesh("cpu", (2,)), STYLES[style])
    model(tokens).logits.square().sum().backward()
    for rank in ranks:
        tokens, adapters = tokens_of(rank)
        for layer in plain.model.layers:
            layer.mlp.experts.moe_ops_lora.adapter_ids = torch.tensor(adapters).repeat_interleave(3)
        plain(tokens).logits.square().sum().backward()
    for name, parameter in model.model.layers[0].mlp.experts.moe_ops_lora.named_parameters():
        expected = plain.model.layers[0].mlp.experts.moe_ops_lora.get_parameter(name).grad
        found = parameter.grad.full_tensor().view(expected.shape)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, msg=name)


@on_ranks(2)
def test_compiled_once_for_all_adapters():
    ids = torch.full((9,), -1)
    stock, model = model_with_adapters("qwen3_moe", ids, init_device_mesh("cpu", (2,)))
    function = torch.compile(model.model.layers[0].mlp, fullgraph=True, backend="aot_eager")
    hidden = torch.randn(3, 3, H, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for adapter in (-1, 0, 1):
            ids.fill_(adapter)
            expected = (stock if adapter < 0 else changed(stock, adapter)).model.layers[0].mlp(hidden)
            torch.testing.assert_close(function(hidden), expected, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_they_move_with_their_experts():
    tokens, adapters = tokens_of(0)
    ids = torch.tensor(adapters).repeat_interleave(3)
    stock, model = model_with_adapters("qwen3_moe", ids, init_device_mesh("cpu", (2,)))
    ExpertRebalancer(model).place("round_robin")
    with torch.no_grad():
        expected = expected_logits(stock, tokens, adapters)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        for number, layer in enumerate(model.model.layers):  # and are loaded to where these are
            for adapter in range(2):
                layer.mlp.experts.moe_ops_lora.load_adapter(adapter, *drawn(number, adapter), scaling=SCALING)
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)


@on_ranks(1)
def test_refused():
    from tests.huggingface.families import tiny_model

    ids, model = torch.full((9,), -1), tiny_model("qwen3_moe")
    with pytest.raises(
        ValueError, match=r"model has no patched experts: expected some, by layers.huggingface.patch"
    ):
        huggingface.add_adapters(model, 2, R, ids)
    with pytest.raises(TypeError, match="model=None: expected"):
        huggingface.add_adapters(None, 2, R, ids)
    huggingface.patch(model)
    huggingface.add_adapters(model, 2, R, ids)
    with pytest.raises(
        ValueError, match="module has lora: expected None, adapters are made for what a rank holds"
    ):
        huggingface.patch(model, mesh=init_device_mesh("cpu", (1,)))
    model = tiny_model("qwen3_moe")
    model.model.layers[1].mlp.experts.act_fn = torch.nn.Tanh()
    huggingface.patch(model)
    with pytest.raises(
        ValueError, match=r"model.layers.1.mlp.experts computes its activation itself: expected one"
    ):
        huggingface.add_adapters(model, 2, R, ids)
