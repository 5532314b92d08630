"""The whole server in a process of its own, with the engine that counts: how it starts, and how it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.connection import SPARE_CONNECTIONS
from app.leaving import Leaving
from app.serve import _OTHER_FILES, _room_for, bind, url_of
from model_runner.errors import StartupError

SCRIPT = Path(__file__).with_name("counting_server.py")


class Running:
    """A server that has been started. Its lines are read as they come."""

    def __init__(self, *argv: str, port: int = 0, knobs: dict[str, Any] | None = None) -> None:
        common = ["--port", str(port), "--kv-cache-memory", "256KiB", "--served-model-name", "counting"]
        command = [sys.executable, str(SCRIPT), *common, "--model", json.dumps(knobs or {}), *argv]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def said(self, pattern: str, seconds: float = 60) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            if not self._reader.is_alive():
                break
            time.sleep(0.02)
        raise AssertionError(f"never said {pattern!r}: {self.lines}")

    def url(self) -> str:
        return self.said(r"ready on (http://\S+)")[1]

    def listening(self) -> str:
        """Where it listens, which it may do long before it is ready."""
        self.said("fit at once")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for each in psutil.Process(self.process.pid).net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    return f"http://127.0.0.1:{each.laddr.port}"
        raise AssertionError("it does not listen")

    def ended(self, seconds: float = 30) -> int:
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def close(self) -> None:
        for each in (*psutil.Process(self.process.pid).children(), self.process) if self.alive() else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.ended()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def alive(self) -> bool:
        return self.process.poll() is None


@contextlib.contextmanager
def running(*argv: str, port: int = 0, knobs: dict[str, Any] | None = None) -> Iterator[Running]:
    server = Running(*argv, port=port, knobs=knobs)
    try:
        yield server
    finally:
        server.close()


def asked(max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "counting", "prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, **more}


def test_it_shows_the_table_then_listens_then_says_that_it_is_ready() -> None:
    with running() as server:
        url = server.url()
        table, ready = (
            next(n for n, line in enumerate(server.lines) if words in line)
            for words in ("fit at once", "Plimsoll is ready")
        )
        assert table < ready
        assert any("KV per token  256 bytes" in line for line in server.lines)
        assert httpx.get(f"{url}/readyz").status_code == 200
        answer = httpx.post(f"{url}/v1/completions", json=asked(3), headers={"x-request-id": "mine"})
        assert answer.json()["usage"]["completion_tokens"] == 3
        line = server.said(r"request ended .*")[0]
        assert "reason=length prompt_tokens=3 generated_tokens=3 reserved_bytes=4096" in line
        assert not any("Uvicorn" in each or "Started server" in each for each in server.lines)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
        assert server.lines[-1].endswith("INFO stopped")


@pytest.mark.parametrize("stream", [True, False])
def test_an_ending_says_what_the_client_was_told(stream: bool) -> None:
    """A stop string in the last output, which the engine sends as the end by length."""
    with running() as server:
        url = f"{server.url()}/v1/completions"
        text = httpx.post(url, json=asked(4)).json()["choices"][0]["text"]
        answer = httpx.post(url, json=asked(4, stop=[text[-1]], stream=stream)).text
        assert '"finish_reason":"stop"' in answer
        assert '"finish_reason":"length"' not in answer
        server.said(r"request ended .*reason=stop .*generated_tokens=4")
        page = httpx.get(f"{server.url()}/metrics").text
        assert 'plimsoll_requests_ended_total{reason="stop"} 1.0' in page


def test_json_all_the_way() -> None:
    with running("--log-format", "json") as server:
        server.said("Plimsoll is ready")
        server.process.send_signal(signal.SIGINT)
        assert server.ended() == 0
        lines = [json.loads(line) for line in server.lines]
        assert "KV budget" in next(line for line in lines if line["message"] == "planned")["table"]


def test_it_listens_while_it_loads() -> None:
    with running(knobs={"load_seconds": 3}) as server:
        url = server.listening()
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert httpx.get(f"{url}/readyz").status_code == 503
        refused = httpx.post(f"{url}/v1/completions", json=asked(3))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "starting")
        assert server.url() == url
        assert httpx.get(f"{url}/readyz").status_code == 200


def test_a_signal_while_it_loads_ends_it_at_once() -> None:
    with running(knobs={"load_seconds": 60}) as server:
        server.listening()
        server.process.send_signal(signal.SIGTERM)
        assert server.ended(15) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_it_drains_with_an_open_listener(number: signal.Signals) -> None:
    """What runs finishes, who comes in the meantime is told, and the port stays open until the last end."""
    with running(knobs={"step_seconds": 0.02}) as server, httpx.Client() as client:
        url = server.url()
        with client.stream("POST", f"{url}/v1/completions", json=asked(100, stream=True)) as response:
            events = response.iter_lines()
            next(events)
            server.process.send_signal(number)
            server.said("draining")
            assert httpx.get(f"{url}/readyz").status_code == 503
            refused = httpx.post(f"{url}/v1/completions", json=asked(3))
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
            data = [line for line in events if line.startswith("data: ")]
        assert data[-1] == "data: [DONE]"
        assert json.loads(data[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.ended() == 0
        assert "generated_tokens=100" in server.said("request ended request_id=.*reason=length.*")[0]


def test_what_outlasts_the_shutdown_timeout_is_ended_clearly() -> None:
    argv = ["--shutdown-timeout", "300ms"]
    with running(*argv, knobs={"step_seconds": 0.05}) as server, httpx.Client() as client:
        url = server.url()
        with client.stream("POST", f"{url}/v1/completions", json=asked(900, stream=True)) as response:
            events = response.iter_lines()
            next(events)
            server.process.send_signal(signal.SIGTERM)
            last = [line for line in events if line.startswith("data: ")][-1]
        assert json.loads(last[6:])["error"]["code"] == "draining"
        assert server.ended() == 0
        server.said("request ended .*reason=abort .*cause=shutdown")


def test_a_second_signal_ends_every_stream_clearly_and_soon() -> None:
    with running(knobs={"step_seconds": 0.05}) as server, contextlib.ExitStack() as stack:
        url = server.url()
        engine = psutil.Process(server.process.pid).children()[0]
        streams = []
        for _ in range(3):
            ask = httpx.stream("POST", f"{url}/v1/completions", json=asked(300, stream=True), timeout=30)
            streams.append(stack.enter_context(ask).iter_lines())
            next(streams[-1])
        server.process.send_signal(signal.SIGINT)
        server.said("draining")
        server.process.send_signal(signal.SIGINT)  # the same, told twice
        time.sleep(0.7)
        assert server.alive()
        server.process.send_signal(signal.SIGINT)
        for events in streams:
            last = [line for line in events if line.startswith("data: ")][-1]
            assert json.loads(last[6:])["error"]["code"] == "draining"
        assert server.ended(10) == 128 + signal.SIGINT
        assert sum("reason=abort" in line and "cause=shutdown" in line for line in server.lines) == 3
        engine.wait(10)


def test_who_is_slow_holds_up_nobody_in_a_hurry() -> None:
    """A body that doesn't come: after one signal it is waited for, after two for a second at most."""
    with running() as server:
        url = httpx.URL(server.url())
        with socket.create_connection((url.host, url.port or 0)) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n")
            time.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            server.said("draining")
            time.sleep(0.7)
            server.process.send_signal(signal.SIGTERM)
            assert server.ended(10) == 128 + signal.SIGTERM
            server.said("leaving, though not all is told")


