"""Who gets to the server: so many at once, on the routes that are served."""

import asyncio
import json

import pytest

from layers.serve.admission import Admission

CHAT = {"type": "http", "path": "/v1/chat/completions"}


class App:
    """An application whose answers wait until they are let go, or fail."""

    def __init__(self):
        self.go, self.asked, self.error = asyncio.Event(), 0, None

    async def __call__(self, scope, receive, send):
        self.asked += 1
        await self.go.wait()
        if self.error is not None:
            raise self.error


async def asking():
    return {"type": "http.request", "body": b"{}", "more_body": False}


async def answered(application, scope, receive=asking):
    sent = []

    async def send(message):
        sent.append(message)

    await application(scope, receive, send)
    return (sent[0]["status"], json.loads(sent[1]["body"])["error"]["message"]) if sent else None


@pytest.mark.parametrize("end", ["answered", "raised", "cancelled"])
def test_so_many_at_once_and_room_again_however_they_end(end):
    async def story():
        inner = App()
        application = Admission(inner, 2)
        asked = [asyncio.create_task(answered(application, CHAT)) for _ in range(2)]
        await asyncio.sleep(0)
        status, told = await answered(application, CHAT, None)  # at once: nothing of it is received
        assert status == 429 and told.startswith("2 requests are in work")
        assert inner.asked == 2
        if end == "cancelled":
            asked[0].cancel()
            asked[1].cancel()
        else:
            inner.error = ValueError("broken") if end == "raised" else None
            inner.go.set()
        await asyncio.gather(*asked, return_exceptions=True)
        inner.error = None
        inner.go.set()
        assert [await answered(application, CHAT) for _ in range(3)] == [None] * 3

    asyncio.run(story())


def test_other_routes():
    async def story():
        inner = App()
        application = Admission(inner, 1)
        inner.go.set()
        for path in ("/health", "/v1/models", "/v1/completions"):
            assert await answered(application, {"type": "http", "path": path}) is None
        assert await answered(application, {"type": "lifespan"}) is None
        assert inner.asked == 4
        status, told = await answered(application, {"type": "http", "path": "/reset"})
        assert status == 404 and "/reset is not served here" in told
        assert inner.asked == 4

    asyncio.run(story())


def test_health_is_told_while_there_is_no_room():
    async def story():
        inner = App()
        application = Admission(inner, 1)
        task = asyncio.create_task(answered(application, CHAT))
        await asyncio.sleep(0)
        health = asyncio.create_task(answered(application, {"type": "http", "path": "/health"}))
        await asyncio.sleep(0)
        assert inner.asked == 2
        inner.go.set()
        assert await asyncio.gather(task, health) == [None, None]

    asyncio.run(story())


def sent(*parts):
    """`receive` of a request in several parts; what comes then waits for ever."""
    messages = asyncio.Queue()
    for number, part in enumerate(parts):
        messages.put_nowait({"type": "http.request", "body": part, "more_body": number + 1 < len(parts)})
    return messages.get, messages


def test_a_request_that_never_ends_takes_nobodys_place():
    async def story():
        inner = App()
        application = Admission(inner, 1)
        receive, messages = sent()
        messages.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        slow = asyncio.create_task(answered(application, CHAT, receive))
        await asyncio.sleep(0)
        first = asyncio.create_task(answered(application, CHAT))
        await asyncio.sleep(0)
        assert inner.asked == 1
        messages.put_nowait({"type": "http.request", "body": b"}", "more_body": False})
        status, _ = await slow
        assert status == 429 and inner.asked == 1
        inner.go.set()
        assert await first is None

    asyncio.run(story())


def test_the_application_receives_all_of_a_request():
    async def story():
        bodies = []

        async def inner(scope, receive, send):
            bodies.extend([(await receive())["body"] for _ in range(3)])

        receive, messages = sent(b"a", b"b")
        messages.put_nowait({"type": "http.disconnect", "body": "left"})
        assert await answered(Admission(inner, 1), CHAT, receive) is None
        assert bodies == [b"a", b"b", "left"]

    asyncio.run(story())
