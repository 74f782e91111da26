"""Models of transformers whose experts are shared by ranks, against the stock model of one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from layers import huggingface
from layers.huggingface.stacked import Part
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


def refused(model, error, match, **options):
    """Asserts that a patch raises and changes nothing."""
    before = {name: vars(each).keys() for name, each in model.named_modules()}
    implementation = model.config._experts_implementation
    with pytest.raises(error, match=match):
        huggingface.patch(model, **options)
    assert {name: vars(each).keys() for name, each in model.named_modules()} == before
    assert model.config._experts_implementation == implementation


@on_ranks(2)
def test_another_mesh_or_style_is_refused():
    from tests.huggingface.families import tiny_model

    model = tiny_model("qwen3_moe")
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "one"))
    refused(model, ValueError, r"mesh has 2 dimensions: expected one, such as mesh\['ep'\]", mesh=grid)
    one, both = grid["one"], init_device_mesh("cpu", (2,))
    huggingface.patch(model, mesh=grid["ep"], style=ExpertParallel("alltoall", max_tokens=10))
    again = {"mesh": both, "style": ExpertParallel("alltoall", max_tokens=10)}
    huggingface.patch(model, **again)
    shared = r"by which model.layers.0.mlp.experts is shared"
    was = r"expected ExpertParallel\('alltoall', Portions\(max_tokens=10, .*\)\), " + shared
    refused(
        model, ValueError, rf"mesh=ranks \[{dist.get_rank()}\]: expected ranks \[0, 1\], {shared}", mesh=one
    )
    refused(model, ValueError, rf"style=ExpertParallel\('allreduce', .*\): {was}", mesh=both)
    for style in (ExpertParallel("alltoall", max_tokens=12), ExpertTensorParallel()):
        refused(model, ValueError, rf"style={type(style).__name__}\('.*\): {was}", mesh=both, style=style)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"mesh": "ep"}, TypeError, "mesh='ep': expected DeviceMesh, got str"),
        ({"style": "ep"}, TypeError, "style='ep': expected ExpertParallel or ExpertTensorParallel, got str"),
        ({"style": ColwiseParallel()}, TypeError, r"style=ColwiseParallel\(.*\): expected ExpertParallel or"),
        (
            {"style": ExpertParallel()},
            ValueError,
            "mesh=None with style=ExpertParallel: expected a mesh of one",
        ),
    ],
)
def test_what_is_no_mesh_or_no_style(options, error, match):
    from tests.huggingface.families import tiny_model

    refused(tiny_model("qwen3_moe"), error, match, **options)


@on_ranks(2)
@pytest.mark.parametrize("style", ["default", "tensor"])
def test_state_dicts_of_stacked_experts(style):
    from tests.huggingface.loops import HIDDEN, Loop, block

    def whole(state):
        return {
            name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()
        }

    own, ours = block(Loop), block(Loop)
    huggingface.patch(ours, mesh=init_device_mesh("cpu", (2,)), style=STYLES[style], stack_experts=True)
    saved, expected = ours.state_dict(), own.state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(each, expected[name]) for name, each in whole(saved).items())
    saved = {name: each * 2 for name, each in saved.items()}
    own.load_state_dict(whole(saved))
    ours.load_state_dict(saved)
    hidden = torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(ours(hidden)[0], own(hidden)[0], rtol=1e-4, atol=1e-4)
    whole_experts = block(Loop)
    huggingface.patch(whole_experts, stack_experts=True)
    for each in (ours, whole_experts):
        with pytest.raises(RuntimeError, match=r"gate_up_proj is shared by ranks: expected assign=False"):
            each.load_state_dict(saved, assign=True)


@on_ranks(2)
def test_parameters_of_which_one_has_more_experts():
    """LongCat-Flash's first weight has those that return their input, too: ranks had parts of it that were others'."""
    from tests.coverage.cases import inputs, is_installed, stock_model

    if not is_installed("flint"):
        pytest.skip("the router of LongCat-Flash keeps its own code")
    stock, mesh = stock_model("longcat_flash"), init_device_mesh("cpu", (2,))
    model = copy.deepcopy(stock)
    fault = "gate_up_proj has 10 experts, down_proj has 8: expected as many for whole experts on ranks"
    with pytest.raises(ValueError, match=fault):
        huggingface.patch(model, mesh=mesh)
    with pytest.raises(ValueError, match=fault):
        huggingface.tp_plan(model, ExpertParallel())
    assert "model.layers.*.mlp.experts.down_proj" in huggingface.tp_plan(model, ExpertTensorParallel())
    huggingface.patch(model, mesh=mesh, style=ExpertTensorParallel())
    given = inputs("longcat_flash")
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, stock(**given).logits, rtol=1e-4, atol=1e-4)


@on_ranks(2)
@pytest.mark.parametrize("style", ["default", "tensor"])
def test_whole_parameters_in_the_place_of_parts(style):
    """Every rank would have run the first of them for its own."""
    stock, model = models("gpt_oss", style)
    model.load_state_dict(stock.state_dict(), assign=True, strict=False)
    with pytest.raises(TypeError, match=r"gate_up_proj=<.*>: expected a DTensor, for ranks share it"):
        model(tokens_of(0, style))


@on_ranks(2)
@pytest.mark.parametrize("style", ["alltoall", "tensor"])
def test_a_gathered_state_dict_is_saved(style, tmp_path):
    """By the recipe of docs/parallel.md."""
    stock, model = models("qwen3_moe", style)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    expected = stock.state_dict()
    if dist.get_rank() == 0:
        flat = {name: each.flatten(1, 2) if each.dim() == 4 else each for name, each in state.items()}
        model.save_pretrained(tmp_path, state_dict=flat)
        loaded = type(stock).from_pretrained(tmp_path).state_dict()
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(each, expected[name]) for name, each in loaded.items())
    dist.barrier()


@on_ranks(2)
@pytest.mark.parametrize("style", ["alltoall", "tensor"])
def test_parts_are_not_saved(style, tmp_path):
    """One rank raised from deep inside, the other had nothing to say."""
    _, model = models("qwen3_moe", style)
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts is shared by ranks: expected a state_dict"):
        model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    model.save_pretrained(tmp_path, False, {})  # by place
    dist.barrier()


@on_ranks(2)
@pytest.mark.parametrize("style", ["default", "tensor"])
def test_state_dicts_of_experts_in_rows(style):
    """dbrx has [E * I, H], which no view of a part of gate and up rows is."""
    from tests.coverage.cases import outputs, stock_model

    stock, mesh = stock_model("dbrx"), init_device_mesh("cpu", (2,))
    model = copy.deepcopy(stock)
    huggingface.patch(model, mesh=mesh, style=STYLES[style], stack_experts=True)
    saved, expected = model.state_dict(), stock.state_dict()
    assert saved.keys() == expected.keys()
    for name, each in saved.items():
        assert torch.equal(each.full_tensor() if isinstance(each, DTensor) else each, expected[name])
        assert "experts" not in name or each.to_local().shape[0] * 2 == each.shape[0]
    with torch.no_grad():
        for each in model.transformer.blocks[0].ffn.experts.parameters():
            each.zero_()
        model.load_state_dict(saved)
        torch.testing.assert_close(outputs(model, "dbrx")[0], outputs(stock, "dbrx")[0], rtol=1e-4, atol=1e-4)


@on_ranks(2)
@pytest.mark.parametrize(
    ("experts", "dim", "is_whole"), [(3, 2, True), (4, 2, False), (3, 0, True), (4, 0, False)]
)
def test_rows_of_any_number_of_experts(experts, dim, is_whole):
    """Parts of gate and up rows, of which ranks get whole experts where these can be shared out evenly."""
    mesh, stacked = init_device_mesh("cpu", (2,)), torch.randn(experts, 2, 4, 5)
    part = Part("w1", "gate_up_proj", (slice(None), slice(0, 4)))
    rows = part.weight(distribute_tensor(stacked, mesh, [Shard(dim)]))
    assert torch.equal(rows.full_tensor(), stacked[:, 0].flatten(0, 1))
    assert rows.placements == (Replicate() if is_whole else Shard(0),)


@on_ranks(2)
def test_blocks_that_are_patched_as_a_whole_are_not_shared():
    """Nothing was said, and every rank kept all experts."""
    from tests.coverage.cases import stock_model

    with pytest.raises(
        ValueError, match=r"layers.0.feed_forward is a Llama4TextMoe, patched as a whole: exp"
    ):
        huggingface.patch(stock_model("llama4"), mesh=init_device_mesh("cpu", (2,)))
