"""The work before the door, bounded: reading bodies, checking them, tokenising.

A request is priced only when its tokens are known, so this is where a crowd could fill the memory and the
event loop without ever meeting the door. At most so many requests and so many bytes of bodies are in
preparation at once; one body may be so long, and may take so long to arrive; what takes long runs in few
threads.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from starlette.requests import Request

from model_runner.errors import InvalidRequest, QueueFull, RequestTooLarge

MAX_REQUESTS = 1024
MAX_BODIES = 16  # of the largest size, or more that are smaller
BODY_SECONDS = 60.0
INLINE_BYTES = (
    4096  # a body up to here is prepared in about a millisecond, less than a thread's turn would take
)
RETRY_SECONDS = (1.0, 2.0)  # preparation is short: room comes soon. A range, so that a crowd scatters.

T = TypeVar("T")


class ClientDisconnected(Exception):
    """Nobody is there to read an answer."""


class BodyTimeout(InvalidRequest):
    """The body did not arrive in time."""


class Preparation:
    """Bounds for all requests together. Lives as long as the server."""

    def __init__(
        self,
        *,
        max_request_bytes: int,
        threads: int,
        max_requests: int = MAX_REQUESTS,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self._max_request_bytes = max_request_bytes
        self._max_bytes = MAX_BODIES * max_request_bytes
        self._max_requests = max_requests
        self._body_seconds = body_seconds
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
        self.requests = 0
        self.bytes = 0

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def enter(self) -> Iterator[Lease]:
        """A place among the requests in preparation. Raises QueueFull when there is none."""
        if self.requests >= self._max_requests:
            message = f"{self.requests} requests are being read and tokenised already, and no more may be."
            raise QueueFull(message, retry_after_seconds=random.uniform(*RETRY_SECONDS))
        lease = Lease(self)
        self.requests += 1
        try:
            yield lease
        finally:
            self.requests -= 1
            self.bytes -= lease.bytes

    async def read_body(self, request: Request, lease: Lease) -> bytes:
        """The whole body. Raises RequestTooLarge as soon as it is known to be, QueueFull when all bodies
        together are too large, BodyTimeout, and ClientDisconnected.
        """
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_request_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._body_seconds):
                return await self._read(request, lease)
        except TimeoutError:
            message = f"The body must arrive within {self._body_seconds:g} seconds."
            raise BodyTimeout(message, code="request_timeout") from None

    async def run(self, work: Callable[[], T], size: int) -> T:
        """`work()`, in a thread when it has `size` bytes to work on and that may take long."""
        if size <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def _read(self, request: Request, lease: Lease) -> bytes:
        body = bytearray()
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            body += message.get("body", b"")
            if len(body) > self._max_request_bytes:
                raise self._too_large()
            self._charge(lease, len(body))
            if not message.get("more_body", False):
                return bytes(body)

    def _charge(self, lease: Lease, size: int) -> None:
        self.bytes += size - lease.bytes
        lease.bytes = size
        if self.bytes > self._max_bytes:
            message = (
                f"Bodies of {self.bytes} bytes together are being read, "
                f"and no more than {self._max_bytes} may be."
            )
            raise QueueFull(message, retry_after_seconds=random.uniform(*RETRY_SECONDS))

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"The body must be at most {self._max_request_bytes} bytes long.")


class Lease:
    """One request's place in the preparation, and the bytes of its body that are held."""

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation
        self.bytes = 0

    async def read_body(self, request: Request) -> bytes:
        return await self._preparation.read_body(request, self)
