"""transformers' server with our model in it, from the first line it prints to a clean end."""

import gc
import inspect
import signal
from typing import Any

import uvicorn
from transformers import GenerationConfig
from transformers.cli.serving.server import build_server

from layers.serve.admission import Admission
from layers.serve.batching import batching_config
from layers.serve.generation import Batches, Chat, Completion, OneBatch
from layers.serve.model import PatchedModels, sampling_of
from layers.serve.options import ServeOptions

_GRACE = 5  # seconds that streams have to end after SIGTERM


def serve(options: ServeOptions) -> None:
    """Loads the model, tries it, and answers requests until SIGTERM or SIGINT.

    Raises ValueError for a model that cannot be served so; the message says why.
    """
    models = PatchedModels(options)
    batches = Batches(batching_config(options))
    try:
        application = _application(models, batches, options)
        gc.collect()
        gc.freeze()  # else Python looks through all that was loaded once in a while: over 0.1 s in which nothing runs
        print(f"ready: http://{options.host}:{options.port}/v1, model {options.model!r}", flush=True)
        _run(uvicorn.Config(
            Admission(application, options.max_requests), host=options.host, port=options.port,
            log_level="warning", timeout_graceful_shutdown=_GRACE,
        ))  # fmt: skip
    finally:
        gc.unfreeze()
        batches.stop()
        models.shutdown()


def _application(models: PatchedModels, batches: Batches, options: ServeOptions) -> Any:
    model_id = models.process_model_name(options.model)
    model, _ = models.load_model_and_processor(model_id)
    sampling = sampling_of(model, options)
    model.generation_config = GenerationConfig.from_dict(sampling.to_dict())
    batches.begin(model, sampling)
    state = OneBatch(batches, sampling)
    handlers = {
        "model_manager": models,
        "chat_handler": Chat(models, state),
        "completion_handler": Completion(models, state),
        "generation_state": state,
    }
    # Handlers of routes that `Admission` does not let through; which there are depends on transformers' version.
    needed = {name for name in inspect.signature(build_server).parameters if name.endswith("_handler")}
    return build_server(**{**dict.fromkeys(needed), **handlers})


def _run(config: uvicorn.Config) -> None:
    # Having ended, uvicorn raises the signal again for whoever handled it before: here nobody has to die of it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    uvicorn.Server(config).run()