def test_a_third_signal_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[tuple[str, int]] = []
    monkeypatch.setattr("app.leaving.leave_now", lambda why, code: exits.append((why, code)))

    async def scenario() -> None:
        leaving = Leaving()
        monkeypatch.setattr("app.leaving._HURRY_SECONDS", 60.0)
        loop = asyncio.get_running_loop()
        times = iter([100.0, 100.1, 101.0, 101.1, 101.6])
        monkeypatch.setattr(loop, "time", lambda: next(times))
        monkeypatch.setattr(loop, "call_later", lambda *_: None)
        steps = []
        for _ in range(5):
            leaving._on_signal(signal.SIGTERM)
            steps.append((leaving.asked.is_set(), leaving.hurried.is_set(), len(exits)))
        monkeypatch.undo()
        assert steps == [
            (True, False, 0),
            (True, False, 0),  # the same, told twice
            (True, True, 0),
            (True, True, 0),
            (True, True, 1),
        ]

    asyncio.run(scenario())
    assert exits == [("third signal (SIGTERM): leaving at once", 128 + signal.SIGTERM)]


def test_an_engine_that_cannot_start_is_one_message_and_exit_1(tmp_path: Path) -> None:
    with running(knobs={"fails_at_start_if": str(tmp_path)}) as server:
        assert server.ended(60) == 1
        assert server.lines[-1] == "plimsoll: no such model"
        assert not any("Traceback" in line for line in server.lines)


def test_in_json_that_message_is_a_line_of_json(tmp_path: Path) -> None:
    with running("--log-format", "json", knobs={"fails_at_start_if": str(tmp_path)}) as server:
        assert server.ended(60) == 1
        last = json.loads(server.lines[-1])
        assert (last["level"], last["message"]) == ("error", "no such model")


def test_a_port_in_use_is_known_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running(port=port) as server:
            assert server.ended() == 1
            assert len(server.lines) == 1
            assert f"port {port} of 127.0.0.1 is in use" in server.lines[0]


def test_a_name_is_bound_on_all_its_addresses() -> None:
    sockets = bind("localhost", 0)
    try:
        assert len({each.getsockname()[1] for each in sockets}) == 1
        assert url_of(sockets).startswith("http://")
    finally:
        for each in sockets:
            each.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no TCP_USER_TIMEOUT")
def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.serve._STALLED_SECONDS", 1)
    (listener,) = bind("127.0.0.1", 0)
    with listener, socket.socket() as client:
        listener.listen()
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            server.settimeout(60)
            with pytest.raises(OSError, match="timed out") as cut:
                server.sendall(b"x" * 2**26)  # far more than the system's buffers hold
            assert cut.value.errno == errno.ETIMEDOUT


@pytest.mark.parametrize(
    ("host", "says"),
    [("no.such.host.invalid", "is no address of this machine"), ("192.0.2.1", "write 127.0.0.1, or 0.0.0.0")],
)
def test_an_address_that_is_not_ours(host: str, says: str) -> None:
    with pytest.raises(StartupError, match=says):
        bind(host, 0)


@pytest.mark.parametrize(
    ("soft", "hard", "room", "raised"),
    [
        (1000, 1000, 1000 - SPARE_CONNECTIONS - _OTHER_FILES, None),
        (1000, 100_000, 2048, 2048 + SPARE_CONNECTIONS + _OTHER_FILES),
        (1000, resource.RLIM_INFINITY, 2048, 2048 + SPARE_CONNECTIONS + _OTHER_FILES),
        (100_000, 100_000, 2048, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 2048, None),
    ],
)
def test_connections_are_no_more_than_the_files_that_may_be_open(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, room: int, raised: int | None
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, both: limits.append(both))
    assert _room_for(2048) == room
    assert limits[-1] == (raised or soft, hard)
