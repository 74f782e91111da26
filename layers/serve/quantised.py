"""A server's model, its experts read into fewer bits."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from layers.huggingface import quantisation
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
    name, _, revision = (model, "", "") if Path(model).is_dir() else model.partition("@")
    config = AutoConfig.from_pretrained(name, revision=revision or "main")
    published = vars(config).pop("quantization_config", None)
    if published is not None and (experts, published["quant_method"]) != ("mxfp4", "mxfp4"):
        told = f"the checkpoint is quantised by {published['quant_method']!r}"
        raise ValueError(f"experts={experts!r}: {told}, expected one in 16 bits, or in MXFP4 for 'mxfp4'")
    kind, block, dtype = _FORMATS[experts]
    named |= {"config": config, "revision": revision or "main"}
    (architecture, *_) = config.architectures or ("AutoModelForCausalLM",)
    quantised = quantisation(kind, block, dtype=dtype)
    return getattr(transformers, architecture).from_pretrained(name, quantization_config=quantised, **named)
