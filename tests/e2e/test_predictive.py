"""Predictive admission on a real server and model: more at once, and the same tokens whatever was paused."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
import pytest

from tests.e2e.server import Server, Watch, eventually, serving
from tests.e2e.test_load import over_the_line

SMALL = ("--dtype", "float32", "--kv-cache-memory", "24MiB", "--max-model-len", "auto")
PATIENT = ("--max-queue-seconds", "3600s")


def bodies(rng: random.Random, count: int) -> list[dict[str, object]]:
    """Prompts of token ids; half of them name no limit that has anything to do with their length."""
    return [
        {
            "prompt": [rng.randrange(100, 40_000) for _ in range(rng.randrange(8, 60))],
            "max_tokens": rng.choice([24, 60, 120]),
            "temperature": 0,
            "ignore_eos": rng.random() < 0.5,
            "stop_token_ids": [28, 30, 198] if rng.random() < 0.5 else [],
            "logprobs": 0,
        }
        for _ in range(count)
    ]


async def all_at_once(url: str, wanted: list[dict[str, object]]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=900, limits=limits) as client:
        return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in wanted))


def tokens(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    found: list[str] = response.json()["choices"][0]["logprobs"]["tokens"]
    return found


@pytest.mark.timeout(900)
def test_tokens_are_those_of_strict_admission_whatever_was_paused() -> None:
    """A reckless risk, so that the line is reached: some are held, some computed again, none changed."""
    wanted = bodies(random.Random(4), 60)
    with serving(*SMALL, *PATIENT, "--admission", "predictive", "--overflow-risk", "0.5") as reckless:
        with Watch(reckless, over_the_line) as watch:
            answers = asyncio.run(all_at_once(reckless.url, wanted))
            eventually(reckless.idle, "every byte is back", 60)
        assert not watch.complaints
        metrics = reckless.metrics()
    assert metrics["plimsoll_preemptions_total"] > 0
    assert metrics["plimsoll_recomputed_tokens_total"] > 0
    with serving(*SMALL, *PATIENT, "--admission", "strict") as careful:
        again = asyncio.run(all_at_once(careful.url, wanted))
        assert careful.metrics()["plimsoll_preemptions_total"] == 0
    assert [tokens(answer) for answer in answers] == [tokens(answer) for answer in again]


def in_the_batch_at_once(server: Server, wanted: list[dict[str, object]]) -> float:
    """Sequences in a step, in the mean, while these are answered."""
    before = server.metrics()
    answers = asyncio.run(all_at_once(server.url, wanted))
    assert Counter(answer.status_code for answer in answers) == {200: len(wanted)}
    after = server.metrics()
    steps = after["plimsoll_batch_size_count"] - before["plimsoll_batch_size_count"]
    return (after["plimsoll_batch_size_sum"] - before["plimsoll_batch_size_sum"]) / steps


@pytest.mark.timeout(900)
def test_answers_that_end_early_make_room_that_strict_admission_keeps_shut() -> None:
    """Every answer stops after a few tokens, and every request might take hundreds."""
    rng = random.Random(7)
    wanted = [
        {
            "prompt": [rng.randrange(100, 40_000) for _ in range(24)],
            "max_tokens": 400,
            "min_tokens": 12,
            "logit_bias": {"28": 100},
            "stop_token_ids": [28],
            "temperature": 0,
        }
        for _ in range(64)
    ]
    batches = {}
    for admission in ("strict", "predictive"):
        with serving(*SMALL, *PATIENT, "--admission", admission) as own:
            in_the_batch_at_once(own, wanted)  # it learns
            batches[admission] = in_the_batch_at_once(own, wanted)
            eventually(own.idle, "every byte is back", 60)
    assert batches["predictive"] > 2 * batches["strict"], batches
