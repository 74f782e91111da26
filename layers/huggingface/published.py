"""`as_published(config)`: what a config of transformers says of a checkpoint in 4 bits, as a `Published` format.

Who published it wrote down how in `quantization_config`. All that would change a number is looked at; whatever we do
not compute is refused here, before anything is read.
"""

import copy
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from layers._checks import expect_type
from layers.huggingface import published_formats as formats
from layers.huggingface.published_formats import Published
from moe_ops.errors import value_error

METHOD = "moe_ops_published"
"""Names our quantizer where transformers looks for one."""

_FIELD, _METHOD = "quantization_config", "quant_method"
_BITS = 4
_LEAST = 32  # columns that share a scale of integers
Settings = dict[str, Any]


def as_published(config: PreTrainedConfig) -> PreTrainedConfig:
    """See `layers.huggingface.as_published`."""
    expect_type("config", config, PreTrainedConfig)
    found = copy.deepcopy(config)
    named: Any = found if getattr(found, _FIELD, None) else found.get_text_config(decoder=True)
    published = vars(named).pop(_FIELD, None)
    if not published:
        value_error("config has no {}: expected that of a checkpoint in 4 bits", _FIELD)
    settings = dict(published if isinstance(published, dict) else published.to_dict())
    format_of(settings)
    found.quantization_config = {_METHOD: METHOD, "published": settings}
    return found


def is_published(settings: Settings) -> bool:
    """Whether a method of quantisation is one of those read here."""
    return settings.get(_METHOD) in _READERS


def format_of(settings: Settings) -> Published:
    """How weights are stored that a `quantization_config` describes. Raises ValueError for what is not read so."""
    if not is_published(settings):
        value_error(
            "{}={!r} of {}: expected one of {}", _METHOD, settings.get(_METHOD), _FIELD, list(_READERS)
        )
    return _READERS[settings[_METHOD]](settings)


def _gptq(settings: Settings) -> Published:
    _expect(settings, "bits", _BITS)
    _expect(settings, "pack_dtype", "int32", None)
    version = _expect(settings, "checkpoint_format", "gptq", "gptq_v2", None)
    for name in settings.get("dynamic") or {}:
        if not name.startswith("-:"):  # which leaves modules as they are
            value_error("dynamic of {} has {!r}: expected the same settings for all modules", _FIELD, name)
    has_zeros = not _expect(settings, "sym", True, False)
    return formats.gptq(_columns(settings), has_zeros, version == "gptq_v2")


def _awq(settings: Settings) -> Published:
    _expect(settings, "bits", _BITS)
    _expect(settings, "zero_point", True)
    for name in ("version", "format", "checkpoint_format"):
        _expect(settings, name, "gemm", "GEMM", None)
    return formats.awq(_columns(settings))


def _compressed_tensors(settings: Settings) -> Published:
    for name in ("sparsity_config", "transform_config"):
        of_all = settings.get(name) or {}
        if of_all.get("format", "dense") != "dense" or of_all.get("config_groups"):
            value_error("{}={} of {}: expected none", name, str(of_all), _FIELD)
    group = _only_group(settings)
    name = group.get("format") or settings.get("format")
    weights = group.get("weights") or {}
    _expect(weights, "num_bits", _BITS)
    if _expect({"format": name}, "format", "pack-quantized", "nvfp4-pack-quantized") == "pack-quantized":
        return _pack_quantized(group, weights)
    _expect(weights, "type", "float")
    _expect(weights, "group_size", 16)
    _expect(group.get("input_activations") or {}, "num_bits", _BITS, None)
    return formats.nvfp4_pack_quantized()


def _pack_quantized(group: Settings, weights: Settings) -> Published:
    _expect(weights, "type", "int")
    _expect(weights, "actorder", None, False, "weight", "static")  # of others columns are in another order
    _expect(group, "input_activations", None)
    is_channel = _expect(weights, "strategy", "group", "channel") == "channel"
    columns = None if is_channel else _columns(weights)
    return formats.pack_quantized(columns, not _expect(weights, "symmetric", True, False))


def _only_group(settings: Settings) -> Settings:
    groups = settings.get("config_groups") or {}
    if len(groups) != 1:
        value_error("config_groups of {} has {} groups: expected one, of all modules", _FIELD, len(groups))
    (group,) = groups.values()
    _expect(group, "output_activations", None)
    return group


def _modelopt(settings: Settings) -> Published:
    settings = settings.get("quantization") or settings  # as hf_quant_config.json has it
    _expect(settings, "quant_algo", "NVFP4")
    _expect(settings, "group_size", 16, None)
    return formats.nvfp4_of_modelopt()


def _columns(settings: Settings) -> int | None:
    """How many share a scale; None for all of a row."""
    size = settings.get("group_size")
    if not isinstance(size, int) or (size != -1 and (size < _LEAST or size % _LEAST)):
        value_error("group_size={} of {}: expected -1, or a multiple of {}", size, _FIELD, _LEAST)
    return None if size == -1 else size


def _expect(settings: Settings, name: str, *allowed: Any) -> Any:
    value = settings.get(name)
    if value not in allowed:
        wanted = " or ".join(repr(each) for each in allowed if each is not None) or "none"
        value_error("{}={!r} of {}: expected {}", name, value, _FIELD, wanted)
    return value


_READERS: dict[str, Callable[[Settings], Published]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}
