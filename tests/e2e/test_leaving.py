"""Every way out: the client hangs up, the operator stops the server, the engine dies, the parent dies."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.e2e.server import Server, eventually, serving

BUDGET = ("--kv-cache-memory", "64MiB", "--max-model-len", "auto")
LONG = {"prompt": "Count for ever: one, two,", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
# max_tokens with which not even one request fits beside a LONG one. Each ends soon by its stop string.
LARGE = 2400


@pytest.fixture
def own() -> Iterator[Server]:
    with serving(*BUDGET, "--max-queue-seconds", "3600s", "--shutdown-timeout", "100s") as running:
        yield running


def in_background(server: Server, body: dict[str, object]) -> tuple[threading.Thread, list[str]]:
    """A stream read to its end in a thread; its events gather in the list."""
    events: list[str] = []

    def run() -> None:
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=300) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    events.append(line[6:])

    thread = threading.Thread(target=run)
    thread.start()
    return thread, events


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_bytes(server: Server, stream: bool) -> None:
    before = server.metrics()['plimsoll_aborts_total{cause="client_disconnected"}']
    with pytest.raises(httpx.ReadTimeout):
        server.post("/v1/completions", LONG, timeout=1.5) if not stream else consume_until_timeout(server)
    eventually(server.idle, "the bytes of a client that left are free", 10)
    assert server.metrics()['plimsoll_aborts_total{cause="client_disconnected"}'] == before + 1


def consume_until_timeout(server: Server) -> None:
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={**LONG, "stream": True}, timeout=30
    ) as response:
        assert response.status_code == 200
        for index, _ in enumerate(response.iter_lines()):
            if index == 6:
                raise httpx.ReadTimeout("hung up on purpose")


def test_a_waiting_client_that_hangs_up_leaves_the_queue(server: Server) -> None:
    fills = {**LONG, "max_tokens": 1000, "stream": True}
    with (
        httpx.stream("POST", server.url + "/v1/completions", json=fills, timeout=60) as first,
        ThreadPoolExecutor() as pool,
    ):
        assert first.status_code == 200
        waiting = pool.submit(server.post, "/v1/completions", {**LONG, "max_tokens": 1000, "n": 1}, 2.0)
        waiting_too = pool.submit(server.post, "/v1/completions", {**LONG, "max_tokens": 1000}, 2.0)
        eventually(lambda: server.metrics()["plimsoll_requests_waiting"] >= 1, "one waits", 5)
        for future in (waiting, waiting_too):
            assert isinstance(future.exception(timeout=10), httpx.ReadTimeout)
    eventually(server.idle, "nobody waits and nothing is reserved", 10)


def test_sigterm_lets_streams_end_and_refuses_newcomers(own: Server) -> None:
    thread, events = in_background(own, {**LONG, "max_tokens": 200, "stream": True})
    eventually(lambda: len(events) > 2, "the stream has begun")
    own.process.send_signal(signal.SIGTERM)
    eventually(lambda: own.get("/readyz").status_code == 503, "not ready at once", 5)
    refused = own.post("/v1/completions", {"prompt": "hello"})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert int(refused.headers["retry-after"]) >= 1
    assert own.get("/healthz").status_code == 200
    thread.join(120)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert own.process.wait(30) == 0


def test_a_killed_engine_is_replaced_and_the_queue_is_kept(own: Server) -> None:
    thread, events = in_background(own, {**LONG, "stream": True})
    eventually(lambda: len(events) > 2, "the stream has begun")
    with ThreadPoolExecutor() as pool:
        # One runs and has sent nothing yet: it is run again. One waits in the queue: it is kept.
        silent = pool.submit(own.post, "/v1/completions", {**LONG, "max_tokens": 40})
        eventually(lambda: own.metrics()["plimsoll_requests_running"] == 2, "both run")
        queued = pool.submit(own.post, "/v1/completions", {**LONG, "max_tokens": LARGE, "stop": ["three"]})
        queued_too = pool.submit(
            own.post, "/v1/completions", {**LONG, "max_tokens": LARGE, "stop": ["three"]}
        )
        eventually(lambda: own.metrics()["plimsoll_requests_waiting"] >= 1, "at least one waits")
        own.engine().kill()
        eventually(lambda: own.get("/readyz").status_code == 503, "not ready while restarting", 10)
        assert own.get("/healthz").status_code == 200
        refused = own.post("/v1/completions", {"prompt": "hello"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_restarting")
        assert int(refused.headers["retry-after"]) >= 1
        thread.join(60)
        assert json.loads(events[-1])["error"]["code"] == "internal_error"
        assert silent.result().json()["usage"]["completion_tokens"] == 40
        assert queued.result().status_code == 200
        assert queued_too.result().status_code == 200
    own.wait_ready()
    assert own.post("/v1/completions", {"prompt": "hello", "max_tokens": 4}).status_code == 200
    assert own.metrics()["plimsoll_engine_restarts_total"] == 1
    eventually(own.idle, "nothing is held after a restart")


def test_a_request_at_two_deaths_is_not_tried_a_third_time(own: Server) -> None:
    with ThreadPoolExecutor() as pool:
        unlucky = pool.submit(own.post, "/v1/completions", LONG)
        for death in range(2):
            eventually(
                lambda: own.metrics()["plimsoll_kv_cache_used_bytes"] > 0, f"it runs before death {death}", 60
            )
            own.engine().kill()
            eventually(
                lambda: own.metrics()["plimsoll_kv_cache_used_bytes"] == 0, "the death was noticed", 10
            )
        answer = unlucky.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "x-request-id" in answer.headers
    own.wait_ready()
    eventually(own.idle, "nothing is held")


def test_a_stuck_step_counts_as_death() -> None:
    with serving(*BUDGET, "--engine-step-timeout", "10s") as own:
        thread, events = in_background(own, {**LONG, "stream": True})
        eventually(lambda: len(events) > 2, "the stream has begun")
        stuck = own.engine()
        stuck.suspend()
        eventually(
            lambda: not stuck.is_running() or stuck.status() == psutil.STATUS_ZOMBIE, "it was killed", 20
        )
        thread.join(30)
        assert "error" in json.loads(events[-1])
        own.wait_ready()
        assert own.metrics()["plimsoll_engine_restarts_total"] == 1


def test_an_engine_whose_parent_dies_exits() -> None:
    with serving(*BUDGET) as own:
        engine = own.engine()
        thread, events = in_background_ignoring_errors(own)
        eventually(lambda: len(events) > 2, "the engine is busy")
        os.kill(own.process.pid, signal.SIGKILL)
        own.process.wait(10)
        thread.join(10)
        assert engine.wait(15) is not None or not engine.is_running()


def in_background_ignoring_errors(server: Server) -> tuple[threading.Thread, list[str]]:
    events: list[str] = []

    def run() -> None:
        try:
            with httpx.stream(
                "POST", server.url + "/v1/completions", json={**LONG, "stream": True}, timeout=60
            ) as response:
                for line in response.iter_lines():
                    events.append(line)
        except httpx.TransportError:
            events.append("cut off")

    thread = threading.Thread(target=run)
    thread.start()
    return thread, events


def test_a_deadline_that_passes_in_the_queue_is_a_504() -> None:
    small = ("--kv-cache-memory", "2MiB", "--max-model-len", "64", "--max-queue-seconds", "25s")
    with serving(*small, "--engine-step-timeout", "90s") as own, ThreadPoolExecutor() as pool:
        body = {**LONG, "max_tokens": 50}
        first = pool.submit(own.post, "/v1/completions", body)
        eventually(lambda: own.metrics()["plimsoll_requests_running"] == 1, "the first runs")
        engine = own.engine()
        engine.suspend()  # so that the forecast, made in good faith, does not come true
        late = own.post("/v1/completions", body)
        engine.resume()
        assert (late.status_code, late.json()["error"]["code"]) == (504, "queue_timeout")
        assert first.result().status_code == 200
        eventually(own.idle, "nothing is held")
