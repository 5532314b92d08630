"""Two hundred mixed requests on a small budget: one ending each, the line never passed, tokens as alone."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass

import httpx
import pytest

from tests.e2e.server import Server, Watch, eventually

REQUESTS = 200
PROMPTS = [
    "The ship left the harbour at dawn and",
    "A short list of things to pack for a winter crossing:",
    "In 1876 a law was passed so that no ship could be loaded past",
    "def gcd(a, b):\n    ",
    "The difference between weather and climate is",
    "Once upon a time there was a lighthouse keeper who " * 6,
    "Water boils at 100 degrees and freezes at",
    "Dear harbour master, " + "we wrote to you last week about the cargo. " * 12,
]
LONGEST = 48


@dataclass
class Sent:
    prompt: str
    max_tokens: int
    seed: int | None
    stream: bool
    hangs_up: bool
    impossible: bool


@dataclass
class Ending:
    kind: str  # "completed" | "refused" | "left"
    text: str = ""


def mixed(rng: random.Random) -> list[Sent]:
    return [
        Sent(
            prompt=rng.choice(PROMPTS),
            max_tokens=rng.randint(1, LONGEST),
            seed=rng.choice([None, 11, 12]),
            stream=rng.random() < 0.5,
            hangs_up=index % 5 == 0,
            impossible=index % 17 == 3,
        )
        for index in range(REQUESTS)
    ]


def body(sent: Sent, max_tokens: int) -> dict[str, object]:
    sampling = {"temperature": 0} if sent.seed is None else {"temperature": 0.8, "seed": sent.seed}
    return {
        "prompt": sent.prompt,
        "max_tokens": max_tokens,
        "n": 16 if sent.impossible else 1,
        "ignore_eos": True,
        "stream": sent.stream,
        **sampling,
    }


async def one(client: httpx.AsyncClient, sent: Sent, rng: random.Random) -> Ending:
    wanted = body(sent, 1000 if sent.impossible else sent.max_tokens)
    patience = rng.uniform(0.05, 3.0)
    try:
        async with asyncio.timeout(patience if sent.hangs_up else None):
            async with client.stream("POST", "/v1/completions", json=wanted) as response:
                if response.status_code != 200:
                    error = json.loads(await response.aread())["error"]
                    assert sent.impossible, error
                    assert (response.status_code, error["code"]) == (400, "kv_cache_budget_exceeded"), error
                    return Ending("refused")
                if not sent.stream:
                    choice = json.loads(await response.aread())["choices"][0]
                    assert choice["finish_reason"] == "length"
                    return Ending("completed", choice["text"])
                return Ending("completed", await streamed_text(response))
    except TimeoutError:
        assert sent.hangs_up
        return Ending("left")


async def streamed_text(response: httpx.Response) -> str:
    """The text of one stream, which must end with exactly one finish reason and one [DONE]."""
    events = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    assert events.count("[DONE]") == 1
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert all("error" not in chunk for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    return "".join(choice["text"] for choice in choices)


async def everyone(url: str, requests: list[Sent], rng: random.Random) -> list[Ending]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def arrive(sent: Sent, after: float) -> Ending:
            await asyncio.sleep(after)
            return await one(client, sent, rng)

        return await asyncio.gather(*(arrive(sent, rng.uniform(0, 5)) for sent in requests))


def over_the_line(now: dict[str, float]) -> str | None:
    budget = now["plimsoll_kv_cache_budget_bytes"]
    reserved, used = now["plimsoll_kv_cache_reserved_bytes"], now["plimsoll_kv_cache_used_bytes"]
    if not 0 <= reserved <= budget:
        return f"reserved {reserved} of {budget}"
    return f"used {used} of {budget}" if not 0 <= used <= budget else None


@pytest.mark.timeout(1500)
def test_two_hundred_mixed_requests(server: Server) -> None:
    rng = random.Random(20)
    requests = mixed(rng)
    before = server.metrics()
    with Watch(server, over_the_line) as watch:
        endings = asyncio.run(everyone(server.url, requests, rng))
        eventually(server.idle, "every byte is back after the load", 60)
    assert not watch.complaints
    assert watch.scrapes > 10
    assert len(endings) == REQUESTS
    refused = [sent for sent, ending in zip(requests, endings, strict=True) if ending.kind == "refused"]
    assert all(sent.impossible for sent in refused)

    after = server.metrics()
    ended = {
        key: after[key] - before.get(key, 0)
        for key in after
        if key.startswith("plimsoll_requests_ended_total{")
    }
    entered = sum(
        after[key] - before.get(key, 0)
        for key in after
        if key.startswith("plimsoll_admissions_total{") and 'decision="rejected"' not in key
    )
    assert sum(ended.values()) == entered, ended

    texts: dict[tuple[str, int | None], list[str]] = {}
    for sent, ending in zip(requests, endings, strict=True):
        if ending.kind == "completed":
            texts.setdefault((sent.prompt, sent.seed), []).append(ending.text)
    assert sum(map(len, texts.values())) >= REQUESTS // 2
    for (prompt, seed), got in texts.items():
        alone = Sent(prompt, LONGEST, seed, stream=False, hangs_up=False, impossible=False)
        whole = server.post("/v1/completions", body(alone, LONGEST)).json()["choices"][0]["text"]
        for text in got:  # a shorter request's tokens are the beginning of a longer one's
            assert whole.startswith(text.rstrip("�")), (prompt, seed)
