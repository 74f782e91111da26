"""`FusedMoE.weight_loader`: every shard, kind and placement, against slices of the whole matrices."""

import pytest
import torch
from torch import nn

from layers import FusedMoE, MoEConfig, TensorShard, WeightScale, add_weight_scales, determine_expert_map
from layers.weights.scales import WeightScale as Kind

E, H, I = 6, 10, 12


def _config(activation="silu", **options):
    return MoEConfig(E, 2, H, I, activation=activation, **options)


def _whole(seed=0):
    """Gate, up [E, I, H] and down [E, H, I] of all experts."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(E, I, H, generator=generator), torch.randn(E, I, H, generator=generator),
            torch.randn(E, H, I, generator=generator))  # fmt: skip


def _load_all(experts, gate, up, down, stem="weight"):
    w13, w2 = getattr(experts, f"w13_{stem}"), getattr(experts, f"w2_{stem}")
    loaded = []
    for expert in range(E):
        for param, tensor, shard_id in ((w13, gate, "w1"), (w13, up, "w3"), (w2, down, "w2")):
            name = f"experts.{expert}.{shard_id}.{stem}"
            loaded.append(
                experts.weight_loader(param, tensor[expert], name, shard_id, expert, return_success=True)
            )
    return loaded


def _rows(shard, size=I):
    return slice(shard.rank * size // shard.size, (shard.rank + 1) * size // shard.size)


@pytest.mark.parametrize("shard", [TensorShard(), TensorShard(0, 3), TensorShard(2, 3)])
def test_gate_and_up_are_narrowed_separately(shard):
    experts = FusedMoE(_config(), shard=shard)
    gate, up, down = _whole()
    assert all(_load_all(experts, gate, up, down))
    mine = _rows(shard)
    assert torch.equal(experts.w13_weight, torch.cat([gate[:, mine], up[:, mine]], 1))
    assert torch.equal(experts.w2_weight, down[:, :, mine])


def test_interleaved_rows():
    shard = TensorShard(1, 2)
    experts = FusedMoE(_config("swiglu_oai;interleaved=True"), shard=shard)
    gate, up, down = _whole()
    _load_all(experts, gate, up, down)
    assert torch.equal(experts.w13_weight[:, 0::2], gate[:, _rows(shard)])
    assert torch.equal(experts.w13_weight[:, 1::2], up[:, _rows(shard)])


def test_experts_without_a_gate():
    experts = FusedMoE(_config("relu2"), shard=TensorShard(1, 2))
    _, up, down = _whole()
    experts.weight_loader(experts.w13_weight, up[3], "experts.3.up_proj.weight", "w1", 3)
    experts.weight_loader(experts.w2_weight, down[3], "experts.3.down_proj.weight", "w2", 3)
    assert torch.equal(experts.w13_weight[3], up[3, 6:])
    assert torch.equal(experts.w2_weight[3], down[3, :, 6:])
    with pytest.raises(ValueError, match="shard_id='w3': activation 'relu2' has no up projection"):
        experts.weight_loader(experts.w13_weight, up[3], "experts.3.weight", "w3", 3)


def test_sharded_layers_add_up_to_the_whole_one():
    gate, up, down = _whole()
    config = _config(has_bias=True)
    biases = [torch.randn(E, I), torch.randn(E, I), torch.randn(E, H)]
    hidden, logits = torch.randn(7, H), torch.randn(7, E)
    outputs = []
    for shards in (1, 4):
        parts = []
        for rank in range(shards):
            experts = FusedMoE(config, shard=TensorShard(rank, shards))
            _load_all(experts, gate, up, down)
            _load_all(experts, *biases, stem="bias")
            parts.append(experts(hidden, logits).double())
        outputs.append(sum(parts))
    assert (outputs[0] - outputs[1]).norm() <= 1e-5 * outputs[0].norm()


@pytest.mark.parametrize("strategy", ["balanced", "round_robin"])
def test_experts_of_other_ranks_are_left_out(strategy):
    count, expert_map = determine_expert_map(4, 1, E, strategy)
    experts = FusedMoE(_config(), expert_map)
    gate, up, down = _whole()
    loaded = _load_all(experts, gate, up, down)
    mine = [expert for expert in range(E) if expert_map[expert] >= 0]
    assert [index // 3 for index, success in enumerate(loaded) if success] == [
        e for e in mine for _ in range(3)
    ]
    assert experts.w13_weight.shape[0] == count == len(mine)
    assert torch.equal(experts.w2_weight, down[mine])
    assert experts.weight_loader(experts.w2_weight, down[0], "weight", "w2", mine[0]) is None


@pytest.mark.parametrize("held", [slice(0, 6), slice(0, 3), slice(3, 6)])
def test_fused_checkpoints_have_all_experts_in_one_tensor(held):
    expert_map = None if held == slice(0, 6) else determine_expert_map(2, held.start // 3, E)[1]
    shard = TensorShard(1, 2)
    experts = FusedMoE(_config(), expert_map, shard=shard)
    gate, up, down = _whole()
    for param, tensor, shard_id in (
        (experts.w13_weight, gate, "w1"), (experts.w13_weight, up, "w3"), (experts.w2_weight, down, "w2"),
    ):  # fmt: skip
        assert experts.weight_loader(param, tensor, "experts.weight", shard_id, 0, return_success=True)
    assert torch.equal(experts.w13_weight, torch.cat([gate[held, _rows(shard)], up[held, _rows(shard)]], 1))
    assert torch.equal(experts.w2_weight, down[held, :, _rows(shard)])


def _transposed(shape):
    param = nn.Parameter(torch.zeros(shape), requires_grad=False)
    param.is_transposed = True
    return param


@pytest.mark.parametrize("fused", [False, True])
def test_transposed_parameters(fused):
    shard = TensorShard(2, 3)
    experts = FusedMoE(_config(), shard=shard)
    w13, w2 = _transposed((E, H, 2 * I // 3)), _transposed((E, I // 3, H))
    gate, up, down = (tensor.mT.contiguous() for tensor in _whole())
    for expert in [0] if fused else range(E):
        for param, tensor, shard_id in ((w13, gate, "w1"), (w13, up, "w3"), (w2, down, "w2")):
            experts.weight_loader(param, tensor if fused else tensor[expert], "weight", shard_id, expert)
    assert torch.equal(w13, torch.cat([gate[:, :, _rows(shard)], up[:, :, _rows(shard)]], 2))
    assert torch.equal(w2, down[:, _rows(shard)])


def test_padded_parameters_take_the_unpadded_part_of_each_rank():
    shard = TensorShard(1, 2)
    experts = FusedMoE(_config(), shard=shard)
    padded_i, padded_h = 16, 12  # 6 rows on each rank, 10 columns
    w13 = nn.Parameter(torch.full((E, 2 * padded_i, padded_h), 7.0))
    w2 = nn.Parameter(torch.full((E, padded_h, padded_i), 7.0))
    gate, up, down = _whole()
    for expert in range(E):
        experts.weight_loader(w13, gate[expert], "weight", "w1", expert)
        experts.weight_loader(w13, up[expert], "weight", "w3", expert)
        experts.weight_loader(w2, down[expert], "weight", "w2", expert)
    expected13, expected2 = torch.zeros_like(w13), torch.zeros_like(w2)
    expected13[:, :6, :H], expected13[:, 16:22, :H] = gate[:, 6:], up[:, 6:]
    expected2[:, :H, :6] = down[:, :, 6:]
    assert torch.equal(w13, expected13)
    assert torch.equal(w2, expected2)


def test_biases():
    gate, up, down = torch.randn(E, I), torch.randn(E, I), torch.randn(E, H)
    for rank in range(2):
        experts = FusedMoE(_config(has_bias=True), shard=TensorShard(rank, 2))
        assert all(_load_all(experts, gate, up, down, stem="bias"))
        mine = _rows(experts.shard)
        assert torch.equal(experts.w13_bias, torch.cat([gate[:, mine], up[:, mine]], 1))
        assert torch.equal(experts.w2_bias, down if rank == 0 else torch.zeros_like(down))


def _scale_source(kind, block):
    """Scales of the whole gate, up and down projection."""
    rows, columns = block
    shapes = {
        Kind.TENSOR: ((), (), ()),
        Kind.CHANNEL: ((I, 1), (I, 1), (H, 1)),
        Kind.GROUP: ((I, H // columns), (I, H // columns), (H, I // columns)),
        Kind.BLOCK: ((-(-I // rows), -(-H // columns)),) * 2 + ((-(-H // rows), -(-I // columns)),),
    }
    return [torch.rand(E, *shape) for shape in shapes[kind]]


@pytest.mark.parametrize("shard", [TensorShard(), TensorShard(1, 2)])
@pytest.mark.parametrize("kind", list(WeightScale))
def test_scales_of_every_kind(kind, shard):
    block = (3, 2)
    experts = FusedMoE(_config(), shard=shard)
    add_weight_scales(experts, kind, block)
    assert experts.w13_weight_scale.quant_method == experts.w2_weight_scale.quant_method == kind.value
    gate, up, down = _scale_source(kind, block)
    assert all(_load_all(experts, gate, up, down, stem="weight_scale"))
    w13, w2 = experts.w13_weight_scale, experts.w2_weight_scale
    if kind is Kind.TENSOR:
        assert torch.equal(w13, torch.stack([gate, up], 1)) and torch.equal(w2, down)
        return
    mine = _rows(shard, gate.shape[1])
    assert torch.equal(w13, torch.cat([gate[:, mine], up[:, mine]], 1))
    assert torch.equal(w2, down if kind is Kind.CHANNEL else down[:, :, _rows(shard, down.shape[2])])
    assert "w13_weight_scale" in experts.state_dict()


def test_blocks_at_the_edges_are_smaller():
    experts = FusedMoE(_config())
    add_weight_scales(experts, WeightScale.BLOCK, (7, 7))
    gate, up, down = torch.rand(3, E, 2, 2)
    assert all(_load_all(experts, gate, up, down, stem="weight_scale"))
    assert torch.equal(experts.w13_weight_scale, torch.cat([gate, up], 1))
    assert torch.equal(experts.w2_weight_scale, down)


def test_group_scales_of_w2_that_are_not_sharded():
    experts = FusedMoE(_config(), shard=TensorShard(1, 2))
    param = nn.Parameter(torch.zeros(E, H, I // 2), requires_grad=False)
    param.quant_method, param.load_full_w2 = "group", True
    whole = torch.rand(H, I // 2)
    experts.weight_loader(param, whole, "w2_weight_scale", "w2", 4)
    assert torch.equal(param[4], whole)


def test_single_values_and_group_indices():
    experts = FusedMoE(_config(), shard=TensorShard(1, 2))
    scale, index = nn.Parameter(torch.zeros(E)), nn.Parameter(torch.zeros(E, 5, dtype=torch.int32), False)
    assert experts.weight_loader(scale, torch.tensor([2.5]), "experts.1.input_scale", "w1", 1, True)
    assert scale.tolist() == [0, 2.5, 0, 0, 0, 0]
    apart = nn.Parameter(torch.zeros(E, 2))  # gate and up have an input scale each
    for shard_id, value in (("w1", 3.0), ("w3", 4.0)):
        experts.weight_loader(apart, torch.tensor(value), "experts.1.input_scale", shard_id, 1)
    assert apart[1].tolist() == [3, 4] and not apart[0].any()
    experts.weight_loader(index, torch.arange(10, dtype=torch.int32), "experts.2.g_idx", "w2", 2)
    experts.weight_loader(index, torch.arange(5, dtype=torch.int32), "experts.3.g_idx", "w1", 3)
    assert index[2].tolist() == [5, 6, 7, 8, 9] and index[3].tolist() == [0, 1, 2, 3, 4]


def test_packed_integers():
    experts = FusedMoE(_config(), shard=TensorShard(1, 2))
    packed = nn.Parameter(torch.zeros(E, I, H // 2, dtype=torch.uint8), requires_grad=False)
    whole = torch.randint(0, 255, (I, H // 2), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"has shape \(12,\): expected a dimension -2"):
        experts.weight_loader(packed, whole[:, 0], "experts.0.gate_proj.weight_packed", "w1", 0)
    experts.weight_loader(packed, whole, "experts.0.gate_proj.weight_packed", "w1", 0)
    assert torch.equal(packed[0, :6], whole[6:])


def test_names_that_are_no_weight_are_declined():
    experts = FusedMoE(_config())
    assert (
        experts.weight_loader(experts.w13_weight, torch.ones(I, H), "experts.0.alpha", "w1", 0, True) is False
    )


def test_the_mapping_names_every_matrix_of_every_physical_expert():
    mapping = FusedMoE.make_expert_params_mapping(
        "gate_proj", "down_proj", "up_proj", 2, num_redundant_experts=3
    )
    assert mapping[:3] == [
        ("experts.w13_", "experts.0.gate_proj.", 0, "w1"),
        ("experts.w2_", "experts.0.down_proj.", 0, "w2"),
        ("experts.w13_", "experts.0.up_proj.", 0, "w3"),
    ]
    assert len(mapping) == 15
    held = {physical: name.split(".")[1] for _, name, physical, _ in mapping}
    assert held == {0: "0", 1: "1", 2: "0", 3: "1", 4: "0"}  # redundant ones from the first again


def test_a_loop_over_a_checkpoint_fills_replicas_too():
    """What model loaders do with the two methods: physical experts 4 and 5 are copies of 0 and 1."""
    expert_map = torch.tensor([-1, 1, -1, -1, 0, 2], dtype=torch.int32)
    experts = FusedMoE(_config(), expert_map)
    logical = 4
    gate, up, down = _whole()
    checkpoint = {
        f"mlp.experts.{expert}.{name}.weight": tensor[expert]
        for expert in range(logical)
        for name, tensor in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))
    }
    parameters = {f"mlp.experts.{name}": param for name, param in experts.named_parameters()}
    mapping = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", logical, 2)
    for name, tensor in checkpoint.items():
        for param_name, weight_name, expert_id, shard_id in mapping:
            if weight_name in name:
                experts.weight_loader(
                    parameters[name.replace(weight_name, param_name)], tensor, name, shard_id, expert_id
                )
    assert torch.equal(experts.w13_weight, torch.cat([gate, up], 1)[[0, 1, 1]])
    assert torch.equal(experts.w2_weight, down[[0, 1, 1]])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"shard_id": "w13"}, ValueError, "shard_id='w13': expected one of 'w1', 'w2', 'w3'"),
        ({"expert_id": E}, ValueError, rf"expert_id={E}: expected an expert in \[0, {E}\)"),
        ({"expert_id": "0"}, ValueError, r"expert_id='0': expected an expert in \[0, 6\)"),
        ({"expert_id": True}, ValueError, r"expert_id=True: expected an expert in \[0, 6\)"),
        ({"name": None}, TypeError, "weight_name=None: expected str, got NoneType"),
        ({"weight": [1.0]}, TypeError, r"loaded_weight=\[1\.0\]: expected Tensor, got list"),
        ({"expert_id": -1}, ValueError, rf"expert_id=-1: expected an expert in \[0, {E}\)"),
        ({"weight": torch.ones(I, H + 1)}, ValueError, r"shape \(12, 11\): expected \(12, 10\)"),
        ({"weight": torch.ones(H, I)}, ValueError, r"shape \(10, 12\): expected \(12, 10\)"),
        ({"weight": torch.ones(I)}, ValueError, r"loaded weight has shape \(12,\): expected \(12, 10\)"),
        ({"weight": torch.ones(E + 1, I, H)}, ValueError, r"shape \(7, 12, 10\): expected 6 experts"),
        (
            {"weight": torch.ones(I, H, dtype=torch.int8)},
            TypeError,
            "has dtype torch.int8: expected torch.float32",
        ),
        (
            {"name": "experts.0.weight_scale"},
            ValueError,
            "quant_method=None of the scale: expected one of 'tensor'",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, error, message):
    experts = FusedMoE(_config())
    before = experts.w13_weight.clone()
    values = {
        "weight": torch.ones(I, H),
        "name": "experts.0.weight",
        "shard_id": "w1",
        "expert_id": 0,
        **change,
    }
    with pytest.raises(error, match=message):
        experts.weight_loader(
            experts.w13_weight, values["weight"], values["name"], values["shard_id"], values["expert_id"]
        )
    assert torch.equal(experts.w13_weight, before)


def test_shards_and_blocks_that_do_not_divide_are_named():
    with pytest.raises(ValueError, match="intermediate_size=12: expected a multiple of the shard's size=5"):
        FusedMoE(_config(), shard=TensorShard(0, 5))
    with pytest.raises(ValueError, match=r"rank=2: expected a rank in \[0, size=2\)"):
        TensorShard(2, 2)
    with pytest.raises(TypeError, match=r"rank=1\.0: expected an int"):
        TensorShard(1.0, 2)
    with pytest.raises(TypeError, match="shard=2: expected TensorShard"):
        FusedMoE(_config(), shard=2)
    experts = FusedMoE(_config(), shard=TensorShard(0, 2))
    for block in ((4, 2), (2, 4)):
        with pytest.raises(ValueError, match="of the shard is 6: expected a multiple of the block's 4"):
            add_weight_scales(experts, WeightScale.BLOCK, block)
    with pytest.raises(ValueError, match="hidden_size is 10: expected a multiple of the block's 4"):
        add_weight_scales(experts, WeightScale.GROUP, (1, 4))
    with pytest.raises(TypeError, match="kind='channel': expected WeightScale"):
        add_weight_scales(experts, "channel")
    with pytest.raises(TypeError, match=r"module=Linear\(.*: expected FusedMoE, got Linear"):
        add_weight_scales(nn.Linear(2, 2), WeightScale.TENSOR)
    for block in ((128,), 128, (1, 2, 3)):
        with pytest.raises(ValueError, match=r"block=.*: expected \(rows, columns\)"):
            add_weight_scales(experts, WeightScale.BLOCK, block)
    with pytest.raises(ValueError, match="block columns=0: expected at least 1"):
        add_weight_scales(experts, WeightScale.BLOCK, (2, 0))
    interleaved = FusedMoE(_config("swiglu_oai;interleaved=True"))
    add_weight_scales(interleaved, WeightScale.BLOCK, (3, 2))
    with pytest.raises(ValueError, match=r"activation\.interleaved=True: expected False"):
        interleaved.weight_loader(interleaved.w13_weight_scale, torch.ones(4, 5), "weight_scale", "w1", 0)
