"""Clients that send what people send, and write down what became of every request."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

WORDS = ["ship", "sea", "port", "crew", "wind", "sail", "mast", "rope", "deck", "tide", "wave", "coast"]
CHAT = 40  # tokens that the template and the question add, about
WATCHED = 20  # of the refused, at once


@dataclass
class Sent:
    """One request, and what became of it. Seconds, on the monotonic clock or since it was sent."""

    at: float
    ended_at: float = 0.0
    status: int = 0
    code: str | None = None  # of a refusal, or of an error within the stream
    ttft: float | None = None
    queued: float = 0.0
    retry_after: float | None = None
    room_after: float | None = None  # when it would have been let in or queued, where that was watched
    watched: bool = False
    again: Sent | None = None  # the next try

    @property
    def completed(self) -> bool:
        return self.status == 200 and self.code is None


def body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """(path, body): 64 to 512 prompt tokens, and max_tokens of 16 to 128; a third are chats without any."""
    tokens = rng.randrange(64, 513)
    common = {"stream": True, "temperature": 0.8, "seed": rng.randrange(10**6)}
    if rng.random() < 1 / 3:
        text = f"Tell me about these: {' '.join(rng.choices(WORDS, k=tokens - CHAT))}"
        return "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": text}]}
    prompt = [rng.randrange(100, 40_000) for _ in range(tokens)]
    return "/v1/completions", {**common, "prompt": prompt, "max_tokens": rng.randrange(16, 129)}


async def send(client: httpx.AsyncClient, path: str, wanted: dict[str, Any], tenant: str) -> Sent:
    """Asserts that it gets one ending: an error, or a stream with one finish reason and one [DONE]."""
    one = Sent(at=time.monotonic())
    async with client.stream("POST", path, json=wanted, headers={"x-tenant": tenant}) as response:
        one.status = response.status_code
        if response.status_code == 200:
            one.queued = float(response.headers["x-plimsoll-queue-seconds"])
            await _read_stream(response, one)
        else:
            one.code = json.loads(await response.aread())["error"]["code"]
            if "retry-after-ms" in response.headers:
                one.retry_after = float(response.headers["retry-after-ms"]) / 1000
    one.ended_at = time.monotonic()
    return one


async def _read_stream(response: httpx.Response, one: Sent) -> None:
    events = []
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            one.ttft = time.monotonic() - one.at if one.ttft is None else one.ttft
            events.append(line[6:])
    assert Counter(events)["[DONE]"] <= 1, events
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    if "error" in chunks[-1]:
        one.code = chunks.pop()["error"]["code"]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    ended = [reason for reason in reasons if reason is not None]
    assert len(ended) == (one.code is None), (ended, one.code)
    assert one.code is not None or events[-1] == "[DONE]", events[-1]


async def watch_for_room(
    client: httpx.AsyncClient, wanted: dict[str, Any], tenant: str, one: Sent, most: float
) -> None:
    """Ask, without a trace and for `most` seconds, when it would have been let in or queued."""
    one.watched = True
    while time.monotonic() - one.at < most:
        await asyncio.sleep(0.25)
        headers = {"x-tenant": tenant}
        answer = (await client.post("/v1/admission/check", json=wanted, headers=headers)).json()
        if answer["decision"] != "rejected":
            one.room_after = time.monotonic() - one.at
            return


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=900, limits=httpx.Limits(max_connections=None))


async def closed_loop(url: str, clients: int, seconds: float, rng: random.Random) -> list[Sent]:
    """So many clients, each of which sends its next request when its last has ended, and waits as told."""
    sent: list[Sent] = []
    until = time.monotonic() + seconds

    async def busy(client: httpx.AsyncClient) -> None:
        while time.monotonic() < until:
            one = await send(client, *body(rng), "default")
            sent.append(one)
            await asyncio.sleep(one.retry_after or 0.0)

    async with client_of(url) as client, asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(busy(client))
    return sent


async def open_loop(
    url: str,
    rates: Sequence[tuple[float, float]],
    rng: random.Random,
    *,
    come_back: bool = False,
    watch_seconds: float = 0.0,
    tenant: str = "default",
) -> list[Sent]:
    """Poisson arrivals; `rates` are (seconds, requests a second), one after the other.

    `come_back`: the refused try once again, when they were told to. `watch_seconds`: for so long it is
    watched when there would have been room for them.
    """
    sent: list[Sent] = []
    watching = 0

    async def one(client: httpx.AsyncClient) -> None:
        nonlocal watching
        path, wanted = body(rng)
        first = await send(client, path, wanted, tenant)
        sent.append(first)
        if first.retry_after is None:
            return
        if come_back:
            await asyncio.sleep(first.retry_after)
            first.again = await send(client, path, wanted, tenant)
        elif watch_seconds and watching < WATCHED:
            watching += 1
            await watch_for_room(client, wanted, tenant, first, watch_seconds)
            watching -= 1

    async with client_of(url) as client, asyncio.TaskGroup() as group:
        due = phase_ends = time.monotonic()
        for seconds, rate in rates:
            due, phase_ends = phase_ends + rng.expovariate(rate), phase_ends + seconds
            while due < phase_ends:
                await asyncio.sleep(max(due - time.monotonic(), 0.0))
                group.create_task(one(client))
                due += rng.expovariate(rate)
        await asyncio.sleep(max(phase_ends - time.monotonic(), 0.0))
    return sent
