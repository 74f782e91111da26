"""The model of a server: loaded, patched, and its kernels loaded."""

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.cli.serving.model_manager import ModelManager

import moe_ops
from layers.huggingface import patch
from layers.serve.options import ServeOptions

_MOST_TOKENS = 8192  # of a step that kernels are loaded for where transformers decides how many there are


class PatchedModels(ModelManager):
    """transformers' manager, holding the one model of the server."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        super().__init__(device=options.device, dtype=options.dtype, force_model=options.model)

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        model = super()._load_model(*args, **kwargs).eval().requires_grad_(False)
        expect_no_collision(model, self._options)
        report = patch(model)
        print(report, flush=True)
        if self._options.backend is None:
            load_kernels(model, self._options.max_batch_tokens or _MOST_TOKENS)
        return model

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
        """The one model, as OpenAI lists them; transformers lists what lies in its cache."""
        return [{"id": self._options.model, "object": "model", "created": 0, "owned_by": "local"}]


def expect_no_collision(model: nn.Module, options: ServeOptions) -> None:
    """Raises ValueError where transformers' way to compile, in the checkpoint or here, is not ours to run beside."""
    generation: Any = model.generation_config
    if generation.cache_implementation is not None:
        told = (
            f"the checkpoint's generation config has cache_implementation={generation.cache_implementation!r}"
        )
        raise ValueError(f"{told}: expected None, continuous batching has pages of its own")
    if generation.compile_config is not None:
        raise ValueError(
            "the checkpoint's generation config has a compile_config, by which transformers would compile generate() "
            "without our passes: expected none, the server compiles with --backend"
        )
    if options.backend is not None and options.backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise ValueError(f"backend={options.backend!r}: expected a backend of torch.compile, such as {known}")
    if options.backend == "cudagraphs":
        raise ValueError(
            "backend='cudagraphs': continuous batching captures steps itself, and no graph holds another"
        )


def load_kernels(model: nn.Module, max_tokens: int) -> None:
    """Loads what the model's layers launch, uncompiled, for up to so many tokens, on a GPU.

    Compiled steps have few numbers of tokens, all of which run before the first request (`batching.capture`).
    """
    device = next(model.parameters()).device

    def step(tokens: int) -> None:
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        model(input_ids=ids, use_cache=False, logits_to_keep=1)

    moe_ops.warmup_step(step, max_tokens, device=device)


def sampling_of(model: nn.Module, options: ServeOptions) -> GenerationConfig:
    """How the server draws tokens: one way for all requests, for so does continuous batching."""
    checkpoint: Any = model.generation_config
    generation: Any = GenerationConfig.from_dict(checkpoint.to_dict())
    if options.greedy:
        generation.update(do_sample=False, temperature=None, top_p=None, top_k=None)
    generation.use_cache = False
    return generation
