"""`load_checkpoint`: what goes where, and what is refused with the module unchanged."""

import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from layers import (
    ExpertLora,
    FusedMoE,
    MoEBlock,
    MoEConfig,
    RouterConfig,
    SharedExpertConfig,
    TensorShard,
    WeightScale,
    add_weight_scales,
    checkpoint_state_dict,
    determine_expert_map,
    load_checkpoint,
)
from tests.layers.weights.families import tiny_config, tiny_model

E, H, I = 4, 8, 6
CONFIG = MoEConfig(
    E,
    2,
    H,
    I,
    router=RouterConfig(has_correction_bias=True),
    shared_experts=SharedExpertConfig(10, "sigmoid"),
)


class _Qwen3Moe:
    """As much of a config as names a format."""

    model_type = "qwen3_moe"


def _block(seed=0, config=CONFIG, **options):
    torch.manual_seed(seed)
    block = MoEBlock(config, **options)
    if block.experts.e_score_correction_bias is not None:
        block.experts.e_score_correction_bias.normal_()
    return block


def _state(block, layer="model.layers.3"):
    return checkpoint_state_dict(block, _Qwen3Moe, prefix=layer)


def _equal(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _raises(target, source, *messages, **options):
    """That the load is refused with all of the messages, and changes nothing."""
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        load_checkpoint(target, source, progress=False, **options)
    for message in messages:
        assert re.search(message, str(caught.value)), f"{message!r} not in {caught.value}"
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_block_from_memory_and_from_a_file(dtype, tmp_path):
    block = _block(dtype=dtype)
    state = _state(block)
    save_file(state, tmp_path / "one.safetensors")
    for source in (state, tmp_path / "one.safetensors", str(tmp_path / "one.safetensors")):
        other = _block(1, dtype=dtype)
        load_checkpoint(other, source, progress=False)
        assert _equal(other, block)
        assert other.experts.e_score_correction_bias.dtype == torch.float32


def test_attention_beside_a_layer_is_not_its_business():
    block = _block()
    other = _block(1)
    load_checkpoint(
        other, {**_state(block), "model.layers.3.self_attn.q_proj.weight": torch.ones(2)}, progress=False
    )
    assert _equal(other, block)


def test_layers_are_found_by_name_or_in_order():
    source = {
        name: t
        for layer in range(3)
        for name, t in _state(_block(layer), f"model.layers.{layer + 1}").items()
    }
    in_order = nn.ModuleList(_block(9) for _ in range(3))
    load_checkpoint(in_order, source, progress=False)
    assert all(_equal(block, _block(layer)) for layer, block in enumerate(in_order))

    stage = nn.Module()  # a pipeline stage: layers 2 and 3 of the model
    stage.model = nn.Module()
    stage.model.layers = nn.ModuleDict({"2": nn.Module(), "3": nn.Module()})
    for layer in stage.model.layers.values():
        layer.feed_forward = _block(9)
    load_checkpoint(stage, source, progress=False)
    assert _equal(stage.model.layers["2"].feed_forward, _block(1))
    assert _equal(stage.model.layers["3"].feed_forward, _block(2))

    one = _block(9)
    load_checkpoint(one, source, prefix="model.layers.2", progress=False)
    assert _equal(one, _block(1))
    _raises(
        one, source, r"the module has 1 MoE layers \(''\), the checkpoint 3 \('model.layers.1.mlp', .*prefix="
    )
    _raises(one, source, "prefix='model.layers.7': expected tensors below it", prefix="model.layers.7")


def test_more_layers_than_ten_stay_in_order():
    source = {name: t for layer in range(11) for name, t in _state(_block(layer), f"l.{layer}").items()}
    blocks = nn.ModuleList(_block(50) for _ in range(11))
    load_checkpoint(blocks, source, progress=False)
    assert all(_equal(block, _block(layer)) for layer, block in enumerate(blocks))
    load_checkpoint(blocks[0], source, prefix="l.1", progress=False)  # and not l.10
    assert _equal(blocks[0], _block(1))


@pytest.mark.parametrize("shard", [TensorShard(), TensorShard(1, 2)])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai;interleaved=True"])
@pytest.mark.parametrize("placed", [False, True])
def test_experts_alone_take_their_part(shard, activation, placed, tmp_path):
    config = MoEConfig(E, 2, H, I, activation=activation, has_bias=activation != "silu")
    whole = _block(config=config)
    if config.has_bias:  # stacked, transposed, rows of gate and up alternating
        source = checkpoint_state_dict(whole, tiny_config("gpt_oss"), prefix="layers.0")
    else:
        source = checkpoint_state_dict(whole, _Qwen3Moe, prefix="layers.0")
    save_file(source, tmp_path / "model.safetensors")
    expert_map = determine_expert_map(2, 1, E)[1] if placed else None
    held = slice(2, 4) if placed else slice(0, 4)
    experts = FusedMoE(config, expert_map, shard=shard)
    load_checkpoint(experts, tmp_path, progress=False)
    rows = slice(shard.rank * I // shard.size, (shard.rank + 1) * I // shard.size)
    gate_up = whole.experts.w13_weight[held]
    pairs = (
        gate_up.unflatten(1, (-1, 2))
        if config.activation.interleaved
        else gate_up.unflatten(1, (2, -1)).mT.mT
    )
    mine = pairs[:, rows] if config.activation.interleaved else pairs[:, :, rows]
    assert torch.equal(experts.w13_weight, mine.flatten(1, 2))
    assert torch.equal(experts.w2_weight, whole.experts.w2_weight[held][:, :, rows])
    if config.has_bias:
        bias = whole.experts.w13_bias[held].unflatten(1, (-1, 2))[:, rows].flatten(1)
        assert torch.equal(experts.w13_bias, bias)
        down = whole.experts.w2_bias[held]
        assert torch.equal(experts.w2_bias, down if shard.rank == 0 else torch.zeros_like(down))


def test_what_two_parts_of_a_weight_miss_is_named_once():
    """Of a shard, what alternates is read as gate rows and as up rows."""
    config = MoEConfig(E, 2, H, I, activation="swiglu_oai;interleaved=True", has_bias=True)
    source = checkpoint_state_dict(_block(config=config), tiny_config("gpt_oss"), prefix="layers.0")
    del source["layers.0.mlp.experts.gate_up_proj_bias"]
    shard = FusedMoE(config, shard=TensorShard(1, 2))
    _raises(shard, source, r"missing \(1\):\n    layers\.0\.mlp\.experts\.gate_up_proj_bias$")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_shards_of_stacked_experts(rank, transposed):
    experts = FusedMoE(MoEConfig(E, 2, H, I), shard=TensorShard(rank, 2))
    gate, up, down = torch.randn(E, I, H), torch.randn(E, I, H), torch.randn(E, H, I)
    stored = {"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down}
    named = {f"mlp.experts.{name}": t.mT if transposed else t for name, t in stored.items()}
    load_checkpoint(experts, named, progress=False)
    rows = slice(3 * rank, 3 * rank + 3)
    assert torch.equal(experts.w13_weight, torch.cat([gate[:, rows], up[:, rows]], 1))
    assert torch.equal(experts.w2_weight, down[:, :, rows])


def test_shards_of_experts_without_a_gate():
    config = MoEConfig(E, 2, H, I, activation="relu2")
    whole, part = FusedMoE(config), FusedMoE(config, shard=TensorShard(1, 2))
    load_checkpoint(part, checkpoint_state_dict(whole, tiny_config("nemotron_h")), progress=False)
    assert torch.equal(part.w13_weight, whole.w13_weight[:, 3:])
    assert torch.equal(part.w2_weight, whole.w2_weight[:, :, 3:])


def test_rows_that_alternate_in_the_layer_only():
    block = _block(config=MoEConfig(E, 2, H, I))
    alternating = _block(config=MoEConfig(E, 2, H, I, activation="silu;interleaved=True"))
    load_checkpoint(alternating, checkpoint_state_dict(block, _Qwen3Moe), progress=False)
    rows = block.experts.w13_weight.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    assert torch.equal(alternating.experts.w13_weight, rows)


def test_a_selection_bias_in_half_precision_is_widened(tmp_path):
    block, other = _block(), _block(1)
    state = _state(block)
    name = "model.layers.3.mlp.gate.e_score_correction_bias"
    rounded = state[name].bfloat16()
    save_file({**state, name: rounded}, tmp_path / "model.safetensors")
    load_checkpoint(other, tmp_path, progress=False)
    assert torch.equal(other.experts.e_score_correction_bias, rounded.float())
    _raises(other, {**state, name: state[name].double()}, "has dtype torch.float64: expected torch.float32")


def test_stacked_experts_on_disk_either_way_round():
    for hidden, inter in ((8, 6), (8, 4), (6, 6)):  # 2I = H, and I = H: one of the two matrices tells
        config = MoEConfig(E, 2, hidden, inter)
        block = _block(config=config)
        names = {"mlp.gate.weight": block.gate.weight.data}
        for transposed in (False, True):
            w13, w2 = block.experts.w13_weight.data, block.experts.w2_weight.data
            stored = (w13.mT, w2.mT) if transposed else (w13, w2)
            other = _block(1, config=config)
            named = dict(zip(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), stored, strict=True))
            load_checkpoint(other, {**names, **named}, progress=False)
            assert _equal(other, block)


def test_ungated_experts_stacked_and_transposed():
    config = MoEConfig(E, 2, H, I, activation="relu2")
    block = _block(config=config)
    stored = {
        "mixer.gate.weight": block.gate.weight.data,
        "mixer.experts.gate_and_up_projs": block.experts.w13_weight.data.mT.contiguous(),
        "mixer.experts.down_projs": block.experts.w2_weight.data.mT.contiguous(),
    }
    other = _block(1, config=config)
    load_checkpoint(other, stored, progress=False)
    assert _equal(other, block)


def test_models_load_what_is_beside_their_experts(tmp_path):
    stock = tiny_model("qwen3_moe")
    stock.save_pretrained(tmp_path, max_shard_size="50KB")
    ours = tiny_model("qwen3_moe")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_()
    for layer in ours.model.layers:
        layer.mlp = MoEBlock.from_hf(layer.mlp)
    load_checkpoint(ours, tmp_path, progress=False)
    tokens = torch.arange(3, 12).unsqueeze(0)
    with torch.no_grad():
        expected, output = stock(tokens).logits, ours(tokens).logits
    assert (output - expected).norm() <= 1e-5 * expected.norm()
    saved = checkpoint_state_dict(ours, stock.config)
    _raises(
        ours, {**saved, "model.extra.weight": torch.ones(1)}, r"unexpected \(1\):\n    model\.extra\.weight"
    )
    del saved["model.norm.weight"], saved["lm_head.weight"]
    _raises(ours, saved, r"missing \(2\):\n    .*\n", r"    model\.norm\.weight", r"    lm_head\.weight")


def test_all_problems_are_named_at_once(tmp_path):
    block, target = _block(), _block(1)
    state = _state(block, "")
    del state["mlp.experts.0.gate_proj.weight"], state["mlp.gate.weight"]
    state["mlp.experts.4.gate_proj.weight"] = torch.ones(I, H)
    state["mlp.norm.weight"] = torch.ones(H)
    state["mlp.experts.1.up_proj.weight"] = torch.ones(I, H + 1)
    state["mlp.experts.2.down_proj.weight"] = torch.ones(H, I, dtype=torch.float16)
    messages = (
        r"missing \(2\):\n    mlp\.experts\.0\.gate_proj\.weight\n    mlp\.gate\.weight",
        r"unexpected \(2\):\n    mlp\.experts\.4\.gate_proj\.weight\n    mlp\.norm\.weight",
        r"    mlp\.experts\.1\.up_proj\.weight has shape \(6, 9\): expected \(6, 8\)",
        r"    mlp\.experts\.2\.down_proj\.weight has dtype torch\.float16: expected torch\.float32",
    )
    _raises(target, state, *messages)
    save_file(state, tmp_path / "model.safetensors")
    _raises(target, tmp_path, *messages)


def test_an_expert_that_is_missing_as_a_whole():
    block = _block(config=MoEConfig(E, 2, H, I))
    state = checkpoint_state_dict(block, tiny_config("mixtral"), prefix="layers.0")
    kept = {name: tensor for name, tensor in state.items() if ".experts.0." not in name}
    _raises(
        block,
        kept,
        r"missing \(3\):\n" + "".join(f"    .*experts.0.{name}.weight\n?" for name in ("w1", "w3", "w2")),
    )


def test_a_gate_too_many_or_too_few():
    gated, ungated = (FusedMoE(MoEConfig(E, 2, H, I, activation=name)) for name in ("silu", "relu2"))
    stored = checkpoint_state_dict(ungated, tiny_config("nemotron_h"), prefix="layers.0")
    _raises(gated, stored, r"missing \(4\):\n    layers\.0\.mixer\.experts\.0\.gate_proj\.weight")
    stored = checkpoint_state_dict(gated, _Qwen3Moe, prefix="layers.0")
    _raises(ungated, stored, r"unexpected \(4\):\n    layers\.0\.mlp\.experts\.0\.gate_proj\.weight")


def test_biases_without_a_place_are_unexpected():
    biased = _block(config=MoEConfig(E, 2, H, I, has_bias=True))
    stored = checkpoint_state_dict(biased.experts, tiny_config("gpt_oss"), prefix="layers.0")
    plain, bias = MoEBlock(MoEConfig(E, 2, H, I)).experts, r"    layers\.0\.mlp\.experts\.{}_proj_bias"
    _raises(plain, stored, r"unexpected \(2\):", bias.format("gate_up"), bias.format("down"))
    without = {name: tensor for name, tensor in stored.items() if not name.endswith("bias")}
    _raises(biased.experts, without, r"missing \(2\):", bias.format("gate_up"), bias.format("down"))
    per_expert = checkpoint_state_dict(plain, _Qwen3Moe, prefix="layers.0")
    _raises(biased.experts, per_expert, r"missing \(4\):", bias.format("gate_up"), r"unexpected \(12\):")


def test_a_checkpoint_without_experts():
    _raises(
        _block(), {"encoder.layer.0.weight": torch.ones(2)}, "no MoE layer of a known family.*encoder.layer.0"
    )


def test_what_cannot_be_loaded_into(tmp_path):
    state = _state(_block())
    with pytest.raises(ValueError, match="module=Linear: expected a MoEBlock or FusedMoE in it"):
        load_checkpoint(nn.Linear(2, 2), state)
    with pytest.raises(TypeError, match="module=None: expected Module"):
        load_checkpoint(None, state)
    with pytest.raises(ValueError, match=r"gate\.weight is on the meta device: expected memory"):
        load_checkpoint(MoEBlock(CONFIG, device="meta"), state)
    scaled = _block()
    add_weight_scales(scaled.experts, WeightScale.CHANNEL)
    _raises(
        scaled, state, "experts.w13_weight_scale, experts.w2_weight_scale: not part of a checkpoint's format"
    )
    adapted = _block()
    adapted.experts.lora = ExpertLora(adapted.experts, 1, 2, torch.zeros(1, dtype=torch.int32))
    _raises(
        adapted, state, "experts.lora.a13, .*: not part of a checkpoint's format; .*lora is None meanwhile"
    )
    with pytest.raises(TypeError, match="prefix=3: expected str"):
        load_checkpoint(_block(), state, prefix=3)
    with pytest.raises(TypeError, match="path_or_state_dict is a int: expected a path"):
        load_checkpoint(_block(), 3)
    for name, tensor, message in (("a", 3, "'a': int, expected"), (3, torch.ones(1), "3: Tensor, expected")):
        with pytest.raises(TypeError, match=f"state dict has {message} tensors by name"):
            load_checkpoint(_block(), {**state, name: tensor})
    name = sorted(state)[-1]
    _raises(
        _block(1), {**state, name: state[name].to("meta")}, f"{name}' on the meta device: expected its values"
    )


def test_a_progress_bar_counts_the_bytes(capsys):
    block = _block()
    load_checkpoint(block, _state(block))
    shown = capsys.readouterr().err
    assert "loading weights: 100%" in shown
    load_checkpoint(block, _state(block), progress=False)
    assert not capsys.readouterr().err
