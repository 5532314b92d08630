"""One streamed completion over a plain connection, timed as a client sees it.

The generator may share the cores with the server that it measures, so it does as little as it can for each
token: httptools parses HTTP in C, and of each event only what is counted is decoded.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec


@dataclass(slots=True)
class Sample:
    """What became of one request. Times are seconds; `error` is its kind, None when it ended as it should."""

    started: float = 0.0
    ended: float = 0.0
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)  # between the arrivals of texts
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    usage_told: bool = False  # if not, each text was counted as one token

    @property
    def e2e(self) -> float:
        return self.ended - self.started


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Exchange(asyncio.Protocol):
    """Writes one request and reads one answer."""

    def __init__(self, request: bytes, sample: Sample) -> None:
        self._request = request
        self._sample = sample
        self._parser = httptools.HttpResponseParser(self)
        self._lines = b""
        self._last_text = 0.0
        self._texts = 0
        self._finished = False
        self._done_told = False
        self._broken: str | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.DecodeError):
            self._end("malformed answer")

    def connection_lost(self, exc: Exception | None) -> None:
        # An answer without a length ends with its connection.
        self._end(self._outcome() if self._done_told else "connection lost")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._lines += body
            return
        *lines, self._lines = (self._lines + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._end(f"HTTP {status}{_code_of(self._lines)}")
        else:
            self._end(self._outcome())

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._done_told = True
            return
        chunk = _decode(data)
        if chunk.error is not None:
            self._broken = f"error in the stream{_code_of(data)}"
        if chunk.usage is not None:
            self._sample.prompt_tokens = chunk.usage.prompt_tokens
            self._sample.output_tokens = chunk.usage.completion_tokens
            self._sample.usage_told = True
        for choice in chunk.choices:
            if choice.text or (choice.delta and choice.delta.content):
                self._text()
            self._finished |= choice.finish_reason is not None

    def _text(self) -> None:
        self._texts += 1
        now = time.perf_counter()
        if self._sample.ttft is None:
            self._sample.ttft = now - self._sample.started
        else:
            self._sample.gaps.append(now - self._last_text)
        self._last_text = now

    def _outcome(self) -> str | None:
        return self._broken or (None if self._finished else "stream without an ending")

    def _end(self, error: str | None) -> None:
        if not self.done.done():
            self._sample.error = error
            if not self._sample.usage_told:
                self._sample.output_tokens = self._texts
            self.done.set_result(None)


def _code_of(body: bytes) -> str:
    """` queue_full` of an error in OpenAI's shape; nothing of another shape."""
    try:
        error = msgspec.json.decode(body)["error"]
        return f" {error.get('code') or error['type']}"
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return ""


class Client:
    """Sends completions to one server; a fresh connection for each, as a crowd of clients would."""

    def __init__(self, base_url: str, endpoint: str, api_key: str, timeout_seconds: float) -> None:
        parts = urlsplit(base_url)
        assert parts.hostname is not None
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {parts.path}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{key}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nConnection: close\r\n"
        )
        self._timeout_seconds = timeout_seconds

    async def complete(self, body: dict[str, Any]) -> Sample:
        """Every outcome is a Sample: an error is a kind of result here, not an exception."""
        payload = msgspec.json.encode(body)
        request = f"{self._head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload
        sample = Sample(started=time.perf_counter())
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(self._timeout_seconds):
                transport, exchange = await asyncio.get_running_loop().create_connection(
                    lambda: _Exchange(request, sample), self._host, self._port, ssl=self._tls
                )
                await exchange.done
        except TimeoutError:
            sample.error = "timeout"
        except OSError as error:
            sample.error = f"connection failed ({type(error).__name__})"
        finally:
            sample.ended = time.perf_counter()
            if transport is not None:
                transport.close()
        return sample
