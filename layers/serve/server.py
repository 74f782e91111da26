"""transformers' server with our model in it, from the first line it prints to a clean end."""

import asyncio
import gc
import inspect
import signal
from typing import Any

import uvicorn
from transformers import GenerationConfig
from transformers.cli.serving.server import build_server

from layers.serve import replies
from layers.serve.admission import Admission
from layers.serve.batching import batching_config
from layers.serve.generation import Batches, Chat, Completion, OneBatch
from layers.serve.messages import tell_answers_alone
from layers.serve.model import PatchedModels, sampling_of
from layers.serve.options import ServeOptions
from layers.serve.trial import expect_answers_alike

_GRACE = 5  # seconds that streams have to end after SIGTERM


def serve(options: ServeOptions) -> None:
    """Loads the model, tries it, and answers requests until SIGTERM or SIGINT.

    Raises ValueError for a model that cannot be served so, or not at this address; the message says why.
    """
    expect_free(options.host, options.port)
    batches = Batches(batching_config(options))  # which says what has no room before the model is loaded
    models = PatchedModels(options)
    try:
        application = _application(models, batches, options)
        gc.collect()
        gc.freeze()  # else Python looks through all that was loaded once in a while: over 0.1 s in which nothing runs
        config = uvicorn.Config(
            Admission(application, options.max_requests), host=options.host, port=options.port,
            log_level="warning", timeout_graceful_shutdown=_GRACE,
        )  # fmt: skip
        _run(config, f"ready: http://{options.host}:{options.port}/v1, model {options.model!r}")
    finally:
        gc.unfreeze()
        batches.stop()
        models.shutdown()


def expect_free(host: str, port: int) -> None:
    """Raises ValueError where no server can listen. uvicorn would say so when the model is loaded, after minutes."""

    async def bound() -> None:
        loop = asyncio.get_running_loop()
        (await loop.create_server(asyncio.Protocol, host, port, start_serving=False)).close()

    try:
        asyncio.run(bound())
    except (OSError, UnicodeError) as error:
        raise ValueError(f"host={host!r}, port={port}: no server can listen there: {error}") from error


def _application(models: PatchedModels, batches: Batches, options: ServeOptions) -> Any:
    model_id = models.process_model_name(options.model)
    model, tokenizer = models.load_model_and_processor(model_id)
    sampling = sampling_of(model, options)
    model.generation_config = GenerationConfig.from_dict(sampling.to_dict())
    try:
        expect_answers_alike(model)
        batches.begin(model, sampling)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{_described(model.config)} is not served by continuous batching: {error}"
        ) from error
    tell_answers_alone(tokenizer, model)  # type: ignore[arg-type]
    state = OneBatch(batches, sampling)
    handlers = {
        "model_manager": models,
        "chat_handler": Chat(models, state),
        "completion_handler": Completion(models, state),
        "generation_state": state,
    }
    # Handlers of routes that `Admission` does not let through; which there are depends on transformers' version.
    needed = {name for name in inspect.signature(build_server).parameters if name.endswith("_handler")}
    application = build_server(**{**dict.fromkeys(needed), **handlers})
    replies.install(application)
    return application


def _described(config: Any) -> str:
    """What of a model most often is in the way of continuous batching."""
    text = config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or ()))
    traits = {
        "an encoder": getattr(config, "is_encoder_decoder", False),
        f"layers of {', '.join(kinds)}": kinds,
        "latents for keys and values": getattr(text, "kv_lora_rank", None),
    }
    told = " and ".join(name for name, has in traits.items() if has)
    return f"a {config.model_type}" + (f" with {told}" if told else "")


class _Server(uvicorn.Server):
    """One that says when it listens."""

    def __init__(self, config: uvicorn.Config, told: str) -> None:
        super().__init__(config)
        self._told = told

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._told, flush=True)


def _run(config: uvicorn.Config, told: str) -> None:
    # Having ended, uvicorn raises the signal again for whoever handled it before: here nobody has to die of it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    _Server(config, told).run()
