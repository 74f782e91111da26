"""Every family of the installed transformers: as a config, as a block, from disk and back to the byte."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from layers import MoEBlock, MoEConfig, checkpoint_state_dict, load_checkpoint
from layers.families import FAMILIES as EXPRESSED, REFUSED
from tests.helpers import RELATIVE_NORM, relative_error
from tests.layers.weights.families import (
    CASES,
    FAMILIES,
    is_installed,
    moe_blocks,
    run,
    tiny_config,
    tiny_model,
)

MODELS = Path(transformers.__file__).parent / "models"
IS_NEWEST = is_installed("flint")


def _hidden(scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_compute_what_stock_ones_do(family):
    model = tiny_model(family)
    block = list(moe_blocks(model).values())[-1]
    ours = MoEBlock.from_hf(block, model.config)
    for scale in (1.0, 4.0):  # the larger one reaches the activations' clamps
        expected = run(block, _hidden(scale))
        error = relative_error(run(ours, _hidden(scale)), expected)
        assert error <= RELATIVE_NORM[torch.float32], f"inputs times {scale}"


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "dbrx"])
def test_blocks_of_half_precision(family):
    model = tiny_model(family).bfloat16()
    block = list(moe_blocks(model).values())[-1]
    ours = MoEBlock.from_hf(block, model.config)
    output = run(ours, _hidden().bfloat16())
    expected = run(block.float(), _hidden().bfloat16().float())  # the same rounded weights
    assert output.dtype == torch.bfloat16
    assert (
        ours.experts.e_score_correction_bias is None
        or ours.experts.e_score_correction_bias.dtype == torch.float32
    )
    assert relative_error(output, expected) <= RELATIVE_NORM[torch.bfloat16]


@pytest.mark.parametrize("family", ["axk2", "deepseek_v3"])
def test_experts_of_groups_left_out_where_all_scores_are_negative(family):
    """In A.X-K2 they count as zero and are chosen: both of the one group that is left out."""
    if not is_installed(family):
        pytest.skip("an older transformers")
    model = tiny_model(family, n_group=4, topk_group=3)
    block = list(moe_blocks(model).values())[-1]
    with torch.no_grad():
        block.gate.e_score_correction_bias -= 3
    assert (
        relative_error(run(MoEBlock.from_hf(block, model.config), _hidden()), run(block, _hidden()))
        <= RELATIVE_NORM[torch.float32]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_share_the_weights(family):
    model = tiny_model(family)
    block = list(moe_blocks(model).values())[-1]
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    ours = MoEBlock.from_hf(block, model.config)
    stored = {tensor.untyped_storage().data_ptr() for tensor in block.parameters()}
    copied = {n for n, p in ours.named_parameters() if p.untyped_storage().data_ptr() not in stored}
    # gate and up are two matrices in shared experts, and in DBRX's routed ones
    assert copied <= {"shared_experts.gate_up_proj.weight"} | (
        {"experts.w13_weight"} if family == "dbrx" else set()
    )
    assert ours.experts.w2_weight.data_ptr() in {tensor.data_ptr() for tensor in block.parameters()}
    after = block.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_come_and_go(family, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    blocks = moe_blocks(model)
    config = MoEConfig.from_hf(model.config)
    ours = nn.ModuleList(MoEBlock(config) for _ in blocks)
    load_checkpoint(ours, tmp_path, progress=False)
    for (name, stock), block in zip(blocks.items(), ours, strict=True):
        expected = run(stock, _hidden())
        if family.startswith("granitemoe") and block.shared_experts is not None:  # it lies beside the block
            expected = expected + run(model.get_submodule(f"{name.rpartition('.')[0]}.shared_mlp"), _hidden())
        assert relative_error(run(block, _hidden()), expected) <= RELATIVE_NORM[torch.float32]

    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    stored = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    if family == "qwen3_omni_moe_text" and not IS_NEWEST:
        return  # older versions wrote this part of the model as it is in memory
    number = re.findall(r"\d+", list(blocks)[-1])[0]
    layer = next(m[1] for name in stored if (m := re.match(rf"(.*(?:layers|blocks)\.{number})\.", name)))
    saved = checkpoint_state_dict(ours[-1], model.config, prefix=layer)
    of_block = re.compile(
        rf"{re.escape(layer)}\.(?!.*attn).*(expert|router|shared|moe|latent|gate\.w|score_correction)"
    )
    assert saved.keys() == {name for name in stored if of_block.match(name)}
    for name, tensor in saved.items():
        assert tensor.is_contiguous()
        assert _bytes(tensor) == _bytes(stored[name]), name
    save_file(saved, tmp_path / "again.safetensors")


def _bytes(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_state_dicts_in_memory_load(family):
    model = tiny_model(family)
    block = list(moe_blocks(model).values())[-1]
    expected = MoEBlock.from_hf(block, model.config)
    ours = MoEBlock(expected.config)
    load_checkpoint(ours, block.state_dict(), progress=False)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


def test_every_family_is_expressed_or_refused():
    refused_or_expressed = {**EXPRESSED, **REFUSED}
    folders = {case.folder for case in CASES.values()}
    unknown = set()
    for folder in MODELS.iterdir():
        configuration = folder / f"configuration_{folder.name}.py"
        modelling = folder / f"modeling_{folder.name}.py"
        if not configuration.is_file() or not modelling.is_file() or folder.name in folders:
            continue
        if not re.search(
            r"^class \w*(Experts|MoE|Moe|MoeBlock|SparseMLP)\(nn\.Module", modelling.read_text(), re.M
        ):
            continue
        types = set(re.findall(r'model_type = "([^"]+)"', configuration.read_text()))
        if not types & refused_or_expressed.keys():
            unknown.add(folder.name)
    assert not unknown
    assert EXPRESSED.keys() == CASES.keys(), "a family without a case"


def test_any_config_is_taken_or_refused_by_name():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    answers = {"taken": 0, "refused": 0}
    for model_type in sorted(
        {*EXPRESSED, *REFUSED, "qwen3_vl_moe", "llama4", "kimi_k25", "gemma4", "step3p7"}
    ):
        if model_type not in CONFIG_MAPPING:
            continue
        config = CONFIG_MAPPING[model_type]()
        try:
            assert isinstance(MoEConfig.from_hf(config), MoEConfig)
            answers["taken"] += 1
        except ValueError as error:
            assert re.search(r"\w+: [\w.]+=.*: ", str(error), re.DOTALL), error  # noqa: PT017
            answers["refused"] += 1
    assert answers["taken"] > 40
    assert answers["refused"] >= len([name for name in REFUSED if name in CONFIG_MAPPING])


def test_fields_that_refuse_are_fields():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = [name for name in REFUSED if name in CONFIG_MAPPING]
    assert len(known) > 10
    for name in known:
        with pytest.raises(ValueError, match=re.escape(f"{name}: {REFUSED[name].field}=")) as caught:
            MoEConfig.from_hf(CONFIG_MAPPING[name]())
        assert hasattr(CONFIG_MAPPING[name](), REFUSED[name].field), caught.value


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("mixtral", {"hidden_act": "relu"}, "mixtral: hidden_act='relu': expected one of 'silu'"),
        ("mixtral", {"router_jitter_noise": 0.1}, "mixtral: router_jitter_noise=0.1: noise"),
        ("cohere2_moe", {"shared_expert_combination_strategy": "max"}, "combination_strategy='max'"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias=True: biases of a shared expert"),
        ("deepseek_v2", {"topk_method": "noaux"}, "topk_method='noaux': expected 'greedy'"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min=0.1: a smallest sum"),
        (
            "llama4_text",
            {"num_experts_per_tok": 2},
            "num_experts_per_tok=2: weights are applied to the input",
        ),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias=True: biases"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu': expected 'relu2'"),
        ("laguna", {"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping=5.0: a cap"),
        ("step3p5", {"swiglu_limits": [7.0, 0.0]}, r"swiglu_limits=\[7.0, 0.0\]: expected one limit for all"),
        (
            "hunyuan_v1_moe",
            {"moe_topk": [1, 2]},
            r"num_experts_per_tok=\[1, 2\]: expected one int for all layers",
        ),
    ],
)
def test_fields_that_cannot_be_expressed_are_named(family, options, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig.from_hf(tiny_config(family, **options))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("deepseek_v3", {"norm_topk_prob": False, "n_shared_experts": 2}),
        ("deepseek_v2", {"topk_method": "greedy"}),
        ("axk2", {"n_group": None, "topk_group": None}),
        ("cohere2_moe", {"expert_selection_fn": "sigmoid"}),
        ("cohere2_moe", {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 0}),
        ("gpt_oss", {"swiglu_limit": 2.0}),
        ("hy_v4", {"swiglu_limit": 0.5, "hidden_act": "gelu"}),
        ("aria_text", {"hidden_act": "gelu_pytorch_tanh"}),
        ("lfm2_moe", {"norm_topk_prob": False}),
        ("lfm2_moe", {"use_expert_bias": False}),
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}),
        ("hunyuan_v1_moe", {"moe_topk": [2, 2]}),
        ("step3p5", {"swiglu_limits": [0.01] * 4, "swiglu_limits_shared": [0.0, None, 0, 0.0]}),
        ("step3p5", {"swiglu_limits": [0.0] * 4, "swiglu_limits_shared": [0.02] * 4}),
        ("dbrx", {"ffn_config": {"hidden_size": 64, "ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 3,
                                 "moe_normalize_expert_weights": None, "ffn_act_fn": {"name": "gelu"}}}),
    ],
)  # fmt: skip
def test_options_of_configs_reach_the_layer(family, options):
    if family == "gpt_oss" and not IS_NEWEST:
        pytest.skip("older versions have this limit in the code, whatever the config says")
    model = tiny_model(family, **options)
    block = list(moe_blocks(model).values())[-1]
    ours = MoEBlock.from_hf(block, model.config)
    error = relative_error(run(ours, _hidden()), run(block, _hidden()))
    assert error <= RELATIVE_NORM[torch.float32]


def test_what_is_no_config_of_a_moe_model_is_named():
    with pytest.raises(TypeError, match="config is a dict: expected a config of transformers"):
        MoEConfig.from_hf({"model_type": "mixtral"})
    with pytest.raises(ValueError, match="model_type='llama': no family of mixture-of-experts models"):
        MoEConfig.from_hf(transformers.LlamaConfig())


def test_blocks_that_are_not_their_configs_are_refused():
    block = moe_blocks(tiny_model("mixtral"))["model.layers.0.mlp"]
    with pytest.raises(ValueError, match=r"experts.gate_up_proj is \(8, 80, 64\), expected \(8, 48, 64\)"):
        MoEBlock.from_hf(block, tiny_config("qwen3_moe"))
    block.extra = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"tensors that MoEBlock cannot express: extra\.bias, extra\.weight"):
        MoEBlock.from_hf(block)
    with pytest.raises(ValueError, match="block=DbrxFFN: expected config=, the block holds none"):
        MoEBlock.from_hf(moe_blocks(tiny_model("dbrx"))["transformer.blocks.0.ffn"])
    with pytest.raises(TypeError, match="expected Module"):
        MoEBlock.from_hf("mixtral")


def test_shared_weights_train_together():
    block = moe_blocks(tiny_model("gpt_oss"))["model.layers.0.mlp"].train()
    ours = MoEBlock.from_hf(block)
    assert ours.training
    assert ours.gate.weight is block.router.weight
    assert ours.experts.w13_bias is block.experts.gate_up_proj_bias
    assert ours.experts.w13_weight.is_leaf and ours.experts.w13_weight.requires_grad
    with torch.no_grad():
        ours.experts.w2_weight.mul_(2)
    assert relative_error(run(ours, _hidden()), run(block, _hidden())) <= RELATIVE_NORM[torch.float32]


def test_frozen_weights_stay_frozen():
    block = moe_blocks(tiny_model("qwen2_moe"))["model.layers.0.mlp"].requires_grad_(False).eval()
    ours = MoEBlock.from_hf(block)
    assert not ours.training
    assert not any(parameter.requires_grad for parameter in ours.parameters())


def test_a_config_of_several_parts_gives_its_text():
    inner = MoEConfig.from_hf(transformers.Qwen3VLMoeTextConfig())
    assert MoEConfig.from_hf(transformers.Qwen3VLMoeConfig()) == inner
    assert dataclasses.replace(inner, emit="fused") != inner
