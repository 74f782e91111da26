"""Checkpoints for the demo: small ones written by transformers itself, or one the user has on disk."""

import json
from pathlib import Path

import torch
from torch import nn

_SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    # Wider than the usual 0.02, so that random weights still have a clear favourite at every step.
    "initializer_range": 0.1,
}


class UnsupportedCheckpoint(Exception):
    """The demo cannot run this checkpoint; the message tells the user why."""


def small_mixtral() -> nn.Module:
    """Two layers, 8 experts of which 2 are chosen, float32, random weights."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_SIZES, intermediate_size=192, num_local_experts=8, num_experts_per_tok=2, sliding_window=None
    )
    return MixtralForCausalLM(config)


def small_qwen3_moe() -> nn.Module:
    """Two layers, 16 experts of which 4 are chosen, float32, random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_SIZES,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=4,
        head_dim=32,
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(config)


SMALL_MODELS = {"mixtral": small_mixtral, "qwen3_moe": small_qwen3_moe}


def write_small_checkpoint(family: str, folder: Path) -> Path:
    """Writes the family's small checkpoint with `save_pretrained` and returns its path."""
    torch.manual_seed(0)
    _quiet()
    path = folder / family
    SMALL_MODELS[family]().save_pretrained(path)
    return path


def load(path: Path, device: str, dtype: torch.dtype) -> nn.Module:
    """The checkpoint as transformers loads it, ready for inference.

    Raises:
        UnsupportedCheckpoint: there is no causal language model with mixture-of-experts blocks at `path`.
    """
    from transformers import AutoModelForCausalLM

    check_checkpoint(path)
    _quiet()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    except (ValueError, OSError) as error:
        raise UnsupportedCheckpoint(
            f"{path}: transformers cannot load it as a causal language model: {error}"
        ) from error
    if not moe_blocks(model):
        raise UnsupportedCheckpoint(
            f"{path}: model type {model.config.model_type!r} has no mixture-of-experts block"
        )
    return model.to(device).eval().requires_grad_(False)


def check_checkpoint(path: Path) -> str:
    """The model type a checkpoint folder names. Raises UnsupportedCheckpoint when `path` is no such folder."""
    config = path / "config.json"
    if not config.is_file():
        raise UnsupportedCheckpoint(
            f"{path}: no config.json there; expected a folder written by save_pretrained"
        )
    model_type = json.loads(config.read_text()).get("model_type")
    if not model_type:
        raise UnsupportedCheckpoint(f"{config}: names no model_type")
    return model_type


def moe_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's mixture-of-experts blocks by name: modules that own a router and experts."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "experts") and (hasattr(module, "gate") or hasattr(module, "router"))
    }


def _quiet() -> None:
    """No progress bars of transformers between our own lines."""
    from transformers.utils import logging

    logging.disable_progress_bar()
