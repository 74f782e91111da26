"""`huggingface.quantisation`: a model that is read so is the model that `quantise_experts` makes of one read whole."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from transformers import AutoConfig, AutoModelForCausalLM

from layers import WeightScale, huggingface
from moe_ops.mxfp4 import powers
from tests.fuzz.quantised import unpacked
from tests.helpers import relative_error
from tests.huggingface.families import tiny_model, tokens
from tests.huggingface.test_quantising import APART, FORMATS, FROM_ZEROS, INT8, PAIRS, _named

MXFP4 = WeightScale.GROUP, (1, 32)
CASES = [("qwen3_moe", *each) for each in (*FORMATS, *APART)] + [
    (family, *FORMATS[index]) for family in ("gpt_oss", "deepseek_v3", "mixtral") for index in (1, 3)
]


def _read(folder, kind, block, stored, **named):
    quantisation = huggingface.quantisation(kind, block, **_named(stored), rows="exact")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantisation, **named)


def _bytes(model):
    return {name: each.detach().contiguous().view(torch.uint8) for name, each in model.named_parameters()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of each family, in bfloat16."""
    folders = {}

    def of(family):
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            tiny_model(family, torch.bfloat16).save_pretrained(folders[family])
        return folders[family]

    return of


@pytest.mark.parametrize(("family", "kind", "block", "dtype"), CASES)
def test_what_is_read_is_what_quantising_makes(saved, family, kind, block, dtype):
    whole = AutoModelForCausalLM.from_pretrained(saved(family), dtype=torch.bfloat16)
    huggingface.patch(whole)
    huggingface.quantise_experts(whole, kind, block, **_named(dtype), rows="exact")
    found = _read(saved(family), kind, block, dtype, dtype=torch.bfloat16)
    expected, actual = _bytes(whole), _bytes(found)
    assert expected.keys() == actual.keys()
    for name, each in expected.items():
        assert torch.equal(actual[name], each), name
    for (name, was), now in zip(whole.named_parameters(), found.parameters(), strict=True):
        assert (now.dtype, now.requires_grad) == (was.dtype, was.requires_grad), name
    with torch.no_grad():
        assert torch.equal(found(tokens(2, 7)).logits, whole(tokens(2, 7)).logits)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder of gpt-oss as it is published, and a stock model in float32 of the weights that it stands for."""
    folder, stock = tmp_path_factory.mktemp("published"), tiny_model("gpt_oss")
    stock.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for name in [each for each in state if each.endswith(("gate_up_proj", "down_proj"))]:
        rows, groups = state[name].shape[2], state.pop(name).shape[1] // 32
        state[f"{name}_blocks"] = torch.randint(256, (8, rows, groups, 16), dtype=PAIRS)
        state[f"{name}_scales"] = scales = torch.randint(118, 124, (8, rows, groups), dtype=PAIRS)
        numbers = unpacked(state[f"{name}_blocks"].flatten(2)).unflatten(2, (groups, 32))
        stood_for = numbers * powers(scales, torch.float32)[..., None]
        stock.get_parameter(name).data.copy_(stood_for.flatten(2).mT)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, stock


def _config(folder):
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    return config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_mxfp4_is_taken_as_it_is(published, dtype):
    folder, stock = published
    found = _read(folder, *MXFP4, PAIRS, config=_config(folder), dtype=dtype)
    state = load_file(folder / "model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        path = f"model.layers.1.mlp.experts.{name}"
        assert torch.equal(found.get_parameter(path), state[f"{path}_blocks"].flatten(2))
        assert torch.equal(found.get_parameter(f"{path}_scale_inv"), state[f"{path}_scales"])
        assert found.get_parameter(f"{path}_bias").dtype == dtype
    with torch.no_grad():
        error = relative_error(found(tokens(2, 7)).logits, stock(tokens(2, 7)).logits)
    assert error < (1e-5 if dtype == torch.float32 else 3e-2)


def test_what_comes_of_it_is_a_patched_model(saved):
    found = _read(saved("qwen3_moe"), *FORMATS[3], dtype=torch.float32)
    compiled = torch.compile(found, fullgraph=True, backend="aot_eager")
    embedded = found.get_input_embeddings()(tokens(1, 5)).detach().requires_grad_()
    found(inputs_embeds=embedded).logits.square().mean().backward()
    assert embedded.grad.norm() > 0 and found.model.layers[0].mlp.gate.weight.grad.norm() > 0
    with torch.no_grad():
        assert relative_error(compiled(tokens(2, 5)).logits, found(tokens(2, 5)).logits) < 1e-6
        assert found.generate(tokens(1, 6), max_new_tokens=3, do_sample=False).shape[1] == 9
    assert found.hf_quantizer.is_compileable and found.is_quantized
    assert '"quant_method": "moe_ops"' in found.config.to_json_string()
    assert len(huggingface.patch(found, emit="stages").experts) == 2
    with pytest.raises(ValueError, match="is quantised, of which a checkpoint says nothing"):
        found.save_pretrained("nowhere")


def test_adapters_of_the_rest_train_beside_them(saved, tmp_path):
    """QLoRA by PEFT and transformers' Trainer, saved and loaded; without adapters Trainer refuses such a model."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    model = _read(saved("qwen3_moe"), *FORMATS[3], dtype=torch.float32)
    rows = [{"input_ids": row, "labels": row} for row in tokens(2, 8)]
    how = {"max_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "save_strategy": "no"}
    named = {"args": TrainingArguments(str(tmp_path), use_cpu=True, **how), "train_dataset": rows}
    with pytest.raises(ValueError, match="purely quantized models"):
        Trainer(model=model, **named)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    before = {name: each.detach().clone() for name, each in adapted.named_parameters()}
    Trainer(model=adapted, **named).train()
    changed = {name for name, each in adapted.named_parameters() if not torch.equal(each, before[name])}
    assert changed and all("lora_" in name for name in changed)
    adapted.save_pretrained(tmp_path / "adapters")
    again = _read(saved("qwen3_moe"), *FORMATS[3], dtype=torch.float32)
    again.load_adapter(tmp_path / "adapters")
    with torch.no_grad():
        assert torch.equal(again(tokens(1, 5)).logits, adapted.eval()(tokens(1, 5)).logits)


@pytest.mark.parametrize(("dtype", "size"), [(INT8, 1), (PAIRS, 0.5), (FROM_ZEROS, 0.5)])
def test_devices_are_filled_by_what_is_stored(saved, dtype, size):
    """As `device_map` asks it of a model on the meta device."""
    kind, block, _ = next(each for each in FORMATS if each[2] == dtype)
    found = _read(saved("qwen3_moe"), kind, block, dtype)
    quantizer, path = found.hf_quantizer, "model.layers.0.mlp.experts.down_proj"
    sizes = [quantizer.param_element_size(found, n, p) for n, p in found.named_parameters() if n == path]
    assert sizes == [size]
    gate = "model.layers.0.mlp.gate.weight"
    assert quantizer.param_element_size(found, gate, found.get_parameter(gate)) == 2


@pytest.mark.parametrize(
    ("kind", "block", "dtype"), [FORMATS[0], FORMATS[4], (WeightScale.GROUP, (1, 64), PAIRS)]
)
def test_published_mxfp4_becomes_nothing_else(published, kind, block, dtype):
    folder, _ = published
    told = r"mlp\.experts\.\w+ in the checkpoint has dtype torch\.uint8: expected .* block=\(1, 32\)"
    with pytest.raises(ValueError, match=told):
        _read(folder, kind, block, dtype, config=_config(folder))


def test_numbers_that_stand_for_others_are_refused(saved, tmp_path):
    """transformers would cast float8 to bfloat16, and pass over the scales."""
    shutil.copytree(saved("qwen3_moe"), tmp_path, dirs_exist_ok=True)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file(state | {name: state[name].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=rf"{name} in the checkpoint has dtype torch\.float8_e4m3fn: expected"
    ):
        _read(tmp_path, *FORMATS[0])
    save_file(state | {"model.steps": torch.arange(3)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert _read(tmp_path, *FORMATS[0]).is_quantized  # of what is elsewhere nothing is asked


@pytest.mark.parametrize("missing", ["down_proj", "down_proj_blocks", "down_proj_scales"])
def test_weights_that_are_missing_are_refused(saved, published, missing, tmp_path):
    is_published = missing != "down_proj"
    folder = published[0] if is_published else saved("gpt_oss")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    state = load_file(tmp_path / "model.safetensors")
    del state[f"model.layers.1.mlp.experts.{missing}"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    named = {"config": _config(tmp_path)} if is_published else {}
    with pytest.raises(ValueError, match=rf"layers\.1\.mlp\.experts\.{missing} is not in the checkpoint"):
        _read(tmp_path, *MXFP4, PAIRS, **named)


def test_models_without_experts_are_refused(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts that transformers dispatches"):
        _read(tmp_path, *FORMATS[0])


@pytest.mark.parametrize("is_published", [False, True])
def test_experts_on_a_disk_are_refused(saved, published, is_published, tmp_path):
    devices = dict.fromkeys(["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"], "cpu")
    devices |= {"lm_head": "cpu", "model.layers.1": "disk"}
    named = {"device_map": devices, "offload_folder": tmp_path}
    folder = published[0] if is_published else saved("gpt_oss")
    named |= {"config": _config(folder)} if is_published else {}
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.gate_up_proj is offloaded: expected"):
        _read(folder, *MXFP4, PAIRS, **named)


def test_experts_that_cannot_run_on_our_operators_are_refused(saved, monkeypatch):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    monkeypatch.setattr(Qwen3MoeExperts, "forward", lambda self, *args: args[0])
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts cannot run on our operators: .* forward"):
        _read(saved("qwen3_moe"), *FORMATS[0])


def test_parts_of_experts_are_refused(saved):
    found = _read(saved("qwen3_moe"), *FORMATS[0])
    experts, path = found.model.layers[0].mlp.experts, "model.layers.0.mlp.experts.down_proj"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        whole = DTensor.from_local(experts.down_proj.data, init_device_mesh("cpu", (1,)), [Replicate()])
        experts.down_proj = torch.nn.Parameter(whole, requires_grad=False)
        convert = found.hf_quantizer.get_quantize_ops().convert
        with pytest.raises(ValueError, match="down_proj is read by parts: expected whole experts"):
            convert({"down_proj": torch.zeros(1)}, full_layer_name=path, model=found)
        with pytest.raises(ValueError, match="down_proj is read by parts"):  # as published bytes would be
            found.hf_quantizer._process_model_after_weight_loading(found)
    finally:
        torch.distributed.destroy_process_group()


def test_experts_that_lie_as_other_kernels_want_them_are_left():
    """As transformers leaves them where it has these kernels: weights are objects of theirs, not parameters."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    if not hasattr(mxfp4, "Mxfp4GptOssMLP"):
        pytest.skip("an older transformers changes the block's forward")
    model = tiny_model("gpt_oss")
    layer = model.model.layers[1]
    layer.mlp = mxfp4.Mxfp4GptOssMLP(layer.mlp.router, mxfp4.Mxfp4GptOssExperts(model.config))
    for name in ("gate_up_proj", "down_proj"):
        del layer.mlp.experts._parameters[name]
    report = huggingface.patch(model)
    assert report.experts == ("model.layers.0.mlp.experts",)
    ((name, why),) = report.left
    assert name == "model.layers.1.mlp" and "layers.huggingface.quantisation reads them as published" in why


@pytest.mark.parametrize(
    ("named", "error", "words"),
    [
        ({"kind": "channel"}, TypeError, "kind="),
        ({"dtype": torch.float16}, TypeError, "dtype="),
        ({"rows": ""}, ValueError, "rows=''"),
        ({"zero_points": True}, ValueError, "zero_points=True with dtype"),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(named, error, words):
    given = {"kind": WeightScale.CHANNEL, "dtype": INT8} | named
    with pytest.raises(error, match=words):
        huggingface.quantisation(given.pop("kind"), **given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_mxfp4_on_a_gpu(published, dtype):
    folder, stock = published
    found = _read(folder, *MXFP4, PAIRS, config=_config(folder), dtype=dtype, device_map="cuda")
    with torch.no_grad():
        error = relative_error(found(tokens(3, 7).cuda()).logits.cpu().float(), stock(tokens(3, 7)).logits)
    assert error < (1e-4 if dtype == torch.float32 else 3e-2)
