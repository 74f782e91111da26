"""The model of a server: loaded, patched, and its kernels loaded."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import model_info, try_to_load_from_cache
from jinja2 import TemplateError
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.cli.serving.model_manager import ModelManager

import moe_ops
from layers.huggingface import patch
from layers.serve import quantised
from layers.serve.options import ServeOptions
from moe_ops._checks import as_device

# What no batch does, and what a checkpoint may say of it all the same.
_PASSED_OVER: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "stop_strings": (None, []),
    "max_time": (None,),
}
_OF_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens")
_PATIENCE = 10  # seconds, with the hub
_MOST_TOKENS = 8192  # of a step that kernels are loaded for where transformers decides how many there are


_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")  # over devices, as transformers calls it


class PatchedModels(ModelManager):
    """transformers' manager, holding the one model of the server."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        if options.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device={options.device!r}: PyTorch finds no GPU here")
        if options.cuda_graphs and not torch.cuda.is_available():
            raise ValueError("cuda_graphs=True: PyTorch finds no GPU here, and only its steps are captured")
        if options.device not in _SPREAD:
            as_device("device", options.device)
            _expect_numbers(options.device)
        expect_backend(options.backend)
        _expect_folder_or_name(options.model)
        _expect_there(options.model)
        super().__init__(device=options.device, dtype=options.dtype, force_model=options.model)

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        try:
            model = self._read(*args, **kwargs).eval().requires_grad_(False)
        except SafetensorError as error:  # of a file that was not copied to its end, say
            raise ValueError(f"the weights of {self._options.model!r} cannot be read: {error}") from error
        expect_no_collision(model, self._options)
        report = patch(model)
        print(report, flush=True)
        if self._options.backend is None:
            load_kernels(model, self._options.max_batch_tokens or _MOST_TOKENS)
        return model

    def _read(self, name: str, *args: Any, **kwargs: Any) -> Any:
        model, fewer_bits = self._options.model, self._options.experts
        config = quantised.published_config(model) if fewer_bits is None else None
        if fewer_bits is None and config is None:
            return super()._load_model(name, *args, **kwargs)
        named = {
            "attn_implementation": self.attn_implementation,
            "dtype": self.dtype,
            "device_map": self.device,
        }
        if fewer_bits is not None:
            return quantised.read(model, fewer_bits, **named)
        return quantised.read_by(config, model, **named)

    def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
        return tokenizer_of(super()._load_processor(*args, **kwargs))

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
        """The one model, as OpenAI lists them; transformers lists what lies in its cache."""
        return [{"id": self._options.model, "object": "model", "created": 0, "owned_by": "local"}]


def _expect_folder_or_name(model: str) -> None:
    path = Path(model)
    is_path = path.is_absolute() or path.exists() or model.startswith((".", "~")) or model.count("/") > 1
    if is_path and not path.is_dir():  # transformers would ask the hub for it
        raise ValueError(
            f"model={model!r}: expected a folder that save_pretrained wrote, or a name on the hub"
        )


def _expect_there(model: str) -> None:
    """Asks the hub once: to load, transformers asks it for one file after the other, and again after errors."""
    name, _, revision = model.partition(":")[0].partition("@")  # behind a colon is a file of it
    named: dict[str, Any] = {"revision": revision or None}
    if Path(model).is_dir() or isinstance(try_to_load_from_cache(name, "config.json", **named), str):
        return
    try:
        model_info(name, timeout=_PATIENCE, **named)
    except Exception as error:  # of the hub, or of the client that it uses in its version
        told = " ".join(str(error).split())
        raise ValueError(
            f"model={model!r}: there is no such folder, and the hub gives no such model: {told}"
        ) from error


def expect_backend(backend: str | None) -> None:
    """Raises ValueError for what is no backend of torch.compile, or captures graphs."""
    if backend is not None and backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise ValueError(f"backend={backend!r}: expected a backend of torch.compile, such as {known}")
    if backend == "cudagraphs":
        raise ValueError(
            "backend='cudagraphs': continuous batching captures steps itself, and no graph holds another"
        )


def _expect_numbers(device: str) -> None:
    """A device may have a name and no numbers, as meta, or be missing in this build of PyTorch."""
    try:
        torch.ones(1, device=device).add(1).item()
    except Exception as error:  # each backend has its own
        told = str(error).partition(". ")[0]
        raise ValueError(
            f"device={device!r}: expected one that computes here, such as 'cpu': {told}"
        ) from error


def tokenizer_of(processor: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, also of one that takes images and has a processor: text is all that is served.

    Raises ValueError where there is none, or where its template passes over a message that is a text.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"the checkpoint has a {type(processor).__name__}: expected a tokenizer")
    if not tokenizer.encode("a text", add_special_tokens=False):  # where its files are missing
        raise ValueError(
            "the checkpoint's tokenizer makes no tokens of a text: expected its files beside the weights"
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = getattr(processor, "chat_template", None)
    if tokenizer.chat_template is not None and not _is_read(tokenizer, "a text"):
        raise ValueError("the checkpoint's chat template passes over messages whose content is a text")
    return tokenizer


def _is_read(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    try:
        rendered: Any = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    except (TemplateError, ValueError, TypeError, LookupError, AttributeError):
        return True  # it wants more than that, which who asks is told
    return text in rendered


def expect_no_collision(model: nn.Module, options: ServeOptions) -> None:
    """Raises ValueError for what a checkpoint asks of `generate` that continuous batching does not do."""
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
    if not options.greedy:
        _expect_nothing_passed_over(generation)


def _expect_nothing_passed_over(generation: Any) -> None:
    for name, allowed in _PASSED_OVER.items():
        value = getattr(generation, name)
        if value not in allowed:
            raise ValueError(
                f"the checkpoint's generation config has {name}={value!r}, which continuous batching passes over: "
                f"expected {allowed[-1]!r}, or --greedy, which takes the most likely token instead"
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
        of_tokens = {name: getattr(checkpoint, name) for name in _OF_TOKENS}
        generation = GenerationConfig(do_sample=False, **of_tokens)
    generation.use_cache = False
    return generation
