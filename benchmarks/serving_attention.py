"""PyTorch's flash attention for transformers' continuous batching, where the package flash_attn is not installed.

Without either, a step attends to all of the cache through a mask, which takes most of its time: what experts take is
then hardly seen. Both ways that are compared get the same attention.
"""

import inspect
from typing import Any

import transformers
from torch import Tensor
from torch.nn.attention import varlen
from transformers.integrations import flash_paged

_SAYS_GQA = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters  # torch 2.11 has it always


def is_known() -> bool:
    """Whether it is known how the installed transformers asks for flash attention: 5.17 does in one place."""
    return hasattr(flash_paged, "lazy_import_paged_flash_attention")


def use_torch_flash(model: Any) -> None:
    """Has continuous batching of `model` attend by `torch.nn.attention.varlen`, on a GPU, in 16 bits.

    Raises ValueError where it is not known how.
    """
    if not is_known():
        raise ValueError(f"attention='flash': transformers {transformers.__version__} asks for it elsewhere")
    flash_paged.lazy_import_paged_flash_attention = lambda implementation: (attend, None)
    model.config._attn_implementation = "paged|flash_attention_2"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *lengths: Any,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """What flash_attn's `flash_attn_varlen_func` is called with.

    [tokens, heads, D] of sequences side by side; `lengths`: where queries and keys of each start, and the most of each.
    """
    if not causal:
        raise ValueError("causal=False: expected attention to what came before")
    options: dict[str, Any] = {"enable_gqa": True} if _SAYS_GQA else {}
    window = window_size[0], 0
    out = varlen.varlen_attn(query, key, value, *lengths, scale=softmax_scale, window_size=window, **options)
    assert isinstance(out, Tensor)  # and not a pair, for nothing else was asked for
    return out
