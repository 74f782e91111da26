"""Quantised experts that ranks share, against the layer of one device."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import inductor_passes
from layers import FusedMoE, MoEConfig, WeightScale, huggingface, quantise_experts
from layers.parallel import ExpertParallel, ExpertRanks, ExpertRebalancer, styles
from layers.parallel.layout import experts_layout
from layers.weights.scales import SCALES, WEIGHTS
from tests.helpers import relative_error
from tests.layers.parallel import exchanges
from tests.layers.parallel.world import on_ranks

E, K, H, I = 8, 2, 32, 16
STYLES = {
    "allreduce": ExpertParallel("allreduce"),
    "allgather": ExpertParallel("allgather"),
    "alltoall": ExpertParallel("alltoall"),
    "alltoall_static": ExpertParallel("alltoall", max_tokens=9),
    "auto": ExpertParallel(max_tokens=9),
}
KINDS = {
    WeightScale.TENSOR: torch.float8_e4m3fn,
    WeightScale.CHANNEL: torch.int8,
    WeightScale.GROUP: torch.float8_e4m3fn,
    WeightScale.BLOCK: torch.float8_e4m3fn,
}


def make_layer(kind, **options) -> FusedMoE:
    torch.manual_seed(3)
    layer = FusedMoE(MoEConfig(E, K, H, I, has_bias=True, **options))
    quantise_experts(layer, kind, (8, 16), dtype=KINDS[kind])
    return layer


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def tokens_of(rank):
    """Rank 1 has none."""
    generator = torch.Generator().manual_seed(rank)
    count = 0 if rank == 1 else 9 - rank
    return torch.randn(count, H, generator=generator), torch.randn(count, E, generator=generator)


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_values(style, kind):
    _expect_values(make_layer(kind), style)


@on_ranks(2)
@pytest.mark.parametrize(
    ("style", "dtype", "zero_points"),
    [
        ("allreduce", torch.uint8, False),
        ("allgather", torch.uint4, False),
        ("alltoall", torch.uint4, False),
        ("allgather", torch.uint4, True),
        ("alltoall", torch.float4_e2m1fn_x2, False),
    ],
    ids=str,
)
def test_values_in_4_bits(style, dtype, zero_points):
    _expect_values(make_layer_in_4_bits(dtype, zero_points), style)


def make_layer_in_4_bits(dtype, zero_points) -> FusedMoE:
    torch.manual_seed(3)
    layer = FusedMoE(MoEConfig(E, K, H, 32, has_bias=True))
    columns = 16 if dtype == torch.float4_e2m1fn_x2 else 32
    quantise_experts(layer, WeightScale.GROUP, (1, columns), dtype=dtype, zero_points=zero_points)
    return layer


def _expect_values(layer, style):
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), STYLES[style])
    hidden, logits = tokens_of(0 if style == "allreduce" else dist.get_rank())
    with torch.no_grad():
        actual, expected = sharded(hidden, logits), layer(hidden, logits)
    assert actual.shape == expected.shape and (not len(hidden) or relative_error(actual, expected) < 1e-5)
    for name in (*WEIGHTS, *layer.quantisation.parameters):
        part, whole = sharded.get_parameter(name), layer.get_parameter(name)
        assert (
            part.placements == (Shard(0),)
            and part.to_local().numel() * dist.get_world_size() == whole.numel()
        )
        assert torch.equal(part.to_local(), whole.data.chunk(dist.get_world_size())[dist.get_rank()])


@on_ranks(2)
@pytest.mark.parametrize("kind", [*KINDS, None], ids=str)
def test_experts_change_places_with_their_scales(kind):
    """And with their zero points, of integers of 4 bits."""
    layer = make_layer_in_4_bits(torch.uint4, True) if kind is None else make_layer(kind)
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), ExpertParallel("allreduce"))
    rebalancer = ExpertRebalancer(sharded)
    hidden, logits = tokens_of(0)
    with torch.no_grad():
        expected = layer(hidden, logits)
        rebalancer.place("round_robin")
        assert not sharded.balancing.is_initial()
        assert relative_error(sharded(hidden, logits), expected) < 1e-5


@on_ranks(2)
def test_scales_that_are_powers_of_two_change_places():
    from tests.huggingface.families import tiny_model, tokens
    from tests.huggingface.test_quantised_experts import _quantised

    model = _quantised(tiny_model("qwen3_moe"), scale_fmt="ue8m0")
    huggingface.patch(model, mesh=mesh_of_all(), style=ExpertParallel("allreduce"))
    assert model.model.layers[0].mlp.experts.down_proj_scale_inv.dtype == torch.float8_e8m0fnu
    rebalancer, given = ExpertRebalancer(model), tokens(2, 5)
    with torch.no_grad():
        expected = model(given).logits
        rebalancer.place("round_robin")
        assert relative_error(model(given).logits, expected) < 1e-4


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        (lambda: FusedMoE(MoEConfig(E, K, H, I), dtype=torch.bfloat16), torch.bfloat16),
        (lambda: make_layer(WeightScale.CHANNEL), torch.float32),
        (lambda: make_layer_in_4_bits(torch.uint4, True), torch.float32),
    ],
    ids=["bfloat16", "8 bits", "4 bits"],
)
def test_buffers_of_symmetric_memory_hold_any_tokens(layer, dtype, monkeypatch):
    """Weights of 8 bits do not say what tokens are."""
    monkeypatch.setattr(styles, "fault_of_symmetric_memory", lambda mesh: None)
    monkeypatch.setattr(styles, "SymmetricPrepareAndFinalize", lambda mesh, owners, **sizes: sizes)
    layout, owners = experts_layout(layer()), ExpertRanks(E, 2)
    assert styles.chosen_dispatcher(None, layout, owners, 9) == "symmetric"
    made = ExpertParallel("symmetric", max_tokens=9)._exchange(None, layout, owners)
    assert (made["dtype"], made["max_tokens"], made["hidden_size"]) == (dtype, 9, H)


def test_a_plan_names_their_scales():
    from tests.huggingface.families import tiny_model
    from tests.huggingface.test_quantised_experts import _quantised

    rules = huggingface.tp_plan(_quantised(tiny_model("qwen3_moe")), ExpertParallel("allreduce"))
    assert rules["model.layers.*.mlp.experts.down_proj_scale_inv"] == "grouped_gemm"


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_read_by_parts(kind):
    layer = make_layer(kind)
    sharded = parallelize_module(make_layer(kind), mesh_of_all(), ExpertParallel("allreduce"))
    for name in (*WEIGHTS, *SCALES):
        parameter, whole = sharded.get_parameter(name), layer.get_parameter(name).data
        parameter.to_local().zero_()
        parts = zip(("w1", "w3"), whole.chunk(2, dim=1)) if name.startswith("w13") else [("w2", whole)]
        for shard_id, tensors in parts:
            for expert in range(E):
                sharded.weight_loader(parameter, tensors[expert], f"experts.{name}", shard_id, expert)
        assert torch.equal(parameter.to_local(), whole.chunk(2)[dist.get_rank()])


@on_ranks(2)
@pytest.mark.parametrize("dispatcher", ["allreduce", "alltoall"])
@pytest.mark.parametrize("how", ["dynamic", "static", "in 4 bits"])
def test_models_of_transformers(how, dispatcher):
    from tests.huggingface.families import tiny_model, tokens
    from tests.huggingface.test_fp4_experts import fp4_model
    from tests.huggingface.test_quantised_experts import _quantised

    is_fp4 = how == "in 4 bits"
    alone = fp4_model() if is_fp4 else _quantised(tiny_model("qwen3_moe"), activation_scheme=how)
    if how == "static":
        for layer in alone.model.layers:
            layer.mlp.experts.gate_up_proj_activation_scale.data.copy_(torch.linspace(1e-3, 2e-2, 8))
            layer.mlp.experts.down_proj_activation_scale.data.copy_(torch.linspace(2e-3, 1e-4, 8))
    shared = copy.deepcopy(alone)
    huggingface.patch(alone)
    huggingface.patch(shared, mesh=mesh_of_all(), style=ExpertParallel(dispatcher))
    scale = shared.model.layers[0].mlp.experts.down_proj_scale_inv
    assert isinstance(scale, DTensor) and scale.to_local().shape[0] == 4
    given = tokens(2, 5, seed=0 if dispatcher == "allreduce" else dist.get_rank())
    with torch.no_grad():
        assert relative_error(shared(given).logits, alone(given).logits) < 1e-4


@on_ranks(2)
@pytest.mark.parametrize(
    ("dtype", "zero_points"),
    [(torch.int8, False), (torch.uint8, False), (torch.uint4, True), (torch.float4_e2m1fn_x2, False)],
    ids=str,
)
def test_models_that_were_quantised(dtype, zero_points):
    """gpt-oss has biases, and transposed weights before."""
    from tests.huggingface.families import tiny_model, tokens

    alone = tiny_model("gpt_oss")
    huggingface.patch(alone)
    how = {"dtype": dtype, "rows": "exact", "zero_points": zero_points}
    huggingface.quantise_experts(alone, WeightScale.GROUP, (1, 32), **how)
    shared = copy.deepcopy(alone)
    huggingface.patch(shared, mesh=mesh_of_all())
    experts = shared.model.layers[0].mlp.experts
    zeros = ["down_proj_zero_point", "gate_up_proj_zero_point"] if zero_points else []
    for name in ("gate_up_proj", "gate_up_proj_scale_inv", "down_proj_bias", *zeros):
        assert getattr(experts, name).to_local().shape[0] == 4
    with torch.no_grad():
        assert relative_error(shared(tokens(2, 5)).logits, alone(tokens(2, 5)).logits) < 1e-5
    with pytest.raises(ValueError, match="experts is sharded"):
        huggingface.quantise_experts(shared, WeightScale.GROUP, (1, 32), dtype=dtype)


def test_what_a_quantised_model_is_for_ranks():
    from tests.huggingface.families import INTER, tiny_model

    model = tiny_model("gpt_oss")
    huggingface.patch(model)
    experts = model.model.layers[0].mlp.experts
    before = experts_layout(experts)
    huggingface.quantise_experts(model, WeightScale.GROUP, (1, 32), dtype=torch.uint8)
    after = experts_layout(experts)
    assert (after.hidden_size, after.intermediate_size) == (before.hidden_size, INTER)
    assert set(after.parameters) - set(before.parameters) == {"gate_up_proj_scale_inv", "down_proj_scale_inv"}


@on_ranks(2)
def test_compiled_whole():
    layer = make_layer(WeightScale.BLOCK)
    sharded = parallelize_module(copy.deepcopy(layer), mesh_of_all(), STYLES["alltoall_static"])
    function = torch.compile(sharded, fullgraph=True, options=inductor_passes.options())
    hidden, logits = (each[: 5 + dist.get_rank()] for each in tokens_of(0))
    with torch.no_grad():
        assert relative_error(function(hidden, logits), layer(hidden, logits)) < 1e-5


@on_ranks(2)
def test_state_dicts_and_casts():
    layer = make_layer(WeightScale.GROUP)
    sharded = parallelize_module(make_layer(WeightScale.GROUP), mesh_of_all(), ExpertParallel("allreduce"))
    state = {name: each.clone() for name, each in sharded.state_dict().items()}
    assert state.keys() == layer.state_dict().keys()
    for each in sharded.parameters():
        each.data.to_local().zero_()
    sharded.load_state_dict(state)
    hidden, logits = tokens_of(0)
    with torch.no_grad():
        assert relative_error(sharded(hidden, logits), layer(hidden, logits)) < 1e-5
        sharded.to(torch.bfloat16), layer.to(torch.bfloat16)
        assert (
            sharded.w13_weight.dtype == torch.float8_e4m3fn
            and sharded.w13_weight_scale.dtype == torch.float32
        )
        hidden, logits = hidden.bfloat16(), logits.bfloat16()
        assert relative_error(sharded(hidden, logits), layer(hidden, logits)) < 1e-2


@on_ranks(2)
@pytest.mark.parametrize("name", ["all_gather", "padded", "variable"])
@pytest.mark.parametrize("is_batched", [False, True], ids=["standard", "batched"])
def test_modular_kernels(is_batched, name):
    whole = exchanges.make_layer(exchanges.config())
    kernel = exchanges.ALL[name](whole)
    kernel = exchanges.batched(kernel) if is_batched else kernel
    for layer in (whole, kernel.experts.layer):
        quantise_experts(layer, WeightScale.BLOCK, (8, 8))
    hidden, logits = (each[: 5 + dist.get_rank()] for each in (torch.randn(6, 16), torch.randn(6, 8)))
    with torch.no_grad():
        assert relative_error(kernel(hidden, logits), whole(hidden, logits)) < 1e-5
