"""A server's model, its experts read into fewer bits, or in those in which they are published."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from layers.huggingface import as_published, quantisation
from layers.huggingface.published import is_published
from layers.serve.options import Experts
from layers.weights.scales import WeightScale
from moe_ops.int4 import INTEGERS
from moe_ops.nvfp4 import NUMBERS
from moe_ops.pairs import PAIRS

_FORMATS: dict[Experts, tuple[WeightScale, tuple[int, int], torch.dtype]] = {
    "float8": (WeightScale.CHANNEL, (1, 1), torch.float8_e4m3fn),
    "int8": (WeightScale.CHANNEL, (1, 1), torch.int8),
    "mxfp4": (WeightScale.GROUP, (1, 32), PAIRS),
    "nvfp4": (WeightScale.GROUP, (1, 16), NUMBERS),
    "int4": (WeightScale.GROUP, (1, 128), INTEGERS),
}


def read(model: str, experts: Experts, **named: Any) -> Any:
    """What `from_pretrained` reads of a folder, or of a name on the hub, behind which "@" and a revision may stand.

    transformers takes no other quantisation than what a checkpoint's config names, so it is not told what that is:
    published MXFP4 is read as it is. Raises ValueError for checkpoints that are quantised otherwise.
    """
    name, revision = _parts(model)
    config = AutoConfig.from_pretrained(name, revision=revision)
    published = vars(config).pop("quantization_config", None)
    if published is not None and (experts, published["quant_method"]) != ("mxfp4", "mxfp4"):
        told = f"the checkpoint is quantised by {published['quant_method']!r}"
        raise ValueError(f"experts={experts!r}: {told}, expected one in 16 bits, or in MXFP4 for 'mxfp4'")
    kind, block, dtype = _FORMATS[experts]
    return read_by(config, model, quantization_config=quantisation(kind, block, dtype=dtype), **named)


def read_by(config: Any, model: str, **named: Any) -> Any:
    """The same by a config."""
    name, revision = _parts(model)
    (architecture, *_) = config.architectures or ("AutoModelForCausalLM",)
    return getattr(transformers, architecture).from_pretrained(
        name, config=config, revision=revision, **named
    )


def published_config(model: str) -> Any:
    """That of a checkpoint whose experts stay in the 4 bits in which they are published; None for all others."""
    name, revision = _parts(model)
    if not is_published(_written(name, revision).get("quantization_config") or {}):
        return None
    try:
        return as_published(AutoConfig.from_pretrained(name, revision=revision))
    except ValueError as error:
        print(f"{name} is read as transformers reads it: {error}", flush=True)
        return None


def _written(name: str, revision: str) -> dict[str, Any]:
    """What a config says; nothing where there is none, of which whoever reads the model tells."""
    try:
        return PreTrainedConfig.get_config_dict(name, revision=revision)[0]
    except OSError:
        return {}


def _parts(model: str) -> tuple[str, str]:
    """Name and revision."""
    name, _, revision = (model, "", "") if Path(model).is_dir() else model.partition("@")
    return name, revision or "main"
