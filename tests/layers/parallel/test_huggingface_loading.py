"""Models of transformers of which each rank loads its part: of experts ours, of the rest by transformers' own plan."""

import collections
import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from layers import huggingface
from layers.parallel import ExpertParallel, ExpertTensorParallel
from layers.weights.files import open_checkpoint
from tests.helpers import mixed
from tests.layers.parallel.world import on_ranks

STYLES = {
    "experts": lambda: ExpertParallel("allreduce"),
    "parts": ExpertTensorParallel,
    "own_tokens": lambda: ExpertParallel("alltoall", max_tokens=10),
    "own_tokens_parts": lambda: ExpertTensorParallel("allgather"),
}
EXPERTS = ".experts."


def saved(family, folder):
    """The stock model, the same on every rank, and its files."""
    from tests.huggingface.families import tiny_model

    torch.manual_seed(5)
    stock = tiny_model(family, num_key_value_heads=4)  # some for each rank
    for name, parameter in stock.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter)
    stock.save_pretrained(folder)  # on the first rank alone
    dist.barrier()
    return stock


def planned(stock, style):
    with torch.device("meta"):
        return huggingface.tp_plan(type(stock)(stock.config), style)


def loaded(stock, folder, plan):
    from transformers.distributed import DistributedConfig

    split = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=plan)
    return type(stock).from_pretrained(folder, distributed_config=split)


class Recorded:
    """A safetensors file, or a slice of a tensor in it, that counts what is read."""

    def __init__(self, of, read, name=None) -> None:
        self.of, self.read, self.name = of, read, name

    def __getattr__(self, name):
        return getattr(self.of, name)

    def __exit__(self, *error):
        return self.of.__exit__(*error)

    def get_slice(self, name):
        return Recorded(self.of.get_slice(name), self.read, name)

    def __getitem__(self, index):
        part = self.of[index]
        self.read[self.name] += part.numel()
        return part


@contextlib.contextmanager
def elements_read():
    """By name of the stored tensor: how many elements of it this process reads."""
    from transformers import modeling_utils

    read, opened = collections.Counter(), modeling_utils.safe_open
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(
            modeling_utils, "safe_open", lambda *args, **options: Recorded(opened(*args, **options), read)
        )
        yield read


def split_memory(model):
    """Where the parts of experts' parameters lie."""
    of_experts = {name: each for name, each in model.named_parameters() if EXPERTS in name}
    return {
        name: each.to_local().data_ptr()
        for name, each in of_experts.items()
        if isinstance(each, DTensor)
        and any(placement.is_shard() or hasattr(placement, "split_factor") for placement in each.placements)
    }


@on_ranks(2, 4)
@pytest.mark.parametrize(("style", "family"), mixed(STYLES, ("qwen3_moe", "gpt_oss", "deepseek_v3")))
def test_each_rank_reads_its_part_and_no_other(family, style, tmp_path):
    size, chosen = dist.get_world_size(), STYLES[style]()
    stock = saved(family, tmp_path)
    with elements_read() as read:
        model = loaded(stock, tmp_path, planned(stock, chosen))
    memory = split_memory(model)
    huggingface.patch(model, mesh=init_device_mesh("cpu", (size,)), style=chosen)
    assert split_memory(model) == memory  # nothing was copied

    everyones = [None] * size
    dist.all_gather_object(everyones, dict(read))
    sizes = {
        name: math.prod(each.shape) for name, each in open_checkpoint(tmp_path).items() if EXPERTS in name
    }
    whole = {name for name in sizes if "parts" in style and name.endswith("down_proj_bias")}
    for name, number in sizes.items():
        assert sum(each.get(name, 0) for each in everyones) == number * (size if name in whole else 1), name
    split = sizes.keys() - whole
    assert sum(read[name] for name in split) * size == sum(sizes[name] for name in split)

    rank = dist.get_rank() if "own" in style else 0
    tokens = torch.randint(0, 96, (2, 5), generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, stock(tokens).logits, rtol=1e-4, atol=1e-4)


def model_and_its_stock(family, folder, style):
    stock = saved(family, folder)
    model = loaded(stock, folder, planned(stock, style))
    huggingface.patch(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), style=style)
    return model, stock


