"""transformers' continuous batching behind its server: what reaches it fits, and no result of it is lost."""

from typing import Any

from fastapi import HTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import CBGenerateManager, GenerationState

from layers.serve.requests import problem

_PROMPTS = (1, 2, 7, 40)  # tokens of requests before the first
_ANSWER = 3
_PATIENCE = 1800  # seconds for a step that compiles


class Batches(CBGenerateManager):
    """One continuous batch, begun before the first request."""

    def begin(self, model: Any, sampling: Any) -> None:
        """Starts it, and waits until requests of several lengths, alone and together, have been answered.

        Raises RuntimeError where one was not: the batch could not be made, or the model failed in it.
        """
        self.init_cb(model, sampling)
        cb: Any = self._cb
        self._room = 0
        for number, prompt in enumerate(_PROMPTS):
            cb.add_request(
                [0] * prompt, request_id=f"before-{number}", max_new_tokens=_ANSWER, eos_token_id=-1
            )
        for _ in _PROMPTS:
            result = cb.get_result(timeout=_PATIENCE)
            if result is None or result.error is not None:
                fatal = cb.background_thread_status.fatal_error
                raise RuntimeError(f"the model did not answer: {fatal or (result and result.error)}")
        cache = cb.batch_processor.cache
        in_cache = cache.num_blocks * cb.batch_processor.cb_config.page_size
        self._room = min(
            in_cache, getattr(model.config.get_text_config(), "max_position_embeddings", in_cache)
        )

    @property
    def room(self) -> int:
        """The most tokens, of prompt and answer, that one request can have."""
        return self._room

    # transformers calls both with more, which differs from version to version.
    def generate_streaming(  # type: ignore[override]
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, **rest: Any
    ) -> Any:
        """As transformers does, and hands on what was generated before its handler was there."""
        self._fit(inputs, gen_config)
        begun = super().generate_streaming(model, processor, inputs, gen_config, **rest)
        self._hand_on()
        return begun

    async def generate_non_streaming(  # type: ignore[override]
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, **rest: Any
    ) -> Any:
        """As transformers does."""
        self._fit(inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, **rest)

    def _fit(self, inputs: Any, gen_config: Any) -> None:
        length, room = len(inputs["input_ids"]), self.room
        if not length:
            raise HTTPException(400, "the prompt has 0 tokens: expected at least 1")
        if length >= room:
            raise HTTPException(400, f"the prompt has {length} tokens: expected fewer than {room}")
        gen_config.max_new_tokens = min(gen_config.max_new_tokens, room - length)

    def _hand_on(self) -> None:
        # transformers adds a request first and registers its handler then: what came between lies in its queue.
        router: Any = self._cb.output_router  # type: ignore[union-attr]
        while not router.output_queue.empty():
            output = router.output_queue.get_nowait()
            if output.request_id in router.result_handlers:
                router.deliver(output)


class OneBatch(GenerationState):
    """The state of a server with one model and one batch."""

    def __init__(self, batches: Batches, sampling: Any) -> None:
        super().__init__(continuous_batching=True)
        self._cb_manager, self.sampling = batches, sampling

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        """The batch, whoever asks."""
        return self._cb_manager


class Chat(ChatCompletionHandler):
    """transformers' `/v1/chat/completions`, behind our checks."""

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        _expect_fine(body, self.generation_state, "messages")


class Completion(CompletionHandler):
    """transformers' `/v1/completions`, behind our checks."""

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        _expect_fine(body, self.generation_state, "prompt")


def _expect_fine(body: dict[str, Any], state: Any, needed: str) -> None:
    told = problem(body, state.sampling, needed)
    if told is not None:
        raise HTTPException(400, told)
