"""Errors and streams as OpenAI's clients read them."""

import asyncio
import json

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from transformers.cli.serving.utils import CBWorkerDeadError

from layers.serve.admission import error
from layers.serve.replies import ended, install

RAISED = {
    "bad": (HTTPException(400, "n=3: no"), 400, "n=3: no"),
    "twice": (HTTPException(409, "in work"), 409, "in work"),
    "half": (HTTPException(400, "requested '\ud800'"), 400, "requested '\\ud800'"),
    "dead": (CBWorkerDeadError("it ended"), 503, "it ended"),
    "fault": (KeyError("x"), 500, "KeyError: 'x'"),
}


def answered(raised, body=b"{}", method="POST"):
    """The status of an application's answer whose only route raises, and its error."""
    app, sent = FastAPI(), []

    @app.post("/")
    async def answer(body: dict):
        raise raised

    install(app)
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "path": "/", "query_string": b"", "headers": headers}

    async def receive():
        return {"type": "http.request", "body": body}

    async def send(message):
        sent.append(message)

    async def ask():
        await asyncio.gather(
            app(scope, receive, send), return_exceptions=True
        )  # a fault is raised for the log as well

    asyncio.run(ask())
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]


@pytest.mark.parametrize(("raised", "status", "told"), RAISED.values(), ids=RAISED)
def test_errors_are_objects_with_a_message(raised, status, told):
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert answered(raised) == (status, {"message": told, "type": kind, "param": None, "code": status})


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
    ],
)
def test_kinds_are_those_of_the_api(status, kind):
    assert error(status, "no")["error"]["type"] == kind


def test_what_is_no_request_is_told_so():
    status, told = answered(None, b"[1]")
    assert (status, told["message"]) == (422, "body: Input should be a valid dictionary")
    assert answered(None, method="GET")[1]["message"] == "Method Not Allowed"


def streamed(*parts):
    async def generate():
        for part in parts:
            yield part

    async def read():
        return [part async for part in ended(StreamingResponse(generate())).body_iterator]

    return asyncio.run(read())


def test_a_stream_ends_with_its_last_line():
    assert streamed("data: {}\n\n", "data: 5\n\n") == ["data: {}\n\n", "data: 5\n\n", "data: [DONE]\n\n"]


def test_a_failure_in_a_stream_is_read_by_clients():
    told, end = streamed('data: {}\n\ndata: {"error": "no "kernel"\n here"}\n\n')
    first, second, _ = told.split("\n\n")
    assert first == "data: {}" and end == "data: [DONE]\n\n"
    assert json.loads(second.removeprefix("data: "))["error"]["message"] == 'no "kernel"\n here'


def test_who_leaves_ends_what_is_generated():
    ended_by = []

    async def generate():
        try:
            while True:
                yield "data: {}\n\n"
        except GeneratorExit:
            ended_by.append("the client")
            raise

    async def leave():
        parts = ended(StreamingResponse(generate())).body_iterator
        await anext(parts)
        await parts.aclose()
        assert ended_by == ["the client"]

    asyncio.run(leave())


def test_other_replies_stay():
    reply = object()
    assert ended(reply) is reply
