from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from app.bench.client import Client, Sample
from tests.app.bench.server import Answer, Server, event, stream

BODY = {"prompt": "x", "max_tokens": 5, "stream": True}


def ask(answer: Answer, *, timeout: float = 10.0, endpoint: str = "completions", **body: Any) -> Sample:
    with Server(answer) as server:
        client = Client(server.url, endpoint, "", timeout)
        return asyncio.run(client.complete(BODY | body))


def raw(*parts: str) -> Answer:
    async def answer(body: dict[str, Any]) -> Response:
        async def written() -> Any:
            for part in parts:
                yield part

        return StreamingResponse(written(), media_type="text/event-stream")

    return answer


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_stream_is_timed_as_a_client_sees_it(endpoint: str, split: bool) -> None:
    async def answer(body: dict[str, Any]) -> Response:
        return StreamingResponse(stream(body, gap=0.03, split=split))

    more = {"messages": []} if endpoint == "chat" else {}
    sample = ask(answer, endpoint=endpoint, **more)
    assert sample.error is None
    assert (sample.prompt_tokens, sample.output_tokens) == (7, 5)
    assert sample.ttft is not None
    assert 0.03 <= sample.ttft <= sample.e2e - sum(sample.gaps)
    assert len(sample.gaps) == 4
    assert min(sample.gaps) > 0.01
    assert sample.e2e >= 5 * 0.03


def test_a_role_without_text_is_not_the_first_token() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    end = event({"choices": [{"delta": {"content": "a"}, "finish_reason": "stop"}]})
    sample = ask(raw(role, end, "data: [DONE]\n\n"), endpoint="chat")
    assert sample.error is None
    assert sample.ttft is not None
    assert sample.gaps == []


def test_without_usage_each_text_is_a_token() -> None:
    texts = [
        event({"choices": [{"text": "a"}]}),
        event({"choices": [{"text": "b", "finish_reason": "stop"}]}),
    ]
    sample = ask(raw(*texts, "data: [DONE]\n\n"))
    assert (sample.error, sample.output_tokens, sample.usage_told) == (None, 2, False)


def test_an_answer_may_end_with_its_connection() -> None:
    done = event({"choices": [{"text": "a", "finish_reason": "stop"}]}) + "data: [DONE]\n\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + done.encode())
        writer.close()

    async def ask_it() -> Sample:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await Client(f"http://127.0.0.1:{port}", "completions", "", 5).complete(BODY)

    sample = asyncio.run(ask_it())
    assert (sample.error, sample.output_tokens) == (None, 1)


async def too_busy(body: dict[str, Any]) -> Response:
    return JSONResponse({"error": {"message": "full", "type": "t", "code": "queue_full"}}, 429)


async def nonsense(body: dict[str, Any]) -> Response:
    return Response("oops", 500)


async def silence(body: dict[str, Any]) -> Response:
    await asyncio.sleep(2)
    return Response("")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (too_busy, "HTTP 429 queue_full"),
        (nonsense, "HTTP 500"),
        (silence, "timeout"),
        (raw(event({"choices": [{"text": "a"}]})), "stream without an ending"),
        (
            raw(event({"error": {"code": "internal_error"}}), "data: [DONE]\n\n"),
            "error in the stream internal_error",
        ),
        (raw("data: {broken\n\n"), "malformed answer"),
    ],
)
def test_errors_are_told_apart(answer: Answer, kind: str) -> None:
    assert ask(answer, timeout=1.0).error == kind


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    sample = asyncio.run(Client(f"http://127.0.0.1:{port}", "chat", "", 5).complete(BODY))
    assert sample.error == "connection failed (ConnectionRefusedError)"
    assert sample.e2e >= 0


def test_a_server_that_hangs_up() -> None:
    async def hang_up() -> Sample:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await Client(f"http://127.0.0.1:{port}", "chat", "", 5).complete(BODY)

    assert asyncio.run(hang_up()).error == "connection lost"


def test_the_key_is_sent() -> None:
    with Server() as server:
        asyncio.run(Client(server.url, "completions", "sesame", 5).complete(BODY))
        assert server.keys == ["Bearer sesame"]
