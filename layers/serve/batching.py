"""transformers' continuous batching: made from our options, captured and tried before anybody is answered."""

from bisect import bisect_right
from collections.abc import Sequence
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
    Raises ValueError for a cache in which what is answered before the first request has no room.
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
    config = ContinuousBatchingConfig(
        varlen_compile_config=compiled,
        decode_compile_config=compiled,
        **{name: value for name, value in given.items() if value is not None},
    )
    _expect_room(options.num_blocks, getattr(config, _PAGE))
    return config


def _expect_room(num_blocks: int | None, page_size: int | None) -> None:
    needed = max(_PROMPTS) + _ANSWER
    if num_blocks is not None and page_size is not None and num_blocks * page_size < needed:
        told = f"num_blocks={num_blocks} of page_size={page_size} hold {num_blocks * page_size} tokens"
        raise ValueError(f"{told}: expected at least {needed}, for what is answered before the first request")


def small() -> ContinuousBatchingConfig:
    """Options of a batch of a few requests that runs once: nothing is compiled, captured or read by block tables."""
    given: dict[str, Any] = {_PAGE: 16}
    return ContinuousBatchingConfig(
        max_batch_tokens=64, num_blocks=256, use_cuda_graph=False, max_blocks_per_request=0, **given
    )


def begun(model: Any, sampling: GenerationConfig, config: ContinuousBatchingConfig) -> Any:
    """A running ContinuousBatchingManager of `model`.

    On a GPU its steps were captured or compiled for every number of tokens, and everywhere requests of several lengths,
    alone and together, were answered.
    Raises RuntimeError where one was not: the batch could not be made, or the model failed in it; ValueError for what
    `sampling` does to logits and no batch does.
    """
    manager = model.init_continuous_batching(generation_config=sampling, continuous_batching_config=config)
    _expect_nothing_dropped(manager, model._get_logits_processor(sampling))
    if model.device.type != "cpu":
        capture(manager)
    manager.start()
    try:
        answers(manager, [[0] * length for length in _PROMPTS], _ANSWER)
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


def _expect_nothing_dropped(manager: Any, asked: Any) -> None:
    kept = {type(each) for each in manager.logit_processor.logits_processor}
    dropped = [type(each).__name__ for each in asked if type(each) not in kept]
    if dropped:
        raise ValueError(
            f"the checkpoint's generation config asks for {', '.join(dropped)}, which transformers leaves out of "
            "continuous batching: expected none there, or --greedy, which takes the most likely token instead"
        )


def answers(manager: Any, prompts: Sequence[list[int]], length: int) -> list[list[int]]:
    """What a running manager answers to all prompts at once, so many tokens each. RuntimeError where it does not."""
    names = [f"before-{number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        manager.add_request(prompt, request_id=name, max_new_tokens=length, eos_token_id=-1)
    found: dict[str, list[int]] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=_PATIENCE)
        if result is None or result.error is not None:
            fatal = manager.background_thread_status.fatal_error
            raise RuntimeError(f"the model did not answer: {fatal or (result and result.error)}")
        found[result.request_id] = list(result.generated_tokens)
    return [found[name] for name in names]


def room(manager: Any) -> int:
    """The most tokens, of prompt and answer, that one request of a manager that was `begun` can have."""
    cache, text = manager.batch_processor.cache, manager.model.config.get_text_config()
    in_cache = cache.num_blocks * getattr(manager.continuous_batching_config, _PAGE)
    if hasattr(
        cache, "cache_allocators"
    ):  # which share sectors: a request that fits only their sum ends the batch
        in_cache = bisect_right(range(1, in_cache + 1), False, key=lambda tokens: not _fits(cache, tokens))
    return min(in_cache, getattr(text, "max_position_embeddings", in_cache), *_turned_alike(text))


def _fits(cache: Any, tokens: int) -> bool:
    each = cache.cache_allocators.values()
    sectors = (-(-kind.needs_new_blocks("", 0, tokens) // kind.blocks_per_sector) for kind in each)
    return sum(sectors) <= cache.num_sectors


def _turned_alike(text: Any) -> list[int]:
    """Beyond so many tokens one request of the batch changes the frequencies by which all others are turned."""
    rope = getattr(text, "rope_parameters", None) or {}
    each = [rope, *(of_a_layer for of_a_layer in rope.values() if isinstance(of_a_layer, dict))]
    long = [kind for kind in each if kind.get("rope_type") == "longrope"]
    return [kind["original_max_position_embeddings"] for kind in long]
