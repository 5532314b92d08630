"""What surrounds every request, as plain ASGI: its id, its key, and an answer even to what nobody foresaw."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import logs
from app.connection import FULL, too_many
from app.errors import error_response, unforeseen
from app.tenancy import Tenancy
from model_runner.errors import InvalidAPIKey

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
_MAX_ID_CHARACTERS = 128
_NOT_IN_AN_ID = re.compile(r"[^!-~]")  # printable ASCII without the space: it goes into headers and log lines


class RequestContext:
    """The outermost. Takes the client's `x-request-id` or makes one, and returns it with every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = clean_request_id(Headers(scope=scope).get(REQUEST_ID, ""))
        request_id = given or f"req-{uuid.uuid4().hex}"
        scope["state"] = {
            **scope.get("state", {}),
            "request_id": request_id,
            "request_id_was_given": bool(given),
        }
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # The last place where a fault can still become an answer.
            logger.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if started:
                raise
            await error_response(unforeseen(), request_id)(scope, receive, send_with_id)


class ConnectionLimit:
    """On a connection past the limit only what is `always_answered` is: probes and scrapes."""

    def __init__(
        self, app: ASGIApp, always_answered: Collection[str], on_refusal: Callable[[], None]
    ) -> None:
        self._app = app
        self._always_answered = always_answered
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit = scope["state"].get(FULL) if scope["type"] == "http" else None
        if limit is None or scope["path"] in self._always_answered:
            await self._app(scope, receive, send)
            return
        error, request_id = too_many(limit), scope["state"]["request_id"]
        self._on_refusal()
        logs.refusal(request_id, error)
        await error_response(error, request_id)(scope, receive, send)


class Authentication:
    """Guards /v1/* with keys, when there are any, and says whose it is. Probes and metrics are open."""

    def __init__(self, app: ASGIApp, tenancy: Tenancy, on_refusal: Callable[[], None]) -> None:
        self._app = app
        self._tenancy = tenancy
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"].startswith("/v1/")
        if not guarded or not self._tenancy.has_keys:
            await self._app(scope, receive, send)
            return
        holder = self._tenancy.holder(Headers(scope=scope).get("authorization", ""))
        if holder is None:
            self._on_refusal()
            message = "A valid key is required: send `Authorization: Bearer KEY`."
            response = error_response(InvalidAPIKey(message), scope["state"]["request_id"])
            await response(scope, receive, send)
            return
        scope["state"]["key_holder"] = holder
        await self._app(scope, receive, send)


def clean_request_id(given: str) -> str:
    return _NOT_IN_AN_ID.sub("", given)[:_MAX_ID_CHARACTERS]
