"""transformers' continuous batching: made from our options, captured and tried before anybody is answered."""

from dataclasses import fields
from typing import Any

import torch
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig

from layers.serve.options import ServeOptions

# The tokens of a block; transformers 5.17 has the one name, later versions the other.
_PAGE = ({field.name for field in fields(ContinuousBatchingConfig)} & {"page_size"} or {"block_size"}).pop()
_PROMPTS = (1, 2, 7, 40)  # tokens of requests before the first
_ANSWER = 3
_PATIENCE = 1800  # seconds for a step that compiles


def batching_config(options: ServeOptions) -> ContinuousBatchingConfig:
    """transformers' options: both its paths compiled by `options.backend`.

    Never with graphs of the compiler's own ("reduce-overhead"), for a step is captured as a whole; and for any number
    of tokens, of which there are many. `fullgraph` is not possible: paged attention is a graph break.
    """
    compiled = None
    if options.backend is not None:
        compiled = CompileConfig(backend=options.backend, mode="default", dynamic=True, fullgraph=False)
    given: dict[str, Any] = {
        "max_batch_tokens": options.max_batch_tokens,
        "num_blocks": options.num_blocks,
        _PAGE: options.page_size,
        "use_cuda_graph": options.cuda_graphs,
    }
    return ContinuousBatchingConfig(
        varlen_compile_config=compiled,
        decode_compile_config=compiled,
        **{name: value for name, value in given.items() if value is not None},
    )


def begun(model: Any, sampling: GenerationConfig, config: ContinuousBatchingConfig) -> Any:
    """A running ContinuousBatchingManager of `model`.

    On a GPU its steps were captured or compiled for every number of tokens, and everywhere requests of several lengths,
    alone and together, were answered.
    Raises RuntimeError where one was not: the batch could not be made, or the model failed in it.
    """
    manager = model.init_continuous_batching(generation_config=sampling, continuous_batching_config=config)
    if model.device.type != "cpu":
        capture(manager)
    manager.start()
    try:
        _try(manager)
    except BaseException:
        manager.stop(block=True, timeout=2, hard_stop=True)
        raise
    return manager


@torch.no_grad()
def capture(manager: Any) -> None:
    """Runs the steps of a manager that has not started: captured ones are captured, compiled ones load their kernels.

    First what transformers' own `warmup` runs, the largest step and the decodes, so that its memory serves the others;
    then a step of every number of tokens to which transformers pads, with little in the cache. Steps that are prepared
    while others run take turns between two sets of buffers, each with graphs of its own. Of steps that are not padded
    there is nothing to run. Graphs of longer caches are captured when they come, without compiling.
    """
    manager.warmup()
    runner, config = manager.batch_processor.model_runner, manager.continuous_batching_config
    if runner.pad_inputs:
        most, buffers = manager.batch_processor.cache.max_batch_tokens, runner.inputs_and_outputs
        for _ in getattr(buffers, "io_pairs", (buffers,)):
            for tokens in range(config.q_padding_interval_size, most, config.q_padding_interval_size):
                runner.run_one_warmup(manager.model, tokens, getattr(config, _PAGE))
            if hasattr(buffers, "swap_io_pairs"):
                buffers.swap_io_pairs()


def _try(manager: Any) -> None:
    for number, prompt in enumerate(_PROMPTS):
        manager.add_request(
            [0] * prompt, request_id=f"before-{number}", max_new_tokens=_ANSWER, eos_token_id=-1
        )
    for _ in _PROMPTS:
        result = manager.get_result(timeout=_PATIENCE)
        if result is None or result.error is not None:
            fatal = manager.background_thread_status.fatal_error
            raise RuntimeError(f"the model did not answer: {fatal or (result and result.error)}")


def room(manager: Any) -> int:
    """The most tokens, of prompt and answer, that one request of a manager that was `begun` can have."""
    in_cache = manager.batch_processor.cache.num_blocks * getattr(manager.continuous_batching_config, _PAGE)
    text = manager.model.config.get_text_config()
    return min(in_cache, getattr(text, "max_position_embeddings", in_cache))
