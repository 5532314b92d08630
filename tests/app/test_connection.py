"""A connection before there is a request, and after its client has left."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterable, Iterator

import httpx
import pytest

from app.connection import MAX_HEAD_BYTES, SPARE_CONNECTIONS
from app.routes.operations import OPERATIONS
from model_runner.async_engine import Submission, Tokens
from model_runner.tokenizer import Tokenizer
from tests.app.conftest import Server
from tests.app.fake_engine import FOREVER, FakeEngine, Played, saying


@pytest.fixture
def connection(server: Server) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), timeout=10) as connected:
        yield connected


def flood(connection: socket.socket, opening: bytes, piece: bytes) -> int:
    """Send without end; returns how many bytes the server let in before it closed."""
    connection.sendall(opening)
    sent = 0
    try:
        while sent < 64 * MAX_HEAD_BYTES:
            sent += connection.send(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return sent


@pytest.mark.parametrize(
    ("opening", "piece"),
    [
        (b"GET /", b"x" * 4096),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: ", b"x" * 4096),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n", b"X: y\r\n" * 700),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
            b"X: y\r\n" * 700,
        ),
    ],
    ids=["url", "value", "fields", "trailers"],
)
def test_no_head_is_endless(connection: socket.socket, opening: bytes, piece: bytes) -> None:
    assert flood(connection, opening, piece) < 64 * MAX_HEAD_BYTES


def test_a_head_that_is_too_long_is_told_so(connection: socket.socket) -> None:
    beginning = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"x" * (MAX_HEAD_BYTES - 1000)
    for piece in (beginning, b"x" * 2000, b"x"):
        connection.sendall(piece)
        time.sleep(0.2)  # so that each is read alone
    answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "head_too_large"


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_what_is_no_http_is_refused_in_the_usual_shape(connection: socket.socket) -> None:
    connection.sendall(b"hello\r\n\r\n")
    head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("beginning", [b"", b"GET /healthz HTTP/1.1\r\nHost:"])
def test_a_head_must_come_in_time(
    engine: FakeEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    monkeypatch.setattr("app.connection.HEAD_SECONDS", 0.3)
    with Server(engine, tokenizer) as server:
        port = httpx.URL(server.url).port or 0
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(beginning)
            assert connection.recv(1) == b""


def test_a_client_that_pipelines_and_leaves_is_noticed(
    connection: socket.socket, server: Server, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    def script(submission: Submission) -> Iterable[Played]:
        for _ in range(2000):
            yield Tokens(0, 0, tokenizer.encode(" Hello"))
            yield 0.01

    engine.script = script
    body = b'{"prompt": "Hi", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection.sendall(head + body + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"200 OK" in connection.recv(65536)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    server.until(lambda: engine.streams[0].aborts == ["client_disconnected"])


# The limit on connections


@pytest.fixture
def narrow(engine: FakeEngine, tokenizer: Tokenizer) -> Iterator[Server]:
    with Server(engine, tokenizer, max_connections=2) as running:
        yield running


def connected(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), timeout=10)


def test_past_the_limit_probes_are_answered_and_nothing_else(
    narrow: Server, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.script = lambda submission: [Tokens(0, 0, tokenizer.encode(" Hello")), FOREVER]
    with contextlib.ExitStack() as streams:
        for _ in range(2):
            asked = {"prompt": "Hi", "stream": True}
            stream = httpx.stream("POST", f"{narrow.url}/v1/completions", json=asked, timeout=20)
            assert streams.enter_context(stream).status_code == 200
        for path in OPERATIONS:
            answer = httpx.get(narrow.url + path)
            assert answer.status_code == 200, path
            assert answer.headers["connection"] == "close"
        long = {"prompt": "Hi " * 100_000}  # it is answered before this is read
        asked_for = (("POST", "/v1/completions"), ("POST", "/v1/admission/check"), ("GET", "/v1/models"))
        for method, path in asked_for:
            refused = httpx.request(method, narrow.url + path, json=long)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "too_many_connections")
            assert error["type"] == "server_error"
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
        assert narrow.rejections("too_many_connections") == 3
        assert len(engine.streams) == 2
    engine.script = saying([28])
    narrow.until(lambda: httpx.post(f"{narrow.url}/v1/completions", json={"prompt": "Hi"}).status_code == 200)


def test_idle_connections_are_bounded(narrow: Server) -> None:
    """A few more than the limit are heard, for the probes; the rest are told and closed at once."""
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(connected(narrow)) for _ in range(2 + SPARE_CONNECTIONS + 50)]
        for each in crowd[-50:]:
            head, _, body = read_all(each).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: " in head
            assert json.loads(body)["error"]["code"] == "too_many_connections"
        crowd[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert crowd[0].recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_connection_past_the_limit_must_ask_soon(
    engine: FakeEngine, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.connection.SPARE_HEAD_SECONDS", 0.3)
    with Server(engine, tokenizer, max_connections=1) as server, connected(server) as first:
        with connected(server) as spare:
            assert spare.recv(1) == b""
        first.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert first.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_connection_past_the_limit_is_like_any_other_once_there_is_room(narrow: Server) -> None:
    with contextlib.ExitStack() as stack:
        first, _, third = (stack.enter_context(connected(narrow)) for _ in range(3))
        first.close()
        narrow.until(lambda: len(narrow._server.server_state.connections) == 2)
        for _ in range(2):
            third.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert third.recv(65536).startswith(b"HTTP/1.1 200 ")
