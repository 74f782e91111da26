"""Models of transformers whose experts are shared by ranks, against the stock model of one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from layers import huggingface
from layers.parallel import ExpertParallel, ExpertTensorParallel
from tests.layers.parallel.world import on_ranks

STYLES = {
    "default": None,
    "allgather": ExpertParallel("allgather"),
    "alltoall": ExpertParallel("alltoall", max_tokens=10),
    "tensor": ExpertTensorParallel(),
}
SAME_TOKENS = ("default", "tensor")
styles = pytest.mark.parametrize("style", STYLES)


def models(family, style):
    from tests.huggingface.families import tiny_model

    stock = tiny_model(family)
    model, mesh = copy.deepcopy(stock), init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    report = huggingface.patch(model, mesh=mesh, style=STYLES[style])
    assert len(report.experts) == 2
    return stock, model


def tokens_of(rank, style):
    """[2, 5]."""
    seed = 0 if style in SAME_TOKENS else rank
    return torch.randint(0, 96, (2, 5), generator=torch.Generator().manual_seed(seed))


@on_ranks(2)
@styles
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_logits(family, style):
    stock, model = models(family, style)
    ids = tokens_of(dist.get_rank(), style)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
    part = model.model.layers[0].mlp.experts.down_proj
    assert isinstance(part, DTensor)
    assert part.to_local().numel() * 2 == stock.model.layers[0].mlp.experts.down_proj.numel()


@on_ranks(2)
@pytest.mark.parametrize("style", ["alltoall", "tensor"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_gradients(family, style):
    stock, model = models(family, style)
    ranks = [0] if style in SAME_TOKENS else [0, 1]
    model(tokens_of(dist.get_rank(), style)).logits.square().sum().backward()
    for rank in ranks:
        stock(tokens_of(rank, style)).logits.square().sum().backward()
    for name, parameter in model.model.layers[1].mlp.experts.named_parameters():
        expected = stock.model.layers[1].mlp.experts.get_parameter(name).grad
        torch.testing.assert_close(
            parameter.grad.full_tensor().view(expected.shape), expected, rtol=1e-3, atol=1e-3, msg=name
        )


@on_ranks(2)
def test_generated_tokens():
    stock, model = models("qwen3_moe", "default")
    prompt = tokens_of(0, "default")
    found, expected = (
        each.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0) for each in (model, stock)
    )
    assert torch.equal(found, expected)


@on_ranks(2)
def test_patched_first_and_sharded_by_name():
    from tests.huggingface.families import tiny_model

    stock = tiny_model("qwen3_moe")
    model, mesh = copy.deepcopy(stock), init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    experts = "model.layers.*.mlp.experts"
    with pytest.raises(
        TypeError, match=r"module=Qwen3MoeExperts: expected FusedMoE, .* or experts of a patched model"
    ):
        parallelize_module(model, mesh, {experts: ExpertParallel()})
    huggingface.patch(model)
    parallelize_module(model, mesh, {experts: ExpertParallel("allreduce")})
    huggingface.patch(model, mesh=mesh, save_for_backward="inputs")  # changes the option alone
    ids = tokens_of(0, "default")
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(
        ValueError, match=r"model.layers.0.mlp.experts is sharded over a mesh: expected experts that"
    ):
        huggingface.unpatch(model)


def test_a_style_needs_a_mesh():
    from tests.huggingface.families import tiny_model

    with pytest.raises(
        ValueError, match="mesh=None with style=ExpertParallel: expected a mesh of one dimension"
    ):
        huggingface.patch(tiny_model("qwen3_moe"), style=ExpertParallel())
