"""`huggingface.as_published`: models whose checkpoints are in 4 bits compute what their checkpoints stand for."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from layers import huggingface
from tests.helpers import relative_error
from tests.huggingface.families import tokens
from tests.huggingface.publishing import KINDS, publish, read

FAMILIES = ("qwen2_moe", "mixtral", "deepseek_v3", "olmoe", "glm4_moe")
CASES = [("qwen3_moe", kind) for kind in KINDS] + [
    (family, kind) for family in FAMILIES for kind in ("gptq", "modelopt")
]
EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_logits_are_those_of_what_is_published(published, family, kind):
    folder, stock = published(family, kind)
    found = read(folder)
    with torch.no_grad():
        assert relative_error(found(tokens(2, 7)).logits, stock(tokens(2, 7)).logits) < 2e-6
    for name, parameter in found.named_parameters():
        if ".experts." not in name:
            expected = stock.get_parameter(name)
            torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=0, msg=name)
    stays = found.get_submodule(EXPERTS)
    assert stays.down_proj.dtype == stays.gate_up_proj.dtype == torch.uint8
    assert stays.gate_up_proj.shape == (8, 2 * stays.down_proj.shape[2] * 2, 32)


def _bytes(tensor):
    """In the order of a tensor's elements."""
    return bytes(tensor.detach().flatten().clone().view(torch.uint8).tolist())


@pytest.mark.parametrize(
    ("kind", "parts", "beside"),
    [
        ("gptq", ("scales",), ["scale_inv", "zero_point"]),
        ("gptq, symmetric", ("scales",), ["scale_inv"]),
        ("awq", ("scales",), ["scale_inv", "zero_point"]),
        ("pack-quantized", ("weight_packed", "weight_scale"), ["scale_inv"]),
        ("modelopt", ("weight", "weight_scale", "weight_scale_2"), ["scale_inv", "global_scale"]),
    ],
)
def test_bytes_are_those_that_are_published(published, kind, parts, beside):
    """Numbers and scales of an expert, where they lie as they are read, and what there is beside them."""
    folder, _ = published("qwen3_moe", kind)
    experts, state = read(folder).get_submodule(EXPERTS), load_file(folder / "model.safetensors")
    names = [name for name, _ in experts.named_parameters() if name.startswith("gate_up_proj_")]
    assert names == [f"gate_up_proj_{each}" for each in beside]
    places = {"scales": "_scale_inv", "weight_scale": "_scale_inv", "weight_scale_2": "_global_scale"}
    for part in parts:
        of_projections = [state[f"{EXPERTS}.5.{leaf}.{part}"] for leaf in ("gate_proj", "up_proj")]
        found = experts.get_parameter("gate_up_proj" + places.get(part, ""))[5]
        if part == "scales":
            of_projections = [each.T for each in of_projections]
        elif part == "weight_scale_2":
            of_projections = [each.view(1) for each in of_projections]
        expected = b"".join(_bytes(each) for each in of_projections)
        assert _bytes(found) == expected, part
    assert not any(parameter.requires_grad for parameter in experts.parameters())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_files_of_a_model_and_its_devices(family, tmp_path):
    """Experts of a layer lie in several files; scales stay what they are beside tokens of another dtype."""
    stock = publish(tmp_path, family, "gptq", shard="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    found = read(tmp_path, torch.bfloat16, device_map={"": "cpu"})
    assert found.get_submodule(EXPERTS).down_proj_scale_inv.dtype == torch.float16
    rest = {each.dtype for name, each in found.named_parameters() if ".experts." not in name}
    assert rest == {torch.bfloat16}
    with torch.no_grad():
        assert relative_error(found(tokens(2, 7)).logits, stock(tokens(2, 7)).logits) < 3e-2


@pytest.mark.parametrize("kind", ["awq", "modelopt"])
def test_what_stays_in_16_bits(kind, tmp_path):
    """A layer's experts, and attention; the latter's matrices have the names of ModelOpt's in 4 bits.

    They are in float32 in the file, which transformers casts to the model's dtype.
    """
    keep = ("layers.0.mlp.experts", "self_attn.q_proj", "1.self_attn")
    stock = publish(tmp_path, "qwen3_moe", kind, keep, torch.float32)
    for dtype, error in ((torch.float32, 2e-6), (torch.bfloat16, 3e-2)):
        found = read(tmp_path, dtype)
        first, second = (layer.mlp.experts for layer in found.model.layers)
        assert (first.down_proj.dtype, second.down_proj.dtype) == (dtype, torch.uint8)
        assert {layer.self_attn.q_proj.weight.dtype for layer in found.model.layers} == {dtype}
        with torch.no_grad():
            assert relative_error(found(tokens(2, 7)).logits, stock(tokens(2, 7)).logits) < error


def test_what_comes_of_it_is_a_patched_model(published):
    folder, stock = published("qwen3_moe", "awq")
    config = AutoConfig.from_pretrained(folder)
    before = config.to_dict()
    ours = huggingface.as_published(config)
    assert (
        config.to_dict() == before and ours.quantization_config["published"] == before["quantization_config"]
    )
    found = AutoModelForCausalLM.from_pretrained(folder, config=ours, dtype=torch.float32)
    compiled = torch.compile(found, fullgraph=True, backend="aot_eager")
    embedded = found.get_input_embeddings()(tokens(1, 5)).detach().requires_grad_()
    found(inputs_embeds=embedded).logits.square().mean().backward()
    assert embedded.grad.norm() > 0 and found.model.layers[0].self_attn.q_proj.weight.grad.norm() > 0
    with torch.no_grad():
        assert relative_error(compiled(tokens(2, 5)).logits, found(tokens(2, 5)).logits) < 1e-6
    named = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(found.generate(tokens(1, 6), **named), stock.generate(tokens(1, 6), **named))
    assert found.hf_quantizer.is_compileable and found.is_quantized
    assert found.hf_quantizer.reading is None  # nor is the model kept by what read it
    assert '"quant_method": "moe_ops_published"' in found.config.to_json_string()
    assert len(huggingface.patch(found, emit="stages").experts) == 2
    with pytest.raises(ValueError, match="is quantised, of which a checkpoint says nothing"):
        found.save_pretrained("nowhere")


def test_the_model_without_its_head(published):
    """Its names begin otherwise than those in the checkpoint."""
    from transformers import AutoModel

    folder, stock = published("mixtral", "gptq")
    config = huggingface.as_published(AutoConfig.from_pretrained(folder))
    found = AutoModel.from_pretrained(folder, config=config, dtype=torch.float32)
    with torch.no_grad():
        expected = stock.model(tokens(2, 7)).last_hidden_state
        assert relative_error(found(tokens(2, 7)).last_hidden_state, expected) < 2e-6


def test_adapters_of_the_rest_are_read_beside_them(published, tmp_path):
    """PEFT asks for the conversions of a model that has been read."""
    from peft import LoraConfig, get_peft_model

    folder, _ = published("qwen3_moe", "awq")
    adapted = get_peft_model(
        read(folder), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path)
    again = read(folder)
    again.load_adapter(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(tokens(1, 5)).logits, adapted.eval()(tokens(1, 5)).logits)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(published, kind):
    folder, stock = published("qwen3_moe", kind)
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        found = read(folder, dtype, device_map="cuda")
        with torch.no_grad():
            logits = found(tokens(3, 7).cuda()).logits.cpu().float()
            assert relative_error(logits, stock(tokens(3, 7)).logits) < error
