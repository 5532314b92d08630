"""One client's connection: uvicorn's, bounded before there is a request, and honest about who has left.

uvicorn with httptools reads a head of any length for as long as it takes, keeps trailers without end, answers
what is no HTTP in plain text, and on a connection with pipelined requests tells only the last of them that
the client is gone.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024  # and what one read brings beyond them
HEAD_SECONDS = 60.0


class Connection(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fruitless = 0  # bytes since a head was complete, or since the last of a body
        self._deadline: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                "The request's head is too long.",
                "head_too_large",
            )
            return
        self._fruitless += len(data)
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg, "invalid_http")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._fruitless = 0
        self._forget_deadline()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._fruitless = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._fruitless = 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._answering is not None and not self._answering.response_complete:
            self._await_head()  # the head of a pipelined request: its turn has not come
        else:
            self.transport.close()

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: HTTPStatus, message: str, code: str) -> None:
        """There is no request to answer, so it is written by hand, in the shape of all other errors."""
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = msgspec.json.encode({"error": error})
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
