"""A small server that answers completions as it is told to, over a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

Answer = Callable[[dict[str, Any]], Awaitable[Response]]


def event(data: object) -> str:
    return f"data: {json.dumps(data)}\n\n"


async def stream(body: dict[str, Any], *, gap: float = 0.01, split: bool = False) -> AsyncIterator[str]:
    """As many texts as were asked for, `gap` seconds before each, then the usage."""
    for index in range(body["max_tokens"]):
        await asyncio.sleep(gap)
        finish = "length" if index == body["max_tokens"] - 1 else None
        text = {"delta": {"content": "é"}} if "messages" in body else {"text": "é"}
        written = event({"choices": [{"index": 0, **text, "finish_reason": finish}]})
        if split:  # a network may cut anywhere
            yield written[:9]
            await asyncio.sleep(0.002)
            yield written[9:]
        else:
            yield written
    usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
    yield event({"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


async def good(body: dict[str, Any]) -> Response:
    return StreamingResponse(stream(body), media_type="text/event-stream")


class Server:
    """Remembers what it was asked, and how many requests it had at once."""

    def __init__(self, answer: Answer = good) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.arrivals: list[float] = []
        self.at_once = self.most_at_once = 0
        read = "plimsoll_model_weights_read_bytes"
        self.metrics = f"# TYPE {read} gauge\n{read} 1e6\n"
        routes = [
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/metrics", self._metrics),
        ]
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(Starlette(routes=routes), log_level="error", ws="none", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    async def _complete(self, request: Request) -> Response:
        self.arrivals.append(time.monotonic())
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.url.path)
        self.keys.append(request.headers.get("authorization"))
        answer = await self.answer(body)
        if isinstance(answer, StreamingResponse):
            answer.body_iterator = self._counted(answer.body_iterator)
        return answer

    async def _counted(self, parts: Any) -> AsyncIterator[Any]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            async for part in parts:
                yield part
        finally:
            self.at_once -= 1

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "small"}]})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.metrics)

    def __enter__(self) -> Server:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
