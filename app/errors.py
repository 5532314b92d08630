"""One table from what went wrong to what the client is told, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.preparation import BodyTimeout
from model_runner import errors

INVALID = "invalid_request_error"
RATE_LIMIT = "rate_limit_exceeded"
SERVER = "server_error"

PROJECTED_BYTES = "x-plimsoll-projected-bytes"
QUEUE_SECONDS = "x-plimsoll-queue-seconds"
FREE_BYTES = "x-plimsoll-free-bytes"

_PARTING_SECONDS = 5.0
_PARTING_BYTES = 32 * 2**20

# class -> (HTTP status, OpenAI's `type`). A class that isn't here is told as its nearest parent.
TABLE: dict[type[errors.PlimsollError], tuple[int, str]] = {
    errors.InvalidRequest: (400, INVALID),
    errors.ContextLengthExceeded: (400, INVALID),
    errors.KVCacheBudgetExceeded: (400, INVALID),
    errors.RequestTooLarge: (413, INVALID),
    errors.InvalidAPIKey: (401, INVALID),
    errors.ModelNotFound: (404, INVALID),
    errors.QueueFull: (429, RATE_LIMIT),
    errors.WaitTooLong: (429, RATE_LIMIT),
    errors.TenantRateLimited: (429, RATE_LIMIT),
    errors.TenantQueueFull: (429, RATE_LIMIT),
    errors.TenantOverLimit: (429, RATE_LIMIT),
    errors.QueueTimeout: (504, SERVER),
    errors.TooManyConnections: (503, SERVER),
    errors.Draining: (503, SERVER),
    errors.Starting: (503, SERVER),
    errors.EngineRestarting: (503, SERVER),
    errors.PlimsollError: (500, SERVER),
    BodyTimeout: (408, INVALID),
}


def status_and_type(error: errors.PlimsollError) -> tuple[int, str]:
    return next(TABLE[kind] for kind in type(error).__mro__ if kind in TABLE)


def error_body(error: errors.PlimsollError, request_id: str) -> dict[str, Any]:
    """The JSON body of an error, as protocol.responses.ErrorResponse describes it.

    A fault of ours names the request, for whoever will look for it in the log.
    """
    code = error.code if isinstance(error, errors.InvalidRequest) and error.code else error.reason.value
    fault = status_and_type(error)[0] == 500
    body: dict[str, Any] = {
        "message": f"{error.message} (request {request_id})" if fault else error.message,
        "type": status_and_type(error)[1],
        "param": error.param if isinstance(error, errors.ClientError) else None,
        "code": code,
    }
    if isinstance(error, errors.KVCacheBudgetExceeded):
        body["required_bytes"] = error.required_bytes
        body["budget_bytes"] = error.budget_bytes
        body["largest_max_tokens"] = error.largest_max_tokens
    elif isinstance(error, errors.NoRoom) and (short := error.shortage) is not None:
        body["required_bytes"] = short.required_bytes
        body["free_bytes"] = short.free_bytes
        body["predicted_wait_seconds"] = round(short.predicted_wait_seconds, 3)
    return {"error": body}


def error_headers(error: errors.PlimsollError) -> dict[str, str]:
    if isinstance(error, errors.InvalidAPIKey):
        return {"www-authenticate": 'Bearer realm="plimsoll"'}
    if isinstance(error, errors.RequestTooLarge | BodyTimeout):
        return {"connection": "close"}  # the rest of the body is still on its way, and nobody will read it
    if isinstance(error, errors.EngineDied):
        return {"x-should-retry": "false"}  # it has been tried again here already
    if isinstance(error, errors.TooManyConnections):
        return {"connection": "close", **retry_headers(error.retry_after_seconds)}
    if isinstance(error, errors.NoRoom) and (short := error.shortage) is not None:
        figures = {PROJECTED_BYTES: str(short.required_bytes), FREE_BYTES: str(short.free_bytes)}
        return {**figures, **retry_headers(error.retry_after_seconds)}
    if isinstance(error, errors.LoadError):
        return retry_headers(error.retry_after_seconds)
    return {}


def retry_headers(seconds: float) -> dict[str, str]:
    """In whole seconds, which every client reads, and in milliseconds, which OpenAI's prefers.

    `seconds` are the engine's forecast, with its jitter.
    """
    milliseconds = max(1, math.ceil(max(seconds, 0.0) * 1000))
    return {"retry-after": str(max(1, math.ceil(milliseconds / 1000))), "retry-after-ms": str(milliseconds)}


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: errors.PlimsollError, request_id: str) -> Response:
    kind = Parting if isinstance(error, errors.RequestTooLarge | errors.TooManyConnections) else Response
    body = msgspec.json.encode(error_body(error, request_id))
    return kind(body, status_and_type(error)[0], error_headers(error), "application/json")


class Parting(Response):
    """An answer to a client that is still sending a body which nobody wants.

    It is sent whole at once; then what still comes is dropped, for a while and up to a size, because a socket
    that is closed with unread bytes in it is reset, and the answer with it.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_stay(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "more_body": True}
            await send(message)

        await super().__call__(scope, receive, send_and_stay)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PARTING_SECONDS):
                dropped = 0
                while dropped < _PARTING_BYTES:
                    message = await receive()
                    dropped += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        break
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def unforeseen() -> errors.ServerFault:
    """What a client is told of a fault that nobody foresaw. The traceback goes to the log."""
    return errors.ServerFault("The server failed on this request.")


def http_error_response(error: HTTPException, method: str, path: str) -> Response:
    """404 and 405 of the router, in the shape of all the others."""
    phrase = HTTPStatus(error.status_code).phrase
    messages = {
        404: (f"There is nothing at {path}.", "unknown_url"),
        405: (f"{path} does not take {method}.", "method_not_supported"),
    }
    message, code = messages.get(error.status_code, (f"{phrase}: {error.detail}", None))
    kind = INVALID if error.status_code < 500 else SERVER
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return json_response(body, error.status_code, dict(error.headers or {}))
