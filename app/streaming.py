"""Reading a request's stream to its end: into one answer, or into server-sent events as the tokens come.

Whoever reads, watches the client too: the moment it hangs up, the request is aborted and its bytes are free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.assembly import Delta, RequestAssembly
from app.errors import PROJECTED_BYTES, QUEUE_SECONDS, error_body, error_response, unforeseen
from app.preparation import ClientDisconnected
from app.responses import AnswerFormat, usage
from model_runner.errors import PlimsollError
from model_runner.request_stream import RequestStream, Restarted

logger = logging.getLogger(__name__)

CLIENT_DISCONNECTED = "client_disconnected"
SERVER_FAULT = "server_fault"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather the tokens otherwise
]
_INLINE_SCORES = 500  # about two milliseconds to write, with the most of likeliest tokens
_DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


def price_headers(stream: RequestStream) -> dict[str, str]:
    """What the request was priced at, and how long it had waited when it was let in."""
    return {PROJECTED_BYTES: str(stream.projected_bytes), QUEUE_SECONDS: f"{stream.queue_seconds:.3f}"}


async def while_connected(receive: Receive, stream: RequestStream, work: Coroutine[Any, Any, T]) -> T:
    """`work`'s result. Raises ClientDisconnected when the client leaves first; however `work` is left, the
    request has ended or is aborted.

    `receive` must have no more of the body to give: what comes next is the disconnection.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnected
        return worker.result()
    finally:
        # After the end it does nothing; if the worker came to its own end before, a fault has stopped it.
        stream.abort(SERVER_FAULT if worker.done() else CLIENT_DISCONNECTED)
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(
    stream: RequestStream, assembly: RequestAssembly, answer: AnswerFormat, choices: int
) -> bytes:
    """The whole answer's body. Raises what iterating the stream raises."""
    collected = [Delta() for _ in range(choices)]
    texts: list[list[str]] = [[] for _ in range(choices)]
    async for event in stream:
        if isinstance(event, Restarted):
            assembly.reset()
            collected = [Delta() for _ in range(choices)]
            texts = [[] for _ in range(choices)]
            continue
        for index, delta in assembly.push(event):
            texts[index].append(delta.text)
            collected[index].scored += delta.scored
            collected[index].finish_reason = delta.finish_reason
    for choice, parts in zip(collected, texts, strict=True):
        choice.text = "".join(parts)
    counted = usage(assembly.prompt_tokens, assembly.completion_tokens)
    scored = sum(len(choice.scored) for choice in collected)
    return await _written(lambda: msgspec.json.encode(answer.whole(collected, counted)), scored)


async def _written(write: Callable[[], bytes], scored: int) -> bytes:
    """`write()`, in a thread when so many scores would hold up everybody else's tokens."""
    return write() if scored <= _INLINE_SCORES else await asyncio.to_thread(write)


class EventStream(Response):
    """A stream of server-sent events. No header leaves before the first token, so that until then every error
    has its own status; after it, an error is a last event in the usual shape, without [DONE].
    """

    def __init__(
        self, stream: RequestStream, assembly: RequestAssembly, answer: AnswerFormat, request_id: str
    ) -> None:
        super().__init__()
        self._stream = stream
        self._assembly = assembly
        self._answer = answer
        self._request_id = request_id
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._stream, self._send_all(send))
        except ClientDisconnected:
            return
        except PlimsollError as error:
            await self._send_error(error, scope, receive, send)
        except Exception as error:
            if not self._started:
                raise  # answered as every other fault is
            logger.exception(
                "request %s failed in the middle of its stream", self._request_id, exc_info=error
            )
            await self._send_error(unforeseen(), scope, receive, send)

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._batches()) as batches:
            async for events in batches:
                if not self._started:
                    self._started = self._stream.delivered = True
                    priced = [
                        (name.encode(), value.encode()) for name, value in price_headers(self._stream).items()
                    ]
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS + priced})
                await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})

    async def _batches(self) -> AsyncGenerator[bytes, None]:
        """Encoded events, as many in one piece as there are to send."""
        begun: set[int] = set()
        async for event in self._stream:
            if isinstance(event, Restarted):
                self._assembly.reset()
                continue
            batch = []
            for index, delta in self._assembly.push(event):
                write = partial(self._write, index, delta, first=index not in begun)
                batch.append(await _written(write, len(delta.scored)))
                begun.add(index)
            if batch:
                yield b"".join(batch)
        if self._answer.include_usage:
            counted = usage(self._assembly.prompt_tokens, self._assembly.completion_tokens)
            yield encode_events([self._answer.usage_chunk(counted)])

    def _write(self, index: int, delta: Delta, *, first: bool) -> bytes:
        return encode_events(self._answer.chunks(index, delta, first=first))

    async def _send_error(self, error: PlimsollError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._started:
            event = encode_events([error_body(error, self._request_id)])
            await send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            await error_response(error, self._request_id)(scope, receive, send)


def encode_events(bodies: Iterable[object]) -> bytes:
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(body) for body in bodies)
