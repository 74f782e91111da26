"""What OpenAI's clients read of a reply: errors as an object with a message, and streams that say that they end."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from transformers.cli.serving.utils import CBWorkerDeadError

from layers.serve.admission import error

_FAILED = (
    'data: {"error": "'  # as transformers tells of a failure in a stream; its message may have quotes in it
)
_FAILED_END = '"}\n\n'
_DONE = "data: [DONE]\n\n"


def install(application: FastAPI) -> None:
    """Lets all errors of an application be told so."""
    application.add_exception_handler(HTTPException, _of_request)
    application.add_exception_handler(RequestValidationError, _of_body)
    application.add_exception_handler(CBWorkerDeadError, _of_batch)
    application.add_exception_handler(Exception, _of_server)


def ended(reply: Any) -> Any:
    """A reply; a stream has its last line, and a failure in it as clients read it."""
    if isinstance(reply, StreamingResponse):
        reply.body_iterator = _lines(reply.body_iterator)
    return reply


async def _lines(parts: Any) -> AsyncIterator[str]:
    async with aclosing(parts):  # a client that leaves ends what is generated for it
        async for part in parts:
            before, failed, message = part.partition(_FAILED)
            if failed:
                part = f"{before}data: {json.dumps(error(500, message.removesuffix(_FAILED_END)))}\n\n"
            yield part
    yield _DONE


def _json(status: int, message: str, headers: Any = None) -> JSONResponse:
    return JSONResponse(error(status, message), status, headers)


async def _of_request(_request: Request, raised: Any) -> JSONResponse:
    return _json(raised.status_code, str(raised.detail), raised.headers)


async def _of_body(_request: Request, raised: Any) -> JSONResponse:
    told = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in raised.errors())
    return _json(422, "; ".join(told))


async def _of_batch(_request: Request, raised: Exception) -> JSONResponse:
    return _json(503, str(raised))


async def _of_server(_request: Request, raised: Exception) -> JSONResponse:
    return _json(500, f"{type(raised).__name__}: {raised}")
