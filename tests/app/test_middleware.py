"""What surrounds every request: ids, keys, and the bounds before the door."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from app.preparation import BodyTimeout, ClientDisconnected, Preparation
from model_runner.errors import QueueFull, Reason, RequestTooLarge
from model_runner.tokenizer import Tokenizer
from tests.app.conftest import MODEL, Server
from tests.app.fake_engine import FakeEngine

LIMIT = 64 * 1024


@pytest.fixture
def guarded(engine: FakeEngine, tokenizer: Tokenizer) -> Iterator[Server]:
    with Server(engine, tokenizer, api_keys=("one", "schlüssel"), max_request_bytes=LIMIT) as running:
        yield running


def test_a_request_id_is_made_or_taken(server: Server, engine: FakeEngine) -> None:
    made = server.http.get("/healthz").headers["x-request-id"]
    assert made.startswith("req-")
    assert server.http.get("/healthz").headers["x-request-id"] != made
    for _ in range(2):
        headers = {"x-request-id": "req-my id\t7" + "x" * 300}
        response = server.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
        assert response.headers["x-request-id"] == ("req-myid7" + "x" * 300)[:128]
    ids = [submission.request_id for submission in engine.submissions]
    assert all(each.startswith("req-myid7") for each in ids)
    assert len(set(ids)) == 2  # the engine's are unique, whatever the client sends


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer two", "Basic one", "one", "Bearer one two"]
)
def test_wrong_keys(guarded: Server, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/nothing")):
        response = guarded.http.request(method, path, headers=headers, json={"prompt": "Hi"})
        assert response.status_code == 401
        assert response.json()["error"]["code"] == Reason.INVALID_API_KEY
        assert response.headers["www-authenticate"].startswith("Bearer")
        assert response.headers["x-request-id"]


def test_wrong_keys_are_counted(guarded: Server) -> None:
    assert guarded.complete(prompt="Hi").status_code == 401
    assert guarded.rejections(Reason.INVALID_API_KEY) == 1


def test_right_keys(guarded: Server) -> None:
    for key in ("one", "schlüssel"):
        headers = {b"authorization": f"bearer {key}".encode()}
        assert guarded.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/health", "/metrics", "/version"])
def test_probes_and_metrics_need_no_key(guarded: Server, path: str) -> None:
    assert guarded.http.get(path).status_code == 200
    assert guarded.http.head(path).status_code == 200


def test_a_body_over_the_limit_is_refused_before_it_is_read(guarded: Server) -> None:
    """The client says how much is coming, sends none of it, and is answered."""
    with socket.create_connection(("127.0.0.1", httpx.URL(guarded.url).port or 0), timeout=5) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer one\r\n"
        connection.sendall(f"{head}Content-Length: {LIMIT + 1}\r\n\r\n".encode())
        answer = b""
        while b"request_too_large" not in answer:  # head and body may come apart
            piece = connection.recv(65536)
            assert piece, answer
            answer += piece
        assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_chunked_body_over_the_limit_is_refused_on_the_way(guarded: Server) -> None:
    sent = 0

    def body() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(10_000):
            sent += 65536
            yield b"x" * 65536

    headers = {"authorization": "Bearer one"}
    response = guarded.http.post("/v1/completions", content=body(), headers=headers)
    assert response.status_code == 413
    assert str(LIMIT) in response.json()["error"]["message"]
    assert response.headers["connection"] == "close"
    assert sent < 10_000 * 65536


def test_a_client_that_sends_all_before_it_reads_gets_the_answer_too(guarded: Server) -> None:
    """As Python's http.client does; a reset would take the answer with it."""
    url = httpx.URL(guarded.url)
    connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=20)
    connection.request(
        "POST", "/v1/completions", body=b"x" * (24 << 20), headers={"Authorization": "Bearer one"}
    )
    answer = connection.getresponse()
    assert answer.status == 413
    assert b"request_too_large" in answer.read()
    connection.close()


def test_a_body_at_the_limit_is_read(guarded: Server) -> None:
    start = b'{"prompt": "Hi", "user": "'
    body = start + b"x" * (LIMIT - len(start) - 2) + b'"}'
    headers = {"authorization": "Bearer one"}
    assert guarded.http.post("/v1/completions", content=body, headers=headers).status_code == 200
    assert guarded.http.post("/v1/completions", content=body + b" ", headers=headers).status_code == 413


def test_long_prompts_leave_the_event_loop_alone(
    server: Server, engine: FakeEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(text: str) -> list[int]:
        time.sleep(1.0)
        return [5]

    monkeypatch.setattr(tokenizer, "encode_prompt", slowly)
    with httpx.Client(base_url=server.url) as other:
        threads = []
        for _ in range(2):
            thread = threading.Thread(target=server.complete, kwargs={"prompt": "word " * 2000})
            thread.start()
            threads.append(thread)
        time.sleep(0.2)
        began = time.monotonic()
        assert other.get("/healthz").status_code == 200
        assert time.monotonic() - began < 0.5
        for thread in threads:
            thread.join()


def request_of(*messages: Message) -> Request:
    left = list(messages)

    async def receive() -> Message:
        if not left:
            await asyncio.sleep(60)
        return left.pop(0)

    return Request({"type": "http", "headers": []}, receive)


def piece(size: int, more: bool) -> Message:
    return {"type": "http.request", "body": b"x" * size, "more_body": more}


@pytest.fixture
def make() -> Iterator[Callable[..., Preparation]]:
    made = []

    def preparation(**changes: float) -> Preparation:
        made.append(Preparation(max_request_bytes=100, threads=1, **changes))  # type: ignore[arg-type]
        return made[-1]

    yield preparation
    for each in made:
        each.close()


def test_so_many_requests_are_prepared_at_once(make: Callable[..., Preparation]) -> None:
    preparation = make(max_requests=2)
    with preparation.enter(), preparation.enter(), pytest.raises(QueueFull) as caught, preparation.enter():
        pass
    assert caught.value.retry_after_seconds > 0
    assert preparation.requests == 0


def test_so_many_bytes_are_prepared_at_once(make: Callable[..., Preparation]) -> None:
    async def run() -> None:
        preparation = make()
        with pytest.raises(QueueFull):
            await hold(preparation, 17)
        assert (preparation.requests, preparation.bytes) == (0, 0)

    async def hold(preparation: Preparation, count: int) -> None:
        with preparation.enter() as lease:
            assert len(await lease.read_body(request_of(piece(50, True), piece(50, False)))) == 100
            if count > 1:
                await hold(preparation, count - 1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([piece(60, True), piece(60, False)], RequestTooLarge),
        ([piece(60, True)], BodyTimeout),
        ([piece(60, True), {"type": "http.disconnect"}], ClientDisconnected),
    ],
)
def test_bodies_that_never_come_whole(
    make: Callable[..., Preparation], messages: list[Message], error: type[Exception]
) -> None:
    async def run() -> None:
        preparation = make(body_seconds=0.05)
        with pytest.raises(error), preparation.enter() as lease:
            await lease.read_body(request_of(*messages))
        assert (preparation.requests, preparation.bytes) == (0, 0)

    asyncio.run(run())


def test_the_official_client_sends_its_key(guarded: Server) -> None:
    client = guarded.openai.with_options(api_key="one")
    assert [model.id for model in client.models.list()] == [MODEL]
