"""What the processes weigh, at rest and under load."""

from __future__ import annotations

import asyncio

import httpx
import psutil

from tests.e2e.server import eventually, serving

MIB = 1024 * 1024


def test_the_processes_stay_within_their_weight() -> None:
    """API process under 300 MiB; engine under weights + KV budget + 1 GiB, during and after a burst."""
    with serving(
        "--kv-cache-memory", "256MiB", "--max-model-len", "auto", "--max-queue-seconds", "3600s"
    ) as own:
        api, engine = psutil.Process(own.process.pid), own.engine()
        metrics = own.metrics()
        limit = (
            metrics["plimsoll_model_weights_bytes"] + metrics["plimsoll_kv_cache_budget_bytes"] + 1024 * MIB
        )
        heaviest = {"api": 0, "engine": 0}

        def weigh() -> None:
            heaviest["api"] = max(heaviest["api"], api.memory_info().rss)
            heaviest["engine"] = max(heaviest["engine"], engine.memory_info().rss)

        async def burst() -> None:
            body = {"prompt": "word " * 300, "max_tokens": 24, "ignore_eos": True}
            async with httpx.AsyncClient(base_url=own.url, timeout=300) as client:
                crowd = asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(64)))
                while not crowd.done():
                    weigh()
                    await asyncio.sleep(0.1)
                assert {answer.status_code for answer in await crowd} == {200}

        weigh()
        asyncio.run(burst())
        eventually(own.idle, "the burst is over")
        weigh()
        assert heaviest["api"] < 300 * MIB
        assert heaviest["engine"] < limit
