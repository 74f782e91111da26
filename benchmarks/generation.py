"""A greedy generation loop over a model of transformers, small enough to see every call that is compiled.

The key-value cache is static and made once: prefill and decode write into it in place, so the compiled function sees
one input that changes, the token ids. Prefill has a symbolic length after its second compile, decode has length 1.
"""

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NEAR_TIE = 1e-4
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Generation:
    """What a greedy run chose, and how sure it was.

    tokens: [steps, B] int64; gaps: [steps, B], top-1 minus top-2 logit.
    """

    tokens: Tensor
    gaps: Tensor


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two greedy runs were compared and whether they agree up to there."""

    same: bool
    compared: int
    steps: int

    def __str__(self) -> str:
        verdict = "same" if self.same else "DIFFERENT"
        if self.compared == self.steps:
            return f"{verdict} ({self.compared} tokens)"
        return f"{verdict} ({self.compared} tokens, then a near-tie)"


def compare(reference: Generation, other: Generation) -> Agreement:
    """Compares token by token; a reference step whose top-2 gap is below 1e-4 in any row ends the comparison."""
    near_ties = (reference.gaps < NEAR_TIE).any(dim=1).nonzero()
    steps = len(reference.tokens)
    compared = int(near_ties[0]) if len(near_ties) else steps
    return Agreement(torch.equal(reference.tokens[:compared], other.tokens[:compared]), compared, steps)


def static_cache(model: nn.Module, batch: int, length: int) -> object:
    """An initialised StaticCache for `batch` sequences of up to `length` tokens, on the model's device."""
    from transformers import StaticCache

    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = StaticCache(config=model.config, max_cache_len=length)
    parameter = next(model.parameters())
    cache.early_initialization(batch, heads, head_dim, parameter.dtype, parameter.device)
    return cache


def next_token_logits(model: nn.Module, cache: object) -> Callable[[Tensor], Tensor]:
    """The function that is compiled: token ids [B, L] to the last position's logits [B, V], float32."""
    # Called `cache` since transformers 5.24.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    given = {name: cache, "use_cache": True, "logits_to_keep": 1}

    def forward(input_ids: Tensor) -> Tensor:
        output = model(input_ids=input_ids, **given)
        return output.logits[:, -1].float()

    # Dynamo keeps what it compiled with a function's code and limits how often, and by a code's name which sizes it saw
    # vary: each of these has a code and a name of its own.
    forward.__code__ = forward.__code__.replace(co_name=f"forward_{next(_NUMBERS)}")
    return forward


def generate(step: Callable[[Tensor], Tensor], cache: object, prompt: Tensor, steps: int) -> Generation:
    """Greedy: one prefill of `prompt` [B, L], then `steps - 1` decode calls."""
    cache.reset()
    tokens, gaps = [], []
    inputs = prompt
    for _ in range(steps):
        best = step(inputs).topk(2, dim=-1)
        tokens.append(best.indices[:, 0].clone())
        gaps.append((best.values[:, 0] - best.values[:, 1]).clone())
        inputs = tokens[-1][:, None]
    return Generation(torch.stack(tokens).cpu(), torch.stack(gaps).cpu())


@contextmanager
def exact_float32() -> Iterator[None]:
    """TF32 off, so that float32 runs differ by rounding only."""
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # Inductor would have it on
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
