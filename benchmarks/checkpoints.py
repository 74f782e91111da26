"""Checkpoints for the demo: small ones written by transformers itself, or one the user has on disk."""

import json
import sys
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


def small_qwen3_moe(**more: float) -> nn.Module:
    """Two layers, 16 experts of which 4 are chosen, float32, random weights; `more` of its config."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **{**_SIZES, **more},
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


def write_chat_checkpoint(path: Path) -> Path:
    """Writes a small Qwen3-MoE with a tokenizer of ASCII and a chat template, random weights, and returns `path`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    _quiet()
    # As many letters as printed ASCII and a line's end have bytes: half a letter of more would be no text.
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted(
        {letter for code in (10, *range(32, 127)) for letter in split.pre_tokenize_str(chr(code))[0][0]}
    )
    vocabulary = {letter: index for index, letter in enumerate([*letters, "<|im_start|>", "<|im_end|>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = _CHAT_TEMPLATE
    # Wider still: of so few tokens each would be followed by itself.
    model = small_qwen3_moe(vocab_size=len(fast), eos_token_id=fast.eos_token_id, initializer_range=0.5)
    model.generation_config.update(eos_token_id=fast.eos_token_id, pad_token_id=fast.eos_token_id)
    model.save_pretrained(path)
    fast.save_pretrained(path)
    return path


_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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


if __name__ == "__main__":
    write_chat_checkpoint(Path(sys.argv[1]))
