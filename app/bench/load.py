"""Closed and open loops of requests."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

from app.bench.client import Client, Sample
from app.bench.options import BenchOptions
from app.bench.prompts import make_prompt

OnEnd = Callable[[Sample], None]


def bodies(options: BenchOptions, model: str) -> Iterator[dict[str, Any]]:
    """Endless request bodies, no two with the same prompt."""
    for index in itertools.count():
        prompt = make_prompt(options.seed, index, options.prompt_tokens)
        asked: dict[str, Any] = (
            {"messages": [{"role": "user", "content": prompt}]}
            if options.endpoint == "chat"
            else {"prompt": prompt}
        )
        if options.ignore_eos:
            asked["ignore_eos"] = True
        if options.stream_usage:
            asked["stream_options"] = {"include_usage": True}
        yield {
            **asked,
            "model": model,
            "max_tokens": options.output_tokens,
            "temperature": 0,
            "stream": True,
        }


async def closed_loop(
    client: Client, asked: Iterator[dict[str, Any]], *, requests: int, concurrency: int, on_end: OnEnd
) -> list[Sample]:
    """So many clients; each sends its next request when its last has ended."""
    work = itertools.islice(asked, requests)
    samples: list[Sample] = []

    async def one_client() -> None:
        for body in work:
            sample = await client.complete(body)
            samples.append(sample)
            on_end(sample)

    await asyncio.gather(*(one_client() for _ in range(min(concurrency, requests))))
    return samples


async def open_loop(
    client: Client,
    asked: Iterator[dict[str, Any]],
    *,
    requests: int,
    rate: float,
    seed: int,
    on_end: OnEnd,
) -> list[Sample]:
    """Poisson arrivals at `rate` a second, whatever the server does."""
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    due = loop.time()

    async def one(body: dict[str, Any]) -> Sample:
        sample = await client.complete(body)
        on_end(sample)
        return sample

    async with asyncio.TaskGroup() as group:
        tasks = []
        for body in itertools.islice(asked, requests):
            await asyncio.sleep(due - loop.time())
            tasks.append(group.create_task(one(body)))
            due += rng.expovariate(rate)
    return [task.result() for task in tasks]
