"""Quantised experts of which every rank has a part, against the layer of one device."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import inductor_passes
from layers import FusedMoE, LowRank, MoEConfig, WeightScale, huggingface, quantise_experts
from layers.parallel import ExpertTensorParallel, ParallelConfig
from layers.parallel.layout import experts_layout, transformers_layout
from layers.weights.scales import WEIGHTS
from layers.weights.shard import TensorShard
from moe_ops import Activation
from tests.helpers import relative_error
from tests.layers.parallel.world import on_ranks

E, K, H, I = 5, 2, 64, 128
BLOCK = 16, 32
FORMATS = {
    "float8 tensors": (WeightScale.TENSOR, torch.float8_e4m3fn, False),
    "int8 channels": (WeightScale.CHANNEL, torch.int8, False),
    "float8 groups": (WeightScale.GROUP, torch.float8_e4m3fn, False),
    "float8 blocks": (WeightScale.BLOCK, torch.float8_e4m3fn, False),
    "MXFP4": (WeightScale.GROUP, torch.uint8, False),
    "NVFP4": (WeightScale.GROUP, torch.float4_e2m1fn_x2, False),
    "int4": (WeightScale.GROUP, torch.uint4, False),
    "int4 with zero points": (WeightScale.GROUP, torch.uint4, True),
    "int4 channels with zero points": (WeightScale.CHANNEL, torch.uint4, True),
}
ACTIVATIONS = {
    "gated": Activation("silu"),
    "in turns": Activation("swigluoai"),
    "no gate": Activation("relu2"),
}


def make_layer(form, rows="exact", activation="gated") -> FusedMoE:
    torch.manual_seed(3)
    layer = FusedMoE(MoEConfig(E, K, H, I, activation=ACTIVATIONS[activation], has_bias=True))
    with torch.no_grad():
        layer.w2_bias.normal_()
    kind, dtype, zero_points = FORMATS[form]
    quantise_experts(layer, kind, BLOCK, dtype=dtype, rows=rows, zero_points=zero_points)
    return layer


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def tokens_of(seed):
    """Of rank 1, where ranks have their own, none."""
    generator = torch.Generator().manual_seed(seed)
    count = 0 if seed == 1 else 9 - seed
    return torch.randn(count, H, generator=generator), torch.randn(count, E, generator=generator)


@on_ranks(2, 4)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dispatcher", ["allreduce", "allgather"])
def test_values(dispatcher, form):
    layer = make_layer(form)
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), ExpertTensorParallel(dispatcher))
    hidden, logits = tokens_of(0 if dispatcher == "allreduce" else dist.get_rank())
    with torch.no_grad():
        actual, expected = sharded(hidden, logits), layer(hidden, logits)
    assert actual.shape == expected.shape and (not len(hidden) or relative_error(actual, expected) < 1e-5)


@on_ranks(2)
@pytest.mark.parametrize("activation", ["in turns", "no gate"])
@pytest.mark.parametrize(
    "form", [form for form, (kind, *_) in FORMATS.items() if kind in (WeightScale.CHANNEL, WeightScale.GROUP)]
)
def test_other_gates(form, activation):
    layer = make_layer(form, activation=activation)
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), ExpertTensorParallel())
    with torch.no_grad():
        assert relative_error(sharded(*tokens_of(0)), layer(*tokens_of(0))) < 1e-5


@on_ranks(2)
@pytest.mark.parametrize(
    ("form", "bound"), [("float8 groups", 1e-5), ("float8 blocks", 1e-5), ("int8 channels", 0.02)]
)
def test_quantised_rows(form, bound):
    """Of blocks they are those of one device; a part of a row has a finer scale than the row."""
    layer = make_layer(form, rows="quantised")
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), ExpertTensorParallel())
    with torch.no_grad():
        error = relative_error(sharded(*tokens_of(0)), layer(*tokens_of(0)))
    assert error < bound
    assert form != "int8 channels" or error > 1e-5


@on_ranks(2)
@pytest.mark.parametrize("form", FORMATS)
def test_what_is_where(form):
    layer = make_layer(form)
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), ExpertTensorParallel())
    rank, kind = dist.get_rank(), FORMATS[form][0]
    has_rows, has_columns = kind is not WeightScale.TENSOR, kind in (WeightScale.GROUP, WeightScale.BLOCK)
    for w13, w2 in zip(*[iter((*WEIGHTS, *layer.quantisation.parameters))] * 2, strict=True):
        is_cut = (True, True) if w13 == "w13_weight" else (has_rows, has_columns)
        is_cut = (False, False) if w13 == "w13_weight_scale_2" else is_cut
        rows, columns = (sharded.get_parameter(name) for name in (w13, w2))
        of_rows, of_columns = (layer.get_parameter(name).data for name in (w13, w2))
        assert rows.placements == ((Shard(2),) if is_cut[0] else (Replicate(),))
        assert columns.placements == ((Shard(2),) if is_cut[1] else (Replicate(),))
        of_rows = of_rows.unflatten(1, (2, -1)).chunk(2, 2)[rank] if is_cut[0] else of_rows
        of_columns = of_columns.chunk(2, 2)[rank] if is_cut[1] else of_columns
        assert torch.equal(rows.to_local().float(), of_rows.float())
        assert torch.equal(columns.to_local().float(), of_columns.float())


@on_ranks(2)
@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_is_read_by_parts(form):
    layer = make_layer(form)
    sharded = parallelize_module(make_layer(form), mesh_of_all(), ExpertTensorParallel())
    for name in (*WEIGHTS, *layer.quantisation.parameters):
        parameter, whole = sharded.get_parameter(name), layer.get_parameter(name).data
        wanted = parameter.to_local().clone()
        parameter.to_local().zero_()
        parts = zip(("w1", "w3"), whole.chunk(2, dim=1)) if name.startswith("w13") else [("w2", whole)]
        for shard_id, tensors in parts:
            for expert in range(E):
                sharded.weight_loader(parameter, tensors[expert], f"experts.{name}", shard_id, expert)
        assert wanted.float().any() and torch.equal(parameter.to_local(), wanted)


@on_ranks(2)
@pytest.mark.parametrize("form", ["float8 blocks", "int4 with zero points"])
def test_state_dicts_casts_and_compiled_code(form):
    layer = make_layer(form)
    sharded = parallelize_module(make_layer(form), mesh_of_all(), ExpertTensorParallel())
    state = {name: each.clone() for name, each in sharded.state_dict().items()}
    assert state.keys() == layer.state_dict().keys()
    for each in sharded.parameters():
        each.data.to_local().zero_()
    sharded.load_state_dict(state)
    function = torch.compile(sharded, fullgraph=True, options=inductor_passes.options())
    with torch.no_grad():
        assert relative_error(function(*tokens_of(0)), layer(*tokens_of(0))) < 1e-5
        sharded.to(torch.bfloat16), layer.to(torch.bfloat16)
        hidden, logits = (each.bfloat16() for each in tokens_of(0))
        assert relative_error(sharded(hidden, logits), layer(hidden, logits)) < 1e-2


@on_ranks(2)
@pytest.mark.parametrize("form", ["float8 tensors", "int4 with zero points"])
def test_gradients_of_tokens(form):
    layer = make_layer(form)
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), ExpertTensorParallel())
    gradients = []
    for each in (layer, sharded):
        hidden, logits = (tensor.requires_grad_() for tensor in tokens_of(0))
        each(hidden, logits).square().sum().backward()
        gradients.append((hidden.grad, logits.grad, each.get_parameter("w2_bias").grad))
    for expected, actual in zip(*gradients, strict=True):
        actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
        assert relative_error(actual, expected) < 1e-4


@on_ranks(4)
def test_a_parallel_config():
    """Two ranks with tokens of their own, of which two share each."""
    layer = make_layer("float8 blocks")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sharded = ParallelConfig(dp=2, tp=2, ep=False).parallelize(copy.deepcopy(layer), mesh)
    hidden, logits = tokens_of(2 * (dist.get_rank() // 2))
    with torch.no_grad():
        assert relative_error(sharded(hidden, logits), layer(hidden, logits)) < 1e-5


@on_ranks(4)
def test_blocks_are_not_cut():
    """128 columns in four parts have 32 each."""
    layer = make_layer("int8 channels")
    torch.manual_seed(3)
    for kind, block, dtype in (
        (WeightScale.GROUP, (1, 64), torch.uint4),
        (WeightScale.BLOCK, (64, 32), torch.int8),
        (WeightScale.BLOCK, (32, 64), torch.int8),
    ):
        layer = FusedMoE(MoEConfig(E, K, H, I))
        quantise_experts(layer, kind, block, dtype=dtype)
        expected = r"intermediate_size=128 of quantised experts in 4 parts: expected a multiple of 64 in each"
        with pytest.raises(ValueError, match=expected):
            parallelize_module(layer, mesh_of_all(), ExpertTensorParallel())
        assert not isinstance(layer.w2_weight, DTensor)


def test_groups_of_half_a_part_are_shared_out():
    """In 4 bits 128 columns are 64 bytes, and 64 columns are two groups of them."""
    layer = FusedMoE(MoEConfig(E, K, H, I))
    quantise_experts(layer, WeightScale.GROUP, (1, 64), dtype=torch.uint4)
    layout = experts_layout(layer)
    assert layout.parameters["w2_weight_scale"].dim == 2 and layout.unit == 64


@on_ranks(2)
def test_adapters_of_models_in_parts():
    from tests.huggingface.families import tokens

    alone, shared = (stock_model("stored") for _ in range(2))
    huggingface.patch(alone)
    huggingface.patch(shared, mesh=mesh_of_all(), style=ExpertTensorParallel())
    logits = []
    for model in (alone, shared):
        adapters = huggingface.add_adapters(model, 1, 2, torch.zeros(10, dtype=torch.int32))
        for lora in adapters.values():
            generator = torch.Generator().manual_seed(1)
            (E, _, H), (_, _, I) = lora.experts.shapes[0], lora.experts.shapes[1]
            shapes = ((E, 2, H), (E, 2 * I, 2)), ((E, 2, I), (E, H, 2))
            changes = (LowRank(*(torch.randn(each, generator=generator) for each in pair)) for pair in shapes)
            lora.load_adapter(0, *changes, scaling=0.1)
        with torch.no_grad():
            logits.append(model(tokens(2, 5)).logits)
    assert relative_error(*reversed(logits)) < 1e-4


def test_bytes_are_not_cut():
    layer = FusedMoE(MoEConfig(E, K, H, 10))
    quantise_experts(layer, WeightScale.CHANNEL, dtype=torch.uint4)
    assert experts_layout(layer).unit == 2


def stock_model(how, block=BLOCK):
    from tests.huggingface.families import tiny_model
    from tests.huggingface.test_fp4_experts import fp4_model
    from tests.huggingface.test_quantised_experts import _quantised

    if how == "stored in 4 bits":
        return fp4_model(inter=64)
    if how == "stored":
        return _quantised(tiny_model("qwen3_moe"), block=(16, 16))
    model = tiny_model("qwen3_moe" if how == "float8 tensors" else "gpt_oss")
    huggingface.patch(model)
    kind, dtype, zero_points = FORMATS[how]
    huggingface.quantise_experts(model, kind, block, dtype=dtype, rows="exact", zero_points=zero_points)
    return model


@on_ranks(2)
@pytest.mark.parametrize(
    "how",
    [
        "stored",
        "stored in 4 bits",
        "float8 tensors",
        "int8 channels",
        "float8 groups",
        "int4 channels with zero points",
        "NVFP4",
    ],
)
def test_models_of_transformers(how):
    """gpt-oss has gate and up rows in turns, and biases; scales of tensors are for others."""
    from tests.huggingface.families import tokens

    alone = stock_model(how)
    shared = copy.deepcopy(alone)
    huggingface.patch(alone)
    huggingface.patch(shared, mesh=mesh_of_all(), style=ExpertTensorParallel())
    experts = shared.model.layers[0].mlp.experts
    assert experts.down_proj.placements == (Shard(2),)
    with torch.no_grad():
        assert relative_error(shared(tokens(2, 5)).logits, alone(tokens(2, 5)).logits) < 1e-4


@on_ranks(2)
@pytest.mark.parametrize("kind", ["modelopt", "gptq of whole rows"])
def test_models_as_they_are_published(kind, tmp_path):
    """Gate and up rows of NVFP4 have a scale each, of which every rank has both."""
    from tests.huggingface.families import tokens
    from tests.huggingface.publishing import publish, read

    if dist.get_rank() == 0:
        publish(tmp_path, "qwen3_moe", kind)
    dist.barrier()
    alone, shared = read(tmp_path), read(tmp_path)
    huggingface.patch(shared, mesh=mesh_of_all(), style=ExpertTensorParallel())
    assert shared.model.layers[0].mlp.experts.down_proj.to_local().shape == (8, 64, 8)
    with torch.no_grad():
        assert relative_error(shared(tokens(2, 5)).logits, alone(tokens(2, 5)).logits) < 1e-5


def test_blocks_of_stock_models_are_not_cut():
    layout = layout_of("stored")
    assert layout.unit == 16
    layout.expect_parts(TensorShard(1, 2))
    with pytest.raises(
        ValueError, match="intermediate_size=32 of quantised experts in 4 parts: expected a multiple"
    ):
        layout.expect_parts(TensorShard(0, 4))
    assert layout_of("int8 channels").unit == 1
    assert layout_of("float8 groups", (1, 20)).unit == 20  # 32 columns have two of these


def layout_of(how, block=BLOCK):
    return transformers_layout(stock_model(how, block).model.layers[0].mlp.experts)


def test_plans_name_scales():
    model = stock_model("stored")
    rules = huggingface.tp_plan(model, ExpertTensorParallel())
    below = {name.rpartition(".")[2]: kind for name, kind in rules.items() if ".experts." in name}
    assert below["gate_up_proj_scale_inv"] == below["gate_up_proj"] == "packed_colwise"
    assert below["down_proj_scale_inv"] == below["down_proj"] == "rowwise"
