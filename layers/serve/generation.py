"""transformers' continuous batching behind its server: what reaches it fits, and whoever waits is told."""

from collections.abc import Awaitable
from typing import Any

from fastapi import HTTPException
from jinja2 import TemplateError
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import CBGenerateManager, CBWorkerDeadError, GenerationState

from layers.serve.batching import begun, room
from layers.serve.messages import Careful, Reader
from layers.serve.replies import ended
from layers.serve.requests import problem

_ENDING = 2  # seconds that the last step has


class Batches(CBGenerateManager):
    """One continuous batch, begun before the first request."""

    def begin(self, model: Any, sampling: Any) -> None:
        """Starts it. Raises RuntimeError where the model does not answer."""
        self.run(begun(model, sampling, self._cb_config))  # type: ignore[arg-type]

    def run(self, manager: Any) -> None:
        """Answers with `manager`, which runs."""
        self._cb, self._room = manager, room(manager)
        self._add, self._cancel = manager.add_request, manager.cancel_request
        manager.add_request, manager.cancel_request = self._added, self._cancelled

    def stop(self) -> None:
        """Ends it without finishing what nobody reads any more."""
        if self._cb is not None:
            self._cb.stop(block=True, timeout=_ENDING, hard_stop=True)

    # transformers calls both with more, which differs from version to version.
    def generate_streaming(  # type: ignore[override]
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *, request_id: str, **rest: Any
    ) -> Any:
        """As transformers does, and nothing is lost that was generated before its handler was there."""
        self._expect_fit(inputs, gen_config, request_id)
        manager: Any = self._cb
        handlers = manager.output_router.result_handlers

        def hand_on(output: Any) -> None:
            if request_id in handlers:
                handlers[request_id][0](output)

        # transformers adds a request first and its handler then. What comes between waits for the loop, in its order.
        manager.register_result_handler(request_id, hand_on)
        if rest.get("response_parser") is not None:
            rest["response_parser"] = Careful(rest["response_parser"], processor)
        try:
            queue, streamer = super().generate_streaming(
                model, processor, inputs, gen_config, request_id, **rest
            )
        except Exception:
            handlers.pop(request_id, None)
            raise
        put: Any = streamer.put

        def put_and_look(output: Any) -> None:
            put(output)
            _tell_the_end(output.generated_tokens, gen_config)

        streamer.put = put_and_look
        return queue, streamer

    async def generate_non_streaming(  # type: ignore[override]
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *, request_id: str, **rest: Any
    ) -> Any:
        """As transformers does."""
        self._expect_fit(inputs, gen_config, request_id)
        told = await super().generate_non_streaming(model, processor, inputs, gen_config, request_id, **rest)
        _tell_the_end(told[-1], gen_config)
        return told

    def _added(self, *args: Any, **kwargs: Any) -> str:
        # A batch that ends takes no request, or takes it and never looks at it: transformers says so in its log.
        status = self._cb.background_thread_status  # type: ignore[union-attr]
        taken = self._add(*args, **kwargs)
        told = status.can_accept_new_requests()
        if taken is None or told is not None:
            raise CBWorkerDeadError(f"no more requests are taken: {told}")
        return taken

    def _cancelled(self, request_id: str) -> None:
        # Nothing more comes for it, by which transformers would forget its handler.
        self._cb.output_router.result_handlers.pop(request_id, None)  # type: ignore[union-attr]
        self._cancel(request_id)

    def _expect_fit(self, inputs: Any, gen_config: Any, request_id: str) -> None:
        length, most = len(inputs["input_ids"]), self._room
        if not length:
            raise HTTPException(400, "the prompt has 0 tokens: expected at least 1")
        if length >= most:
            raise HTTPException(400, f"the prompt has {length} tokens: expected fewer than {most}")
        if request_id in self._cb.output_router.result_handlers:  # type: ignore[union-attr]
            raise HTTPException(409, f"request {request_id!r} is in work: expected another x-request-id")
        gen_config.max_new_tokens = min(gen_config.max_new_tokens, most - length)


def _tell_the_end(tokens: Any, gen_config: Any) -> None:
    """Lets an answer that ends by itself with the last token it may have be told so: transformers tells of a limit."""
    ends = gen_config.eos_token_id
    if tokens and tokens[-1] in (ends if isinstance(ends, list) else [ends]):
        gen_config.max_new_tokens = None


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

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Its answer; HTTPException 400 for what a template or a field's type does not allow."""
        return await _told(super().handle_request(body, request_id))

    async def _non_streaming(
        self, request_id: str, model: Any, processor: Any, *args: Any, **rest: Any
    ) -> Any:
        return await super()._non_streaming(request_id, model, Reader(processor), *args, **rest)  # type: ignore[arg-type]

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        _expect_fine(body, self.generation_state, "messages")
        if not body.get("chat_template_kwargs"):
            body.pop("chat_template_kwargs", None)  # transformers reads only what is not there as nothing
        if body.get("max_completion_tokens") is not None:
            body["max_tokens"] = body[
                "max_completion_tokens"
            ]  # the one name of both that transformers 5.17 reads


class Completion(CompletionHandler):
    """transformers' `/v1/completions`, behind our checks."""

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Its answer; HTTPException 400 for what a field's type does not allow."""
        return await _told(super().handle_request(body, request_id))

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        _expect_fine(body, self.generation_state, "prompt")


async def _told(answer: Awaitable[Any]) -> Any:
    try:
        return ended(await answer)
    except (ValueError, TypeError, LookupError, AttributeError, TemplateError) as error:
        raise HTTPException(400, f"{type(error).__name__}: {error}") from error


def _expect_fine(body: dict[str, Any], state: Any, needed: str) -> None:
    told = problem(body, state.sampling, needed)
    if told is not None:
        raise HTTPException(400, told)
    body.pop("seed", None)  # where nothing is drawn; transformers would seed the whole process
