"""Which requests reach transformers' server: those it can answer with one pinned model, and only so many at once."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_GENERATES = frozenset({"/v1/chat/completions", "/v1/completions"})
_TELLS = frozenset({"/health", "/v1/models"})
_KINDS = {404: "not_found_error", 429: "rate_limit_error"}


class Admission:
    """An ASGI application around another.

    Requests for text beyond `most` in work are answered 429 at once, so that those in work finish; a request leaves
    when its answer or its stream has ended, however that came about. transformers' routes that load or drop models,
    and those that need other models, are answered 404.
    """

    def __init__(self, app: App, most: int) -> None:
        self._app, self._most, self._in_work = app, most, 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers one connection."""
        path = scope.get("path")
        if scope["type"] != "http" or path in _TELLS:
            await self._app(scope, receive, send)
        elif path not in _GENERATES:
            known = ", ".join(sorted(_GENERATES | _TELLS))
            await _refuse(send, 404, f"{path} is not served here: expected one of {known}")
        elif self._in_work >= self._most:
            await self._refuse_one_more(send)
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        messages = await _body(receive)
        if self._in_work == self._most:
            return await self._refuse_one_more(send)
        self._in_work += 1
        try:
            await self._app(scope, _once_more(messages, receive), send)
        finally:
            self._in_work -= 1

    async def _refuse_one_more(self, send: Send) -> None:
        told = f"{self._in_work} requests are in work, and this server takes no more at once: try again later"
        await _refuse(send, 429, told)


async def _body(receive: Receive) -> list[Message]:
    """What a request consists of. Who never sends its end, as after a lost connection, takes nobody's place."""
    messages = [await receive()]
    while messages[-1].get("more_body"):
        messages.append(await receive())
    return messages


def _once_more(messages: list[Message], receive: Receive) -> Receive:
    left = iter(messages)

    async def received() -> Message:
        return next(left, None) or await receive()

    return received


def error(status: int, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    message = message.encode(errors="backslashreplace").decode()  # half a surrogate pair is in no UTF-8
    kind = "server_error" if status >= 500 else _KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _refuse(send: Send, status: int, told: str) -> None:
    body = json.dumps(error(status, told)).encode()
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
