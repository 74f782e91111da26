"""What `as_published` takes of a config's `quantization_config`, and what it refuses by its name."""

import json

import pytest
from transformers import GPTQConfig

from layers import huggingface
from layers.huggingface.published import format_of
from moe_ops.int4 import INTEGERS
from moe_ops.nvfp4 import NUMBERS
from tests.huggingface.families import tiny_config
from tests.huggingface.publishing import KINDS


def _config(settings):
    config = tiny_config("qwen3_moe")
    config.quantization_config = settings
    return config


def _with(kind, *path, **changes):
    """Settings of a kind with others in a group that the path leads to."""
    settings = json.loads(json.dumps(KINDS[kind][1]))
    inner = settings
    for each in path:
        inner = inner[each]
    inner |= changes
    return settings


GROUP = ("config_groups", "group_0")
WEIGHTS = (*GROUP, "weights")


@pytest.mark.parametrize(
    ("kind", "dtype", "columns", "zero_points"),
    [
        ("gptq", INTEGERS, 32, True),
        ("gptq of whole rows", INTEGERS, None, True),
        ("gptq, symmetric", INTEGERS, 128, False),
        ("awq", INTEGERS, 32, True),
        ("pack-quantized", INTEGERS, 32, False),
        ("pack-quantized, asymmetric", INTEGERS, 32, True),
        ("pack-quantized by rows", INTEGERS, None, False),
        ("nvfp4-pack-quantized", NUMBERS, 16, False),
        ("modelopt", NUMBERS, 16, False),
    ],
)
def test_formats(kind, dtype, columns, zero_points):
    found = format_of(KINDS[kind][1])
    assert (found.dtype, found.columns, found.zero_points) == (dtype, columns, zero_points)


@pytest.mark.parametrize(
    "settings",
    [
        GPTQConfig(bits=4, group_size=64, sym=True),
        _with("gptq", dynamic={"-:.*mlp.gate$": {}}),
        _with("awq", version=None, checkpoint_format="gemm"),
        _with("pack-quantized", *WEIGHTS, actorder="static"),
        _with("pack-quantized", sparsity_config={"format": "dense"}, transform_config={}),
        _with("nvfp4-pack-quantized", *GROUP, input_activations=None, format="nvfp4-pack-quantized"),
        {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
    ],
)
def test_what_changes_no_number_is_taken(settings):
    ours = huggingface.as_published(_config(settings)).quantization_config
    assert ours["quant_method"] == "moe_ops_published" and format_of(ours["published"]).columns in (
        16,
        32,
        64,
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (None, "config has no quantization_config"),
        ({"quant_method": "fp8"}, "quant_method='fp8' of quantization_config: expected one of .*gptq, awq"),
        ({"bits": 4}, "quant_method=None"),
        (_with("gptq", bits=8), "bits=8 of quantization_config: expected 4"),
        (
            _with("gptq", group_size=16),
            "group_size=16 of quantization_config: expected -1, or a multiple of 32",
        ),
        (_with("gptq", group_size=None), "group_size=None"),
        (_with("gptq", sym=None), "sym=None of quantization_config: expected True or False"),
        (
            _with("gptq", checkpoint_format="marlin"),
            "checkpoint_format='marlin' .*: expected 'gptq' or 'gptq_v2'",
        ),
        (_with("gptq", pack_dtype="int64"), "pack_dtype='int64'"),
        (_with("gptq", dynamic={"+:.*down.*": {"bits": 8}}), "dynamic of quantization_config has .*down"),
        (_with("awq", bits=3), "bits=3"),
        (_with("awq", zero_point=False), "zero_point=False of quantization_config: expected True"),
        (_with("awq", version="gemv"), "version='gemv' of quantization_config: expected 'gemm'"),
        (_with("awq", format="gemv_fast"), "format='gemv_fast'"),
        (
            _with("pack-quantized", format="int-quantized"),
            "format='int-quantized' .*: expected 'pack-quantized' or",
        ),
        (_with("pack-quantized", config_groups={}), "config_groups of quantization_config has 0 groups"),
        (
            _with("pack-quantized", "config_groups", other={}),
            "config_groups of quantization_config has 2 groups",
        ),
        (_with("pack-quantized", *GROUP, format="naive-quantized"), "format='naive-quantized'"),
        (
            _with("pack-quantized", *GROUP, input_activations={"num_bits": 8}),
            "input_activations={'num_bits': 8}",
        ),
        (
            _with("pack-quantized", *GROUP, output_activations={"num_bits": 8}),
            "output_activations={'num_bits'",
        ),
        (_with("pack-quantized", *WEIGHTS, num_bits=8), "num_bits=8 of quantization_config: expected 4"),
        (
            _with("pack-quantized", *WEIGHTS, type="float"),
            "type='float' of quantization_config: expected 'int'",
        ),
        (
            _with("pack-quantized", *WEIGHTS, actorder="group"),
            "actorder='group' .*: expected False or 'weight'",
        ),
        (
            _with("pack-quantized", *WEIGHTS, strategy="block"),
            "strategy='block' .*: expected 'group' or 'channel'",
        ),
        (_with("pack-quantized", *WEIGHTS, symmetric=None), "symmetric=None"),
        (_with("pack-quantized", *WEIGHTS, group_size=48), "group_size=48"),
        (
            _with("pack-quantized", sparsity_config={"format": "sparse-24"}),
            "sparsity_config={'format': 'sparse-24'}",
        ),
        (
            _with("pack-quantized", transform_config={"config_groups": {"u": 1}}),
            "transform_config={'config_groups'",
        ),
        (
            _with("nvfp4-pack-quantized", *WEIGHTS, type="int"),
            "type='int' of quantization_config: expected 'float'",
        ),
        (
            _with("nvfp4-pack-quantized", *WEIGHTS, group_size=32),
            "group_size=32 of quantization_config: expected 16",
        ),
        (_with("nvfp4-pack-quantized", *GROUP, input_activations={"num_bits": 8}), "num_bits=8"),
        (_with("modelopt", quant_algo="FP8"), "quant_algo='FP8' of quantization_config: expected 'NVFP4'"),
        (_with("modelopt", group_size=32), "group_size=32 of quantization_config: expected 16"),
    ],
)
def test_what_is_not_read_is_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        huggingface.as_published(_config(settings))


def test_configs_are_configs():
    with pytest.raises(TypeError, match=r"config=.*: expected PreTrainedConfig"):
        huggingface.as_published({"quantization_config": KINDS["gptq"][1]})


def test_of_a_text_model_inside_another():
    from transformers import Qwen3VLMoeConfig

    config = Qwen3VLMoeConfig()
    config.text_config.quantization_config = KINDS["awq"][1]
    found = huggingface.as_published(config)
    assert found.quantization_config["published"] == KINDS["awq"][1]
    assert not hasattr(found.text_config, "quantization_config")
    assert config.text_config.quantization_config == KINDS["awq"][1]
