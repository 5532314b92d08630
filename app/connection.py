"""One client's connection: uvicorn's, bounded before there is a request, and honest about who has left.

uvicorn with httptools reads a head of any length for as long as it takes, keeps trailers without end, answers
what is no HTTP in plain text, and on a connection with pipelined requests tells only the last of them that
the client is gone. Its limit_concurrency refuses requests, in plain text and to probes too, when so many
connections are open; it closes none, so that idle ones can be had without end.
"""

from __future__ import annotations

import asyncio
import random
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.errors import INVALID, error_body, retry_headers
from model_runner.errors import TooManyConnections

MAX_HEAD_BYTES = 64 * 1024  # and what one read brings beyond them
HEAD_SECONDS = 60.0
# Past the limit, so many more are heard: each for one request, of which only probes and scrapes are answered.
SPARE_CONNECTIONS = 64
SPARE_HEAD_SECONDS = 5.0
FULL = "connections_full"  # in the scope's state, for app.middleware
RETRY_SECONDS = (1.0, 2.0)  # when one leaves can't be foreseen. A range, so that a crowd scatters.


def too_many(limit: int) -> TooManyConnections:
    return TooManyConnections(
        f"All {limit} connections that this server takes are in use.",
        retry_after_seconds=random.uniform(*RETRY_SECONDS),
    )


class Connection(HttpToolsProtocol):
    """`limit_concurrency` of uvicorn's configuration is the most connections; None is no limit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limit, self.limit_concurrency = self.limit_concurrency, None
        self._spare = False
        self._fruitless = 0  # bytes since a head was complete, or since the last of a body
        self._deadline: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        excess = self._excess()
        self._spare = excess > 0
        if self._limit is not None and excess > SPARE_CONNECTIONS:
            error = too_many(self._limit)
            headers = retry_headers(error.retry_after_seconds)
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, error_body(error, "")["error"], headers)
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)
        for cycle in (self._answering, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._fruitless > MAX_HEAD_BYTES:
            self._refuse_invalid(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                "The request's head is too long.",
                "head_too_large",
            )
            return
        self._fruitless += len(data)
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        self._refuse_invalid(HTTPStatus.BAD_REQUEST, msg, "invalid_http")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._fruitless = 0
        self._forget_deadline()
        self._spare = self._spare and self._excess() > 0
        if self._spare:
            self.scope["state"][FULL] = self._limit
        super().on_headers_complete()
        if self._spare:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._fruitless = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._fruitless = 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _excess(self) -> int:
        """How many connections there are past the limit."""
        return 0 if self._limit is None else max(len(self.connections) - self._limit, 0)

    def _await_head(self) -> None:
        seconds = SPARE_HEAD_SECONDS if self._spare else HEAD_SECONDS
        self._deadline = self.loop.call_later(seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._answering is not None and not self._answering.response_complete:
            self._await_head()  # the head of a pipelined request: its turn has not come
        else:
            self.transport.close()

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse_invalid(self, status: HTTPStatus, message: str, code: str) -> None:
        self._refuse(status, {"message": message, "type": INVALID, "param": None, "code": code}, {})

    def _refuse(self, status: HTTPStatus, error: dict[str, Any], headers: dict[str, str]) -> None:
        """There is no request to answer, so it is written by hand, in the shape of all other errors."""
        body = msgspec.json.encode({"error": error})
        fields = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **headers,
        }
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.transport.write(head.encode() + b"\r\n" + body)
        self.transport.close()