@on_ranks(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("style", ["experts", "parts"])
def test_what_was_loaded_by_parts_is_saved(family, style, tmp_path):
    """transformers gathers it, but for gate and up that are apart: it wrote them so, and loaded them no more."""
    before, after = tmp_path / "before", tmp_path / "after"
    stock, chosen = saved(family, before), STYLES[style]()
    model, mesh = loaded(stock, before, planned(stock, chosen)), init_device_mesh("cpu", (2,))
    huggingface.patch(model, mesh=mesh, style=chosen)
    if (family, style) == ("qwen3_moe", "parts"):
        with pytest.raises(ValueError, match="experts is shared by ranks: expected a state_dict"):
            model.save_pretrained(after)
        return
    huggingface.add_adapters(model, 1, 2, torch.zeros(1, dtype=torch.int32))
    model.save_pretrained(after)
    dist.barrier()
    expected = stock.state_dict()
    for name, each in type(stock).from_pretrained(after).state_dict().items():
        torch.testing.assert_close(each, expected[name])


@on_ranks(2)
@pytest.mark.parametrize("style", STYLES)
def test_the_rest_is_split_where_ranks_have_the_same_tokens(style, tmp_path):
    model, stock = model_and_its_stock("qwen3_moe", tmp_path, STYLES[style]())
    theirs = stock.model.layers[0].self_attn
    size = 1 if "own" in style else 2
    for name in ("q_proj", "o_proj"):
        weight = model.model.layers[0].self_attn.get_submodule(name).weight
        here = weight.to_local() if isinstance(weight, DTensor) else weight
        assert here.numel() * size == theirs.get_submodule(name).weight.numel()


@on_ranks(2)
def test_generated_tokens(tmp_path):
    model, stock = model_and_its_stock("qwen3_moe", tmp_path, ExpertParallel("allreduce"))
    prompt = torch.randint(0, 96, (2, 5), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), stock.generate(prompt, **options))


@on_ranks(2)
@pytest.mark.parametrize("style", ["experts", "parts"])
def test_gradients(style, tmp_path):
    model, stock = model_and_its_stock("qwen3_moe", tmp_path, STYLES[style]())
    tokens = torch.randint(0, 96, (2, 5), generator=torch.Generator().manual_seed(0))
    for each in (model, stock):
        each(tokens).logits.square().sum().backward()
    for name in (
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
        "mlp.gate.weight",
        "self_attn.q_proj.weight",
    ):
        grad = model.model.layers[0].get_parameter(name).grad
        expected = stock.model.layers[0].get_parameter(name).grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(grad.view(expected.shape), expected, rtol=1e-3, atol=1e-3, msg=name)


@on_ranks(2)
def test_experts_of_another_plan(tmp_path):
    stock, mesh = saved("qwen3_moe", tmp_path), init_device_mesh("cpu", (2,))
    model = loaded(stock, tmp_path, planned(stock, ExpertTensorParallel()))
    with pytest.raises(
        ValueError,
        match=r"mlp.experts.gate_up_proj was loaded by the rule 'packed_colwise': expected 'grouped_gemm', of "
        r"layers.huggingface.tp_plan\(model, ExpertParallel\(...\)\)",
    ):
        huggingface.patch(model, mesh=mesh)
    report = huggingface.patch(loaded(stock, tmp_path, "auto"), mesh=mesh)
    assert report.left[0] == ("model.layers.0.mlp.experts", "its forward has been replaced on the instance")


@on_ranks(2)
def test_another_part_than_the_style_computes_with(tmp_path):
    stock = saved("qwen3_moe", tmp_path)
    model = loaded(stock, tmp_path, planned(stock, ExpertTensorParallel()))
    huggingface.patch(model)
    with pytest.raises(ValueError, match=r"gate_up_proj is placed \(.*\): expected a part for S\(0\)"):
        parallelize_module(
            model, init_device_mesh("cpu", (2,)), {"model.layers.0.mlp.experts": ExpertParallel()}
        )


@on_ranks(4)
def test_experts_of_other_ranks(tmp_path):
    stock = saved("qwen3_moe", tmp_path)
    model = loaded(stock, tmp_path, planned(stock, ExpertParallel("allreduce")))
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with pytest.raises(
        ValueError,
        match=r"gate_up_proj is shared by ranks \[0, 1, 2, 3\]: expected \[\d, \d\], those of the mesh",
    ):
        huggingface.patch(model, mesh=halves["ep"])


def test_plans_of_what_is_none():
    from tests.huggingface.families import tiny_model

    with pytest.raises(TypeError, match="style=None: expected"):
        huggingface.tp_plan(tiny_model("qwen3_moe"), None)
    with pytest.raises(TypeError, match="model='model': expected"):
        huggingface.tp_plan("model", ExpertParallel())


def test_plans_of_experts_in_parts():
    """Gate and up rows in blocks are split apart; where they alternate, neighbours stay together."""
    from tests.huggingface.families import tiny_model

    plans = {}
    for family in ("qwen3_moe", "gpt_oss"):
        plan = huggingface.tp_plan(tiny_model(family), ExpertTensorParallel())
        plans[family] = {name.rpartition(EXPERTS)[2]: kind for name, kind in plan.items() if EXPERTS in name}
    assert plans["qwen3_moe"] == {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
    alternating = {"gate_up_proj": "rowwise", "gate_up_proj_bias": "rowwise", "down_proj": "colwise"}
    assert plans["gpt_oss"] == alternating | {"down_proj_bias": "moe_ops"}
