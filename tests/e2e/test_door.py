"""Admitted, queued, refused: what a client sees at the door of a real server."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, eventually, serving


def test_a_request_that_never_fits_is_told_what_would(server: Server) -> None:
    refused = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 1400, "n": 4})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (
        400,
        "kv_cache_budget_exceeded",
        "max_tokens",
    )
    assert "retry-after" not in refused.headers
    assert error["required_bytes"] > error["budget_bytes"]
    largest = error["largest_max_tokens"]
    assert str(largest) in error["message"]
    body = {"prompt": "hello", "n": 4, "stream": True}
    fits = {**body, "max_tokens": largest}
    with httpx.stream("POST", server.url + "/v1/completions", json=fits, timeout=60) as response:
        assert response.status_code == 200
    assert server.post("/v1/completions", {**body, "max_tokens": largest + 16}).status_code == 400
    eventually(server.idle, "the one that fitted is gone")


def test_a_check_says_what_the_request_then_gets(server: Server) -> None:
    capacity = server.get("/v1/capacity").json()
    assert (
        capacity["growing_bytes_per_token"] * capacity["allocated"]["block_size"]
        == (capacity["allocated"]["block_bytes"])
    )
    assert capacity["free_bytes"] == capacity["kv_budget_bytes"]

    def check(**body: object) -> dict[str, Any]:
        answer: dict[str, Any] = server.post("/v1/admission/check", {"prompt": "hello", **body}).json()
        return answer

    never = check(max_tokens=1400, n=4)
    refused = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 1400, "n": 4})
    assert (never["status"], never["error"]) == (refused.status_code, refused.json()["error"])
    largest = never["largest_max_tokens_now"]
    assert check(max_tokens=largest, n=4)["decision"] == "admitted"
    assert check(max_tokens=largest + 16, n=4)["decision"] == "rejected"
    body = {"prompt": "hello", "n": 4, "max_tokens": largest, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        waits = check(max_tokens=largest, n=4)
        assert waits["decision"] == "queued"
        assert waits["predicted_wait_seconds"] > 0
        assert waits["largest_max_tokens_now"] < largest
        reserved = waits["kv_budget_bytes"] - waits["free_bytes"]
        assert reserved == waits["projected_bytes"]
        assert int(response.headers["x-plimsoll-projected-bytes"]) == reserved
        assert float(response.headers["x-plimsoll-queue-seconds"]) == 0
        door = server.get("/v1/admission").json()
        assert (door["running_requests"], door["waiting"]) == (1, [])
        assert door["reserved_bytes"] == reserved <= door["predicted_peak_bytes"]
    eventually(server.idle, "the stream that was left is gone")


def test_over_the_models_context_both_figures_are_named(server: Server) -> None:
    refused = server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 9000})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    assert str(server.get("/v1/models").json()["data"][0]["max_model_len"]) in error["message"]
    assert "9003" in error["message"]


@pytest.mark.parametrize("where", ["queue_full", "wait_too_long"])
def test_a_full_house_says_when_to_come_back(where: str) -> None:
    bounds = {
        "queue_full": ("--max-queue-requests", "2", "--max-queue-seconds", "600s"),
        "wait_too_long": ("--max-queue-requests", "100", "--max-queue-seconds", "1s"),
    }[where]
    body = {"prompt": "Tell me", "max_tokens": 200, "ignore_eos": True}

    async def crowd(url: str) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(12)))

    with serving("--kv-cache-memory", "6MiB", "--max-model-len", "256", *bounds) as own:
        answers = asyncio.run(crowd(own.url))
        counts = Counter(answer.status_code for answer in answers)
        assert counts[200] >= 1
        assert counts[429] >= 1
        assert set(counts) == {200, 429}
        for refused in (answer for answer in answers if answer.status_code == 429):
            error = refused.json()["error"]
            assert error["code"] == where
            seconds = int(refused.headers["retry-after"])
            milliseconds = int(refused.headers["retry-after-ms"])
            assert seconds >= 1
            assert seconds == max(1, -(-milliseconds // 1000))
        eventually(own.idle, "nothing is left")
        metrics = own.metrics()
        refusals = f'plimsoll_admissions_total{{decision="rejected",reason="{where}"}}'
        assert metrics[refusals] == counts[429]


def test_what_the_metrics_say_is_what_the_request_costs(server: Server) -> None:
    """One request's bytes, from prompt and max_tokens, equal what the ledger shows while it runs."""
    before = server.metrics()
    assert before["plimsoll_kv_cache_bytes_per_token"] == 2 * 30 * 3 * 64 * 4
    body = {"prompt": [100] * 33, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        now = server.metrics()
        tokens = 33 + 200 - 1
        blocks = -(-tokens // 16)
        assert (
            now["plimsoll_kv_cache_reserved_bytes"]
            == blocks * 16 * before["plimsoll_kv_cache_bytes_per_token"]
        )
        assert 0 < now["plimsoll_kv_cache_used_bytes"] <= now["plimsoll_kv_cache_reserved_bytes"]
    eventually(server.idle, "it is gone")


def test_after_a_stop_string_the_next_one_waits_a_moment_and_is_served() -> None:
    """The budget is full of a request that the client has the end of: its room comes back in one step."""
    whole = {"prompt": [5], "stop": ["e", "a", " ", ".", "\n"], "ignore_eos": True}
    with (
        serving("--kv-cache-memory", "32MiB", "--max-model-len", "auto", "--max-queue-seconds", "5") as own,
        httpx.Client(base_url=own.url, timeout=60) as client,
    ):
        limit = client.get("/v1/models").json()["data"][0]["max_model_len"]
        for _ in range(5):
            stopped = client.post("/v1/completions", json={**whole, "max_tokens": limit - 1}).json()
            assert stopped["choices"][0]["finish_reason"] == "stop"
            after = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
            assert after.status_code == 200, after.text
        eventually(own.idle, "nothing is left")
